"""Grouped products, against looked-up matrices in JAX; on every layout and backend."""

from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import assert_agree, assert_close, message, random, run
from tests.ops.layouts import assert_same_on_every_layout
from tests.reference import tf_tpu

batch, length, choice, experts = md.dims(batch=3, length=4, choice=2, experts=5)
embed, d_ff, peers = md.dims(embed=6, d_ff=7, peers=3)
RNG = np.random.default_rng(0)
X, W = random([batch, length, embed]), random([experts, embed, d_ff], seed=1)
GROUP = md.named(RNG.integers(-1, 7, size=(3, 4, 2)).astype(np.int32), [batch, length, choice])
NUMBERS = np.asarray(GROUP)


def looked_up(x, w, group, equation):
    """Returns the products of vectors with looked-up matrices; zeros for numbers outside."""
    inside = (group >= 0) & (group < w.shape[0])
    matrices = jnp.where(inside[..., None, None], w[jnp.where(inside, group, 0)], 0)
    return jnp.einsum(equation, x, matrices)


@pytest.mark.long
@pytest.mark.parametrize(
    ("keep", "equation"),
    [
        (["batch", "length", "choice", "d_ff"], "ble,blkef->blkf"),
        (["d_ff", "length", "batch"], "ble,blkef->flb"),  # summed over rows
        (["choice", "d_ff"], "ble,blkef->kf"),
        ([], "ble,blkef->"),
    ],
)
def test_values_and_two_derivatives_are_those_of_looked_up_matrices(keep, equation):
    assert_agree(
        lambda x, w, group: md.grouped_einsum(x, w, group, "experts", out=keep),
        lambda x, w, group: looked_up(x, w, group, equation),
        X,
        W,
        GROUP,
        order=2,
    )


def test_a_group_for_each_of_the_dims_that_pair_up():
    w = random([experts, peers, embed, d_ff], seed=2)
    group = md.named(RNG.integers(0, 5, size=(4, 3)).astype(np.int32), [length, peers])

    def expected(x, w, group):
        return jnp.einsum("ble,lpef->blpf", x, w[group, jnp.arange(3)])

    def grouped(x, w, group):
        return md.grouped_einsum(x, w, group, "experts", out=["batch", "length", "peers", "d_ff"])

    assert_agree(grouped, expected, X, w, group, order=2)


def test_dims_of_several_kinds_at_once():
    """`heads` is in both factors and kept; `width` is in x alone, `kv` in w alone."""
    heads, width, kv = md.dims(heads=2, width=3, kv=2)
    x = random([heads, length, width, embed], seed=3)
    w = random([embed, experts, heads, kv], seed=4)
    group = md.named(np.array([4, 0, 9, 0], np.int32), [length])

    def expected(x, w, group):
        matrices = jnp.where((group < 5)[None, :, None, None], w[:, group % 5], 0)
        return jnp.einsum("hlwe,elhk->khlw", x, matrices)

    def grouped(x, w, group):
        return md.grouped_einsum(x, w, group, "experts", out=["kv", "heads", "length", "width"])

    assert_agree(grouped, expected, x, w, group, order=2)


def test_a_single_row_and_no_rows_of_x():
    one = md.named(np.int32(2), [])
    found = run(lambda x, w, g: md.grouped_einsum(x, w, g, "experts", over="embed"), X, W, one)
    assert_close(found, np.asarray(X) @ np.asarray(W)[2])
    vector = random([embed], seed=5)
    total = lambda x, w, g: md.grouped_einsum(x, w, g, "experts", out=["d_ff"])  # noqa: E731
    assert_agree(total, lambda x, w, g: looked_up(x, w, g, "e,blkef->f"), vector, W, GROUP)


def gradients(x, w, group):
    def total(x, w):
        h = md.sin(md.grouped_einsum(x, w, group, "experts", over="embed"))
        return md.sum(h * md.arange(d_ff, "float64"))

    return md.grad(total, (0, 1))(x, w)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["numpy", "jax", "tf", "jax_auto"])
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("x:2,y:2", "batch:x; experts:y"),
        ("x:2,y:2", "batch:x; d_ff:y"),
        ("x:3,y:2", "length:x; embed:y"),
        ("x:4,y:2", "batch:x+y?; experts:y"),
    ],
)
def test_every_backend_has_the_numbers_of_numpy_on_one_device(mesh, layout, backend):
    expected = run(gradients, X, W, GROUP)
    for one, other in zip(
        run(gradients, X, W, GROUP, backend=backend, mesh=mesh, layout=layout),
        expected,
        strict=True,
    ):
        assert_close(one, other)


@pytest.mark.parametrize("on", ["experts", "d_ff", "embed", "choice"])
def test_every_layout_has_the_numbers_of_one_device(on):
    layouts = [("x:2", f"{on}:x"), ("x:7", f"{on}:x"), ("x:2,y:3", f"{on}:x+y")]
    assert_same_on_every_layout(
        [lambda x, w, group: md.grouped_einsum(x, w, group, "experts", over="embed")],
        X,
        W,
        GROUP,
        layouts=layouts,
        on_jax=layouts[-1],
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", ["none", "one", "first", "all"])
def test_any_number_of_rows_fits_a_group(kind):
    """More rows than a block has; a group without rows; rows of no group."""
    many, groups = md.dims(length=300, experts=3)
    numbers = {
        "none": np.full(300, -1),
        "one": np.where(np.arange(300) == 7, 2, 9),
        "first": np.zeros(300),
        "all": np.arange(300) % 4,
    }[kind].astype(np.int32)
    x, w = random([many, embed]), random([groups, embed, d_ff])
    group = md.named(numbers, [many])
    expected = run(gradients, x, w, group)
    for backend in ("jax", "tf"):
        for one, other in zip(run(gradients, x, w, group, backend=backend), expected, strict=True):
            assert_close(one, other)


@pytest.mark.parametrize("backend", ["numpy", "jax", "tf"])
def test_half_precision_is_summed_in_float32(backend):
    many = md.Dimension("length", 4096)
    x = md.named(np.ones((4096, 1), np.float16), [many, md.Dimension("embed", 1)])
    w = md.named(np.ones((1, 1, 1), np.float16), list(md.dims(experts=1, embed=1, d_ff=1)))
    group = md.named(np.zeros(4096, np.int32), [many])

    def total(x, w, group):
        return md.grad(lambda w: md.sum(md.grouped_einsum(x, w, group, "experts", over="embed")))(w)

    assert np.asarray(run(total, x, w, group, backend=backend)).item() == 4096


def test_einsum_of_looked_up_matrices_is_a_grouped_product():
    def looked_up(x, w, group):
        return md.einsum(x, md.take(w, group, "experts"), over="embed")

    def names(function, *args):
        return Counter(op.name for op in md.jit(function).trace(*args).prune().operations)

    assert names(looked_up, X, W, GROUP) == {"grouped_einsum": 1}
    assert_close(
        run(looked_up, X, W, GROUP),
        looked_up_by_hand := run(
            lambda x, w, g: md.grouped_einsum(x, w, g, "experts", over="embed"), X, W, GROUP
        ),
    )
    assert looked_up_by_hand.dims.names == ("batch", "length", "choice", "d_ff")
    # One matrix for many vectors is copied, which takes less time than to gather the vectors.
    of_row = md.named(np.array([0, 2, 1], np.int32), [batch])
    assert names(looked_up, X, W, of_row) == {"take": 1, "einsum": 1}
    # A looked-up vector is no matrix.
    vectors = random([experts, embed])
    assert names(looked_up, X, vectors, GROUP) == {"take": 1, "einsum": 1}


WIDE_IN, WIDE_OUT = md.dims(embed=60, d_ff=70)
WIDE = (
    md.spec([batch, length, WIDE_IN], "float64"),
    md.spec([experts, WIDE_IN, WIDE_OUT], "float64"),
    md.spec(GROUP.dims, "int32"),
)


def lowered(mesh=None, layout=None):
    def grouped(x, w, group):
        return md.grouped_einsum(x, w, group, "experts", over="embed")

    return md.jit(grouped, mesh=mesh, layout=layout, backend="numpy").lower(*WIDE)


def test_flops_are_a_product_for_each_row_shared_by_those_who_split_the_groups():
    whole = 2 * NUMBERS.size * WIDE_IN.size * WIDE_OUT.size
    assert lowered().flops == whole
    assert lowered("x:3", "batch:x").flops == whole // 3
    assert lowered("x:5", "experts:x").flops == whole // 5
    assert lowered("x:7", "d_ff:x").flops == whole // 7


def kinds(mesh, layout):
    return [collective.kind for collective in lowered(mesh, layout).collectives]


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("x:3", "batch:x"),
        ("x:2", "choice:x"),
        ("x:7", "d_ff:x"),
        ("x:3,y:7", "batch:x; d_ff:y"),
    ],
)
def test_splits_of_rows_and_of_columns_are_local(mesh, layout):
    assert kinds(mesh, layout) == []


@pytest.mark.parametrize("layout", ["experts:x", "embed:x"])
def test_split_groups_and_contracted_dims_leave_partial_sums(layout):
    assert kinds("x:5", layout) == ["all_reduce"]


def test_the_matrices_are_gathered_where_that_sends_less():
    program = md.jit(
        lambda x, w, g: md.grouped_einsum(x, w, g, "experts", over="embed"),
        mesh="x:5",
        layout="experts:x",
        backend="numpy",
    ).lower(X, W, GROUP)
    assert [c.kind for c in program.collectives] == ["all_gather"]


def test_mistakes_are_told():
    def told(*args, x=X, w=W, g=GROUP, **kwargs):
        return message(lambda x, w, g: md.grouped_einsum(x, w, g, *args, **kwargs), x, w, g)

    assert "no dim `expert` in [experts=5, embed=6, d_ff=7]" in told("expert", over="embed")
    assert "Did you mean `embed`" in told("experts", over="emebd")
    assert "out dim `heads` is in no operand" in told("experts", out=["heads"])
    assert "give either out=..., the dims to keep, or over=..." in told("experts")
    assert "the indices must be integers, got f64" in told("experts", over="embed", g=X)
    assert "x has the dim `experts`, which counts the groups of w; rename it in one" in told(
        "experts", over="embed", x=random([batch, experts, embed])
    )
    assert "dtypes differ: f64 and f32" in told(
        "experts", over="embed", w=md.named(np.asarray(W, np.float32), W.dims)
    )
    wide = md.Dimension("d_ff", 9)
    assert "out dim `d_ff` has size 9 but the operands have 7" in told("experts", out=[batch, wide])
    slip = md.named(np.asarray(W), [experts, md.Dimension("embde", 6), d_ff])
    assert "names that differ by a slip" in told("experts", out=[batch, d_ff], w=slip)
    assert "dim `embed` has size" in told(
        "experts", over="embed", x=random([batch, length, md.Dimension("embed", 5)])
    )


def test_the_program_names_the_dim_of_the_groups():
    assert "grouped_einsum(x, w, group, experts)" in str(lowered())


@pytest.mark.long
def test_the_program_of_tensorflow_on_tpus_has_the_same_values():
    def product(x, w, group):
        return md.grouped_einsum(x, w, group, "experts", out=["batch", "length", "choice", "d_ff"])

    on_tpu = tf_tpu.jit(product, mesh="data:3", layout="batch:data")(X, W, GROUP)
    assert_close(on_tpu, looked_up(np.asarray(X), np.asarray(W), NUMBERS, "ble,blkef->blkf"))
