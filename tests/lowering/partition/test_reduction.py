"""Reductions over split dims are local, then one collective of the reduced size."""

import pytest

import meshdsl as md
from tests.lowering.plans import collectives, lowered
from tests.ops.agreement import random

batch, embed, vocab = md.dims(batch=8, embed=16, vocab=24)


@pytest.mark.parametrize("name", ["sum", "max", "min", "mean"])
def test_a_split_dim_costs_one_all_reduce_of_the_result(name):
    x = random([batch, embed])
    program = lowered(lambda x: getattr(md, name)(x, "embed"), x, layout="embed:model; batch:data")
    (instruction,) = [i for i in program.block.instructions if i.is_collective]
    assert instruction.op == "all_reduce"
    assert instruction.params["kind"] == {"mean": "sum"}.get(name, name)
    assert program.collectives[0].payload_bytes == 4 * 8  # 4 of 8 rows, float64


@pytest.mark.parametrize("name", ["sum", "max", "min", "mean", "logsumexp", "softmax"])
def test_a_whole_dim_costs_nothing(name):
    x = random([batch, embed])
    assert collectives(lambda x: getattr(md, name)(x, "embed"), x, layout="batch:data+model") == []


def test_reductions_one_after_the_other_are_one():
    found = collectives(
        lambda x: md.sum(md.sum(x, "embed") * 2, "batch"),
        random([batch, embed]),
        layout="embed:model; batch:data",
    )
    assert found == ["all_reduce data+model []"]


def test_softmax_over_a_split_dim_moves_its_statistics_only():
    x = random([batch, embed])
    for name in ("softmax", "log_softmax", "logsumexp"):
        found = collectives(
            lambda x: getattr(md, name)(x, "embed"),  # noqa: B023
            x,
            layout="embed:model; batch:data",
        )
        assert found == ["all_reduce model [batch=8]"] * 2


@pytest.mark.parametrize("layout", ["vocab:model", "batch:data; vocab:model", "vocab:model+data"])
def test_cross_entropy_over_a_split_vocab_never_gathers_the_logits(layout):
    def loss(x, table, labels):
        logits = md.einsum(x, table, over="embed")
        picked = md.sum(md.one_hot(labels, vocab, "float64") * logits, "vocab")
        return md.mean(md.logsumexp(logits, "vocab") - picked)

    labels = md.named([0, 5, 23, 7, 7, 1, 2, 11], ["batch"])
    x, table = random([batch, embed]), random([vocab, embed])
    program = lowered(loss, x, table, labels, layout=layout)
    assert program.collectives
    assert all(c.kind == "all_reduce" for c in program.collectives)
    assert max(c.payload_bytes for c in program.collectives) <= 8 * 8  # [batch], float64
    backward = lowered(md.grad(loss), x, table, labels, layout=layout).collectives
    assert {str(c.dims) for c in backward} <= {"[]", "[batch=8]", "[batch=8, embed=16]"}


def test_a_product_sends_the_parts_of_one_number_per_device():
    found = collectives(
        lambda x: md.prod(x, "embed"), random([batch, embed]), layout="embed:model; batch:data"
    )
    there = ["all_to_all model [devices_=4, elements_=8]"] * 2
    assert found == [*there, "all_gather model [elements_=8]"]


@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_where_the_extreme_is_costs_two_reductions_of_the_result(name):
    found = collectives(
        lambda x: getattr(md, name)(x, "embed"),
        random([batch, embed]),
        layout="embed:model; batch:data",
    )
    assert found == ["all_reduce model [batch=8]"] * 2


@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_the_extreme_that_is_compared_is_the_one_that_was_sent(name):
    """Compilers that compute it twice may round differently; then no device has the extreme."""
    x = random([batch, embed])
    program = lowered(lambda x: getattr(md, name)(md.exp(x), "embed"), x, layout="embed:model")
    block = program.block.instructions
    (sent, _) = [i for i in block if i.is_collective]
    (compared,) = [i for i in block if i.op == "equal"]
    (barrier,) = [i for i in block if i.op == "barrier"]
    assert sent.inputs[0] is compared.inputs[0] is barrier.outputs[0]


def test_whole_numbers_are_compared_without_a_barrier():
    x = md.named(range(16), ["embed"])
    program = lowered(lambda x: md.argmax(x, "embed"), x, layout="embed:model")
    assert "barrier" not in [i.op for i in program.block.instructions]
