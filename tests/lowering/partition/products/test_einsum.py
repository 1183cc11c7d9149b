"""Products on split dims: what stays local, what is left partial, what has to move."""

import pytest

import meshdsl as md
from tests.lowering.plans import collectives
from tests.ops.agreement import random

batch, length, embed, d_ff, heads, kv = md.dims(batch=8, length=4, embed=16, d_ff=32, heads=4, kv=2)


def product(x, w):
    return md.einsum(x, w, over="embed")


def mlp(x, w_in, w_out):
    return md.einsum(md.relu(md.einsum(x, w_in, over="embed")), w_out, over="d_ff")


@pytest.mark.parametrize(
    "layout",
    [
        "",
        "batch:data",
        "d_ff:model",
        "batch:data; d_ff:model",
        "batch:data+model",
        "d_ff:model+data",
    ],
)
def test_a_product_without_split_contracted_dims_is_local(layout):
    assert collectives(product, random([batch, embed]), random([embed, d_ff]), layout=layout) == []


@pytest.mark.parametrize("batch_rule", ["", "batch:data; "])
def test_contracting_a_split_dim_leaves_a_partial_sum(batch_rule):
    x, w = random([batch, embed]), random([embed, d_ff])
    expected = ["all_reduce model [batch=8, d_ff=32]"]
    assert collectives(product, x, w, layout=batch_rule + "embed:model") == expected


def test_axes_that_split_one_contracted_dim_are_reduced_together():
    x, w = random([batch, embed]), random([embed, d_ff])
    expected = ["all_reduce data+model [batch=8, d_ff=32]"]
    assert collectives(product, x, w, layout="embed:data+model") == expected


def test_a_partial_sum_that_is_wanted_split_is_reduce_scattered():
    x, w = random([batch, embed]), random([embed, d_ff])
    found = collectives(product, x, w, layout="embed:model; batch:model?")
    assert found == ["reduce_scatter model [batch=8, d_ff=32]"]


def test_the_smaller_operand_is_gathered():
    x, w = random([batch, embed]), random([embed, d_ff])
    found = collectives(product, x, w, layout="batch:model; d_ff:model?")
    assert found == ["all_gather model [embed=16, d_ff=32]"]


def test_megatrons_mlp_has_one_reduction_each_way():
    x, w_in, w_out = random([batch, embed]), random([embed, d_ff]), random([d_ff, embed])
    layout = "batch:data; d_ff:model"
    forward = ["all_reduce model [batch=8, embed=16]"]
    assert collectives(mlp, x, w_in, w_out, layout=layout) == forward

    def loss(x, w_in, w_out):
        return md.sum(md.sin(mlp(x, w_in, w_out)))

    found = collectives(md.grad(loss, (0, 1, 2)), x, w_in, w_out, layout=layout)
    assert sorted(found) == [
        "all_reduce data [d_ff=32, embed=16]",
        "all_reduce data [embed=16, d_ff=32]",
        "all_reduce model [batch=8, embed=16]",  # the activations, then their gradient
        "all_reduce model [batch=8, embed=16]",
    ]


def test_megatrons_sequence_parallelism_gathers_and_scatters_instead():
    x, w_in, w_out = random([batch, length, embed]), random([embed, d_ff]), random([d_ff, embed])
    found = collectives(mlp, x, w_in, w_out, layout="batch:data; d_ff:model; length:model?")
    assert found == [
        "all_gather model [batch=8, length=4, embed=16]",
        "reduce_scatter model [batch=8, length=4, embed=16]",
    ]


def test_gradients_of_query_key_and_value_are_added_before_one_reduction():
    weights = [random([embed, heads, kv], seed=i) for i in range(3)]

    def loss(x, q, k, v):
        parts = zip((md.square, md.sin, md.tanh), (q, k, v), strict=True)
        return sum((md.sum(f(md.einsum(x, w, over="embed"))) for f, w in parts), 0.0)

    x = random([batch, length, embed])
    found = collectives(md.grad(loss), x, *weights, layout="batch:data; heads:model")
    assert found == ["all_reduce model [batch=8, length=4, embed=16]"]


def test_a_tensor_times_itself_is_no_linear_function_of_its_partial_sum():
    def model(x, w):
        y = md.einsum(x, w, over="embed")
        return md.einsum(y, y, over="d_ff"), y * y

    x, w = random([batch, embed]), random([embed, d_ff])
    assert collectives(model, x, w, layout="embed:model") == ["all_reduce model [batch=8, d_ff=32]"]
