"""NamedArray, named and spec: arguments of traced functions."""

import copy
import ctypes
import mmap
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md

batch, embed = md.dims(batch=8, embed=4)


def test_names_take_their_size_from_the_data():
    x = md.named(np.zeros((8, 4), np.float32), ["batch", embed])
    assert x.dims == x.shape == md.Shape([batch, embed])
    assert x.dtype == np.float32
    assert x.layout is None
    assert repr(x) == "NamedArray(f32[batch=8, embed=4])"


def test_anything_numpy_reads_will_do():
    assert md.named([[1, 2], [3, 4]], ["a", "b"]).dims.sizes == (2, 2)
    assert float(md.named(2.5, [])) == 2.5
    assert int(md.named(3, [])) == 3
    assert np.asarray(md.named(jnp.arange(3), "a"), np.float64).tolist() == [0, 1, 2]


def test_the_order_of_the_dims_is_that_of_the_data():
    x = md.named(np.arange(32).reshape(8, 4), [batch, embed])
    found = md.jit(lambda x: x.transpose(["embed", "batch"]), backend="numpy")(x)
    assert np.array_equal(found, x.data.T)


def test_misfits_are_told_together():
    with pytest.raises(ValueError, match=r"the data has 2 dims \(8, 4\), but 1 dims were given: b"):
        md.named(np.zeros((8, 4)), [batch])
    with pytest.raises(ValueError) as error:
        md.named(np.zeros((3, 5)), [batch, embed])
    assert str(error.value) == (
        "named: dim 0 of the data has size 3, but batch=8 was given; "
        "dim 1 of the data has size 5, but embed=4 was given"
    )
    with pytest.raises(ValueError, match="two dims of one name: `a`"):
        md.named(np.zeros((2, 2)), ["a", "a"])


def test_later_changes_of_the_callers_array_do_not_reach_it():
    data = np.ones((8, 4), np.float32)
    whole = md.named(data, [batch, embed])
    part = md.named(data[:, :2], ["batch", "half"])
    view = data.view()
    view.flags.writeable = False
    seen = md.named(view, [batch, embed])
    doubled = md.jit(lambda x: x * 2)(whole)
    data[:] = 7
    for x in (whole, part, seen):
        assert np.asarray(x).max() == 1
        with pytest.raises(ValueError, match="read-only"):
            np.asarray(x)[:] = 3
    assert np.asarray(doubled).max() == 2


def test_bytes_and_files_mapped_for_reading_are_shared(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.arange(8))
    lent = memoryview(bytes(8))
    for data in (
        np.load(path, mmap_mode="r"),
        np.load(path, mmap_mode="r")[:],
        np.frombuffer(bytes(8), np.uint8),
        np.frombuffer(lent, np.uint8),
    ):
        assert md.named(data, [batch]).data is data
    for data in (np.load(path, mmap_mode="c"), np.frombuffer(bytearray(8), np.uint8)):
        data.flags.writeable = False
        assert not np.shares_memory(md.named(data, [batch]).data, data)


def read_only_views():
    """Returns read-only arrays, each with what writes its memory all the same."""
    owner = np.arange(8)
    owner.flags.writeable = False

    def written_again():
        owner.flags.writeable = True
        owner[0] = 9

    lent = np.arange(8)
    before = lent[:]
    lent.flags.writeable = False
    viewed = np.arange(8)
    raw, numbers, mapped = bytearray(8), (ctypes.c_int * 8)(), mmap.mmap(-1, 8)
    return {
        "its owner, made writable again": (owner, written_again),
        "a view from before": (lent, lambda: before.__setitem__(0, 9)),
        "what it is broadcast from": (
            np.broadcast_to(viewed, 8),
            lambda: viewed.__setitem__(0, 9),
        ),
        "a bytearray": (
            np.frombuffer(memoryview(raw).toreadonly(), np.uint8),
            lambda: raw.__setitem__(0, 9),
        ),
        "an array of C": (
            np.frombuffer(memoryview(numbers).toreadonly(), np.int32),
            lambda: numbers.__setitem__(0, 9),
        ),
        "a map for writing": (
            np.frombuffer(memoryview(mapped).toreadonly(), np.uint8),
            lambda: mapped.__setitem__(0, 9),
        ),
    }


@pytest.mark.parametrize("writer", read_only_views())
def test_a_read_only_view_of_memory_that_another_can_write_is_copied(writer):
    data, write = read_only_views()[writer]
    x = md.named(data, [batch])
    write()
    assert data[0] == 9
    assert np.asarray(x)[0] == 0


def test_what_another_library_lends_is_copied():
    lent = np.from_dlpack(jnp.arange(3))
    x = md.named(lent, ["a"])
    assert np.asarray(x).tolist() == [0, 1, 2]
    assert not np.shares_memory(x.data, lent)


def test_data_that_are_no_numbers_are_told():
    for data in (np.array(["a"]), ["a"], np.array([None]), np.array(["2020"], "datetime64[D]")):
        with pytest.raises(
            ValueError, match=r"named: the data has dtype .*, which is not of number"
        ):
            md.named(data, ["row"])
    with pytest.raises(ValueError, match="named: the rows of list differ in length"):
        md.named([[1], [1, 2]], ["a", "b"])
    with pytest.raises(ValueError, match=r"named: a key of jax\.random is no array"):
        md.named(jax.random.key(0), [])
    with pytest.raises(ValueError, match=r"named: unknown dtype .*float8_e4m3b11fnuz"):
        md.named(jnp.ones(3, jnp.float8_e4m3b11fnuz), ["a"])
    with pytest.raises(
        ValueError, match=r"has names; rename its dims, as in x.rename\(old='new'\)"
    ):
        md.named(md.named([1], ["a"]), ["b"])
    swapped = md.named(np.array([1, 2], ">i4"), ["a"])
    assert np.asarray(swapped + 1).tolist() == [2, 3]


def test_a_size_is_no_name():
    with pytest.raises(ValueError, match="named: 3 cannot name a dim; give a name, whose size is"):
        md.named(np.ones(3), [3])


def test_it_is_a_tree_of_one_leaf():
    x = md.named(np.ones(4), [embed])
    doubled = jax.tree.map(lambda data: 2 * data, x)
    assert isinstance(doubled, md.NamedArray)
    assert doubled.dims == x.dims
    assert doubled.data.tolist() == [2] * 4


def test_spec_describes_without_data():
    assert repr(md.spec([batch, embed], "bfloat16")) == "bf16[batch=8, embed=4]"
    with pytest.raises(ValueError, match=r"spec: 'batch' has no size; give a md\.Dimension"):
        md.spec(["batch", embed])
    with pytest.raises(ValueError, match="unknown dtype 'complex256'; choose one of bool,"):
        md.spec([batch], "complex256")


def test_results_of_the_jax_backend_are_where_the_layout_says():
    x = md.named(np.arange(32.0).reshape(8, 4), [batch, embed])
    y = md.jit(lambda x: x * 2, mesh="x:2,y:2", layout="batch:x; embed:y")(x)
    assert isinstance(y.data, jax.Array)
    assert str(y.layout) == "batch:x; embed:y"
    assert y.data.sharding.shard_shape(y.data.shape) == (4, 2)
    assert repr(y) == "NamedArray(f64[batch=8, embed=4]; batch:x; embed:y)"


# Dims that do not divide: `data` has pads.

n, m = md.dims(n=5, m=3)


def padded():
    return md.place(md.named(np.arange(15.0).reshape(5, 3), [n, m]), "a:2,b:2", "n:a+b")


def test_a_padded_array_speaks_of_its_logical_dims():
    x = padded()
    assert x.data.shape == (8, 3)
    assert x.dims.sizes == x.shape.sizes == (5, 3)
    assert repr(x) == "NamedArray(f64[n=5, m=3]; n:a+b)"
    assert str(x) == str(md.named(np.arange(15.0).reshape(5, 3), [n, m]))
    assert np.array_equal(x, np.arange(15.0).reshape(5, 3))
    assert np.asarray(x).flags.c_contiguous
    assert np.asarray(x, np.float32).dtype == np.float32


def test_one_number_is_one_number_on_a_mesh_too():
    x = md.place(md.named([2.5], ["n"]), "a:4", "n:a")
    assert x.data.shape == (1,)
    assert (float(x), int(x), x.item(), bool(x)) == (2.5, 2, 2.5, True)


def test_unpadded_is_the_logical_array_on_the_mesh():
    x = padded()
    found = x.unpadded()
    assert isinstance(found, jax.Array)
    assert found.devices() == x.data.devices()
    assert np.array_equal(found, x)
    rows, columns = md.dims(rows=6, columns=5)
    y = md.place(md.named(np.ones((6, 5)), [rows, columns]), "a:2,b:2", "rows:a+b; columns:-")
    assert y.data.shape == (8, 5)
    assert y.unpadded().sharding.spec == jax.sharding.PartitionSpec("a", None)
    on_host = jax.device_get(x)
    assert isinstance(on_host.unpadded(), np.ndarray)
    assert np.array_equal(on_host.unpadded(), x)
    assert np.array_equal(jax.jit(lambda x: x.unpadded())(x), x)


def test_numbers_without_pads_are_a_copy():
    with pytest.raises(ValueError, match=r"f64\[n=5, m=3\]; n:a\+b\) is stored with pads: without"):
        np.array(padded(), copy=False)


def test_trees_of_padded_arrays_keep_their_pads():
    x = padded()
    for other in (
        jax.tree.map(lambda data: data + 1, x),
        jax.tree.map(lambda data: np.asarray(data) + 1, x),
        jax.jit(lambda x: jax.tree.map(lambda data: data + 1, x))(x),
    ):
        assert other.cuts == x.cuts
        assert np.array_equal(other, np.asarray(x) + 1)
    whole = jax.tree.structure(md.named(np.zeros((5, 3)), [n, m]))
    assert jax.tree.structure(x) == jax.tree.structure(padded()) != whole


def test_equal_storage_is_compiled_once():
    traces = []

    @jax.jit
    def function(x):
        traces.append(x.dims)
        return x

    for _ in range(3):
        function(padded())
    assert traces == [md.Shape([n, m])]


def test_padded_arrays_can_be_pickled_and_copied():
    x = padded()
    for other in (pickle.loads(pickle.dumps(x)), copy.copy(x), copy.deepcopy(x)):
        assert (other.dims, other.cuts) == (x.dims, x.cuts)
        assert np.array_equal(other, x)
        assert np.array_equal(md.jit(lambda x: x * 2, "c:4", "n:c")(other), 2 * np.asarray(x))


def test_a_tree_of_shapes_in_place_of_arrays_is_shown():
    x = md.named(np.ones((2, 3), np.float32), ["a", "b"])
    shapes = jax.tree.map(lambda leaf: leaf.shape, {"x": x})
    assert repr(shapes) == "{'x': NamedArray((2, 3), [a=2, b=3])}"
    assert str(shapes["x"]) == "NamedArray((2, 3), [a=2, b=3])"
    with pytest.raises(AttributeError, match=r"NamedArray has no `\.dtype`: its data is a tuple"):
        _ = shapes["x"].dtype
