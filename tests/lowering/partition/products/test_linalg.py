"""Matrices are made whole, and where there is a batch it takes over their axes."""

import numpy as np

import meshdsl as md
from meshdsl import linalg
from tests.lowering.plans import collectives, lowered
from tests.ops.agreement import random

batch, i, j, side = md.dims(batch=8, i=4, j=4, side=8)


def positive():
    x = random([batch, i, j]).data
    return md.named(x @ x.transpose(0, 2, 1) + np.eye(4), [batch, i, j])


def test_a_split_batch_is_local():
    x = positive()
    for layout in ("batch:data+model", "batch:model"):
        for function in (
            lambda x: linalg.cholesky(x, "i", "j"),
            lambda x: linalg.eigh(x, "i", "j", "k"),
            lambda x: linalg.slogdet(x, "i", "j"),
            lambda x: md.fft.fft(x, ["i", "j"]),
        ):
            assert collectives(function, x, layout=layout) == []


def test_a_split_matrix_dim_is_exchanged_for_the_batch():
    x = positive()
    program = lowered(lambda x: linalg.cholesky(x, "i", "j"), x, layout="batch:data; i:model")
    kinds = [c.kind for c in program.collectives]
    assert set(kinds) <= {"all_to_all"}, kinds
    (done,) = [one for one in program.block.instructions if one.op == "cholesky"]
    assert done.outputs[0].local.get("batch").size == 1


def test_without_a_batch_it_is_gathered_once():
    x = md.named(positive().data[0], [i, j])
    found = collectives(lambda x: linalg.eigh(x * 1, "i", "j", "k")[0], x, layout="i:model")
    assert found == ["all_gather model [i=4, j=4]"]


def test_right_sides_stay_split_and_partial_sums_pass_through():
    x, b, w = positive(), random([i, side]), random([side, batch])

    def model(x, b, w):
        return linalg.solve(md.sum(x, "batch"), md.einsum(b, w, over="side"), "i", "j")

    found = collectives(model, x, b, w, layout="batch:data")
    assert found == ["all_reduce data [i=4, j=4]"]
    assert (
        collectives(
            lambda a, b: linalg.solve(a, b, "i", "j"),
            md.named(x.data[0], [i, j]),
            b,
            layout="side:data+model",
        )
        == []
    )
