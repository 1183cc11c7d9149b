"""Convolutions on split dims: halos of k - 1 boundary slabs, and what else has to move.

what is split                  forward                       backward
batch                          -                             all_reduce of the filters' gradient
space                          k - 1 slabs of the operand    k - 1 slabs of the cotangent, and
                                                             that all_reduce
the summed channels            all_reduce of the result      -
the result's channels          -                             all_reduce of the operand's gradient
"""

import numpy as np
import pytest

import meshdsl as md
from tests.lowering.plans import collectives, lowered
from tests.ops.agreement import assert_close, random, run

batch, height, width, depth, channels, features = md.dims(
    batch=4, height=16, width=8, depth=4, channels=4, features=8
)
kh, kw, kd = md.dims(kh=3, kw=3, kd=3)
MESH = "x:4,y:2"


def conv(x, f, **arguments):
    spatial = {"height": "kh", "width": "kw"}
    return md.conv(x, f, spatial, "channels", "features", **arguments)


def gradients(x, f):
    return md.grad(lambda x, f: md.sum(md.sin(conv(x, f))), (0, 1))(x, f)


X, F = random([batch, height, width, channels]), random([kh, kw, channels, features], seed=1)


@pytest.mark.parametrize(
    ("layout", "forward", "backward"),
    [
        ("batch:x", [], ["all_reduce x [kh=3, kw=3, channels=4, features=8]"]),
        (
            "channels:y",
            ["all_reduce y [batch=4, height=16, width=8, features=8]"],
            ["all_reduce y [batch=4, height=16, width=8, features=8]"],  # of the forward pass
        ),
        ("features:y", [], ["all_reduce y [batch=4, height=16, width=8, channels=4]"]),
        (
            "batch:x; features:y",
            [],
            [
                "all_reduce x [kh=3, kw=3, channels=4, features=8]",
                "all_reduce y [batch=4, height=16, width=8, channels=4]",
            ],
        ),
    ],
)
def test_dims_that_are_not_slid_along_move_as_in_einsum(layout, forward, backward):
    assert collectives(conv, X, F, layout=layout, mesh=MESH) == forward
    assert sorted(collectives(gradients, X, F, layout=layout, mesh=MESH)) == backward


def halo_bytes(function, *inputs, layout, mesh=MESH):
    """Returns the bytes of all permutes, having checked that nothing but sums moves besides."""
    found = lowered(function, *inputs, layout=layout, mesh=mesh).collectives
    assert {c.kind for c in found} <= {"permute", "all_reduce"}
    return sum(c.payload_bytes for c in found if c.kind == "permute")


def test_one_split_dim_sends_the_slabs_at_the_boundary():
    operand, cotangent = 2 * (4 * 8 * 4) * 8, 2 * (4 * 8 * 8) * 8  # one slab to each side
    assert halo_bytes(conv, X, F, layout="height:x") == operand
    assert halo_bytes(gradients, X, F, layout="height:x") == operand + cotangent


def test_two_split_dims_send_their_corners_once():
    first = 2 * (4 * 4 * 4) * 8  # 2 rows of 4 columns
    second = (4 * (4 + 2) * 4) * 8  # a column, and the corners: half of the devices send each way
    assert halo_bytes(conv, X, F, layout="height:x; width:y") == first + second
    both = 3 * (first + second)  # the cotangent has twice the channels
    assert halo_bytes(gradients, X, F, layout="height:x; width:y") == both


def test_three_split_dims_in_space():
    x = random([height, width, depth, channels])
    f = random([kh, kw, kd, channels, features], seed=1)

    def volume(x, f):
        spatial = {"height": "kh", "width": "kw", "depth": "kd"}
        return md.conv(x, f, spatial, "channels", "features")

    # Shards are 8 x 4 x 2, and every device has a neighbour on one side only; what comes from
    # there goes next to the zeros of the other, so that all windows lie alike.
    slabs = 4 * 2 + (8 + 2) * 2 + (8 + 2) * (4 + 2)
    layout = "height:a; width:b; depth:c"
    assert halo_bytes(volume, x, f, layout=layout, mesh="a:2,b:2,c:2") == slabs * 4 * 8


@pytest.mark.parametrize(
    ("arguments", "slabs"),
    [
        ({"strides": 2}, 1),  # "same" reaches beyond the end only
        ({"strides": 3}, 4),  # results 0 1 | 2 3 | 4 5 | - begin at 0, 6, 12 of 0-3 | 4-7 | ...
        ({"dilation": 2}, 4),
        ({"padding": {"height": "valid"}}, 2),
        ({"dilation": {"height": 5}}, 4 + 4 + 1),  # further than a shard; +2 and -2 go as one
        ({"padding": {"height": (-4, -4)}}, 4),  # 2 results on each of three devices
    ],
)
def test_no_more_is_sent_than_windows_meet(arguments, slabs):
    def total(x, f):
        return md.sum(md.sin(conv(x, f, **arguments)))

    assert halo_bytes(total, X, F, layout="height:x") == slabs * (4 * 8 * 4) * 8


def test_a_strided_transposed_convolution_sends_what_its_windows_meet():
    def up(x, f):
        return md.conv_transpose(x, f, {"height": "kh"}, "channels", "features", strides=2)

    f = random([kh, channels, features], seed=1)
    assert halo_bytes(up, X, f, layout="height:x") == (4 * 8 * 4) * 8


def test_summing_over_split_channels_and_sliding_along_split_space():
    x, f = md.spec(X.dims, X.dtype), md.spec(F.dims, F.dtype)
    program = md.jit(conv, MESH, "height:x; channels:y", "numpy").lower(x, f)
    kinds = [c.kind for c in program.collectives]
    assert kinds == ["permute", "permute", "all_reduce"]
    assert program.flops == 2 * (4 * 4 * 8 * 8) * (3 * 3 * 2)


def test_filters_split_along_their_window_are_gathered_where_that_is_cheaper():
    f = random([kh, md.Dimension("kw", 4), channels, features], seed=1)
    found = collectives(conv, X, f, layout="kw:y", mesh=MESH)
    assert found == ["all_gather y [kh=3, kw=4, channels=4, features=8]"]


def test_an_operand_and_filters_split_alike_along_the_window_leave_partial_sums():
    signal, echo = random([height]), random([md.Dimension("kh", 16)], seed=1)

    def correlation(x, f):
        return md.conv(x, f, {"height": "kh"}, padding={"height": "valid"})

    found = collectives(correlation, signal, echo, layout="height:x; kh:x", mesh=MESH)
    assert found == ["all_reduce x [height=1]"]


def test_shards_with_no_results_are_sent_nothing():
    def total(x, f):
        return md.sum(conv(x, f, strides={"height": 8}))  # 2 results, at 0 and 8, on 4 devices

    assert halo_bytes(total, X, F, layout="height:x") == 3 * (4 * 8 * 4) * 8


@pytest.mark.parametrize("backend", ["numpy", "jax", "tf"])
def test_pads_of_groups_reach_no_other_group(backend):
    """The logarithm of a pad is infinite; XLA:CPU multiplies elements of other groups by 0."""
    groups = md.Dimension("groups", 5)
    x, f = random([height, groups], low=0.5, high=2.0), random([kh, groups], seed=1)

    def of_logarithms(x, f):
        return md.conv(md.log(x), f, {"height": "kh"})

    def both(x, f):
        slopes = md.grad(lambda x, f: md.sum(md.sin(of_logarithms(x, f))), (0, 1))(x, f)
        return of_logarithms(x, f), *slopes

    found = run(both, x, f, backend=backend, mesh="x:2", layout="groups:x")
    expected = run(both, x, f)
    for have, want in zip(found, expected, strict=True):
        assert np.isfinite(np.asarray(have)).all()
        assert_close(have, want)
