"""What operations that move along a split dim send, next to the least that any program could.

The least follows from positions alone. A device must be sent what its part of the result needs and
it does not hold, and must send what it holds and others need; some device has the most to do.
`pytest -s` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import meshdsl as md
from tests.lowering.plans import collectives, lowered
from tests.ops.agreement import assert_close, random

SIZE, WIDTH = 64, 3
ROW = WIDTH * 8  # bytes of one position
POSITIONS = np.arange(SIZE)
X = random([md.Dimension("length", SIZE), md.Dimension("width", WIDTH)])
Y = random(X.dims, seed=1)


def least(found: np.ndarray, devices: int) -> int:
    """Returns the bytes that some device must send or be sent.

    Args:
        found: the positions of x (from 0 on) and of y (from SIZE on) in the result, -1 for none.
    """
    block = -(-len(found) // devices)
    wanted = [set(found[d * block : (d + 1) * block]) - {-1} for d in range(devices)]
    held = [set(part) | set(part + SIZE) for part in np.array_split(POSITIONS, devices)]
    most = 0
    for device, have in enumerate(held):
        others = set().union(*(want for d, want in enumerate(wanted) if d != device))
        most = max(most, len(wanted[device] - have), len(others & have))
    return ROW * most


def sent(function: Callable, devices: int) -> float:
    """Returns the bytes that a device sends, but for bringing the result to the program's end.

    Ends have no pads, so a result of a size that does not divide is gathered there.
    """
    program = lowered(function, X, Y, layout="length:x", mesh=f"x:{devices}")
    (result,) = program.block.outputs
    uneven = result.shape.get("length").size % devices
    moves = [c for c in program.collectives if not (uneven and c.kind == "all_gather")]
    assert {c.kind for c in moves} <= {"permute"}
    return sum(c.wire_bytes for c in moves)


def shifted(by: int) -> np.ndarray:
    return np.concatenate([np.full(by, -1), POSITIONS[:-by]])


# The operation, and the positions of its operands in the result.
MOVES: dict[str, tuple[Callable, np.ndarray]] = {
    "slice, the first half": (lambda x, y: x["length", :32], POSITIONS[:32]),
    "slice, the middle": (lambda x, y: x["length", 16:48], POSITIONS[16:48]),
    "slice, all but the first": (lambda x, y: x["length", 1:], POSITIONS[1:]),
    "slice, every second": (lambda x, y: x["length", ::2], POSITIONS[::2]),
    "slice, every third": (lambda x, y: x["length", ::3], POSITIONS[::3]),
    "slice, backwards": (lambda x, y: x["length", ::-2], POSITIONS[::-2]),
    "flip": (lambda x, y: md.flip(x, "length"), POSITIONS[::-1]),
    "pad by one": (
        lambda x, y: md.pad(x, "length", 1, 1),
        np.pad(POSITIONS, 1, constant_values=-1),
    ),
    "pad by four, reflected": (
        lambda x, y: md.pad(x, "length", 4, 4, mode="reflect"),
        np.pad(POSITIONS, 4, "reflect"),
    ),
    "pad between": (
        lambda x, y: md.pad(x, "length", 0, 1, interior=1),
        np.insert(POSITIONS, POSITIONS + 1, -1),
    ),
    "shift by one": (lambda x, y: md.shift(x, "length", 1), shifted(1)),
    "shift by one, wrapped": (
        lambda x, y: md.shift(x, "length", 1, wrap=True),
        np.roll(POSITIONS, 1),
    ),
    "shift by 12, wrapped": (
        lambda x, y: md.shift(x, "length", 12, wrap=True),
        np.roll(POSITIONS, 12),
    ),
    "differences": (lambda x, y: md.diff(x, "length"), POSITIONS[1:]),
    "concat": (lambda x, y: md.concat([x, y], "length"), np.arange(2 * SIZE)),
    "concat, crosswise": (
        lambda x, y: md.concat([y, x], "length"),
        np.roll(np.arange(2 * SIZE), SIZE),
    ),
    "tile": (lambda x, y: md.tile(x, "length", 2), np.tile(POSITIONS, 2)),
    "repeat": (lambda x, y: md.repeat(x, "length", 3), np.repeat(POSITIONS, 3)),
}


@pytest.mark.parametrize("name", MOVES)
def test_no_more_is_sent_than_must_be(name):
    function, positions = MOVES[name]
    for devices in (2, 4, 8):
        found, bound = sent(function, devices) / ROW, least(positions, devices) / ROW
        print(f"{name:26} on {devices} devices: {found:4.0f} rows sent, at least {bound:4.0f}")
        assert found == bound


@pytest.mark.parametrize("name", [name for name in MOVES if "differences" not in name])
def test_the_gradient_sends_as_much_back(name):
    function, positions = MOVES[name]
    weights = random([md.Dimension("length", len(positions)), md.Dimension("width", WIDTH)])
    if len(positions) % 8 or name in ("tile", "pad by four, reflected"):
        return  # weights that have to be brought there, or copies that are added up first

    def backward(x, y, w):
        return md.grad(lambda x, y: md.sum(function(x, y) * w), (0, 1))(x, y)

    for devices in (2, 4, 8):
        program = lowered(backward, X, Y, weights, layout="length:x", mesh=f"x:{devices}")
        assert {c.kind for c in program.collectives} <= {"permute"}
        assert program.wire_bytes == least(positions, devices)


def test_one_position_is_summed_from_zeros_and_given_back_for_nothing():
    """An all_reduce of one row: 2 (n-1)/n rows, where a broadcast would have to send one."""
    found = collectives(lambda x: x["length", 5], X, layout="length:x", mesh="x:4")
    assert found == ["all_reduce x [width=3]"]
    g = random([md.Dimension("width", WIDTH)])

    def backward(x, g):
        return md.grad(lambda x: md.sum(x["length", 5] * g))(x)

    assert collectives(backward, X, g, layout="length:x", mesh="x:4") == []


def test_stacking_into_a_split_dim_moves_nothing():
    def stacked(x):
        return md.stack([x, x * 2.0, x * 3.0, x * 4.0], "part")

    assert collectives(stacked, X, layout="part:x", mesh="x:4") == []


def test_a_slice_at_a_tensor_is_summed_from_what_each_device_holds_of_it():
    at = md.named(np.array(7, np.int32), [])
    found = collectives(
        lambda x, at: md.dynamic_slice(x, "length", at, 4), X, at, layout="length:x", mesh="x:4"
    )
    assert found == ["reduce_scatter x [length=4, width=3]"]


def test_an_update_at_a_tensor_gathers_the_update():
    at = md.named(np.array(7, np.int32), [])
    update = random([md.Dimension("length", 4), md.Dimension("width", WIDTH)])

    def model(x, u, at):
        return md.dynamic_update_slice(x, u, "length", at)

    found = collectives(model, X, update, at, layout="length:x", mesh="x:4")
    assert found == ["all_gather x [length=4, width=3]"]


def test_a_shift_by_a_tensor_gathers():
    at = md.named(np.array(7, np.int32), [])
    found = collectives(
        lambda x, at: md.shift(x, "length", at), X, at, layout="length:x", mesh="x:4"
    )
    assert found == ["all_gather x [length=64, width=3]"]


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("x:1", "a:x; x/a:-"),
        ("x:1", "a:x; there/a:-"),
        ("x:1", "b:x; x/b:-; x/a:x"),
        ("x:1,y:1", "a:x; x/a:y"),
        ("x:1,y:1", "a:x+y; x/a:y+x"),
        ("x:1,y:2", "a:x; b:y; x/a:-"),
        ("x:1,y:2", "a:y+x; x/a:y"),
    ],
)
def test_layouts_that_differ_in_axes_of_one_device_need_no_moves(mesh, layout):
    """On a mesh of one device JAX binds no axes: a slice cannot ask for the place along them."""
    a, b = md.dims(a=4, b=6)
    x = random([a, b])

    def model(x):
        return md.cumsum(md.sin(x), "b"), md.name(md.cos(x), "there")

    run = md.jit(model, mesh, layout, backend="jax")
    for found, expected in zip(run(x), md.jit(model, backend="numpy")(x), strict=True):
        assert_close(found, expected)
    sizes = md.Mesh.parse(mesh).sizes
    assert all(sizes[axis] > 1 for move in run.lower(x).collectives for axis in move.axes)
