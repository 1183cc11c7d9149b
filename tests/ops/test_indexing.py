"""Look-ups, scatters and their gradients, indices outside of the table included."""

import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from tests.calls import calls_of
from tests.ops.agreement import assert_agree, assert_close, message, random, run
from tests.ops.layouts import assert_same_on_every_layout

vocab, embed, batch, length = md.dims(vocab=6, embed=4, batch=3, length=2)
TOKENS = np.array([[0, 5], [3, 3], [2, 0]], np.int32)
STRAY = np.array([[0, 6], [-1, 3], [7, -6]], np.int32)


def tokens(data=TOKENS, dtype=np.int32):
    return md.named(data.astype(dtype), [batch, length])


@pytest.mark.parametrize("dims", [[vocab, embed], [embed, vocab], [vocab]])
def test_take_and_two_derivatives(dims):
    at = dims.index(vocab)

    def expected(table, indices):
        found = jnp.take(table, indices, axis=at)
        return jnp.moveaxis(found, (at, at + 1), (0, 1))

    assert_agree(lambda t, i: md.take(t, i, "vocab"), expected, random(dims), tokens(), order=2)


@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.parametrize("layout", ["", "vocab:x", "vocab:x; batch:y", "embed:x; length:x?"])
def test_an_index_outside_of_the_table_gives_zeros_and_no_gradient(layout, backend):
    table = random([vocab, embed])

    def model(table, indices):
        return md.take(table, indices, vocab), md.grad(
            lambda t: md.sum(md.take(t, indices, vocab) * md.arange(embed, "float64"))
        )(table)

    found, gradient = run(
        model, table, tokens(STRAY), mesh="x:2,y:3", layout=layout, backend=backend
    )
    inside = (STRAY >= 0) & (STRAY < 6)
    expected = np.where(inside[..., None], table.data[np.where(inside, STRAY, 0)], 0)
    assert_close(found, expected)
    counts = np.bincount(STRAY[inside], minlength=6)
    assert_close(gradient, counts[:, None] * np.arange(4.0))


def test_integers_are_looked_up_too():
    table = md.named(np.arange(6, dtype=np.int32) ** 2, [vocab])
    assert np.array_equal(run(lambda t, i: md.take(t, i, "vocab"), table, tokens()), TOKENS**2)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32", "uint32", "int64"])
def test_indices_of_every_integer_dtype(dtype):
    table = random([vocab, embed])
    found = run(lambda t, i: md.take(t, i, "vocab"), table, tokens(dtype=dtype))
    assert_close(found, table.data[TOKENS])
    hot = run(lambda i: md.one_hot(i, vocab, "float64"), tokens(dtype=dtype))
    assert_close(hot, np.eye(6)[TOKENS])


def test_one_hot_is_zero_for_an_index_outside():
    found = run(lambda i: md.one_hot(i, vocab), tokens(STRAY))
    assert found.dims.names == ("batch", "length", "vocab")
    assert np.array_equal(found, STRAY[..., None] == np.arange(6))


def test_one_hot_counts_further_than_narrow_indices_reach():
    long = md.Dimension("vocab", 300)
    narrow = md.named(np.array([3, 100, -1], np.int8), [batch])
    found = run(lambda i: md.one_hot(i, long), narrow)
    assert np.array_equal(found, narrow.data[:, None] == np.arange(300))


rows, places = md.dims(batch=3, length=7)
WIDE = random([rows, places])
AT = md.named(
    np.array([[0, 6, 6, -1, 2], [7, 3, 3, 3, 0], [5, 5, 1, 99, 5]], np.int32),
    [rows, md.Dimension("spot", 5)],
)
ALONG = md.named(AT.data, [rows, md.Dimension("length", 5)])
UPDATES = random([rows, md.Dimension("spot", 5)], seed=5)


def inside(indices, size=7):
    return (indices >= 0) & (indices < size)


def test_dims_that_table_and_indices_share_pair_up():
    def expected(table, indices):
        found = jnp.take_along_axis(table, jnp.clip(indices, 0, 6), 1)
        return jnp.where(inside(indices), found, 0)

    assert_agree(lambda t, i: md.take(t, i, "length"), expected, WIDE, AT, order=2)
    assert_agree(lambda t, i: md.take_along(t, i, "length"), expected, WIDE, ALONG, order=2)
    labels = md.named(np.array([6, 7, 0]), [rows])
    found = run(lambda t, i: md.take(t, i, places), WIDE, labels)
    assert_close(found, [WIDE.data[0, 6], 0, WIDE.data[2, 0]])


def test_take_along_keeps_the_order_of_the_dims():
    x = random([length, embed, batch])
    at = md.named(np.array([[3, 0], [1, 9]]), [md.Dimension("more", 2), md.Dimension("embed", 2)])
    wide = ["more", "embed", length, batch]
    found = run(lambda x, i: md.take_along(x, md.broadcast(i, wide), "embed"), x, at)
    assert found.dims.names == ("more", "length", "embed", "batch")
    assert_close(found.data[0], x.data[:, [3, 0]])
    assert_close(found.data[1], np.stack([x.data[:, 1], 0 * x.data[:, 0]], 1))


def test_take_along_refuses_dims_of_which_each_has_one_that_the_other_lacks():
    x = random([md.Dimension("row", 3), md.Dimension("column", 3)])
    at = md.named(np.zeros((3, 2), np.int32), ["rwo", "column"])
    text = message(lambda x, i: md.take_along(x, i, "column"), x, at)
    assert "the indices s32[rwo=3, column=2] have `rwo`, which x f64[row=3, column=3] lacks" in text
    assert "Did you mean `row` instead of `rwo`?" in text
    assert "md.take(x, indices, 'column')" in text
    found = run(lambda x, i: md.take_along(x["row", 0], i, "column"), x, at)
    assert found.dims.names == ("rwo", "column")


def scattered(x, indices, updates, mode):
    """Returns what a loop over rows and updates, in order, makes of x."""
    found = np.array(x)
    for row in range(len(found)):
        for at, update in zip(indices[row], updates[row], strict=True):
            if 0 <= at < found.shape[1]:
                before = found[row, at]
                found[row, at] = {
                    "set": update,
                    "add": before + update,
                    "max": np.maximum(before, update),
                    "min": np.minimum(before, update),
                }[mode]
    return found


@pytest.mark.parametrize("mode", ["set", "add", "max", "min"])
def test_scatter_and_two_derivatives(mode):
    def function(x, u, i):
        return md.scatter(x, i, u, "length", mode)

    assert_close(
        run(function, WIDE, UPDATES, AT), scattered(WIDE.data, AT.data, UPDATES.data, mode)
    )

    def reference(x, u, i):  # one update after the other, each of another element
        for column in range(5):
            there = jnp.arange(7) == i[:, column : column + 1]
            before, put = x, u[:, column : column + 1]
            put = {
                "set": put,
                "add": x + put,
                "max": jnp.maximum(x, put),
                "min": jnp.minimum(x, put),
            }[mode]
            x = jnp.where(there, put, before)
        return x

    assert_agree(function, reference, WIDE, UPDATES, AT, order=2)


def test_of_several_updates_the_last_in_row_major_order_wins():
    x = md.named(np.zeros(4), ["place"])
    at = md.named(np.array([[1, 2, 1], [1, 9, 2]]), ["major", "minor"])
    updates = md.named(np.arange(1.0, 7.0).reshape(3, 2), ["minor", "major"])
    for layout in ("", "place:x", "major:x", "minor:y", "place:x; minor:y"):
        for backend in ("numpy", "jax") if layout in ("", "place:x; minor:y") else ("numpy",):
            found = run(
                lambda x, i, u: md.scatter(x, i, u, "place"),
                *(x, at, updates),
                **{"mesh": "x:2,y:3", "layout": layout, "backend": backend},
            )
            assert np.array_equal(found, [0, 2, 6, 0])  # [1, 0] beats [0, 0] and [0, 2]


def test_the_work_of_tracing_scatters_grows_with_their_number():
    place, update = md.dims(place=64, update=4)

    def work(count):
        def model(x, indices):
            for _ in range(count):
                x = md.scatter(x, indices, 1.0, "place")
            return x

        jitted, specs = md.jit(model), (md.spec([place]), md.spec([update], "int32"))
        return calls_of(lambda: jitted.trace(*specs))

    work(1)
    assert work(40) - work(20) <= 1.1 * (work(20) - work(0))


@pytest.mark.parametrize("mode", ["set", "add", "max", "min"])
def test_indices_along_the_other_dims_leave_the_order_of_the_dims(mode):
    x = random([vocab, embed])
    at = md.named(np.array([[0, 5, 2, 7], [1, 5, 4, 3]]), [md.Dimension("update", 2), embed])
    put = random([md.Dimension("update", 2), embed], seed=1)
    found = run(lambda x, i, p: md.scatter(x, i, p, "vocab", mode), x, at, put)
    assert found.dims == x.dims
    assert_close(found, scattered(x.data.T, at.data.T, put.data.T, mode).T)


@pytest.mark.parametrize("backend", ["numpy", "jax", "jax_auto", "tf"])
@pytest.mark.parametrize("layout", ["", "vocab:x", "embed:x", "update:x"])
def test_unique_updates_are_written_and_those_outside_dropped(layout, backend):
    # Over four devices a part of `vocab` has pads.
    table, rows = random([vocab, embed]), random([md.Dimension("update", 4), embed], seed=1)
    where = {"mesh": "x:4", "layout": layout} if backend != "tf" else {}
    put = md.jit(
        lambda t, i, u: md.scatter(t, i, u, "vocab", unique=True), backend=backend, **where
    )
    for at in ([0, 5, 2, 3], [-1, 6, -1, 1], [7, -6, 4, 6]):
        expected = table.data.copy()
        for place, row in zip(at, rows.data, strict=True):
            if 0 <= place < 6:
                expected[place] = row
        assert_close(put(table, md.named(np.array(at, np.int32), ["update"]), rows), expected)


@pytest.mark.parametrize("dims", [[vocab, embed], [embed, vocab]])
def test_unique_updates_have_derivatives(dims):
    at, update = dims.index(vocab), md.Dimension("update", 3)

    def reference(x, u, i):
        found = jnp.moveaxis(x, at, 0).at[i].set(u, mode="drop")
        return jnp.moveaxis(found, 0, at)

    assert_agree(
        lambda x, u, i: md.scatter(x, i, u, "vocab", unique=True),
        reference,
        random(dims),
        random([update, embed], seed=1),
        md.named(np.array([4, 9, 1], np.int32), [update]),
        order=2,
    )


def test_unique_updates_along_shared_dims_need_no_order():
    x, updates = random([batch, vocab]), random([batch, length], seed=1)
    for unique in (False, True):
        found = run(
            lambda x, i, u, unique=unique: md.scatter(x, i, u, "vocab", unique=unique),
            x,
            tokens(np.array([[0, 5], [3, 7], [2, 0]])),
            updates,
        )
        at = np.array([[0, 5], [3, 7], [2, 0]])
        assert_close(found, scattered(x.data, at, updates.data, "set"))


@pytest.mark.parametrize("backend", ["numpy", "jax", "jax_auto"])
@pytest.mark.parametrize("layout", ["", "vocab:x", "embed:x"])
def test_one_index_writes_its_place_and_is_dropped_outside(layout, backend):
    table, row = random([vocab, embed]), random([embed], seed=1)
    put = md.jit(
        lambda t, i, r: md.scatter(t, i, r, "vocab"), mesh="x:2", layout=layout, backend=backend
    )
    for at in (0, 5, 6, -1, 7):
        expected = table.data.copy()
        if 0 <= at < 6:
            expected[at] = row.data
        assert_close(put(table, np.int32(at), row), expected)


@pytest.mark.parametrize("sizes", [{}, {"update": 1}])
@pytest.mark.parametrize("stray", [-1, 4])
def test_one_update_outside_of_a_split_dim_changes_no_shard(stray, sizes):
    # XLA wrote rows of another device's part in place of this one's.
    def function(x, index, value):
        written = md.scatter(md.zeros([row], "float64"), index, value, "row", mode="add")
        return x.rename(column="row") + written

    row, column = md.dims(row=4, column=4)
    update = [md.Dimension(*one) for one in sizes.items()]
    index = md.named(np.full([*sizes.values()], stray, np.int32), update)
    value = md.named(np.full([*sizes.values()], 9.0), update)
    found = md.jit(function, "x:3", "row:x")(md.named(np.arange(4.0), [column]), index, value)
    assert_close(found, np.arange(4.0))


def test_a_nan_that_is_overwritten_is_gone():
    x = md.named(np.array([np.nan, 1.0]), ["place"])
    updates = md.named(np.array([np.nan, 5.0]), ["update"])
    at = md.named(np.array([0, 0]), ["update"])
    found = run(lambda x, i, u: md.scatter(x, i, u, "place"), x, at, updates)
    assert np.array_equal(found, [5, 1])


def test_updates_may_be_a_number_or_lack_dims():
    def model(x, i, row):
        return md.scatter(x, i, 7, "length"), md.scatter(x, i, row, "length", mode="add")

    row = random([md.Dimension("spot", 5)])
    put, added = run(model, WIDE, AT, row)
    updates = np.broadcast_to(row.data, (3, 5))
    assert_close(put, scattered(WIDE.data, AT.data, np.full((3, 5), 7.0), "set"))
    assert_close(added, scattered(WIDE.data, AT.data, updates, "add"))


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "bfloat16"])
def test_scatter_of_other_dtypes(dtype):
    dtype = md.spec([], dtype).dtype
    x = md.named(np.array([0, 1, 1, 0, 1]).astype(dtype), ["place"])
    updates = md.named(np.array([1, 0, 0, 1]).astype(dtype), ["update"])
    at = md.named(np.array([0, 1, 0, 4], np.int8), ["update"])
    for mode, expected in [("set", [0, 0, 1, 0, 1]), ("max", [1, 1, 1, 0, 1])]:
        for backend in ("numpy", "jax"):
            function = lambda x, i, u: md.scatter(x, i, u, "place", mode)  # noqa: B023, E731
            found = run(function, x, at, updates, backend=backend)
            assert found.dtype == dtype
            assert np.array_equal(np.asarray(found).astype(int), expected)


def test_indices_beyond_32_bits_are_outside():
    table = random([vocab])
    far = md.named(np.array([2**32, 2**32 + 1, -(2**32), 3]), ["n"])
    assert_close(run(lambda t, i: md.take(t, i, "vocab"), table, far), [0, 0, 0, table.data[3]])
    unsigned = md.named(np.array([2**32 - 1, 3], np.uint32), ["n"])
    assert_close(run(lambda t, i: md.take(t, i, "vocab"), table, unsigned), [0, table.data[3]])


def test_updates_that_reach_the_extreme_together_share_its_gradient():
    x = md.named(np.array([1.0, 5.0, 5.0]), ["place"])
    at = md.named(np.array([0, 0, 1, 2]), ["update"])
    updates = md.named(np.array([4.0, 4.0, 2.0, 5.0]), ["update"])
    gradient = md.grad(lambda x, u, i: md.sum(md.scatter(x, i, u, "place", "max")), (0, 1))
    by_x, by_updates = run(gradient, x, updates, at)
    assert_close(by_x, [0, 1, 0.5])
    assert_close(by_updates, [0.5, 0.5, 0, 0.5])


@pytest.mark.long
def test_every_layout_gives_the_same():
    functions = [
        lambda x, u, i, j: md.take(x, i, "length"),
        lambda x, u, i, j: md.take(x, i, "batch"),
        lambda x, u, i, j: md.take_along(x, j, "length"),
        lambda x, u, i, j: md.take_along(x, i.rename(spot="length") - 2, "length"),
        *(
            lambda x, u, i, j, mode=mode: md.scatter(x, i, u, "length", mode)
            for mode in ("set", "add", "max", "min")
        ),
        lambda x, u, i, j: md.scatter(x, j, md.sin(x), "length"),
        lambda x, u, i, j: md.segment_sum(x, j, md.Dimension("length", 5), over="length"),
        lambda x, u, i, j: md.segment_mean(x, j, md.Dimension("spot", 5)),
    ]
    same = md.named(np.random.default_rng(1).integers(-1, 8, (3, 7)), [rows, places])
    along = md.named(np.asarray(AT.data), [rows, md.Dimension("spot", 5)])

    assert_same_on_every_layout(functions, WIDE, UPDATES, along, same)
    spots = [
        ("x:2,y:2", "spot:x+y"),
        ("x:4,y:2", "spot:y; length:x"),
        ("x:3,y:2", "spot:x;batch:y"),
    ]
    assert_same_on_every_layout(functions, WIDE, UPDATES, along, same, layouts=spots)


def test_an_index_may_be_a_python_number():
    table = random([vocab, embed])
    found = run(
        lambda t: [md.take(t, 2, "vocab"), md.scatter(t, 2, 0, "vocab"), md.one_hot(2, vocab)],
        table,
    )
    assert_close(found[0], table.data[2])
    assert_close(found[1], np.where(np.arange(6)[:, None] == 2, 0, table.data))
    assert_close(found[2], np.arange(6) == 2)
    text = message(lambda t: md.take(t, 2.0, "vocab"), table)
    assert "the indices must be integers, got f32" in text


def test_mistakes_are_told():
    table, indices = random([vocab, embed]), tokens()
    for function, text in [
        (lambda t, i: md.take(t, t, "vocab"), "take: the indices must be integers, got f64"),
        (lambda t, i: md.take(t, i, "vocabs"), "no dim `vocabs` in [vocab=6, embed=4]. Did you"),
        (
            lambda t, i: md.take(t, i.rename(length="embed"), "vocab"),
            "take: dim `embed` has size 4 in the table but 2 in the indices; rename it in one",
        ),
        (
            lambda t, i: md.take_along(t, i, "vocab"),
            "take_along: the indices have no dim `vocab`; md.take looks up without it",
        ),
        (
            lambda t, i: md.scatter(t, i, 1, "vocab", mode="mul"),
            "scatter: unknown mode 'mul'; choose one of set, add, max, min",
        ),
        (
            lambda t, i: md.scatter(t, i, md.cast(t, "float32"), "vocab"),
            "scatter: the updates are f32, but x is f64; cast one of them",
        ),
        (
            lambda t, i: md.scatter(t, i, t, "vocab"),
            "the updates have [vocab=6], but may have the dims of the indices and x's others: "
            "[batch=3, length=2, embed=4]",
        ),
        (
            lambda t, i: md.scatter(t > 0, i, True, "vocab", "add"),
            "scatter: needs numbers to add, got bool; mode 'max' is their logical or",
        ),
        (
            lambda t, i: md.scatter(t, i.rename(length="embed"), 1, "vocab"),
            "scatter: dim `embed` has size 4 in the table but 2 in the indices",
        ),
        (lambda t, i: md.one_hot(t, vocab), "one_hot: the indices must be integers, got f64"),
        (
            lambda t, i: md.one_hot(i.rename(length="vocab"), md.Dimension("vocab", 2)),
            "one_hot: the indices have dim `vocab` as well, and a result has a name once; rename "
            "theirs first, as in indices.rename(vocab='vocab_')",
        ),
    ]:
        assert text in message(function, table, indices)


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_complex_numbers(backend):
    z = md.named(WIDE.data + 1j * WIDE.data[::-1], WIDE.dims)

    def model(z, i):
        found = md.take(z, i, "length")
        return found, md.scatter(z, i, found, "length", "add"), md.scatter(z, i, 2.0, "length")

    found, added, put = run(model, z, AT, mesh="x:4", layout="length:x", backend=backend)
    expected = np.take_along_axis(z.data, np.clip(AT.data, 0, 6), 1) * inside(AT.data)
    assert np.allclose(found, expected, rtol=1e-12)
    assert np.allclose(added, scattered(z.data, AT.data, expected, "add"), rtol=1e-12)
    assert np.array_equal(put, scattered(z.data, AT.data, np.full((3, 5), 2.0), "set"))


@pytest.mark.parametrize("name", ["bacth", "bach", "batchs", "battch"])
def test_indices_whose_dim_differs_by_a_slip_are_a_mistake(name):
    x = random(md.dims(batch=2, feature=3))
    i = md.named(np.zeros(2, np.int32), [name])
    u = random([md.Dimension(name, 2)])
    for function in (
        lambda x, i, u: md.take(x, i, "feature"),
        lambda x, i, u: md.scatter(x, i, u, "feature"),
        lambda x, i, u: md.scatter(x, i, u, "feature", mode="add"),
    ):
        text = message(function, x, i, u)
        assert (
            f"dim `{name}` of the indices and dim `batch` of [batch=2, feature=3] have one size, "
            "and names that differ by a slip, so they do not pair up; rename one, as in "
            f"indices.rename({name}='batch')"
        ) in text
    far = md.named(np.zeros(3, np.int32), [name])  # of another size
    assert run(lambda x, i: md.take(x, i, "feature"), x, far).dims.names == (name, "batch")
    straight = md.named(np.zeros(2, np.int32), ["batch"])
    text = message(lambda x, i, u: md.scatter(x, i, u, "feature"), x, straight, u)
    assert f"the updates have [{name}=2]" in text
    assert "Did you mean `batch`?" in text


def test_too_many_updates_to_be_ordered_are_a_mistake():
    wide = md.spec([md.Dimension("a", 2**16), md.Dimension("b", 2**16)], "int8")
    text = message(lambda x, i: md.scatter(x, i, 1.0, "n"), md.spec([md.Dimension("n", 4)]), wide)
    assert "too many updates of one element to be ordered: [a=65536, b=65536]" in text
