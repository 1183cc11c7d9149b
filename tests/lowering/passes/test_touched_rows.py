"""Gradients of tables are computed by their touched rows: the same numbers, and where they are."""

import math

import ml_dtypes  # noqa: F401  # numpy learns of bfloat16
import numpy as np
import pytest

import meshdsl as md
from meshdsl import optim
from meshdsl.lowering import backends, passes
from meshdsl.lowering.passes.touched_rows import touched_rows
from meshdsl.training.state import create
from meshdsl.training.step import make_train_step
from tests.property.pads import poisoned

ROWS, WIDTH, BATCH, RATE = 4096, 8, 16, 0.5
# In these, no gradient as large as the table travels.
LOCAL = ["", "rows:model", "width:model", "batch:data; rows:data?", "rows:data+model"]
LAYOUTS = [*LOCAL, "batch:data", "batch:data; rows:model"]
MESH = "data:2,model:2"
random = np.random.default_rng(0)
# Few distinct rows, two of them outside of the table.
NUMBERS = random.integers(0, 6, BATCH).astype(np.int32) * 700
NUMBERS[3], NUMBERS[4] = -1, ROWS
TABLE = random.normal(size=(ROWS, WIDTH))
AIM = random.normal(size=(BATCH, WIDTH))


class Params(md.Module):
    table: md.Tensor


def loss(params, batch):
    found, aim = md.take(params.table, batch["row"], "rows"), batch["aim"]
    return 0.5 * md.sum(md.square(md.cast(found, "float32") - md.cast(aim, "float32")))


def given(dtype):
    rows, width, batch = md.dims(rows=ROWS, width=WIDTH, batch=BATCH)
    table = md.named(TABLE.astype(np.dtype(dtype)), [rows, width])
    data = {"row": md.named(NUMBERS, [batch]), "aim": md.named(AIM.astype("f4"), [batch, width])}
    return table, data


def trained(optimizer, layout, backend="numpy", dtype="float32", **options):
    """Returns the program of a step, and the results of it."""
    table, data = given(dtype)
    step = make_train_step(loss, optimizer, **options)
    state = md.jit(create(Params, optimizer))(table)
    function = md.jit(step, MESH, layout, backend)
    return function.lower(state, data), function(state, data)


def expected(clip, dtype):
    """Returns the table after a step and the norm of the gradient, in float64."""
    table = given(dtype)[0].data.astype(float)
    inside = (NUMBERS >= 0) & (NUMBERS < ROWS)
    grad = np.zeros_like(table)
    np.add.at(grad, NUMBERS[inside], table[NUMBERS[inside]] - AIM[inside])
    norm = math.sqrt((grad**2).sum())
    return table - RATE * grad * min(1, (clip or math.inf) / norm), norm


def ops(program):
    return [one.op for one, _ in program.block.walk()]


@pytest.mark.long
@pytest.mark.parametrize("backend", backends.BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_step_is_that_of_float64(backend, layout, clip):
    program, found = trained(optim.Sgd(RATE), layout, backend, clip_norm=clip)
    if backend != "jax_auto" and layout in LOCAL:
        assert ops(program).count("row_sums") == ops(program).count("add_rows") == 1
        assert "scatter_add" not in ops(program)
    table, norm = expected(clip, "float32")
    np.testing.assert_allclose(np.asarray(found.state.params.table), table, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.metrics["grad_norm"].data, norm, rtol=1e-5)


@pytest.mark.parametrize("backend", ["numpy", "jax", "tf"])
def test_half_precision_is_added_up_before_it_is_rounded(backend):
    policy = md.Policy(params="float32", compute="bfloat16", output="float32")
    program, found = trained(optim.Sgd(RATE), "rows:model", backend, policy=policy)
    assert "add_rows" in ops(program)
    table, norm = expected(None, "float32")
    np.testing.assert_allclose(np.asarray(found.state.params.table), table, 2**-6, 2**-6)
    np.testing.assert_allclose(found.metrics["grad_norm"].data, norm, rtol=2**-7)


def test_a_table_in_half_precision_is_changed_in_float32_as_a_whole():
    program, found = trained(optim.Sgd(RATE), "rows:model", dtype="bfloat16")
    assert "scatter_add" in ops(program)
    changed = np.asarray(found.state.params.table).astype(float)
    np.testing.assert_allclose(changed, expected(None, "bfloat16")[0], 2**-7, 2**-7)


def test_many_updates_of_a_row_are_not_rounded_away():
    rows, width, batch = md.dims(rows=2**18, width=1, batch=256)
    table = md.named(np.ones((2**18, 1), np.float32), [rows, width])
    at, push = md.named(np.zeros(256, np.int32), [batch]), np.float32(2**-25)

    def f(table, at):
        grad = md.grad(lambda t: md.sum(md.take(t, at, "rows")) * push)(table)
        return table - grad

    for backend in ("numpy", "jax", "tf"):
        step = md.jit(f, "data:1", backend=backend)
        assert "add_rows" in ops(step.lower(table, at))
        assert np.asarray(step(table, at))[0, 0] == np.float32(1 - 256 * 2**-25)


def test_microbatches_add_to_the_gradient_that_they_carry():
    program, found = trained(optim.Sgd(RATE), "rows:model", microbatches=4)
    (loop,) = (one for one in program.block.instructions if one.op == "scan")
    body = [one.op for one in loop.body.instructions]
    assert "add_rows" in body and "scatter_add" not in body
    _, whole = trained(optim.Sgd(RATE), "rows:model", microbatches=1)
    before = TABLE.astype("f4")
    table = np.asarray(whole.state.params.table.data)
    np.testing.assert_allclose(  # the mean over the parts, of a loss that is a sum
        np.asarray(found.state.params.table), before + (table - before) / 4, rtol=1e-5, atol=1e-5
    )


DENSE = {
    "momentum": optim.Sgd(RATE, momentum=0.9),
    "decay": optim.Sgd(RATE, weight_decay=0.1),
    "adam": optim.AdamW(RATE),
}


@pytest.mark.parametrize("name", DENSE)
def test_a_rule_that_makes_every_row_anew_keeps_the_gradient(name):
    program, _ = trained(DENSE[name], "rows:model")
    assert "scatter_add" in ops(program) and not {"row_sums", "add_rows"} & set(ops(program))


def gradient(read, table, numbers):
    """Returns a program that reads a gradient of a table with 64 rows for each number."""
    dims = md.dims(rows=table, width=32)
    few = md.Dimension("few", numbers)

    def f(t, at):
        return read(t, md.grad(lambda t: md.sum(md.square(md.take(t, at, "rows"))))(t))

    return md.jit(f, "data:1").lower(md.spec(list(dims)), md.spec([few], "int32"))


READERS = {
    "result": lambda t, g: (t - g, g),
    "largest": lambda t, g: (t - g, md.max(g)),
    "sums of columns of rows": lambda t, g: md.sum(g, "width"),
    "turned around": lambda t, g: g - t,
    "made in passing": lambda t, g: 2 * t - g,
    "read again": lambda t, g: md.exp(t - g),
    "shifted": lambda t, g: md.sum(g + 1),
}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_of_other_rows_keeps_the_gradient(name):
    found = ops(gradient(READERS[name], 4096, 4))
    assert "scatter_add" in found and "row_sums" not in found


def test_rows_are_used_if_there_are_few():
    def read(t, g):
        return t + g, md.sum(g * g)

    assert "add_rows" in ops(gradient(read, 4096, 16))
    assert "scatter_add" in ops(gradient(read, 64, 16))


def test_no_buffer_is_as_large_as_the_table_and_the_work_is_that_of_the_rows():
    rows, width, batch = md.dims(rows=2**16, width=64, batch=64)
    table, data = md.spec([rows, width]), md.spec([batch], "int32")

    def f(table, at):
        grad = md.grad(lambda t: md.sum(md.square(md.take(t, at, "rows"))))(table)
        return table - RATE * grad, md.sum(md.square(grad))

    program = md.jit(f, "data:1", donate="table").lower(table, data)
    size = 4 * rows.size * width.size
    assert program.peak_bytes < 1.1 * size
    apart = [one for one in program.block.instructions if one.op == "add_rows"]
    assert [one.outputs[0].bytes for one in apart] == [size]


def case(number):
    """Returns a function of a table, with its arguments, a mesh and a layout; all drawn."""
    draw = np.random.default_rng(number)
    sizes = {name: int(draw.integers(1, 5)) for name in ("pair", "other", "d")}
    sizes |= {name: int(draw.choice([1, 2, 4, 4])) for name in ("batch", "length")}
    dims = {name: md.Dimension(name, size) for name, size in sizes.items()}
    dims["rows"] = md.Dimension("rows", int(draw.integers(3000, 4000)) * 2 - number % 2)
    has = {name: bool(draw.integers(2)) for name in ("pair", "other", "length", "d")}
    of_table = ["rows", *(name for name in ("pair", "other", "d") if has[name])]
    of_numbers = ["batch", *(name for name in ("pair", "length") if has[name])]
    table = [dims[name] for name in draw.permutation(of_table)]
    at = [dims[name] for name in draw.permutation(of_numbers)]
    values = draw.normal(size=[d.size for d in table])
    numbers = draw.integers(-1, 5, [d.size for d in at]) * dims["rows"].size // 4

    def f(t, i, scale):
        g = md.grad(lambda t: md.sum(md.sin(md.take(t, i, "rows"))))(t) * scale
        over = [d.name for d in table if d.name == "rows" or number % 3 or kept != d.name]
        changed = t - 0.25 * g if number % 2 else md.transpose(g, t.shape.names) / 4 + t
        return changed, md.sum(md.square(g), over), md.sum(abs(-g))

    kept = str(draw.choice(of_table))
    names = draw.permutation(of_table if number % 4 else sorted({*of_table, *of_numbers}))
    layout = "; ".join(f"{name}:{axis}" for name, axis in zip(names, "xy", strict=False))
    arguments = md.named(values, table), md.named(numbers, at), md.named(np.float64(1.5), [])
    return f, arguments, "x:2,y:2", layout


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_look_ups_give_the_same_numbers(first):
    done = 0
    for number in range(first, first + 20):
        f, arguments, mesh, layout = case(number)
        program = md.jit(f, mesh, layout, "numpy").lower(*arguments)
        with poisoned():
            found = md.jit(f, mesh, layout, "numpy")(*arguments)
        for one, two in zip(found, dense(f, arguments), strict=True):
            np.testing.assert_allclose(np.asarray(one), two, rtol=1e-12, atol=1e-12)
        done += "row_sums" in ops(program)
    assert done > 5


@pytest.mark.long
@pytest.mark.parametrize("backend", ["jax", "tf"])
def test_random_look_ups_give_the_same_numbers_on_devices(backend):
    for number in range(6):
        f, arguments, mesh, layout = case(number)
        arguments = [single(x) for x in arguments]
        found = md.jit(f, mesh, layout, backend)(*arguments)
        for one, two in zip(found, dense(f, arguments), strict=True):
            np.testing.assert_allclose(np.asarray(one), two, rtol=1e-4, atol=1e-5)


def single(x):
    return md.named(x.data.astype("f4"), x.shape) if x.dtype == np.float64 else x


def dense(f, arguments):
    """Returns the results on one device, by gradients that are as large as the tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "PASSES", [one for one in passes.PASSES if one is not touched_rows])
        function = md.jit(f, backend="numpy")
        assert "row_sums" not in ops(function.lower(*arguments))
        return [np.asarray(result) for result in function(*arguments)]


@pytest.mark.parametrize("operation", [md.multiply, md.divide])
def test_an_outer_product_of_a_gradient_is_no_gradient_of_its_table(operation):
    factors = np.array([1.0, 2.0, 4.0])

    def function(table, rows, factor):
        gradient = md.grad(lambda t: 0.5 * md.sum(md.square(md.take(t, rows, "rows"))))(table)
        scaled = md.outer(operation, gradient, factor)
        return md.sum(md.square(scaled), ["rows", "width", "factors"])

    inputs = (
        md.named(TABLE, ["rows", "width"]),
        md.named(NUMBERS, ["batch"]),
        md.named(factors, ["factors"]),
    )
    inside = NUMBERS[(NUMBERS >= 0) & (NUMBERS < ROWS)]
    gradient = np.bincount(inside, minlength=ROWS)[:, None] * TABLE
    powers = factors if operation is md.multiply else 1 / factors
    want = np.square(gradient).sum() * np.square(powers).sum()
    np.testing.assert_allclose(md.jit(function, backend="numpy")(*inputs), want, rtol=1e-12)
