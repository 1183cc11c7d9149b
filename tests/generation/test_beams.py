"""Beam search, against one that scores every sequence there is, and against `transformers`."""

import functools
import itertools

import numpy as np
import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.generation import Place, Searcher, search_texts
from meshdsl.generation.beams import Beams
from meshdsl.models import transformer
from meshdsl.training.data.tokenizers import Bytes
from tests.generation.test_writer import PLACES, PROMPTS, trained

END, VOCAB, MOST = 0, 4, 4


def table(seed, vocab=VOCAB, most=MOST):
    """Returns the log probabilities of the token after every sequence, in float64."""
    rng = np.random.default_rng(seed)
    rows = {}
    for length in range(most):
        for sequence in itertools.product(range(vocab), repeat=length):
            scores = rng.normal(size=vocab) * 1.5
            rows[sequence] = scores - np.log(np.exp(scores).sum())
    return rows


def total(rows, sequence):
    return sum(rows[sequence[:at]][token] for at, token in enumerate(sequence))


def every_text(rows, vocab=VOCAB, most=MOST):
    """Returns all sequences that a text can be: up to an end token, or of the most tokens."""
    return [
        sequence
        for length in range(1, most + 1)
        for sequence in itertools.product(range(vocab), repeat=length)
        if END not in sequence[:-1] and (sequence[-1] == END or length == most)
    ]


def ranked(rows, penalty, **sizes):
    """Returns all texts and their scores, best first."""
    found = [(total(rows, s) / len(s) ** penalty, s) for s in every_text(rows, **sizes)]
    return sorted(found, reverse=True)


def narrow(rows, beams, penalty, vocab=VOCAB, most=MOST):
    """Returns what beams find, by the definition, without an early end."""
    live, found = [()], []
    for length in range(1, most + 1):
        further = [(*prefix, token) for prefix in live for token in range(vocab)]
        further = sorted(further, key=lambda s: -total(rows, s))[: 2 * beams]
        ended = [s[-1] == END or length == most for s in further]
        found += [s for s, ends in zip(further[:beams], ended[:beams], strict=True) if ends]
        live = [s for s, ends in zip(further, ended, strict=True) if not ends][:beams]
    found = [(total(rows, s) / len(s) ** penalty, s) for s in found]
    return sorted(found, reverse=True)[:beams]


def searched(rows, beams, penalty, vocab=VOCAB, most=MOST):
    """Returns what `Beams` finds, and after how many steps."""
    search = Beams(beams, most, penalty, END)
    live, steps = [()] * beams, 0
    while not search.done:
        scores = np.array([rows[prefix] for prefix in live])
        order = np.argsort(-scores, 1)[:, : 2 * beams]
        parents, tokens = search.advance(np.take_along_axis(scores, order, 1), order)
        live = [(*live[p], t) for p, t in zip(parents, tokens, strict=True)]
        steps += 1
    full = [(*each.tokens, END) if each.ended else each.tokens for each in search.found]
    return [(each.score, s) for each, s in zip(search.found, full, strict=True)], steps


@pytest.mark.parametrize("penalty", [-0.5, 0.0, 1.0, 2.0])
def test_enough_beams_find_the_best_of_all_sequences(penalty):
    for seed in range(20):
        rows = table(seed)
        found, _ = searched(rows, VOCAB**MOST, penalty)
        wanted = ranked(rows, penalty)
        assert [s for _, s in found] == [s for _, s in wanted]
        np.testing.assert_allclose([x for x, _ in found], [x for x, _ in wanted], rtol=1e-12)


@pytest.mark.parametrize("penalty", [-0.5, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("beams", [1, 2, 3])
def test_few_beams_find_what_the_definition_does_and_end_early(beams, penalty):
    early = 0
    for seed in range(60):
        rows = table(seed)
        found, steps = searched(rows, beams, penalty)
        wanted = narrow(rows, beams, penalty)
        assert [s for _, s in found] == [s for _, s in wanted]
        np.testing.assert_allclose([x for x, _ in found], [x for x, _ in wanted], rtol=1e-12)
        early += steps < MOST
    assert early or penalty >= 1


def of_model(place, beams=3, prompts=PROMPTS, name="gpt_mini", overrides=None, **options):
    model, params = trained(name, *[overrides] * (overrides is not None))
    given = {"prompt_tokens": 9, "new_tokens": 5, "batch_size": 3, **options}
    searcher = Searcher(model, beams=beams, place=place, **given)
    searcher.load(params)
    return searcher.search(prompts, end=7)


@functools.cache
def of_one_device():
    return of_model(PLACES["one device"])


@pytest.mark.parametrize("where", ["tensor parallel", "flash-decoding"])
def test_every_layout_finds_the_same_texts(where):
    found = of_model(PLACES[where], batch_size=4)
    assert [[each.tokens for each in texts] for texts in found] == [
        [each.tokens for each in texts] for texts in of_one_device()
    ]


def test_log_probabilities_are_those_of_the_full_forward_pass():
    model, params = trained()
    at_once = md.jit(functools.partial(transformer.logits, model.config), backend="numpy")
    for prompt, texts in zip(PROMPTS, of_one_device(), strict=True):
        assert len(texts) == 3 and texts[0].score >= texts[1].score >= texts[2].score
        for text in texts[:1]:
            written = [*text.tokens, *[7] * text.ended]
            tokens = md.named(np.array([prompt + written], "int32"), ["batch", "length"])
            scores = np.asarray(at_once(params, tokens), np.float64)[0, len(prompt) - 1 : -1]
            scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
            wanted = scores[np.arange(len(written)), written].sum()
            assert text.log_probability == pytest.approx(wanted, rel=1e-5)
            assert text.score == pytest.approx(wanted / len(written), rel=1e-5)


def test_beams_of_a_split_batch_stay_on_their_devices():
    model, _ = trained()
    place = PLACES["tensor parallel"]
    searcher = Searcher(model, prompt_tokens=4, new_tokens=4, beams=3, batch_size=2, place=place)
    assert not searcher.programs.reorder.program.collectives


def test_a_text_does_not_depend_on_those_beside_it():
    for number, prompt in enumerate(PROMPTS[:2]):
        (alone,) = of_model(PLACES["one device"], prompts=[prompt], batch_size=1)
        assert [each.tokens for each in alone] == [each.tokens for each in of_one_device()[number]]


def test_one_beam_is_greedy_and_an_encoder_is_read_once():
    sizes = "layers=2,embed=16,heads=4,d_ff=8,vocab=61,kv=4"
    from tests.generation.test_writer import DRAWS, written

    model = trained("t5_mini", sizes)
    greedy = written(PLACES["one device"], DRAWS["greedy"], model=model, new_tokens=5)
    found = of_model(PLACES["one device"], beams=1, name="t5_mini", overrides=sizes)
    for (best,), text in zip(found, greedy, strict=True):
        assert list(best.tokens) == (text[: text.index(7)] if best.ended else text)


def test_texts_are_cut_at_stop_strings_after_the_search():
    class Canned:
        batch_size, start = 2, None

        def search(self, prompts, end):
            texts = [b"one. two", b"three"][: len(prompts)]
            beams = [Beams(1, 8, 1.0, end) for _ in texts]
            for beam, text in zip(beams, texts, strict=True):
                for token in [*text, end]:
                    if not beam.done:
                        beam.advance([[-1.0, -9.0]], [[token, 1]])
            return [beam.found for beam in beams]

    texts = [*search_texts(Canned(), Bytes(), ["a", "b", "c"], stop=["."])]
    assert [text.written for text in texts] == ["one", "three", "one"]
    assert [text.finish for text in texts] == ["stop", "end", "stop"]


def test_mistakes_have_messages():
    model, params = trained()
    with pytest.raises(ValueError, match="needs at least one beam, not 0"):
        Searcher(model, prompt_tokens=4, new_tokens=2, beams=0)
    place = Place(backend="numpy")
    searcher = Searcher(model, prompt_tokens=4, new_tokens=2, beams=2, place=place)
    with pytest.raises(ValueError, match=r"no parameters: load\(params\) first"):
        searcher.search([[1]], 0)
    with pytest.raises(ValueError, match="takes 1 to 1 prompts, got 2"):
        searcher.search([[1], [2]], 0)
    searcher.load(params)
    searcher.programs.steps[1] = lambda *_: {
        "scores": np.full((2, 4), np.nan),
        "tokens": np.zeros((2, 4), int),
    }
    searcher.programs.steps[4] = searcher.programs.steps[1]
    with pytest.raises(ValueError, match="scores after prompt 0 are not finite"):
        searcher.search([[1]], 0)


def test_the_texts_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from meshdsl.training import load_weights

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=32, n_embd=16, n_layer=2, n_head=2, initializer_range=0.6
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path)
    model = models.load(str(tmp_path))
    for beams, penalty in [(1, 1.0), (2, 0.0), (4, 1.0), (4, 2.0), (6, -1.0)]:
        searcher = Searcher(
            model, prompt_tokens=4, new_tokens=8, beams=beams, length_penalty=penalty,
            batch_size=2, place=Place(backend="numpy"),
        )  # fmt: skip
        searcher.load(load_weights(str(tmp_path), searcher.programs.like))
        prompts = [[3, 5, 1, 9], [8, 2, 2, 4]]
        texts = theirs.generate(
            torch.tensor(prompts), num_beams=beams, length_penalty=penalty, max_new_tokens=8,
            early_stopping="never", do_sample=False, eos_token_id=END, pad_token_id=16,
            num_return_sequences=beams, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        for number, found in enumerate(searcher.search(prompts, END)):
            for rank, text in enumerate(found):
                row = number * beams + rank
                wanted = texts.sequences[row, 4:].tolist()
                own = [*text.tokens, *[END] * text.ended]
                assert own == wanted[: len(own)] and {*wanted[len(own) :]} <= {16}
                if beams > 1:
                    score = float(texts.sequences_scores[row])
                    assert text.score == pytest.approx(score, rel=1e-4)
