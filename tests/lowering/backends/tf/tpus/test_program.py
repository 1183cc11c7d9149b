"""Programs of TPU replicas, run by XLA:CPU on eight devices and compiled by the TPU compiler."""

from importlib.util import find_spec

import numpy as np
import pytest

import meshdsl as md
from meshdsl.models.configs import TransformerConfig
from meshdsl.models.transformer import transformer
from meshdsl.tensors import dtypes
from meshdsl.tensors.dtypes import as_dtype
from meshdsl.training.state import create, spec_of
from meshdsl.training.step import make_train_step
from tests.ops.agreement import arrays_of, assert_close, random

pytest.importorskip("tensorflow")

from meshdsl.lowering.backends.tf.arguments import Storage
from tests.benchmarks.tf_tpu_bytes import compiled, planned
from tests.reference import tf_tpu

batch, embed, d_ff, layers = md.dims(batch=8, embed=12, d_ff=20, layers=3)
X = random([batch, embed])
W = random([layers, embed, d_ff], seed=1)
FOUR = md.named(np.array(4, np.int32), [])


def agree(function, *arguments, mesh, layout, tolerance=1e-10, **options):
    """Replicas give what the reference gives on one device; returns the kinds of collectives."""
    expected = arrays_of(md.jit(function, backend="numpy")(*arguments))
    run = tf_tpu.jit(function, mesh, layout, **options)
    for found, want in zip(arrays_of(run(*arguments)), expected, strict=True):
        assert found.dtype == want.dtype
        if want.dtype.kind in "fc":
            assert_close(found, want, tolerance)
        else:
            np.testing.assert_array_equal(_plain(found), _plain(want))
    return {one.kind for one in run.lower(*arguments).collectives}


def test_what_runs_here_are_replicas(monkeypatch):
    """Not TensorFlow's programs for hosts, which give the same numbers."""
    runs = []
    run = tf_tpu.Executable.call_flat
    monkeypatch.setattr(
        tf_tpu.Executable, "call_flat", lambda self, given: runs.append(self) or run(self, given)
    )
    agree(lambda x: md.sum(x, "batch"), X, mesh="a:8", layout="batch:a")
    assert "stablehlo" in runs[0].text


def _plain(array):
    data = np.asarray(array)
    return data.astype("f8") if data.dtype == dtypes.BFLOAT16 else data


# What is moved.


def moved(over, whole, along):
    """Returns results of every collective, but for reductions."""
    return {
        "gathered": whole,
        "exchanged": whole,
        "permuted": md.shift(along, "r", 3, wrap=True),
        "sliced": along["r", 2:9],
        "same": over,
    }


def reduced(over, whole, along):
    """Returns results of every collective."""
    found = {
        "summed": md.sum(over, "device"),
        "scattered": md.sum(over + over, "device"),
        **moved(over, whole, along),
    }
    if over.dtype.kind != "c":
        found |= {"largest": md.max(over, "device"), "least": md.min(over, "device")}
    return found


LAYOUT = "device:a+b; whole/p:b+a; gathered/p:-; exchanged/q:b+a; r:b+a; scattered/p:a+b"
KINDS = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute"}


@pytest.mark.long
@pytest.mark.parametrize(
    "dtype",
    "int8 int32 int64 uint8 uint32 float16 bfloat16 float32 float64 complex64 bool".split(),
)
def test_every_collective_moves_every_dtype(dtype):
    """Small whole numbers, whose sums are exact in all dtypes; 11 and 5 are cut with pads."""
    rng = np.random.default_rng(0)
    low = 0 if dtype.startswith("u") or dtype == "bool" else -3
    high = 2 if dtype == "bool" else 4

    def some(**sizes):
        data = rng.integers(low, high, list(sizes.values())).astype(as_dtype(dtype))
        return md.named(data, list(md.dims(**sizes)))

    operands = some(device=8, p=11, q=5), some(p=11, q=5), some(r=11, s=2)
    function = moved if dtype == "bool" else reduced
    kinds = agree(function, *operands, mesh="a:2,b:4", layout=LAYOUT)
    assert kinds == (KINDS - {"all_reduce", "reduce_scatter"} if dtype == "bool" else KINDS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_nan_wins_and_infinities_hold(dtype):
    data = np.random.default_rng(0).uniform(-1, 1, (8, 11)).astype(as_dtype(dtype))
    data[3, 2], data[5, 4], data[1, 6] = np.nan, np.inf, -np.inf
    x = md.named(data, ["device", "p"])

    def extremes(x):
        return {"largest": md.max(x, "device"), "least": md.min(x, "device")}

    assert agree(extremes, x, mesh="a:2,b:4", layout="device:b+a; p:a?") == {"all_reduce"}


def test_booleans_are_combined():
    x = md.named(np.random.default_rng(0).random((8, 33)) < 0.2, ["device", "p"])

    def both(x):
        return {"any": md.any(x, "device"), "all": md.all(x, "device")}

    assert agree(both, x, mesh="a:8", layout="device:a") == {"all_reduce"}


@pytest.mark.parametrize(
    ("layout", "kind"), [("device:a", "all_reduce"), ("device:a; p:a?", "reduce_scatter")]
)
def test_booleans_that_one_device_has_are_added(layout, kind):
    x = md.named(np.random.default_rng(0).random((8, 33)) < 0.5, ["device", "p"])

    def picked(x):
        return {"one": md.index(x, "device", 3)}

    assert agree(picked, x, mesh="a:8", layout=layout) == {kind}


def test_blocks_that_are_nothing_but_pads_are_sent():
    x = random(md.dims(p=6, q=2))

    def exchanged(x):
        return {"found": x * 2.0}

    assert agree(exchanged, x, mesh="a:3", layout="x/p:a; found/q:a") == {"all_to_all"}


@pytest.mark.parametrize(
    ("mesh", "axes"), [("a:3", "a"), ("a:2,b:3", "b+a"), ("a:2,b:2,c:2", "c+a")]
)
def test_devices_meet_along_any_axes(mesh, axes):
    x = random(md.dims(device=6, p=7))

    def total(x):
        return {"summed": md.sum(x, "device"), "largest": md.max(x, "device"), "gathered": x * 2.0}

    layout = f"device:{axes}; gathered/device:-; gathered/p:{axes}"
    kinds = agree(total, x, mesh=mesh, layout=layout, tolerance=1e-12)
    assert kinds == {"all_reduce", "all_to_all"}


# What contains it.


def layer(x, w):
    h = md.tanh(md.einsum(x, w, over="embed"))
    return x + md.einsum(h, w, over="d_ff"), md.sum(x, "embed")


def loss(x, w):
    y, _ = md.scan(md.checkpoint(layer), x, w, dim="layers")
    return md.mean(md.square(y))


def nested(x, w):
    def outer(x, w):
        def inner(y, v):
            return md.tanh(y + md.einsum(x, v, over="embed")), md.max(y, "batch")

        y, most = md.scan(inner, md.sum(x, "embed"), w, dim="d_ff")
        return x * 0.5 + y, most

    return md.scan(outer, x, w, dim="layers", reverse=True)


def repeated(x, count):
    def step(state):
        number, y = state
        return number + 1, 0.5 * y + md.shift(y, "batch", 1, wrap=True) + md.mean(y)

    return md.while_loop(lambda state: state[0] < count, step, (0, x))


def chosen(x, number):
    def larger(x):
        return md.sum(x, "batch")

    def smaller(x):
        return md.max(x, "batch") * 2.0

    return [md.cond(number > limit, larger, smaller, x) for limit in (3, 5)]


def stacked_in_one_branch(x, w):
    def looped(x, w):
        return md.scan(layer, x, w, dim="layers")

    def plain(x, w):
        return x, md.zeros([layers, batch], "float64")

    return [md.cond(md.sum(x) > limit, looped, plain, x, w) for limit in (-1e3, 1e3)]


CONTROL = {
    "scan": (lambda x, w: md.scan(layer, x, w, dim="layers"), W, "; d_ff:b"),
    "gradient through a checkpoint": (md.grad(loss, (0, 1)), W, "; d_ff:b"),
    "scan in a scan": (nested, W, "; embed:b"),
    "while": (repeated, FOUR, "; embed:b"),
    "cond": (chosen, FOUR, "; embed:b"),
    "scan in one branch of a cond": (stacked_in_one_branch, W, "; d_ff:b"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CONTROL)
def test_collectives_in_bodies(name):
    function, other, rules = CONTROL[name]
    for mesh in ("a:2,b:4", "a:3,b:2"):
        assert agree(function, X, other, mesh=mesh, layout=f"batch:a{rules}")


def test_what_a_checkpoint_computes_again_is_behind_a_barrier():
    program = tf_tpu.jit(md.grad(loss), "a:2,b:4", "batch:a; d_ff:b").lower(X, W)
    assert "barrier" in {instruction.op for instruction, _ in program.block.walk()}
    assert "stablehlo.optimization_barrier" in tf_tpu.program_text(program)


# Ends.


def test_inputs_without_use_and_results_without_work():
    def ends(x, unused, number):
        return {"again": x, "first": x + 1.0, "number": number, "second": x + 1.0, "x": x}

    agree(ends, X, W, FOUR, mesh="a:2,b:4", layout="batch:a; embed:b; x/embed:-")


def test_a_program_of_one_device():
    assert agree(md.grad(loss), X, W, mesh="a:1", layout="batch:a") == set()


def test_results_of_one_call_are_taken_by_the_next_pads_and_all():
    step = tf_tpu.jit(lambda x, y: (x * 2.0 + y, md.sum(x)), "a:3", "batch:a")
    once, _ = step(X, X)
    assert once.cuts
    twice, total = step(once, X)
    np.testing.assert_allclose(np.asarray(twice), 7 * X.data, rtol=1e-12)
    np.testing.assert_allclose(np.asarray(total), 3 * X.data.sum(), rtol=1e-12)


def test_replicas_that_disagree_are_reported():
    program = tf_tpu.jit(lambda x: x * 2.0, "a:2,b:2", "batch:a").lower(X)
    stored = Storage.of(program.block.outputs[0], program.mesh)
    shards = [np.array(X.data[part]) for part in stored.parts]
    np.testing.assert_array_equal(tf_tpu.put_together(stored, shards), X.data)
    shards[1][0, 0] += 1e-9
    with pytest.raises(AssertionError):
        tf_tpu.put_together(stored, shards)


# Numbers.


@pytest.mark.long
def test_random_numbers_are_the_same_everywhere():
    def drawn(x):
        key = md.random.key(3)
        return {
            "normal": md.random.normal(key, x.shape, "float64"),
            "bits": md.random.bits(md.random.fold_in(key, 2), [batch, d_ff]),
        }

    agree(drawn, X, mesh="a:2,b:4", layout="batch:a; embed:b; d_ff:b?")


def test_rows_are_taken_and_added():
    indices = md.named(np.array([7, 0, 3, 3, -1, 8], np.int32), ["spot"])

    def looked_up(x, indices):
        return md.take(x, indices, "batch")

    def gradient(x, indices):
        return md.grad(lambda x: md.sum(md.sin(looked_up(x, indices))))(x)

    for function in (looked_up, gradient):
        for layout in ("batch:a; embed:b?", "spot:a+b", "batch:a; spot:b"):
            agree(function, X, indices, mesh="a:2,b:4", layout=layout)


def test_real_numbers_are_transformed_as_complex_ones():
    def transformed(x):
        z = md.fft.fft(md.cast(x, "complex128"), "embed")
        return md.real(z), md.imag(z)

    agree(transformed, X, mesh="a:2,b:2", layout="batch:a")


def test_large_masks_are_constants_of_whole_bytes():
    """TensorFlow packs the bits of constants, which jaxlib does not."""
    mask = np.random.default_rng(0).random((70, 9)) < 0.3
    x = random(md.dims(p=70, q=9))

    def masked(x):
        return md.where(md.named(mask, x.dims), x, 0.0)

    agree(masked, x, mesh="a:2", layout="p:a?")


# The TPU compiler.

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu")
MIXED = md.Policy(params="float32", compute="bfloat16", output="float32")


def training_step(mesh, layout):
    """Returns the program of a step of a small decoder."""
    config = TransformerConfig(
        layers=2, embed=256, heads=8, vocab=512, max_length=128, remat="full", policy=MIXED
    )
    model = transformer("decoder", config, 16, 128)
    optimizer = md.optim.AdamW(1e-3)
    step = make_train_step(model.loss, optimizer)
    run = tf_tpu.jit(step, mesh, layout, donate="state")
    return run.lower(spec_of(create(model.init, optimizer)), model.batch_spec(16, 128))


def assert_sends_what_is_planned(program, topology):
    """As many numbers are sent; returns whether none of them in fewer bytes (see the benchmark)."""
    text = tf_tpu.program_text(program)
    devices, plan = program.mesh.size, planned(program)
    made = compiled(tf_tpu.compile_for_tpu(text, topology, devices), devices)
    assert made.numbers == plan.numbers
    assert made.sums <= plan.sums and made.rest <= plan.rest
    return made == plan


@needs_libtpu
def test_the_tpu_compiler_sends_what_is_planned():
    x, w = (md.cast(each, "float32") for each in (X, W))
    step = tf_tpu.jit(md.grad(loss, (0, 1)), "a:2,b:4", "batch:a; d_ff:b; w/embed:a; 1/embed:a")
    program = step.lower(x, w)
    assert {one.kind for one in program.collectives} >= {"all_gather", "reduce_scatter"}
    assert assert_sends_what_is_planned(program, "v5e:2x4")


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x4", "v4:2x2x2", "v5p:4x4x4"])
def test_a_training_step_sends_what_is_planned(topology):
    mesh = "data:16,model:4" if topology == "v5p:4x4x4" else "data:2,model:4"
    layout = "batch:data; heads:model; d_ff:model; vocab:model; params/embed:data"
    assert_sends_what_is_planned(training_step(mesh, layout), topology)
