"""Likelihoods of texts, against the full forward pass of each text alone, in float64."""

import functools

import numpy as np
import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.generation import LikelihoodScorer, Place, Sampling, Writer
from meshdsl.models import t5, transformer

SIZES = "layers=2,embed=16,heads=4,d_ff=8,vocab=61,policy=float64"
FAMILIES = {
    "rotary": ("gpt_mini", SIZES),
    "learned positions": ("gpt_mini", f"{SIZES},positions=learned,max_length=24"),
    "window": ("gpt_mini", f"{SIZES},window=5"),
    "latent": ("deepseek_mini", f"{SIZES},kv=4,kv_rank=8,query_rank=8,rotary_kv=4,capacity=none"),
    "t5": ("t5_mini", f"{SIZES},kv=4"),
    "t5 with a start": ("t5_mini", f"{SIZES},kv=4,decoder_start=0"),
}
PLACES = {
    "one device": Place(backend="numpy"),
    "tensor parallel": Place(
        "data:2,model:2", "batch:data; heads:model; vocab:model; optimizer/embed:data", "numpy"
    ),
    "flash-decoding": Place(
        "data:2,model:2", "batch:data; memory_length:model; params/embed:data", "numpy"
    ),
    "jax": Place("data:2,model:4", "batch:data; heads:model; d_ff:model; params/embed:data", "jax"),
}
LENGTH = 24


@functools.cache
def trained(family):
    model = models.load(*FAMILIES[family])
    params = md.jit(model.init, backend="numpy")(md.random.key(1))
    if model.name == "t5_mini":
        scores = md.jit(functools.partial(t5.logits, model.config), backend="numpy")
    else:
        scores = md.jit(functools.partial(transformer.logits, model.config), backend="numpy")
    return model, params, scores


def pairs(longest=LENGTH):
    """Returns texts after texts: short and long ones, in no order, of all widths."""
    rng = np.random.default_rng(0)
    sizes = [(1, 1), (9, 4), (1, longest), (longest - 3, 4), (5, 12), (3, 2), (8, 9), (20, 1)]
    return [tuple(rng.integers(0, 61, size).tolist() for size in each) for each in sizes]


def alone(family, before, text):
    """Returns the log probability of each token of a text, and the likeliest token in its place."""
    model, params, scores = trained(family)

    def named(tokens):
        return md.named(np.array([tokens], "int32"), ["batch", "length"])

    if model.name != "t5_mini":
        read = [*before, *text[:-1]]
        logits = np.asarray(scores(params, named(read)))[0, len(before) - 1 :]
    elif model.decoding.start is None:
        logits = np.asarray(scores(params, named(before[:-1]), named([before[-1], *text[:-1]])))[0]
    else:
        start = model.decoding.start
        logits = np.asarray(scores(params, named(before), named([start, *text[:-1]])))[0]
    logits = logits.astype(np.float64)
    total = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    return logits[np.arange(len(text)), text] - total, logits.argmax(-1)


def scorer_of(family, place="one device", **sizes):
    model, params, _ = trained(family)
    given = {"length": LENGTH, "batch_size": 2, "chunk": 8, **sizes}
    scorer = LikelihoodScorer(model, place=PLACES[place], **given)
    scorer.load(params)
    return scorer


def check(family, place, **sizes):
    texts = pairs()
    if "t5" in family:  # without a start, the last token before the text is no encoder's
        texts = [(before if len(before) > 1 else before * 2, text) for before, text in texts]
    found = scorer_of(family, place, **sizes).score(texts)
    for (before, text), likelihood in zip(texts, found, strict=True):
        wanted, likeliest = alone(family, before, text)
        # The tables of rotary positions are float32.
        np.testing.assert_allclose(likelihood.tokens, wanted, rtol=1e-5, atol=1e-6)
        assert likelihood.likeliest.tolist() == (likeliest == text).tolist()
        assert likelihood.total == pytest.approx(wanted.sum(), rel=1e-5)
        assert likelihood.left_out == 0


@pytest.mark.long
@pytest.mark.parametrize("place", ["one device", "tensor parallel", "flash-decoding"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore::meshdsl.layouts.validate.LayoutWarning")
def test_likelihoods_are_those_of_each_text_alone(family, place):
    check(family, place)


def test_the_jax_backend_agrees_on_eight_devices():
    check("rotary", "jax", batch_size=4)


def choices():
    """Returns texts of which several follow one context, in no order, and some that follow none."""
    rng = np.random.default_rng(3)

    def drawn(size):
        return rng.integers(0, 61, size).tolist()

    texts = []
    for before, sizes in [(9, (1, 1, 1, 1)), (18, (4, 6)), (12, (3, 12, 1)), (9, (2, 9, 5, 4, 7))]:
        context = drawn(before)
        texts += [(context, drawn(size)) for size in sizes]
        # A choice may lie in the last token before the text as well.
        texts.append(([*context[:-1], (context[-1] + 1) % 61], texts[-1][1]))
    texts += [(drawn(11), drawn(3)), (drawn(2), drawn(5)), ([], []), texts[0]]
    texts[-2] = (drawn(3), [])
    return [texts[number] for number in rng.permutation(len(texts))]


@pytest.mark.long
@pytest.mark.parametrize("place", ["one device", "tensor parallel", "flash-decoding"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore::meshdsl.layouts.validate.LayoutWarning")
def test_texts_after_one_context_have_the_likelihoods_that_they_have_alone(family, place):
    texts = choices()
    likelihoods = scorer_of(family, place).score(texts)
    for (before, text), likelihood in zip(texts, likelihoods, strict=True):
        if text:
            wanted, likeliest = alone(family, before, text)
            np.testing.assert_allclose(likelihood.tokens, wanted, rtol=1e-5, atol=1e-6)
            assert likelihood.likeliest.tolist() == (likeliest == text).tolist()
        else:
            assert likelihood.total == 0


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_a_shared_context_does_not_change_how_positions_turn(scaling):
    scale = f"rotary_scaling={scaling},rotary_factor=4,rotary_original=16"
    if scaling == "longrope":
        scale += ",rotary_short=1+1,rotary_long=3+5"
    model = models.load("gpt_mini", f"{SIZES},{scale}")
    params = md.jit(model.init, backend="numpy")(md.random.key(1))
    context = [*range(12)]
    texts = [([*context], [4, 5, 6]), ([*context], [7])]  # all within the original positions

    def scored(some):
        scorer = LikelihoodScorer(model, length=16, chunk=8, place=PLACES["one device"])
        scorer.load(params)
        return [each.tokens for each in scorer.score(some)]

    together = scored(texts)
    for text, tokens in zip(texts, together, strict=True):
        np.testing.assert_array_equal(tokens, scored([text])[0])


class Counting:
    """A scorer's programs, which note the tokens that each call reads."""

    def __init__(self, scorer):
        self.read, compiled = {}, scorer._program

        def program(kind, widths):
            def run(*given):
                if kind in ("read", "score"):
                    self.read[kind] = self.read.get(kind, 0) + given[2].data.shape[1]
                return compiled(kind, widths)(*given)

            return run

        scorer._program = program


def test_a_context_is_read_once_for_all_texts_that_follow_it():
    rng = np.random.default_rng(0)
    contexts = [rng.integers(0, 61, 65).tolist() for _ in range(2)]
    texts = [(context, rng.integers(0, 61, 8).tolist()) for context in contexts for _ in range(4)]
    scorer = scorer_of("rotary", length=80)
    counting = Counting(scorer)
    together = scorer.score(texts)
    # Of both contexts at once 64 tokens; then twice two texts of each, 8 tokens.
    assert counting.read == {"read": 64, "score": 4 * 8}
    counting.read.clear()
    one_by_one = [scorer.score([text])[0] for text in texts]
    assert counting.read == {"read": 8 * 64, "score": 8 * 8}
    for mine, other in zip(together, one_by_one, strict=True):
        np.testing.assert_allclose(mine.tokens, other.tokens, rtol=1e-12)


def test_contexts_that_do_not_fit_are_shared_if_the_same_is_left_of_them():
    rng = np.random.default_rng(0)
    context = rng.integers(0, 61, 40).tolist()
    texts = [(context, rng.integers(0, 61, size).tolist()) for size in (5, 5, 8, 1)]
    likelihoods = scorer_of("learned positions").score(texts)
    for (before, text), likelihood in zip(texts, likelihoods, strict=True):
        assert likelihood.left_out == 40 + len(text) - 1 - LENGTH
        wanted, _ = alone("learned positions", before[likelihood.left_out :], text)
        np.testing.assert_allclose(likelihood.tokens, wanted, rtol=1e-6)


def test_the_text_that_the_model_writes_is_greedy():
    _, params, scores = trained("rotary")
    text = [7, 3]
    for _ in range(6):
        tokens = md.named(np.array([text], "int32"), ["batch", "length"])
        text.append(int(np.asarray(scores(params, tokens))[0, -1].argmax()))
    other = [*text[:5], (text[5] + 1) % 61, *text[6:]]
    found = scorer_of("rotary").score([(text[:2], text[2:]), (other[:2], other[2:])])
    assert [each.greedy for each in found] == [True, False]
    assert found[1].likeliest[:4].tolist() == [True, True, True, False]


def test_a_decoder_may_follow_an_encoder_that_has_read_nothing():
    """An encoder without a start reads all tokens before the text but the last one."""
    model, params, _ = trained("t5")
    writer = Writer(
        model, prompt_tokens=1, new_tokens=4, sampling=Sampling(0), place=PLACES["one device"]
    )
    writer.load(params)
    text = [int(token) for (token,) in writer.write([[7]])]
    (found,) = scorer_of("t5").score([([7], text)])
    assert found.greedy and np.isfinite(found.tokens).all()


def test_what_does_not_fit_is_left_out_on_the_left():
    rng = np.random.default_rng(1)
    before, text = rng.integers(0, 61, 40).tolist(), rng.integers(0, 61, 5).tolist()
    (found,) = scorer_of("learned positions").score([(before, text)])
    assert found.left_out == 40 + 5 - 1 - LENGTH
    wanted, _ = alone("learned positions", before[found.left_out :], text)
    np.testing.assert_allclose(found.tokens, wanted, rtol=1e-6)


@pytest.mark.long
def test_few_programs_are_compiled():
    scorer = scorer_of("rotary", length=100, batch_size=3)
    rng = np.random.default_rng(0)
    texts = [(rng.integers(0, 61, n).tolist(), [1, 2]) for n in range(1, 100)]
    done = []
    scorer.score(texts, done.append)
    assert done[-1] == 99 and done == sorted(done)
    # Widths of 8, 16, 32, 64 and 104 positions: each begins, reads, and scores.
    assert len(scorer._programs) <= 5 * 3
    before = set(scorer._programs)
    scorer.score(texts[::-1])
    assert set(scorer._programs) == before


def test_an_empty_text_is_certain():
    (found,) = scorer_of("rotary").score([([1], [])])
    assert (found.total, found.greedy) == (0.0, True)


def test_mistakes_are_told():
    scorer = scorer_of("rotary")
    with pytest.raises(ValueError, match=r"text 0 follows nothing.*\n.*text 1 has 25 tokens"):
        scorer.score([([], [1]), ([1], [1] * 25)])
    model, _, _ = trained("rotary")
    fresh = LikelihoodScorer(model, length=8, place=PLACES["one device"])
    with pytest.raises(ValueError, match=r"no parameters: load\(params\) first"):
        fresh.score([([1], [2])])
    learned, _, _ = trained("learned positions")
    with pytest.raises(ValueError, match="max_length=24 positions, too few for a text of 25"):
        LikelihoodScorer(learned, length=25)
    with pytest.raises(ValueError, match="resnet_mini does not write text"):
        LikelihoodScorer(models.load("resnet_mini"), length=8)
