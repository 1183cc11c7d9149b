"""Elementwise operations are local where layouts agree, and pass partial sums on."""

import numpy as np
import pytest

import meshdsl as md
from tests.lowering.plans import collectives
from tests.ops.agreement import random

a, b, c = md.dims(a=8, b=16, c=8)


@pytest.mark.parametrize("layout", ["a:data", "a:data; b:model", "b:data+model"])
def test_broadcasting_by_name_is_local(layout):
    x, y = random([a, b]), random([b])
    assert collectives(lambda x, y: md.tanh(x * y) + y, x, y, layout=layout) == []
    assert (
        collectives(lambda x, y: md.where(x > y, x, md.arange(a, "float64")), x, y, layout=layout)
        == []
    )


def test_linear_operations_wait_with_the_reduction():
    def model(x, w):
        y = md.einsum(x, w, over="b")
        return md.sum(-(y * 3 - md.einsum(x * 2, w, over="b")) / 7)

    x, w = random([a, b]), random([b, c])
    assert collectives(model, x, w, layout="b:model") == ["all_reduce model []"]


def test_other_operations_do_not():
    def model(x, w):
        return md.sum(md.square(md.einsum(x, w, over="b")))

    x, w = random([a, b]), random([b, c])
    assert collectives(model, x, w, layout="b:model") == ["all_reduce model [a=8, c=8]"]


def test_what_is_added_to_a_partial_sum_is_added_once():
    def model(x, w, y):
        return md.einsum(x, w, over="b") + y + 1.5 + md.arange(c, "float64")

    x, w, y = random([a, b]), random([b, c]), random([a, c])
    assert collectives(model, x, w, y, layout="b:model+data") == [
        "all_reduce data+model [a=8, c=8]"
    ]


def test_a_constant_may_join_sums_that_are_partial_over_different_axes():
    """A constant masked for two axes is not mistaken for one masked for either."""

    def model(x, y):
        both = md.einsum(x, x.rename(c="e"), over=["a", "b"]) + 2.0
        one = md.einsum(y, y.rename(c="e"), over="a") + 2.0
        return md.square(md.sum(both)), md.square(md.sum(one))

    x, y = random([a, b, c]), random([a, c], seed=1)
    assert collectives(model, x, y, layout="a:data; b:model") == [
        "all_reduce data+model []",
        "all_reduce data []",
    ]


def test_choosing_between_a_partial_sum_and_a_whole_tensor():
    def model(x, w, mask, y):
        return md.sum(md.where(mask, md.einsum(x, w, over="b"), y))

    mask = md.named(np.arange(8) % 3 == 0, [a])
    x, w, y = random([a, b]), random([b, c]), random([a, c])
    assert collectives(model, x, w, mask, y, layout="b:model") == ["all_reduce model []"]
