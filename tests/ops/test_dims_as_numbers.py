"""Numbers where dims belong, as in libraries whose axes have numbers: an error that says so."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl import nn

X = md.named(np.ones((4, 3), np.float32), ["rows", "columns"])
AT = md.named(np.array([0, 1]), ["picked"])
LABELS = md.named(np.zeros(4, np.int32), ["rows"])

CALLS = {
    "argmax": lambda x: md.argmax(x, 1),
    "argsort": lambda x: md.argsort(x, 1),
    "broadcast": lambda x: md.broadcast(x, [0]),
    "concat": lambda x: md.concat([x, x], 0),
    "cross_entropy": lambda x: nn.softmax_cross_entropy(x, LABELS, over=1),
    "cummax": lambda x: md.cummax(x, 1),
    "cumprod": lambda x: md.cumprod(x, 1),
    "cumsum": lambda x: md.cumsum(x, 1),
    "diff": lambda x: md.diff(x, 0),
    "dynamic_slice": lambda x: md.dynamic_slice(x, 0, 0, 2),
    "index": lambda x: md.index(x, 1, "rows"),
    "linear_recurrence": lambda x: md.linear_recurrence(x, x, 0),
    "median": lambda x: md.median(x, 0),
    "merge": lambda x: md.merge(x, [0, 1], "all"),
    "pad": lambda x: md.pad(x, 0, 1, 1),
    "repeat": lambda x: md.repeat(x, 0, 2),
    "shift": lambda x: md.shift(x, 1, "rows"),
    "slice": lambda x: md.slice(x, 0, 0, 2),
    "sort": lambda x: md.sort(x, 1),
    "sum": lambda x: md.sum(x, 1),
    "take": lambda x: md.take(x, AT, 0),
    "tile": lambda x: md.tile(x, 0, 2),
    "top_k": lambda x: md.top_k(x, 2, 1, into="best"),
    "transpose": lambda x: md.transpose(x, [1, 0]),
}


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("name", CALLS)
def test_a_number_is_no_dim(name, traced):
    call = md.jit(CALLS[name]) if traced else CALLS[name]
    with pytest.raises(ValueError, match=r"a dim is a Dimension or a name, .*got") as raised:
        call(X)
    assert "rows=4" in str(raised.value) or "test_dims_as_numbers.py" in str(raised.value)
