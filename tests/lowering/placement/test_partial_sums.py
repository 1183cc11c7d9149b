"""Where partial sums are reduced: late, together, once per loop; and never wrongly."""

import pytest

import meshdsl as md
from tests.lowering.plans import collectives
from tests.ops.agreement import random

batch, embed, layers = md.dims(batch=8, embed=16, layers=3)
same = md.Dimension("d_ff", 16)


def shared(w, x, xs):
    """A loss of a loop in which every iteration uses one weight."""

    def body(c, z):
        return md.tanh(md.einsum(c, w, over="embed").rename(d_ff="embed")) + z, None

    return md.sum(md.square(md.scan(body, x, xs, "layers")[0]))


@pytest.mark.parametrize("axes", ["data", "data+model"])
def test_the_gradient_of_a_shared_weight_is_reduced_once_after_the_loop(axes):
    w, x, xs = random([embed, same]), random([batch, embed]), random([layers, batch, embed])
    found = collectives(md.grad(shared), w, x, xs, layout=f"batch:{axes}")
    assert found == [f"all_reduce {axes} [embed=16, d_ff=16]"]


def test_gradients_of_stacked_weights_are_reduced_once_after_the_loop():
    def loss(w, x):
        def body(c, w):
            return md.tanh(md.einsum(c, w, over="embed").rename(d_ff="embed")), None

        return md.sum(md.square(md.scan(body, x, w, "layers")[0]))

    w, x = random([layers, embed, same]), random([batch, embed])
    assert collectives(md.grad(loss), w, x, layout="batch:data") == [
        "all_reduce data [layers=3, embed=16, d_ff=16]"
    ]


def test_what_the_loop_needs_whole_is_reduced_in_it():
    w, x, xs = random([embed, same]), random([batch, embed]), random([layers, batch, embed])
    assert collectives(shared, w, x, xs, layout="embed:model") == [
        "reduce_scatter model 3 x [batch=8, embed=16]",
        "all_reduce model []",
    ]


def test_microbatches_are_accumulated_before_one_reduction():
    micro = md.Dimension("micro", 4)

    def step(w, xs):
        def body(total, x):
            loss = lambda w: md.mean(md.square(md.einsum(x, w, over="embed")))  # noqa: E731
            return total + md.grad(loss)(w), None

        return md.scan(body, md.zeros([embed, same], "float64"), xs, "micro")[0]

    w, xs = random([embed, same]), random([micro, batch, embed])
    assert collectives(step, w, xs, layout="batch:data+model") == [
        "all_reduce data+model [embed=16, d_ff=16]"
    ]


def test_a_sum_read_whole_and_partial_is_right_in_both():
    def model(x, w):
        y = md.einsum(x, w, over="embed")
        return md.sum(y), md.square(y), y

    found = collectives(model, random([batch, embed]), random([embed, same]), layout="embed:model")
    assert found.count("all_reduce model [batch=8, d_ff=16]") == 1


def test_a_partial_maximum_is_no_partial_sum():
    def model(x):
        return md.sum(md.max(x, "embed") * 2) + md.sum(x, "embed")

    found = collectives(model, random([batch, embed]), layout="embed:model")
    assert found[0] == "all_reduce model [batch=8]"
