"""What each device needs for its windows: against a count of what the windows meet."""

import itertools
import random

import pytest

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.communication.exchange import bounds
from meshdsl.lowering.communication.halos import cut
from meshdsl.tensors.slide import Slide


def meets(slide, o, w):
    """Returns the element that a position of the result and one of the window meet, or None."""
    at = slide.stride * o + slide.dilation * w - slide.low
    return at // slide.base if at % slide.base == 0 else None


@pytest.mark.parametrize("by_window", [False, True])
def test_windows_over_what_a_device_needs_meet_what_they_meet_in_the_whole(by_window):
    mesh = Mesh.parse("x:2,y:3")
    for seed in range(300):
        draw = random.Random(seed)
        slide = Slide(
            *("x", "w", "o"),
            stride=draw.choice([-2, -1, 1, 2, 3]),
            dilation=draw.choice([-3, -1, 1, 2]),
            base=draw.randint(1, 4),
            low=draw.randint(-3, 6),
        )
        outs, windows = draw.randint(1, 9), draw.randint(1, 5)
        axes = draw.choice([("x",), ("y", "x")])
        found = cut(slide, outs, windows, by_window, axes, mesh)
        shards = bounds(windows if by_window else outs, axes, mesh)
        for shard, early, runs in zip(shards, found.early, found.needs, strict=True):
            assert shard.size + early <= found.block
            whole = range(outs) if by_window else range(windows)
            for here, other in itertools.product(range(shard.size), whole):
                pair = (other, shard.start + here) if by_window else (shard.start + here, other)
                element = meets(slide, *pair)
                pair = (other, early + here) if by_window else (early + here, other)
                assert element == _read(runs, meets(found.slide, *pair), found.length)


def _read(runs, at, length):
    """Returns the element of the operand at a place of what a device was given."""
    if at is None:
        return None
    (run,) = runs
    place = at - run.at
    assert 0 <= at < length
    assert 0 <= place < run.positions.size
    return run.positions.start + place


def test_a_slide_and_back_meet_the_same():
    slide = Slide("x", "w", "o", stride=3, dilation=-2, base=2, low=1)
    met = {(o, w, x) for o in range(9) for w in range(4) if (x := meets(slide, o, w)) is not None}
    back = slide.to_operand()
    assert (back.x, back.window, back.out) == ("o", "w", "x")
    assert all(meets(back, x, w) == o for o, w, x in met)
    across = slide.to_window()
    assert (across.x, across.window, across.out) == ("x", "o", "w")
    assert all(meets(across, w, o) == x for o, w, x in met)
    ahead = slide.ahead(4)
    assert ahead.dilation == 2
    assert all(meets(ahead, o, 3 - w) == x for o, w, x in met)
