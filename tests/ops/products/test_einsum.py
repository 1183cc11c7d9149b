"""Einsum by name, against numpy's by letters; every gradient; every mistake."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import assert_agree, assert_close, message, random, run

a, b, c, d = md.dims(a=4, b=3, c=2, d=5)
DIMS = {"a": a, "b": b, "c": c, "d": d}


@pytest.mark.long
@pytest.mark.parametrize(
    "letters",
    [
        "ab,bc->ac",
        "ab,bc->ca",
        "abc,cb->a",
        "abc,bd->dac",
        "ab,ab->ab",
        "ab,ab->",
        "ab,cd->dbca",
        "ab,b->a",
        "ab,->ba",
        "ab->ba",
        "abc->b",
        "ab,bc,cd->ad",
        "ab,bc,cd,a->d",
    ],
)
def test_products_with_two_derivatives(letters):
    words, out = letters.split("->")
    inputs = [
        random([DIMS[name] for name in word], seed=i) for i, word in enumerate(words.split(","))
    ]
    assert_agree(
        lambda *xs: md.einsum(*xs, out=list(out)),
        lambda *xs: jnp.einsum(letters, *xs),
        *inputs,
        order=2,
    )


def test_every_subset_of_two_shared_dims_can_be_contracted():
    x, y = random([a, b, c]), random([c, a], seed=1)
    for count in range(3):
        for over in itertools.combinations("ac", count):
            kept = [name for name in "abc" if name not in over]
            found = run(lambda x, y: md.einsum(x, y, over=list(over)), x, y)  # noqa: B023
            assert found.dims.names == tuple(kept)
            assert_close(found, np.einsum(f"abc,ca->{''.join(kept)}", x.data, y.data))


def test_a_tensor_times_itself():
    assert_agree(
        lambda x: md.einsum(x, x, over="a"), lambda x: jnp.einsum("ab,ab->b", x, x), random([a, b])
    )


def test_half_precision_is_summed_in_single_precision():
    long = md.Dimension("a", 4096)
    x = md.named(np.ones(4096, md.spec([a], "bfloat16").dtype), [long])
    for backend in ("numpy", "jax"):
        found = run(lambda x: md.einsum(x, x, over="a"), x, backend=backend)
        assert float(found) == 4096


def test_integers_multiply_too():
    x = md.named(np.arange(12, dtype=np.int32).reshape(4, 3), [a, b])
    for backend in ("numpy", "jax"):
        found = run(lambda x: md.einsum(x, x.rename(a="d"), over="b"), x, backend=backend)
        assert np.array_equal(found, x.data @ x.data.T)


def test_mistakes_are_told_together():
    x, y = random([a, b]), random([b, c])
    text = message(lambda x, y: md.einsum(x, y, out=["aa", md.Dimension("c", 9)]), x, y)
    assert "einsum: out dim `aa` is in no operand. Did you mean `a`?; " in text
    assert "out dim `c` has size 9 but the operands have 2" in text
    assert "operand 2: f64[b=3, c=2]" in text


def test_other_mistakes_are_told():
    x, y = random([a, b]), random([b, c])
    both = "give either out=..., the dims to keep, or over=..., the dims to sum over"
    for function, text in [
        (lambda x, y: md.einsum(x, y), both),
        (lambda x, y: md.einsum(x, y, out="a", over="b"), both),
        (lambda x, y: md.einsum(over="b"), "einsum: needs at least one tensor"),
        (lambda x, y: md.einsum(x, y, over="e"), "over dim `e` is in no operand"),
        (lambda x, y: md.einsum(x, md.cast(y, "float32"), over="b"), "dtypes differ: f64 and f32"),
        (lambda x, y: md.einsum(x > 0, y > 0, over="b"), "needs numbers, got bool"),
        (lambda x, y: md.einsum(x, y.rename(c="a"), over="b"), "dim `a` has size 4 in f64[a=4"),
    ]:
        assert text in message(function, x, y)


def sized(**sizes):
    return random(list(md.dims(**sizes)))


@pytest.mark.parametrize(
    ("x", "w", "one", "other"),
    [
        (sized(batch=2, embed=8), sized(emebd=8, d_ff=4), "embed", "emebd"),
        (sized(batch=2, embed=8), sized(bacth=2, embed=8), "batch", "bacth"),
        (sized(batch=2, embed=8), sized(bach=2, embed=8), "batch", "bach"),
        (sized(embed=8, kv_heads=2), sized(embed=8, kv_hexds=2), "kv_heads", "kv_hexds"),
        (sized(embed=8, kv_heads=2), sized(embed=8, kvheads=2), "kv_heads", "kvheads"),
    ],
)
def test_a_slip_in_a_name_is_no_outer_product(x, w, one, other):
    text = message(lambda x, w: md.einsum(x, w, over="embed"), x, w)
    assert f"dim `{one}` of {x.dtype.name.replace('float', 'f')}{x.dims} and dim `{other}`" in text
    assert f"rename one, as in x.rename({one}='{other}')" in text
    every = list(dict.fromkeys([*x.dims.names, *w.dims.names]))
    both = run(lambda x, w: md.einsum(x, w, out=every), x, w)
    assert both.dims.names == tuple(every)


@pytest.mark.parametrize(
    ("x", "w"),
    [
        ({"batch": 2, "embed": 8}, {"emebd": 4, "embed": 8}),  # another size
        ({"length": 2, "embed": 8}, {"memory_length": 2, "embed": 8}),
        ({"heads": 2, "embed": 8}, {"kv_heads": 2, "embed": 8}),
        ({"rows": 2, "embed": 8}, {"row": 2, "embed": 8}),
        ({"axis1": 2, "embed": 8}, {"axis2": 2, "embed": 8}),
        ({"a1b": 2, "embed": 8}, {"a2b": 2, "embed": 8}),
        ({"qk_dim": 2, "embed": 8}, {"qv_dim": 2, "embed": 8}),
        ({"in_x_dim": 2, "embed": 8}, {"in_y_dim": 2, "embed": 8}),
        ({"dim_in": 2, "embed": 8}, {"in_dim": 2, "embed": 8}),
        ({"length": 2, "embed": 8}, {"length_": 2, "embed": 8}),
        ({"inner": 2, "embed": 8}, {"outer": 2, "embed": 8}),
        ({"bits": 2, "embed": 8}, {"kits": 2, "embed": 8}),
        ({"row": 2, "embed": 8}, {"raw": 2, "embed": 8}),
    ],
)
def test_names_that_differ_on_purpose_make_an_outer_product(x, w):
    found = run(lambda x, w: md.einsum(x, w, over="embed"), sized(**x), sized(**w))
    assert set(found.dims.names) == {*x, *w} - {"embed"}


@pytest.mark.parametrize(
    ("given", "summed"),
    [
        ({"over": "heads"}, ["heads"]),
        ({"over": "head"}, ["head"]),
        ({"over": ["head", "heads"]}, ["heads", "head"]),
        ({"out": ["batch", "out"]}, ["heads", "head"]),
        ({"out": ["batch", "out", "head"]}, ["heads"]),
    ],
)
def test_a_dim_that_one_operand_has_alone_is_not_summed_over(given, summed):
    x, w = sized(batch=2, heads=4), sized(head=5, out=3)
    text = message(lambda x, w: md.einsum(x, w, **given), x, w)
    for name in summed:
        other = {"heads": "head", "head": "heads"}[name]
        of = x if name == "heads" else w
        assert (
            f"dim `{name}` is summed over, but of the operands only f64{of.dims} has it, so it "
            f"pairs up with nothing. Did you mean `{other}`? Rename it"
        ) in text
        assert f"md.sum(x, '{name}')" in text


def test_of_three_operands_two_have_what_is_summed_over():
    x, w, v = sized(batch=2, embed=8), sized(embed=8, d_ff=4), sized(batch=2)
    found = run(lambda *xs: md.einsum(*xs, over=["embed", "batch"]), x, w, v)
    assert_close(found, np.einsum("be,ed,b->d", x.data, w.data, v.data))
    text = message(lambda *xs: md.einsum(*xs, out="batch"), x, w, v)
    assert "dim `d_ff` is summed over, but of the operands only f64[embed=8, d_ff=4] has it" in text


def test_derivatives_may_sum_what_one_operand_has():
    x, w = sized(batch=2, embed=8), sized(embed=8)

    def function(x, w):
        return md.sum(md.square(md.einsum(x, w, over="embed")))

    assert_agree(
        function, lambda x, w: jnp.sum(jnp.square(jnp.einsum("be,e->b", x, w))), x, w, order=2
    )
