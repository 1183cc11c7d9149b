"""Texts that join and leave the rows of a batch, against the same texts written alone."""

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.generation import Place, RowWriter, Sampling, Writer
from meshdsl.generation.probabilities import StepProbabilities
from meshdsl.models import transformer
from tests.generation.test_writer import PLACES, SIZES, trained

DRAWS = [
    Sampling(temperature=0),
    Sampling(seed=3),
    Sampling(0.8, top_k=20, seed=4),
    Sampling(1.1, top_p=0.9, seed=2**40),
    Sampling(0.9, min_p=0.02, seed=5),
    Sampling(0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.3, seed=3),
    Sampling(temperature=0, repetition_penalty=1.5),
]
CONTEXT = 16
FAMILIES = {
    "gpt_mini": SIZES,
    "learned": f"{SIZES},positions=learned,max_length=16",
    "window": f"{SIZES},window=4",
    "latent": f"{SIZES},kv=4,kv_rank=8,query_rank=8,rotary_kv=4,window=4",
    "experts": SIZES,
    "t5_mini": f"{SIZES},kv=4",
    "t5 with a start": f"{SIZES},kv=4,decoder_start=0",
}
NAMES = {"latent": "deepseek_mini", "experts": "mixtral_mini", "t5 with a start": "t5_mini"}


def family(name):
    return trained(NAMES.get(name, name if "mini" in name else "gpt_mini"), FAMILIES[name])


def asked(count, seed=0):
    """Returns prompts, how their tokens are chosen, and how many are written, all unlike."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        prompt = rng.integers(0, 61, rng.integers(1, 10)).tolist()
        most = 16 if number == 1 else int(rng.integers(1, 8))
        most = min(most, CONTEXT - len(prompt))
        yield prompt, DRAWS[number % len(DRAWS)], most


def alone(model, place, texts):
    """Returns the tokens of texts, each written by itself."""
    loaded, params = model
    found = []
    for _, group in itertools.groupby(sorted(enumerate(texts), key=kind), kind):
        group = list(group)
        sampling, sizes = group[0][1][1], {"prompt_tokens": 9, "new_tokens": 8, "chunk": 4}
        if group[0][1][2] > 8:
            sizes |= {"prompt_tokens": len(group[0][1][0]), "new_tokens": group[0][1][2]}
        writer = Writer(loaded, sampling=sampling, place=place, **sizes)
        writer.load(params)
        for number, (prompt, _, most) in group:
            tokens = itertools.islice(writer.write([prompt]), most)
            found.append((number, [int(token) for (token,) in tokens]))
    return [tokens for _, tokens in sorted(found)]


def kind(numbered):
    _, (_, sampling, most) = numbered
    return most > 8, DRAWS.index(sampling)


def continuous(writer, texts):
    """Returns the tokens of texts that join as soon as a row is free, reading between steps."""
    waiting = list(enumerate(texts))[::-1]
    written = [[] for _ in texts]
    rows, reading = [None] * writer.rows, None
    while waiting or reading or any(row is not None for row in rows):
        if reading is None and waiting and None in rows:
            number, (prompt, sampling, most) = waiting.pop()
            reading = number, most, writer.read(prompt, sampling), None
        if reading is not None:
            number, most, pieces, latest = reading
            following = next(pieces, None)
            reading = number, most, pieces, following
            if following is None:
                written[number].append(latest.first)
                if most > 1:
                    row = rows.index(None)
                    rows[row] = number
                    writer.join(latest, row)
                reading = None
        if any(row is not None for row in rows):
            tokens = np.asarray(writer.step())[:, 0]
            for row, number in enumerate(rows):
                if number is not None:
                    written[number].append(int(tokens[row]))
                    if len(written[number]) == texts[number][2]:
                        rows[row] = None
                        writer.leave(row)
    return written


def check(model, place, rows=3, count=9, **options):
    texts = list(asked(count))
    writer = RowWriter(model[0], context=CONTEXT, rows=rows, place=place, chunk=4, **options)
    writer.load(model[1])
    assert continuous(writer, texts) == alone(model, place, texts)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_texts_that_join_and_leave_are_those_written_alone(name):
    check(family(name), PLACES["one device"])


@pytest.mark.long
@pytest.mark.parametrize("where", ["tensor parallel", "flash-decoding"])
def test_layouts_split_the_rows_and_caches_of_joining_texts(where):
    check(trained(), PLACES[where], rows=4, count=6)


@pytest.fixture
def short_pages(monkeypatch):
    """Texts of these tests have several pages."""
    monkeypatch.setattr("meshdsl.generation.continuous.PAGE", 4)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_texts_that_share_pages_are_those_written_alone(name, short_pages):
    check(family(name), PLACES["one device"], cache_tokens=3 * CONTEXT)


@pytest.mark.parametrize("where", ["tensor parallel", "flash-decoding"])
def test_layouts_split_the_pages(where, short_pages):
    check(trained(), PLACES[where], rows=4, count=6, cache_tokens=4 * CONTEXT)


def test_layouts_split_slots_that_do_not_divide(short_pages):
    place = Place("model:3", "memory_length:model", "numpy")
    check(trained(), place, rows=2, count=4, cache_tokens=40)


@pytest.mark.slow
@pytest.mark.parametrize("cache_tokens", [None, 4 * CONTEXT])
def test_the_jax_backend_joins_texts(cache_tokens, short_pages):
    check(trained(), PLACES["jax"], rows=4, count=3, cache_tokens=cache_tokens)


def test_pages_hold_what_texts_need_and_no_more(short_pages):
    model, params = trained()
    writer = RowWriter(
        model, context=CONTEXT, rows=3, place=PLACES["one device"], chunk=4, cache_tokens=21
    )
    writer.load(params)
    (stack,) = writer.programs.state["cache"].layers.values()
    assert sorted(stack) == ["keys/0", "keys/1", "values/0", "values/1"]
    sizes = {dim.name: dim.size for dim in stack["keys/0"].dims}
    assert sizes == {"memory_length": 24, "heads": 4, "kv": 4}
    *_, first = writer.read([1, 2, 3, 4, 5, 6, 7], Sampling(temperature=0))
    for row in range(2):
        assert writer.fits(first)
        writer.join(first, row)
    assert not writer.fits(first)  # 2 pages are free: for each text that grows
    with pytest.raises(ValueError, match="a text of 7 tokens needs 2 pages; 1 are free"):
        writer.table._free.pop()
        writer.join(first, 2)
    np.asarray(writer.step())
    assert writer.lacking == 1  # both texts have 8 positions now
    with pytest.raises(ValueError, match="the step needs 1 more pages than are free"):
        writer.step()
    writer.leave(1)
    assert not writer.lacking


@pytest.mark.long
def test_a_text_goes_on_after_it_was_read_again(short_pages):
    place = PLACES["one device"]
    for name in ("gpt_mini", "window", "t5_mini", "t5 with a start"):
        model, params = family(name)
        writer = RowWriter(model, context=CONTEXT, rows=2, place=place, chunk=4, cache_tokens=32)
        writer.load(params)
        for number, (prompt, sampling, most) in enumerate(asked(4, seed=1)):
            wanted = alone((model, params), place, [(prompt, sampling, most)])[0]
            for done in range(most):
                pieces = writer.read(prompt, sampling, written=wanted[:done])
                *_, latest = pieces
                assert latest.first == wanted[done], (name, number, done)


def test_pages_are_for_models_that_take_them(short_pages):
    def message(function, *arguments, **options):
        with pytest.raises(ValueError) as caught:
            function(*arguments, **options)
        return str(caught.value)

    model, _ = trained()
    text = message(RowWriter, model, context=CONTEXT, cache_tokens=12)
    assert text == "a cache of 12 tokens has no room for a text of 16: it needs 16, in pages of 4"
    own = replace(model, decoding=replace(model.decoding, paged=False))
    text = message(RowWriter, own, context=CONTEXT, cache_tokens=64)
    assert "takes no pages: its step is to have its slots from `Cache.slots`" in text


def test_a_row_of_a_text_that_has_ended_may_wait_for_long():
    model, params = trained("gpt_mini", FAMILIES["learned"])
    writer = RowWriter(model, context=CONTEXT, rows=2, place=PLACES["one device"], chunk=4)
    writer.load(params)
    for _ in range(3 * CONTEXT):
        writer.step()
    texts = list(asked(2))
    written = continuous(writer, texts)
    assert written == alone((model, params), PLACES["one device"], texts)
    assert int(writer._state["cache"].start) < 4 * CONTEXT


def test_nothing_is_compiled_after_the_writer_is_made(monkeypatch):
    from meshdsl.running.jit import Jitted

    model, params = trained()
    writer = RowWriter(model, context=CONTEXT, rows=2, place=PLACES["one device"], chunk=4)
    monkeypatch.setattr(Jitted, "_compile", None)
    monkeypatch.setattr(Jitted, "_lower", None)
    writer.load(params)
    assert all(continuous(writer, list(asked(7))))


def test_mistakes_have_messages():
    def message(function, *arguments, **options):
        with pytest.raises(ValueError) as error:
            function(*arguments, **options)
        return str(error.value)

    learned = models.load("gpt_mini", FAMILIES["learned"])
    assert message(RowWriter, learned, context=17) == (
        "gpt_mini has learned max_length=16 positions, too few for a text of 17 tokens"
    )
    assert "bert_mini does not write text" in message(
        RowWriter, models.load("bert_mini"), context=4
    )
    writer = RowWriter(trained()[0], context=4, rows=1, place=PLACES["one device"])
    assert message(lambda: next(writer.read([1], DRAWS[0]))) == (
        "the writer has no parameters: load(params) first"
    )
    assert message(lambda: next(writer.read([1] * 5, DRAWS[0]))) == (
        "prompt 0 has 5 tokens; the writer takes 1 to 4"
    )
    assert writer.room(3) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_scores_may_have_any_dtype(dtype):
    """Every step of a `RowWriter` penalises seen tokens, with a penalty that is float32."""
    model, params = trained("gpt_mini", f"{SIZES},policy={dtype}")
    writer = RowWriter(model, context=8, rows=1, place=PLACES["one device"])
    writer.load(params)
    *_, prompt = writer.read([3, 5], Sampling(temperature=0, repetition_penalty=1.5))
    writer.join(prompt, 0)
    found = [prompt.first, *(int(np.asarray(writer.step())[0, 0]) for _ in range(3))]
    alone = Writer(
        model,
        prompt_tokens=2,
        new_tokens=4,
        sampling=Sampling(temperature=0, repetition_penalty=1.5),
        place=PLACES["one device"],
    )
    alone.load(params)
    assert found == [int(token) for (token,) in alone.write([[3, 5]])]
    assert len(set(found)) > 1


@pytest.mark.long
@pytest.mark.parametrize("place", ["tensor parallel", "jax"])
def test_probabilities_are_those_of_the_full_forward_pass_on_every_layout(place):
    model, params = trained()
    writer = RowWriter(model, context=CONTEXT, rows=2, place=PLACES[place], chunk=4, ranked=3)
    writer.load(params)
    writer.warm_up()
    prompt, other = [7, 3, 60, 1, 9], [5]
    *_, silent = writer.read(other, Sampling(seed=1))
    writer.join(silent, 1)
    *_, read = writer.read(prompt, Sampling(0.7, top_k=9, seed=3), reports=True, scored=True)
    writer.join(read, 0)
    found = [*read.prompt_probabilities(prompt), read.first_probability()]
    for _ in range(4):
        tokens = np.asarray(writer.step())[:, 0]
        found.append(StepProbabilities.of(tokens, writer.probabilities).at(0))
    text = [each.token for each in found]
    assert text[:5] == prompt and found[0].log_probability is None
    at_once = md.jit(functools.partial(transformer.logits, model.config), backend="numpy")
    named = md.named(np.array([text], "int32"), ["batch", "length"])
    logits = np.asarray(at_once(params, named))[0].astype(np.float64)
    wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for at, each in enumerate(found[1:]):
        assert each.log_probability == pytest.approx(wanted[at, each.token], abs=1e-5)
        order = np.argsort(-wanted[at])[:3]
        assert [token for token, _ in each.likeliest] == order.tolist()
        values = [value for _, value in each.likeliest]
        np.testing.assert_allclose(values, wanted[at, order], atol=1e-5)


def test_a_writer_without_probabilities_says_so():
    model, params = trained()
    writer = RowWriter(model, context=8, rows=1, place=PLACES["one device"])
    writer.load(params)
    with pytest.raises(ValueError, match="make it with `ranked`"):
        next(writer.read([1], Sampling(), reports=True))
    model, params = family("t5_mini")
    writer = RowWriter(model, context=8, rows=1, place=PLACES["one device"], ranked=2)
    writer.load(params)
    with pytest.raises(ValueError, match="an encoder reads the prompt"):
        next(writer.read([1, 2], Sampling(), scored=True))
    *_, prompt = writer.read([1, 2], Sampling(temperature=0), reports=True)
    likeliest = prompt.first_probability().likeliest
    assert prompt.first == likeliest[0][0]
