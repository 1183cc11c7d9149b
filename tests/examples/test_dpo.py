"""The loss is that of the paper, on any layout, and models learn what is preferred."""

import json
import runpy
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.models import transformer
from meshdsl.training import save_weights
from meshdsl.training.data import Bytes

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "dpo.py"
SIZES = "layers=1,embed=16,heads=4,d_ff=16,policy=float64"
LAYOUTS = {
    "tensor": ("--mesh_shape=data:2,model:4", "--layout=batch:data;heads:model;vocab:model"),
    "FSDP": ("--mesh_shape=data:8", "--layout=batch:data;params/embed:data"),
}
PAIRS = [
    {"prompt": "one:", "chosen": " one", "rejected": " another"},
    {"prompt": "", "chosen": "begins", "rejected": "b"},
    {"prompt": "to the last token", "chosen": "ok", "rejected": "no"},
]


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture
def pairs(tmp_path):
    """Returns the flag of a file of pairs."""
    lines = [json.dumps({"prompt": f"{n}", "chosen": "ab", "rejected": "ba"}) for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    return f"--data={tmp_path}/pairs.jsonl"


def given(monkeypatch, example, *arguments):
    small = [f"--model_args={SIZES}", "--batch_size=8", "--steps=3", "--log_every=1"]
    monkeypatch.setattr(sys, "argv", ["dpo", *small, *arguments])
    return example["arguments"]()


def run_on(monkeypatch, example, backend):
    """Has the example run its programs on another backend."""
    names = example["trained"].__globals__
    monkeypatch.setitem(names, "train", partial(names["train"], backend=backend))
    monkeypatch.setattr(md, "jit", partial(md.jit, backend=backend))


def log_probability(logits, tokens, first):
    """Returns the sum of the logarithms of the probabilities of tokens from a position on."""
    logits = logits - logits.max(-1, keepdims=True)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return sum(logs[at - 1, tokens[at]] for at in range(first, len(tokens)))


def test_the_loss_is_that_of_the_paper(example):
    """Both answers are scored alone here, by all positions of the plain forward pass."""
    model = models.load("gpt_mini", f"{SIZES},vocab=256")
    init = md.jit(model.init, backend="numpy")
    params, reference = (init(md.random.key(seed)) for seed in (0, 1))
    at_once = md.jit(partial(transformer.logits, model.config), backend="numpy")

    def scored(params, pair, name):
        tokens = [*(pair["prompt"].encode() or [Bytes.end]), *pair[name].encode(), Bytes.end]
        logits = np.asarray(at_once(params, md.named(np.array([tokens]), ["batch", "length"])))
        return log_probability(logits[0].astype(np.float64), tokens, max(len(pair["prompt"]), 1))

    beta, margins, of_reference = 0.3, [], []
    for pair in PAIRS:
        chosen, rejected = (scored(params, pair, name) for name in ("chosen", "rejected"))
        pair_of_reference = [scored(reference, pair, name) for name in ("chosen", "rejected")]
        of_reference.append(pair_of_reference)
        margins.append(beta * (chosen - pair_of_reference[0] - rejected + pair_of_reference[1]))
    wanted = np.mean([-np.log(1 / (1 + np.exp(-margin))) for margin in margins])

    arrays = example["arrays_of"](PAIRS, Bytes(), 20)
    batch = {name: md.named(array, example["TEXT"]) for name, array in arrays.items()}
    of_answers = partial(example["log_probabilities"], model.config)
    logs = md.jit(of_answers, backend="numpy")(reference, batch)
    np.testing.assert_allclose(np.asarray(logs), of_reference, rtol=1e-10)
    batch["reference"] = md.named(np.array(of_reference), ["batch", "answer"])
    loss = md.jit(partial(example["preference_loss"], model.config, beta), backend="numpy")
    value, metrics = loss(params, batch)
    np.testing.assert_allclose(float(value), wanted, rtol=1e-10)
    np.testing.assert_allclose(float(metrics["margin"]), np.mean(margins), rtol=1e-9)
    assert float(metrics["accuracy"]) == pytest.approx(np.mean(np.array(margins) > 0))


def test_prompts_begin_as_weights_from_elsewhere_have_learned(example):
    plain, begun = (example["arrays_of"](PAIRS, Bytes(), 21, begin) for begin in (None, 7))
    assert (begun["tokens"][:, :, 0] == 7).all()
    for pair, before, after in zip(PAIRS, plain["learned"], begun["learned"], strict=True):
        # An empty prompt begins with the end token, which this one replaces.
        shift = 1 if pair["prompt"] else 0
        np.testing.assert_array_equal(after, np.roll(before, shift, -1))


def test_a_line_separator_within_a_text_ends_no_pair(example, tmp_path):
    pair = {"prompt": "one\u2028two\x85three", "chosen": " a", "rejected": " b"}
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n" + json.dumps(pair, ensure_ascii=False) + "\n\n", encoding="utf-8")
    assert example["read_pairs"](file) == [pair]


LORA = "--lora=blocks/**/query:2,blocks/**/w_in:2"
CASES = [
    pytest.param("numpy", (), id="all"),
    pytest.param("numpy", (LORA,), id="adapters", marks=pytest.mark.long),
    pytest.param("jax", (), id="all, compiled", marks=pytest.mark.long),
]


@pytest.mark.long
@pytest.mark.parametrize(("backend", "lora"), CASES)
def test_losses_are_the_same_on_every_layout(monkeypatch, example, pairs, backend, lora):
    run_on(monkeypatch, example, backend)
    more = (pairs, "--learning_rate=0.01", *lora)
    losses = {
        name: example["trained"](given(monkeypatch, example, *layout, *more)).losses
        for name, layout in LAYOUTS.items()
    }
    for each in losses.values():  # reports are in float32
        assert each[0] == pytest.approx(np.log(2), abs=1e-7)  # the model is its own reference
        np.testing.assert_allclose(each, losses["tensor"], rtol=2e-7)
    assert losses["FSDP"][-1] < np.log(2) - 1e-4


def test_training_begins_with_the_weights_and_goes_to_what_is_preferred(
    monkeypatch, example, pairs, tmp_path, capsys
):
    model = models.load("gpt_mini", SIZES)
    params = md.jit(model.init, backend="numpy")(md.random.key(7))
    save_weights(tmp_path / "weights.safetensors", params)
    start = (f"--init_from={tmp_path}/weights.safetensors", pairs)
    fast = ("--learning_rate=0.01", "--lora=blocks/**/query:2,embedding:2", "--steps=12")
    run_on(monkeypatch, example, "numpy")
    result = example["trained"](given(monkeypatch, example, *start, *fast))
    assert result.losses[0] == pytest.approx(np.log(2), abs=1e-7)
    assert result.history[-1]["eval_accuracy"] == 1
    capsys.readouterr()


def test_pairs_that_do_not_fit_are_refused(example, tmp_path):
    with pytest.raises(SystemExit, match="some pairs are longer than --length: take 19"):
        example["arrays_of"](PAIRS, Bytes(), 8)
    assert example["arrays_of"](PAIRS, Bytes(), 19)["tokens"].shape == (3, 2, 19)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a"}\n[]\n')
    with pytest.raises(SystemExit, match=r"line 1: needs a prompt, chosen.*\n.*line 2"):
        example["read_pairs"](tmp_path / "pairs.jsonl")


def test_too_few_pairs_are_told(monkeypatch, example, pairs):
    with pytest.raises(SystemExit, match=r"^40 pairs are too few: every fifth .* take 45$"):
        example["trained"](given(monkeypatch, example, pairs, "--batch_size=9"))
