"""Adapters: what they add, what is trained, and what is refused."""

import dataclasses

import numpy as np
import pytest

import meshdsl as md
from meshdsl import models, optim
from meshdsl.models import transformer, with_lora
from meshdsl.training import Recipe, train
from meshdsl.training.state import by_path, spec_of

SIZES = "layers=2,embed=16,heads=4,d_ff=24,vocab=32,policy=float64"
RANKS = "blocks/**/query:2,blocks/attention/out:3,blocks/mlp/w_in:2,embedding:1"
RNG = np.random.default_rng(0)


def batch():
    tokens = RNG.integers(0, 32, (4, 8)).astype("int32")
    return {name: md.named(tokens, ["batch", "length"]) for name in ("tokens", "targets")}


def started(model):
    """Returns parameters whose adapters add something."""
    params = md.jit(model.init, backend="numpy")(md.random.key(0))
    adapters = {
        path: each.replace(up=md.named(RNG.normal(size=each.up.dims.sizes), each.up.dims.names))
        for path, each in params.adapters.items()
    }
    return params.replace(adapters=adapters)


def sums(params):
    """Returns the parameters of the model alone, with what the adapters add, by numpy."""
    plain = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    plain = transformer.Transformer(**{n: v for n, v in plain.items() if n != "adapters"})

    def total(path, equation):
        weight = by_path(plain)[path]
        pair = params.adapters[path]
        added = np.einsum(equation, np.asarray(pair.down), np.asarray(pair.up))
        return md.named(np.asarray(weight) + added, weight.dims.names)

    attention, mlp = plain.blocks.attention, plain.blocks.mlp
    attention = attention.replace(
        query=total("blocks/attention/query", "lea,lahk->lehk"),
        out=total("blocks/attention/out", "lea,lahk->lhke"),
    )
    mlp = mlp.replace(w_in=total("blocks/mlp/w_in", "lea,lad->led"))
    blocks = plain.blocks.replace(attention=attention, mlp=mlp)
    return plain.replace(blocks=blocks, embedding=total("embedding", "ea,av->ve"))


@pytest.mark.parametrize(
    "where",
    [{}, {"mesh": "data:2,model:2", "layout": "heads:model; params/embed:data; batch:data"}],
)
@pytest.mark.filterwarnings("ignore::meshdsl.layouts.validate.LayoutWarning")
def test_the_loss_is_that_of_the_sums(where):
    usual = models.load("gpt_mini", SIZES)
    model, data = with_lora(usual, RANKS), batch()
    params = started(model)
    expected = md.jit(usual.loss, backend="numpy")(sums(params), data)
    found = md.jit(model.loss, backend="numpy", **where)(params, data)
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-12)


def test_gradients_are_those_of_the_sums():
    usual = models.load("gpt_mini", SIZES)
    model, data = with_lora(usual, RANKS), batch()
    params = started(model)
    slopes = md.jit(md.grad(model.loss), backend="numpy")(params, data).adapters
    whole = md.jit(md.grad(usual.loss), backend="numpy")(sums(params), data)
    query, pair = np.asarray(whole.blocks.attention.query), "blocks/attention/query"
    down, up = (np.asarray(getattr(params.adapters[pair], name)) for name in ("down", "up"))
    for found, expected in (
        (slopes[pair].down, np.einsum("lehk,lahk->lea", query, up)),
        (slopes[pair].up, np.einsum("lehk,lea->lahk", query, down)),
    ):
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-9, atol=1e-15)


def test_at_first_adapters_add_nothing_and_paths_stay():
    usual = models.load("gpt_mini", SIZES)
    model, data = with_lora(usual, RANKS), batch()
    params = md.jit(model.init, backend="numpy")(md.random.key(0))
    found = md.jit(model.loss, backend="numpy")(params, data)
    plain = params.replace(adapters={})
    np.testing.assert_array_equal(
        np.asarray(found), np.asarray(md.jit(usual.loss, backend="numpy")(plain, data))
    )
    own, others = by_path(spec_of(usual.init)), by_path(spec_of(model.init))
    assert {path: str(others[path]) for path in own} == {p: str(own[p]) for p in own}
    assert [str(each.dims) for path, each in others.items() if path.endswith("out/down")] == [
        "[layers=2, embed=16, adapter=3]"
    ]
    assert sum(path.startswith("adapters/") for path in others) == len(others) - len(own) == 8


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt_mini", "t5_mini", "bert_mini", "mixtral_mini"])
def test_other_weights_stay_and_have_no_state(name):
    model = with_lora(models.load(name, "layers=2,embed=16,heads=4,d_ff=24,vocab=260"), "query:2")
    recipe = Recipe(model.init, model.loss, optim.AdamW(1e-2), trainable="adapters/**")
    rows = iter(lambda: batch(), None)
    result = train(recipe, rows, steps=2)
    state = by_path(result.state)
    assert all("adapters" in path for path in state if path.startswith("optimizer/m"))
    first = by_path(md.jit(model.init)(md.random.key(recipe.seed)))
    changed = {
        path
        for path, leaf in by_path(result.state.params).items()
        if not np.array_equal(np.asarray(leaf), np.asarray(first[path]))
    }
    assert changed and all(path.startswith("adapters/") for path in changed)


def test_steps_of_decoding_read_the_sums():
    usual = models.load("gpt_mini", SIZES)
    model = with_lora(usual, RANKS)
    params, tokens = started(model), batch()["tokens"]

    def read(model):
        def step(params, tokens):
            cache = model.decoding.empty(md.zeros([tokens.shape.get("batch")], "int32"), 8)
            return model.decoding.step(model.decoding.prepare(params), tokens, cache)[0]

        return md.jit(step, backend="numpy")

    expected = np.asarray(read(usual)(sums(params), tokens))
    np.testing.assert_allclose(np.asarray(read(model)(params, tokens)), expected, atol=1e-12)


def test_overrides_keep_the_adapters():
    model = with_lora(models.load("gpt_mini", SIZES), "query:2").with_overrides("layers=3")
    specs = by_path(spec_of(model.init))
    assert str(specs["adapters/blocks/attention/query/up"].dims).startswith("[layers=3, adapter=2")


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ("", "needs patterns with ranks, as in 'blocks/\\*\\*/query:8'"),
        ("query", "'query': needs a pattern and a rank, as in"),
        ("query:0,key:x", "'query:0': needs a pattern and a rank.*; 'key:x': needs"),
        ("query:2,query:3", "'query' is there twice"),
        ("qery:2", "no parameter is meant by 'qery'. Did you mean `query`"),
        ("final_norm/scale:1", r"final_norm/scale \[embed=16\] is no matrix"),
        ("query:17", "blocks/attention/query: rank 17 is more than that of the weight, 16"),
    ],
)
def test_adapters_that_cannot_be_had_are_told(ranks, told):
    with pytest.raises(ValueError, match=told):
        spec_of(with_lora(models.load("gpt_mini", SIZES), ranks).init)
