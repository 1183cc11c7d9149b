"""Packed documents: each gets the loss it gets alone, in every kind of model, on any layout."""

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.models import load
from meshdsl.models.transformer import logits
from meshdsl.training.data import Documents, PackedRows, Tokens

SMALL = "layers=1,embed=16,heads=2,vocab=32"
KINDS = {
    "rotary": "",
    "learned": "positions=learned",
    "relative": "positions=relative",
    "alibi": "positions=alibi",
    "latent": "attention=latent,kv_rank=8,rotary_kv=4",
    "window": "window=3",
    "none": "positions=none",
}


def run(function):
    """Returns a function that need not be compiled."""
    return md.jit(function, backend="numpy")


def packed():
    """Returns three rows: a piece that fills one, three documents, and three with an empty end."""
    sizes = [5, 4, 6, 13, 2, 7, 3]
    ids = np.random.default_rng(0).integers(0, 32, sum(sizes))
    rows = PackedRows.of(Documents.of([Tokens("a", ids, np.cumsum([0, *sizes]))], 32), 12)
    batch = rows[np.arange(len(rows))]
    assert [row.max() for row in batch["segments"]] == [1, 3, 3]
    assert (batch["segments"] == 0).sum(1).tolist() == [0, 0, 3]
    return batch


def named(batch):
    return {name: md.named(array, ["batch", "length"]) for name, array in batch.items()}


def loss_of_each_alone(model, params, batch):
    """Returns the mean over the tokens of documents that have a row each, in float64.

    What follows a document in its row is later than it, so a causal model does not see it there.
    """
    alone = []
    for tokens, targets, segments in zip(
        batch["tokens"], batch["targets"], batch["segments"], strict=True
    ):
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            row = np.full((2, len(tokens)), -1)
            row[:, : here.sum()] = tokens[here], targets[here]
            alone.append(row)
    inputs, targets = np.stack(alone, 1)
    rows = md.named(np.maximum(inputs, 0).astype(np.int32), ["batch", "length"])
    scores = run(lambda params, rows: logits(model.config, params, rows))(params, rows)
    scores = np.asarray(scores.transpose(["batch", "length", "vocab"]), np.float64)
    chosen = np.take_along_axis(scores, np.maximum(targets, 0)[..., None], -1)[..., 0]
    each = np.log(np.exp(scores).sum(-1)) - chosen
    return each[targets >= 0].mean()


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_have_the_loss_that_they_have_alone(kind):
    model = load("gpt_mini", ",".join(filter(None, [SMALL, KINDS[kind]])))
    params = run(model.init)(md.random.key(0))
    found = float(run(model.loss)(params, named(packed())))
    np.testing.assert_allclose(found, loss_of_each_alone(model, params, packed()), rtol=2e-6)


def test_what_fills_a_row_up_changes_no_gradient():
    model = load("gpt_mini", SMALL)
    params = run(model.init)(md.random.key(0))
    batch, changed = packed(), packed()
    empty = batch["segments"] == 0
    changed["tokens"][empty], changed["targets"][empty] = 7, 9
    step = run(lambda params, batch: md.grad(lambda params: model.loss(params, batch))(params))
    one, other = step(params, named(batch)), step(params, named(changed))
    for name in ("query", "key", "value", "out"):
        found, expected = (np.asarray(getattr(g.blocks.attention, name)) for g in (one, other))
        assert np.abs(expected).max() > 1e-4
        np.testing.assert_allclose(found, expected, atol=1e-7)
    np.testing.assert_allclose(np.asarray(one.embedding), np.asarray(other.embedding), atol=1e-7)


@pytest.mark.parametrize(
    "layout", ["batch:data; heads:model; vocab:model", "batch:data; length:model"]
)
def test_a_layout_changes_nothing(layout):
    model = load("gpt_mini", SMALL + ",positions=learned")
    params = run(model.init)(md.random.key(0))
    batch = named({name: array[1:] for name, array in packed().items()})
    alone = float(run(model.loss)(params, batch))
    split = float(md.jit(model.loss, "data:2,model:2", layout)(params, batch))
    np.testing.assert_allclose(split, alone, rtol=1e-5)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("layout", [None, "batch:data; heads:model; vocab:model"])
def test_only_learned_targets_have_a_loss(packing, layout):
    model = load("gpt_mini", f"{SMALL},policy=float64")
    params = run(model.init)(md.random.key(0))
    batch = packed()
    if not packing:
        batch = {name: batch[name] for name in ("tokens", "targets")}
    learned = np.random.default_rng(1).integers(0, 2, batch["tokens"].shape).astype(np.int32)
    mesh = None if layout is None else "data:3,model:2"
    loss = md.jit(md.value_and_grad(model.loss), mesh, layout, "numpy")
    value, slopes = loss(params, named({**batch, "learned": learned}))

    def each(params, batch):
        alone = dict(batch)
        targets = alone.pop("targets")
        scores = logits(model.config, params, alone["tokens"])
        return md.log_softmax(scores, "vocab"), targets

    if not packing:
        logs, targets = (np.asarray(a) for a in run(each)(params, named(batch)))
        chosen = -np.take_along_axis(logs, targets[..., None], -1)[..., 0]
        assert float(value) == pytest.approx(chosen[learned > 0].mean(), rel=1e-6)
    # Other targets change neither the loss nor a gradient.
    other = {**batch, "targets": np.where(learned > 0, batch["targets"], 3), "learned": learned}
    again, others = loss(params, named(other))
    assert float(again) == float(value)
    flat = [jax.tree.leaves(tree, is_leaf=is_array) for tree in (slopes, others)]
    for one, two in zip(*flat, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))
    everything, _ = loss(params, named({**batch, "learned": np.ones_like(learned)}))
    plain = run(model.loss)(params, named(batch))
    assert float(everything) == pytest.approx(float(plain), rel=1e-6) != float(value)


def is_array(value):
    return isinstance(value, md.NamedArray)
