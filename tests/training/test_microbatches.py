"""Gradient accumulation: the numbers of the whole batch, and one reduction of the gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.lowering.options import Options
from meshdsl.optim import AdamW, Sgd
from meshdsl.tracing.graph import Graph
from meshdsl.training.microbatches import MICROBATCH, accumulated, check_microbatches
from meshdsl.training.state import create, spec_of
from meshdsl.training.step import make_train_step
from tests.training import classifier

TENSOR = "batch:data; heads:model; d_ff:model; vocab:model"
SEQUENCE = f"{TENSOR}; length:model?"


def lowered(microbatches, mesh, layout, model=None):
    """Returns the program of a training step, of the classifier or of a language model."""
    optimizer = AdamW(0.1)
    init, loss, batch = classifier.init, classifier.loss, classifier.BATCH
    if model is not None:
        init, loss, batch = model.init, model.loss, model.batch_spec(16, 8)
    step = make_train_step(loss, optimizer, microbatches=microbatches)
    jitted = md.jit(step, mesh, layout, donate="state", options=Options(bucket_bytes=0))
    return jitted.lower(spec_of(create(init, optimizer)), batch)


@pytest.fixture(scope="module")
def decoder():
    return models.load("gpt_mini", "layers=3,embed=16,heads=2,d_ff=32,vocab=32")


def moved(program, axis):
    """Returns, by line, the bytes of what moves along an axis, and how often."""
    found = {}
    for c in program.collectives:
        if c.dims and axis in c.axes:
            place = c.kind, str(c.source), c.dims.names
            payload, count = found.get(place, (0, 0))
            found[place] = payload + c.payload_bytes, count + c.count
    return found


@pytest.mark.parametrize(("mesh", "layout"), classifier.LAYOUTS)
@pytest.mark.parametrize("microbatches", [2, 8])
def test_steps_in_microbatches_are_those_of_plain_numpy(mesh, layout, microbatches):
    optimizer = Sgd(0.2)
    state = md.jit(create(classifier.init, optimizer), mesh, layout, "numpy")(md.random.key(0))
    step = make_train_step(classifier.loss, optimizer, microbatches=microbatches)
    step = md.jit(step, mesh, layout, "numpy")
    names = ("w_in", "bias", "w_out")
    weights = [np.asarray(getattr(state.params, name), "f8") for name in names]
    for batch in classifier.batches(3):
        state, metrics = step(state, classifier.named(batch))
        value, grads = classifier.numpy_loss_and_grads(*weights, batch)
        weights = [w - 0.2 * g for w, g in zip(weights, grads, strict=True)]
        norm = np.sqrt(sum((g**2).sum() for g in grads))
        np.testing.assert_allclose(float(metrics["loss"]), value, rtol=1e-5)
        np.testing.assert_allclose(float(metrics["grad_norm"]), norm, rtol=1e-5)
    for name, expected in zip(names, weights, strict=True):
        np.testing.assert_allclose(getattr(state.params, name), expected, atol=1e-5)


@pytest.mark.parametrize("layout", [TENSOR, SEQUENCE, "length:model; batch:data; vocab:model?"])
def test_a_transformer_learns_the_same_from_microbatches(decoder, layout):
    rng = np.random.default_rng(0)
    batch = {
        name: md.named(rng.integers(0, 32, spec.dims.sizes).astype("int32"), spec.dims)
        for name, spec in decoder.batch_spec(8, 8).items()
    }
    params = md.jit(decoder.init, backend="numpy")(md.random.key(0))

    def loss(params, batch):
        return decoder.loss(params, batch), {}

    whole = md.jit(md.value_and_grad(loss, has_aux=True), backend="numpy")(params, batch)
    parts = md.jit(accumulated(loss, 4), "data:2,model:2", layout, "numpy")(params, batch)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5)


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("data:4", "batch:data"),
        ("data:3", "batch:data"),  # 16 rows are not split over 3 devices until 8 of them are used
        ("slice:2,data:2", "batch:slice+data"),
        ("slice:2,data:2,model:2", "batch:slice+data; hidden:model"),
        ("data:2,model:2", "pixel:model; batch:data"),
    ],
)
def test_microbatches_move_nothing_and_reduce_gradients_once(mesh, layout):
    for axis in mesh.replace(":", ",").split(",")[::2]:
        whole, parts = (lowered(n, mesh, layout) for n in (1, 2))
        kinds = {kind for kind, _, dims in moved(parts, axis) if "batch" in dims}
        assert kinds == {kind for kind, _, dims in moved(whole, axis) if "batch" in dims}

        def gradients(program, axis=axis):
            found = moved(program, axis)
            return {place: n for place, n in found.items() if "backward" in place[1]}

        assert gradients(parts) == gradients(whole)


@pytest.mark.parametrize("layout", [TENSOR, SEQUENCE])
def test_gradients_of_a_scan_over_layers_stay_partial_across_microbatches(decoder, layout):
    whole, parts = (lowered(n, "data:2,model:2", layout, decoder) for n in (1, 8))
    assert moved(parts, "data") == moved(whole, "data")
    assert all(c.count == 1 for c in parts.collectives if "data" in c.axes)
    # Activations are moved for each microbatch and layer: as many bytes, an eighth at a time.
    ours, theirs = moved(parts, "model"), moved(whole, "model")
    for place in ours.keys() & theirs.keys():
        if "batch" in place[2]:
            assert ours[place][1] == 8 * theirs[place][1]


def test_less_is_kept_for_the_backward_pass(decoder):
    whole, parts = (lowered(n, "data:2,model:2", TENSOR, decoder) for n in (1, 8))
    assert parts.peak_bytes < whole.peak_bytes


def test_what_is_reduced_is_told_with_the_line_of_the_model(decoder):
    program = lowered(4, "data:2", "batch:data", decoder)
    places = {c.source.place.rpartition(":")[0] for c in program.collectives}
    assert "models/layers/attention.py" in places and "models/transformer.py" in places
    assert not any("training" in place for place in places)


def test_layout_rules_know_the_complete_gradients():
    graph = md.jit(accumulated(classifier.loss_and_size, 4)).trace(
        spec_of(classifier.init), classifier.BATCH
    )

    def names(graph: Graph):
        for op in graph.operations:
            if op.name == "name":
                yield op.params["name"]

    (scan,) = (op for op in graph.operations if op.name == "scan")
    assert list(names(scan.params["body"])) == []
    assert [*names(graph)] == [f"gradients/params/{n}" for n in ("w_in", "bias", "w_out")]


def test_half_precision_is_added_up_in_float32():
    """256 + 31 x 0.5 would stay 256 in bfloat16."""
    summands = np.full(32, 0.5, "f4")
    summands[0] = 256

    def loss(params, batch):
        return md.mean(params["w"] * batch["x"]), {}

    w, x = md.named(np.ones((), "f4"), []), md.named(summands, ["batch"])
    arguments = {"w": md.cast(w, "bfloat16")}, {"x": md.cast(x, "bfloat16")}
    (value, _), grads = md.jit(accumulated(loss, 32), backend="numpy")(*arguments)
    assert grads["w"].dtype == np.float32 and value.dtype == np.float32
    assert float(grads["w"]) == float(value) == summands.mean()


def test_metrics_of_every_dtype_are_averaged():
    def loss(params, batch):
        count = md.sum(md.cast(batch["x"] > 2, "int32"))
        return md.mean(params * batch["x"]), {"count": count, "any": md.any(batch["x"] > 2)}

    x = md.named(np.arange(8.0), ["batch"])
    weight = md.named(np.ones(()), [])
    (value, metrics), _ = md.jit(accumulated(loss, 4), backend="numpy")(weight, {"x": x})
    assert float(value) == 3.5
    assert (float(metrics["count"]), float(metrics["any"])) == (5 / 4, 1.0)


def test_every_microbatch_has_a_key_of_its_own():
    def noise(params, batch):
        drawn = md.random.uniform(batch["key"], batch["x"].shape)
        return md.mean(drawn * params), {"drawn": md.mean(drawn)}

    key, x = md.random.key(3), md.named(np.ones(8, "f4"), ["batch"])
    batch = {"key": key, "x": x}
    (value, _), _ = md.jit(accumulated(noise, 4), backend="numpy")(np.float32(1), batch)
    keys = np.asarray(md.random.split(key, md.Dimension(MICROBATCH, 4)))
    drawn = [
        np.asarray(md.random.uniform(md.named(one, ["random_key"]), md.dims(batch=2)))
        for one in keys
    ]
    assert len({float(one[0]) for one in drawn}) == 4
    np.testing.assert_allclose(float(value), np.mean(drawn), rtol=1e-6)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_every_microbatch_of_a_loss_in_jax_has_a_key_of_its_own(make):
    def noise(params, batch):
        return jnp.mean(jax.random.uniform(batch["key"], batch["x"].shape) * params)

    program = md.from_jax(noise, {"batch/x": "batch"})
    params, batch = program.named(np.float32(1), {"key": make(3), "x": np.ones(8, "f4")})
    loss = accumulated(lambda *given: (program(*given), {}), 4)
    (value, _), _ = md.jit(loss, backend="numpy")(params, batch)
    keys = md.random.split(md.random.key(3), md.Dimension(MICROBATCH, 4))
    words = np.asarray(keys)
    drawn = [np.mean(jax.random.uniform(jax.random.wrap_key_data(one), (2,))) for one in words]
    np.testing.assert_allclose(float(value), np.mean(drawn), rtol=1e-6)


def test_raw_keys_that_microbatches_would_share_are_refused():
    def noise(params, batch):
        return jnp.mean(jax.random.uniform(batch["keys"][0], batch["x"].shape) * params)

    program = md.from_jax(noise, {"batch/x": "batch"})
    keys = jax.random.split(jax.random.PRNGKey(3))
    _, batch = program.named(np.float32(1), {"keys": keys, "x": np.ones(8, "f4")})
    with pytest.raises(ValueError, match=r"batch/keys: .*raw_key=2\] are keys that all micro"):
        check_microbatches(batch, 4)


def test_raw_keys_with_a_name_of_their_own_are_refused():
    batch = {"x": md.spec(md.dims(batch=8)), "key": md.spec(md.dims(words=2), "uint32")}
    with pytest.raises(ValueError, match=r"batch/key: u32\[words=2\] looks like a raw key of JAX"):
        check_microbatches(batch, 4)


def test_what_has_no_batch_dim_is_given_whole_and_whole_numbers_have_no_gradient():
    def loss(params, batch):
        number = md.cast(params["n"], "float32")
        return md.mean(params["w"] * batch["x"] * batch["scale"]) + number, {}

    params = {"w": np.float32(2), "n": np.int32(3)}
    batch = {"x": md.named(np.arange(6, dtype="f4"), ["row"]), "scale": np.float32(3)}
    (value, _), grads = md.jit(accumulated(loss, 3, dim="row"), backend="numpy")(params, batch)
    assert float(value) == 18.0 and float(grads["w"]) == 7.5
    assert grads["n"] is None


def told(batch, count, dim="batch"):
    with pytest.raises(ValueError) as error:
        check_microbatches(batch, count, dim)
    return str(error.value)


def test_microbatches_that_do_not_divide_the_batch_are_told_with_those_that_do():
    assert told(classifier.BATCH, 5) == (
        "microbatches=5 do not fit the batch\n"
        "  batch/answer, batch/image: 5 do not divide batch=16; take 4 or 8 microbatches, or a "
        "batch of 15 or 20"
    )
    assert told(classifier.BATCH, 32).endswith(
        "32 do not divide batch=16; take 16 microbatches, or a batch of 32"
    )
    with pytest.raises(ValueError, match=r"^microbatches=3 do not fit the batch\n.*take 2 or 4 "):
        lowered(3, "data:2", "batch:data")


def test_every_reason_why_a_batch_cannot_be_split_is_told():
    batch = {
        "x": md.spec(md.dims(batch=6, microbatch=2)),
        "y": md.spec(md.dims(batch=7)),
        "keys": md.spec(md.dims(layers=2, random_key=2), "uint32"),
    }
    assert told(batch, 3) == (
        "microbatches=3 do not fit the batch\n"
        "  batch/keys: [layers=2, random_key=2] are keys that all microbatches would share; give "
        "one key, and split it in the loss\n"
        "  batch/x: [batch=6, microbatch=2] has a dim `microbatch` already; rename it\n"
        "  batch/y: 3 do not divide batch=7; take 1 or 7 microbatches, or a batch of 6 or 9"
    )


def test_a_batch_without_a_batch_dim_is_told():
    assert told({"x": md.spec(md.dims(rows=6, pixel=2))}, 3) == (
        "microbatches=3 do not fit the batch\n"
        "  nothing in the batch has a dim `batch` to split; its dims: `pixel`, `rows`. "
        "batch_dim=... names another"
    )
    check_microbatches({"x": md.spec(md.dims(rows=6, pixel=2))}, 3, "rows")


def test_less_than_one_microbatch_is_told():
    assert told(classifier.BATCH, 0) == "microbatches must be at least 1, got 0"
    with pytest.raises(ValueError, match=r"^microbatches must be at least 1, got 0$"):
        lowered(0, "data:2", "batch:data")
