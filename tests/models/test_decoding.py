"""Text read in steps, with a cache, has the scores of all of it at once, for every family."""

import functools
from dataclasses import replace

import numpy as np
import pytest

import meshdsl as md
from meshdsl import models, nn
from meshdsl.models import t5, transformer

SIZES = "layers=2,embed=16,heads=4,d_ff=8,policy=float64"
EXPERTS = f"{SIZES},capacity=none"
LATENT = f"{SIZES},kv=4,kv_rank=8,query_rank=8,rotary_kv=4,capacity=none"
FAMILIES = {
    "gpt": ("gpt_mini", SIZES),
    "gpt2": ("gpt2_small", f"{SIZES},vocab=64,max_length=32"),
    "llama": ("llama3_8b", f"{SIZES},kv_heads=2,vocab=64"),
    "windows in some layers": (
        "llama3_8b",
        f"{SIZES},kv_heads=2,vocab=64,window=5,window_pattern=1+0,query_key_norm=true,qkv_bias=true",
    ),
    "gemma 2": (
        "gpt_mini",
        f"{SIZES},kv_heads=2,window=5,window_pattern=1+0,rotary_window_base=7,mlp=geglu,norm_order=both,"
        "norm_unit_offset=true,scaled_embedding=true,query_scale=0.7,attention_soft_cap=2,"
        "logit_soft_cap=3",
    ),
    "yarn": (
        "llama3_8b",
        f"{SIZES},kv_heads=2,vocab=64,rotary_base=50,rotary_scaling=yarn,rotary_factor=4,rotary_original=8,"
        "rotary_high=2,rotary_low=0.5",
    ),
    "longrope, beyond the first length": (
        "llama3_8b",
        f"{SIZES},kv_heads=2,vocab=64,rotary_scaling=longrope,rotary_factor=4,rotary_original=6,"
        "rotary_short=1+2,rotary_long=3+4",
    ),
    "dynamic, within the first length": (
        "llama3_8b",
        f"{SIZES},kv_heads=2,vocab=64,rotary_scaling=dynamic,rotary_factor=4,rotary_original=32",
    ),
    "mixtral": ("mixtral_mini", EXPERTS),
    "mixtral, sorted": ("mixtral_mini", f"{EXPERTS},dispatch=sort"),
    "deepseek": ("deepseek_mini", LATENT),
    "deepseek, another scale": ("deepseek_mini", f"{LATENT},query_scale=0.7"),
    "deepseek, window": ("deepseek_mini", f"{LATENT},window=5"),
    "alibi": ("gpt_mini", f"{SIZES},kv_heads=2,positions=alibi,norm_order=post,mlp=geglu"),
    "relative, window": ("gpt_mini", f"{SIZES},kv_heads=2,positions=relative,window=5,mlp=relu"),
    "no positions": ("gpt_mini", f"{SIZES},positions=none,bias=true"),
}
LAYOUTS = {
    "one device": (None, None),
    "tensor parallel": ("data:2,model:2", "batch:data; heads:model; d_ff:model; vocab:model"),
    "flash-decoding": ("data:2,model:2", "batch:data; memory_length:model; params/embed:data"),
    "over three": ("model:3", "memory_length:model; vocab:model"),
}
PADS = np.array([0, 3, 1], "int32")
LENGTH, CHUNK = 12, 4
# Reading: two chunks of a prompt, then tokens one by one.
PIECES = [(0, 4), (4, 8), *((at, at + 1) for at in range(8, LENGTH))]


@functools.cache
def problem(name, overrides):
    """Returns the model, parameters, tokens, and the scores of all tokens of each text at once."""
    model = models.load(name, overrides)
    params = md.jit(model.init, backend="numpy")(md.random.key(1))
    vocab = model.config.vocab
    tokens = np.random.default_rng(0).integers(0, vocab, (len(PADS), LENGTH)).astype("int32")
    at_once = md.jit(functools.partial(transformer.logits, model.config), backend="numpy")
    wanted = np.zeros((*tokens.shape, vocab))
    for row, pads in enumerate(PADS):
        text = md.named(tokens[row : row + 1, pads:], ["batch", "length"])
        wanted[row, pads:] = np.asarray(at_once(params, text))
    return model, params, tokens, wanted


def steps_of(model, mesh, layout, backend):
    """Returns functions that make a cache, and read tokens into it."""
    where = {"mesh": mesh, "layout": layout, "backend": backend}

    def start(params, pads):
        window, chunk = model.decoding.window, CHUNK
        return {"cache": model.decoding.empty(pads, nn.slots_needed(LENGTH, window, chunk))}

    def step(params, cache, tokens):
        scores, cache = model.decoding.step(params, tokens, cache, every=True)
        return {"scores": scores, "cache": cache}

    return md.jit(start, **where), md.jit(step, donate="cache", **where)


def check(family, where, backend, unrolled=False):
    model, params, tokens, wanted = problem(*FAMILIES[family])
    if unrolled:
        model = replace(model, decoding=model.decoding.unrolled)
        params = md.jit(model.decoding.prepare, backend="numpy")(params)
    start, step = steps_of(model, *LAYOUTS[where], backend)
    cache = start(params, md.named(PADS, ["batch"]))["cache"]
    found = []
    for first, end in PIECES:
        read = step(params, cache, md.named(tokens[:, first:end], ["batch", "length"]))
        cache = read["cache"]
        found.append(np.asarray(read["scores"]))
    scores = np.concatenate(found, 1)
    for row, pads in enumerate(PADS):
        # The tables of rotary positions are float32.
        np.testing.assert_allclose(scores[row, pads:], wanted[row, pads:], rtol=1e-5, atol=1e-6)
    assert np.abs(wanted).max() > 0.1
    assert len(step._compiled) == 2  # chunks and single tokens, whatever their position


@pytest.mark.long
@pytest.mark.parametrize("where", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore::meshdsl.layouts.validate.LayoutWarning")
def test_steps_give_the_scores_of_all_tokens_at_once(family, where):
    check(family, where, "numpy")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore::meshdsl.layouts.validate.LayoutWarning")
def test_steps_of_layers_one_by_one_do_so_too(family):
    check(family, "flash-decoding", "numpy", unrolled=True)


def test_deep_models_keep_their_loops():
    deep = models.load("gpt_mini", SIZES.replace("layers=2", "layers=49"))
    assert deep.decoding.unrolled is None


@pytest.mark.parametrize(
    ("family", "where"),
    [
        ("llama", "tensor parallel"),
        ("relative, window", "flash-decoding"),
        pytest.param("deepseek", "flash-decoding", marks=pytest.mark.slow),
        pytest.param("mixtral", "one device", marks=pytest.mark.slow),
    ],
)
def test_the_jax_backend_agrees(family, where):
    check(family, where, "jax")


def test_experts_drop_nothing_although_training_does():
    """Which tokens a capacity drops depends on later ones, which a step does not know."""
    name, overrides = FAMILIES["mixtral"]
    _, params, tokens, wanted = problem(name, overrides)
    dropping = models.load(name, f"{SIZES},capacity=0.5,report_dropped=true")
    mlp = replace(params.blocks.mlp, capacity=0.5, report_dropped=True)
    params = replace(params, blocks=replace(params.blocks, mlp=mlp))
    start, step = steps_of(dropping, None, None, "numpy")
    cache = start(params, md.named(0 * PADS, ["batch"]))["cache"]
    scores = step(params, cache, md.named(tokens, ["batch", "length"]))["scores"]
    np.testing.assert_allclose(np.asarray(scores)[0], wanted[0], atol=1e-6)
    full = md.jit(functools.partial(transformer.logits, dropping.config), backend="numpy")
    dropped = np.asarray(full(params, md.named(tokens, ["batch", "length"])))
    assert np.abs(dropped[0] - wanted[0]).max() > 1e-3


def test_only_the_last_scores_are_computed_by_default():
    model, params, tokens, wanted = problem(*FAMILIES["gpt"])

    def last(params, pads, tokens):
        return model.decoding.step(params, tokens, model.decoding.empty(pads, LENGTH))[0]

    pads = md.named(0 * PADS, ["batch"])
    scores = md.jit(last, backend="numpy")(params, pads, md.named(tokens, ["batch", "length"]))
    assert scores.dims.names == ("batch", "vocab")
    np.testing.assert_allclose(np.asarray(scores)[0], wanted[0, -1], atol=1e-6)


def test_latent_attention_keeps_only_its_latent_vectors():
    model, *_ = problem(*FAMILIES["deepseek"])
    pads = md.spec([md.Dimension("batch", 3)], "int32")
    cache = md.jit(lambda pads: model.decoding.empty(pads, 16)).trace(pads).outputs
    sizes = [str(t.dims) for t in cache if t.dims.find("latent")]
    assert sizes == ["[layers=1, batch=3, memory_length=16, latent=12]"] * 2


@pytest.mark.parametrize(
    ("mesh", "layout", "collectives"),
    [
        # The layers' results, and those of their MLPs, which are all that is sent.
        ("model:4", "heads:model; d_ff:model", {"all_reduce": 4}),
        # The largest scores, their sums, and what is mixed by them; never keys or values.
        ("model:4", "memory_length:model", {"all_reduce": 6}),
    ],
)
def test_a_step_never_sends_the_cache(mesh, layout, collectives):
    model, params, *_ = problem(*FAMILIES["gpt"])
    start, step = steps_of(model, mesh, layout, "numpy")
    pads = md.spec([md.Dimension("batch", 3)], "int32")
    made = start.trace(params, pads).outputs
    tree = start.lower(params, pads).origin.results
    cache = tree.unflatten([md.spec(t.dims, t.dtype) for t in made])["cache"]
    program = step.lower(params, cache, md.spec(md.dims(batch=3, length=1), "int32"))
    sent = {}
    for each in program.collectives:
        sent[each.kind] = sent.get(each.kind, 0) + each.count
        assert each.payload_bytes <= 3 * 16 * 8  # of the stream of one token of each text
    assert sent == collectives


T5 = "layers=2,embed=16,heads=4,d_ff=8,kv=4,policy=float64"
T5_FAMILIES = {
    "relative": T5,
    "learned, experts": f"{T5},positions=learned,max_length=16,experts=4",
    "rotary": f"{T5},positions=rotary",
}


@pytest.mark.long
@pytest.mark.parametrize("where", LAYOUTS)
@pytest.mark.parametrize("family", T5_FAMILIES)
def test_the_decoder_of_t5_reads_in_steps(family, where):
    model = models.load("t5_mini", T5_FAMILIES[family])
    params = md.jit(model.init, backend="numpy")(md.random.key(1))
    rng = np.random.default_rng(0)
    source, tokens = (rng.integers(0, 256, (3, size)).astype("int32") for size in (6, 5))
    dims = ["batch", "length"]
    at_once = md.jit(functools.partial(t5.logits, model.config), backend="numpy")
    mesh, layout = LAYOUTS[where]
    on = {"mesh": mesh, "layout": layout, "backend": "numpy"}

    def encode(params, source, pads):
        return {"cache": model.decoding.encode(params, source, pads, 5)}

    def step(params, cache, tokens):
        scores, cache = model.decoding.step(params, tokens, cache)
        return {"scores": scores, "cache": cache}

    encode, step = md.jit(encode, **on), md.jit(step, donate="cache", **on)
    cache = encode(params, md.named(source, dims), md.named(PADS, ["batch"]))["cache"]
    found = []
    for at in range(tokens.shape[1]):
        read = step(params, cache, md.named(tokens[:, at : at + 1], dims))
        cache = read["cache"]
        found.append(np.asarray(read["scores"]))
    for row, pads in enumerate(PADS):
        texts = source[row : row + 1, pads:], tokens[row : row + 1]
        wanted = np.asarray(at_once(params, *(md.named(each, dims) for each in texts)))[0]
        np.testing.assert_allclose(np.stack(found, 1)[row], wanted, rtol=1e-5, atol=1e-6)
