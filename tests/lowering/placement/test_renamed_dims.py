"""A split dim may be renamed to a name without a rule: operations read it where it is.

What they send is compared with the same function under a rule for the new name.
"""

import numpy as np
import pytest

import meshdsl as md
from tests.lowering.plans import lowered
from tests.ops.agreement import random

MESH, LAYOUT = "model:8", "channels:model"
length, channels, few = md.dims(length=32, channels=64, few=2)


def free(x):
    return x.rename(channels="free")


def halves():
    """Returns the half of each position of `free`."""
    return md.arange(md.Dimension("free", 64)) // 32


FUNCTIONS = {
    "argmax": lambda x: md.argmax(free(x), "free"),
    "argmin after work": lambda x: md.argmin(md.tanh(free(x)) * 2, "free"),
    "top_k": lambda x: md.top_k(free(x), 2, "free", "k"),
    "nth_largest": lambda x: md.nth_largest(free(x), 2, "free"),
    "median": lambda x: md.median(free(x), "free"),
    "sort": lambda x: md.index(md.sort(free(x), "free"), "free", 0),
    "argsort": lambda x: md.index(md.argsort(free(x), "free"), "free", 0),
    "take": lambda x: md.take(free(x), md.arange(few) * 40, "free"),
    "dynamic_slice": lambda x: md.index(
        md.dynamic_slice(free(x), "free", md.argmax(md.arange(few), "few"), 2), "free", 0
    ),
    "prod": lambda x: md.prod(free(x), "free"),
    "cumsum": lambda x: md.sum(md.cumsum(free(x), "free"), "free"),
    "cumsum of another dim": lambda x: md.sum(md.cumsum(free(x), "length"), "free"),
    "cummax": lambda x: md.sum(md.sin(md.cummax(free(x), "free")), "free"),
    "recurrence": lambda x: md.max(md.linear_recurrence(free(x), free(x), "free"), "free"),
    "segment_sum": lambda x: md.segment_sum(free(x), halves(), few, "free"),
    "concat": lambda x: md.sum(md.concat([free(x), free(x) * 2], "free"), "free"),
    "pooling": lambda x: md.max(md.avg_pool(free(x), {"free": 2}), "free"),
    "a gradient": md.grad(lambda x: md.sum(md.sin(md.cumsum(free(x), "free")))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_rule_for_the_new_name_saves_nothing(name):
    function, x = FUNCTIONS[name], random([length, channels])
    sent, with_rule = (
        lowered(function, x, layout=layout, mesh=MESH).wire_bytes
        for layout in (LAYOUT, f"{LAYOUT}; free:model")
    )
    gathered = 7 / 8 * length.size * channels.size * 8
    assert sent <= with_rule < gathered / 2


@pytest.mark.parametrize("name", FUNCTIONS)
def test_shards_with_pads_give_the_same_numbers(name):
    lowered(FUNCTIONS[name], random([length, channels]), layout=LAYOUT, mesh="model:5")


def test_labels_split_as_the_values_that_they_add_up():
    """Their segments are the same on every device, so that it takes those of its own values."""
    rows, width = md.dims(rows=64, width=4)

    def function(values, labels):
        return md.segment_sum(values, labels, few, "rows")

    labels = md.named(np.arange(64, dtype=np.int32) % 2, [rows])
    program = lowered(
        function, random([rows, width]), labels, layout="values/rows:model", mesh=MESH
    )
    assert program.wire_bytes == pytest.approx(2 * 7 / 8 * few.size * width.size * 8)
