"""Mistakes in calls of layers are shown at the user's line, not at a line of the layer."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl import nn


def array(*, dtype=np.float32, **dims):
    return md.named(np.ones(tuple(dims.values()), dtype), list(dims))


X = array(batch=2, embed=4)
WRONG = [
    (
        lambda x: nn.mlp(x, array(embed=4, hidden=8), array(hidden=8, embed=4)),
        "mlp: over dim `d_ff` is in no operand",
    ),
    (
        lambda x: nn.gated_mlp(x, *[array(embed=5, d_ff=8)] * 2, array(d_ff=8, embed=4)),
        "gated_mlp: dim `embed` has size",
    ),
    (
        lambda x: nn.mean_where(x, array(bach=2, dtype=bool)),
        "mean_where: the mask bool[bach=2] has `bach`, which x f32[batch=2, embed=4] lacks. Did "
        "you mean `batch` instead of `bach`?",
    ),
    (
        lambda x: nn.softmax_cross_entropy(x, array(batch=3, dtype=np.int32), "embed"),
        "softmax_cross_entropy: dim `batch` has size 2 in the logits but 3 in the labels",
    ),
    (lambda x: nn.group_norm(x, ["batch"], "embed", 2, array(depth=4)), "group_norm: one operand"),
    (
        lambda x: nn.route(x, array(embed=4, routed=8), 2, bias=array(expert=3)),
        "route: one operand must have the dims of all",
    ),
]


@pytest.mark.parametrize("traced", [False, True], ids=["named", "traced"])
@pytest.mark.parametrize(("layer", "text"), WRONG)
def test_the_users_line_is_shown(layer, text, traced):
    with pytest.raises(ValueError) as error:
        (md.jit(layer) if traced else layer)(X)
    assert text in str(error.value)
    *_, line = str(error.value).splitlines()
    assert line.startswith("  at tests/nn/test_mistakes.py:")


def test_the_line_of_the_layer_is_shown_beside_it_and_stays_that_of_its_operations():
    with pytest.raises(ValueError) as error:
        nn.group_norm(X, ["batch"], "embed", 2, array(depth=4))
    assert "\n  where it calls multiply\n  in meshdsl/nn/norms.py:" in str(error.value)
    graph = md.jit(lambda x: nn.rms_norm(x, "embed", array(embed=4))).trace(X)
    assert any(op.source.place.startswith("meshdsl/nn/norms.py:") for op in graph.operations)
