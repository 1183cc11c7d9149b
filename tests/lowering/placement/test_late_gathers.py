"""Moves go down to where least is left to move: dims renamed or split to names without a rule."""

import numpy as np
import pytest

import meshdsl as md
from tests.lowering.plans import collectives, lowered
from tests.ops.agreement import random

MESH, LAYOUT = "model:8", "channels:model"
batch, length, channels = md.dims(batch=8, length=32, channels=64)
group, member = md.dims(group=16, member=4)


def free(x):
    """Returns x with the split dim renamed to a name without a rule."""
    return x.rename(channels="free")


def padded(x):
    """Returns x with its renamed dim made longer at both ends."""
    return md.pad(free(x), "free", 1, 1)


def spectrum(x):
    return md.sum(md.abs(md.fft.fft(md.cast(free(x), "complex128"), "length")), "length")


def normalised(x):
    """Returns x with variance 1 in each group of channels."""
    y = x.split(channels, [group, member])
    return (y * md.rsqrt(md.mean(md.square(y), ["length", member]))).merge(
        [group, member], channels
    )


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: md.sum(free(x), ["batch", "length"]), "all_gather model [free=64]"),
        (lambda x: md.max(free(x), "length"), "all_gather model [batch=8, free=64]"),
        (lambda x: md.index(free(x), "length", 3), "all_gather model [batch=8, free=64]"),
        (
            lambda x: md.slice(free(x), "length", 0, 2),
            "all_gather model [batch=8, length=2, free=64]",
        ),
        (lambda x: md.sum(md.tanh(free(x)) + 1, "length"), "all_gather model [batch=8, free=64]"),
        (spectrum, "all_gather model [batch=8, free=64]"),
        (lambda x: md.sum(free(x)), "all_reduce model []"),
        (lambda x: md.sum(free(x), "free"), "all_reduce model [batch=8, length=32]"),
        (
            lambda x: md.sum(x.split(channels, [group, member]), ["length", member]),
            "all_gather model [batch=8, group=16]",
        ),
    ],
)
def test_what_makes_a_tensor_small_comes_before_its_move(function, expected):
    x = random([batch, length, channels])
    assert collectives(function, x, layout=LAYOUT, mesh=MESH) == [expected]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: md.tanh(free(x)).rename(free="channels"),
        md.grad(lambda x: md.sum(md.square(md.mean(md.tanh(free(x)), "length")))),
        normalised,
        md.grad(lambda x: md.sum(md.sin(normalised(x)))),
    ],
)
def test_what_comes_back_to_its_name_is_never_moved(function):
    x = random([batch, length, channels])
    assert [c for c in collectives(function, x, layout=LAYOUT, mesh=MESH) if "[]" not in c] == []


def test_a_sum_of_a_renamed_dim_sends_what_is_left():
    x = md.spec([batch, length, channels], "float32")
    step = md.jit(lambda x: md.sum(free(x), ["batch", "length"]), MESH, LAYOUT)
    assert step.lower(x).wire_bytes == 224  # 57,344 to gather it before


@pytest.mark.parametrize(
    ("function", "sent"),
    [
        (lambda x: md.slice(padded(x), "length", 0, 2), 10_176),  # halos, and 2 of 32 positions
        (lambda x: md.sum(padded(x), "length"), 8_160),
        (lambda x: md.sum(padded(x)), 6_144 + 7),
        (lambda x: md.sum(free(x)["free", 3:60], "length"), 4_864),
        (md.grad(lambda x: md.sum(md.sin(md.slice(padded(x), "length", 0, 2)))), 10_176),
    ],
)
def test_a_dim_that_changes_its_size_is_moved_when_it_is_small(function, sent):
    program = lowered(function, random([batch, length, channels]), layout=LAYOUT, mesh=MESH)
    assert program.wire_bytes == 2 * sent  # of float64; 114,688 to gather it before


def test_what_is_needed_as_the_rules_say_is_moved_once():
    def function(x):
        y = md.tanh(free(x))
        return y * 2, md.sum(y, "length"), md.sin(y)

    found = collectives(function, random([batch, length, channels]), layout=LAYOUT, mesh=MESH)
    assert found == ["all_gather model [batch=8, length=32, channels=64]"]


def test_results_are_where_the_rules_say():
    step = md.jit(lambda x: (free(x), md.sum(free(x), "length")), MESH, LAYOUT)
    program = step.lower(md.spec([batch, length, channels], "float32"))
    assert [str(result.layout) for result in program.block.outputs] == ["replicated"] * 2


def test_a_move_that_comes_later_names_the_line_that_needs_it():
    program = md.jit(lambda x: md.sum(free(x), "length"), MESH, LAYOUT).lower(
        md.spec([batch, length, channels], "float32")
    )
    (move,) = program.collectives
    assert move.source.file.endswith("test_late_gathers.py")


@pytest.mark.parametrize("mesh", ["model:3", "model:5", "data:2,model:4"])
def test_shards_with_pads_give_the_same_numbers(mesh):
    layout = LAYOUT if "data" not in mesh else f"batch:data; {LAYOUT}"
    x = random([batch, length, md.Dimension("channels", 10)])
    for function in (lambda x: md.max(free(x) * 2 + 1, "length"), lambda x: md.sum(free(x))):
        lowered(function, x, layout=layout, mesh=mesh)


def test_a_loop_gets_and_gives_what_the_rules_say():
    layers = md.Dimension("layers", 3)

    def function(x, xs):
        def body(carry, z):
            y = free(carry)
            return carry + z, md.sum(y * y, "length")

        return md.scan(body, x, xs, "layers")

    arrays = random([batch, length, channels]), random([layers, batch, length, channels])
    assert collectives(function, *arrays, layout=LAYOUT, mesh=MESH) == [
        "all_gather model 3 x [batch=8, free=64]"
    ]


# Bytes per byte of an element where a slice is gathered in shards: less than to add it up.
_GATHERED = {
    ("model:8", 7, 9): 84,
    ("model:3", 3, 60): 128,
    ("model:3", 30, 50, "float64"): 672,  # one collective more, whose start costs as 1,024 bytes
}


@pytest.mark.parametrize("dtype", ["float64", "bool", "int8"])
@pytest.mark.parametrize("mesh", ["model:8", "model:3", "model:5"])
@pytest.mark.parametrize(
    ("start", "stop", "step"), [(0, 8, 1), (7, 9, 1), (30, 50, 1), (3, 60, 12), (63, 47, -1)]
)
def test_a_short_slice_of_a_renamed_dim_sends_the_slice(start, stop, step, mesh, dtype):
    if dtype == "float64":
        x = random([length, channels])
    else:
        x = md.named((np.arange(32 * 64).reshape(32, 64) % 5 > 2).astype(dtype), [length, channels])
    program = lowered(lambda x: free(x)["free", start:stop:step], x, layout=LAYOUT, mesh=mesh)
    rows, devices = len(range(start, stop, step)), int(mesh[-1])
    summed = 2 * (devices - 1) / devices * rows * length.size
    case = mesh, start, stop
    sent = _GATHERED.get(case, _GATHERED.get((*case, dtype), summed))
    assert sent <= summed and program.wire_bytes == pytest.approx(sent * x.dtype.itemsize)


@pytest.mark.parametrize("size", [7, 9, 11, 13])
@pytest.mark.parametrize(("start", "stop", "step"), [(0, 3, 1), (2, 5, 1), (6, 0, -3), (1, 7, 2)])
def test_a_short_slice_is_read_where_shards_begin_that_are_cut_twice(size, start, stop, step):
    """Seven positions over two axes: 2+2+0 of the first four, then 2+1+0 of the others."""
    x = random([md.Dimension("channels", size), length])
    layout = "channels:data+model"
    lowered(lambda x: free(x)["free", start:stop:step], x, layout=layout, mesh="data:2,model:3")


def test_the_gradient_of_a_short_slice_sends_the_slice():
    def loss(x):
        return md.sum(md.sin(free(x)["free", 5:12]))

    program = lowered(md.grad(loss), random([length, channels]), layout=LAYOUT, mesh=MESH)
    assert program.wire_bytes == pytest.approx(2 * 7 / 8 * 7 * length.size * 8)
