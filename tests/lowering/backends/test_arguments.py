"""How arrays whose dims do not divide are stored, and how they get into a program."""

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.backends import jax as backend
from meshdsl.tensors.cuts import pad
from tests.ops.agreement import random

n, m, k = md.dims(n=5, m=3, k=8)
TWO_AXES = ("a:2,b:2", "n:a+b")
PLACES = [
    TWO_AXES,
    ("a:2,b:2", "n:b+a"),
    ("a:2,b:2", "n:a; m:b"),
    ("a:2,b:2", "m:a+b"),
    ("b:2,a:2", "n:a+b"),
    ("c:4", "n:c"),
    ("c:5", "n:c"),
    ("c:8", "n:c"),
    ("c:4", ""),
]


def placed(x, where=TWO_AXES):
    mesh, layout = where
    return md.place(x, mesh, layout)


def storage(x, where):
    mesh, layout = md.Mesh.parse(where[0]), md.Layout.parse(where[1])
    devices = backend.device_mesh(mesh)
    return backend.Storage.of(x.dims, layout.assign(x.dims), mesh, devices)


def with_poison(x):
    """Returns a stored array with NaN in its pads."""
    real = pad(np, np.ones(x.dims.sizes, bool), x.cuts)
    data = jax.device_put(np.where(real, np.asarray(x.data), np.nan), x.data.sharding)
    return md.NamedArray(data, x.dims, x.cuts)


def test_each_device_holds_its_block_with_pads():
    x = placed(md.named(np.arange(1.0, 6.0), [n]))
    assert x.cuts == ((2, 2),)
    shards = {s.device.id: s.data.tolist() for s in x.data.addressable_shards}
    assert shards == {0: [1, 2], 1: [3, 0], 2: [4, 5], 3: [0, 0]}


def test_what_divides_has_no_pads():
    x = placed(random([k, m]), ("a:2,b:2", "k:a+b"))
    assert x.cuts == ()
    assert x.data.shape == x.dims.sizes
    assert x.unpadded() is x.data


def test_results_are_stored_as_the_rules_say():
    x = random([n, m])
    for mesh, layout in PLACES:
        y, total = md.jit(lambda x: (x + 1, md.sum(x)), mesh, layout)(x)
        assert y.layout == md.Layout.parse(layout).assign(y.dims)
        assert y.data.shape == storage(y, (mesh, layout)).sizes
        assert np.array_equal(y, np.asarray(x) + 1)
        assert float(total) == pytest.approx(np.asarray(x).sum())


def test_arrays_stored_as_the_program_takes_them_are_not_copied():
    x = placed(random([n, m]))
    assert storage(x, TWO_AXES).put(x) is x.data
    even = placed(random([k]), ("a:2,b:2", "k:a+b"))
    assert storage(even, ("a:2,b:2", "k:a+b")).put(even) is even.data


@pytest.mark.parametrize("source", PLACES)
@pytest.mark.parametrize("target", PLACES)
def test_arrays_stored_otherwise_are_converted(source, target):
    x = random([n, m])
    wanted = storage(x, target)
    stored = wanted.put(placed(x, source))
    assert stored.sharding == wanted.sharding
    assert np.array_equal(md.NamedArray(stored, x.dims, wanted.cuts), x)


def test_arrays_of_the_host_and_of_other_devices_are_converted():
    x = random([n, m])
    wanted = storage(x, TWO_AXES)
    stored = placed(x, ("c:4", "n:c"))
    elsewhere = jax.sharding.Mesh(np.array(jax.devices()[4:]), ("c",))
    far = jax.sharding.NamedSharding(elsewhere, jax.sharding.PartitionSpec("c"))
    for array in (
        x,
        md.NamedArray(jax.device_put(x.data, jax.devices()[5]), x.dims),
        jax.device_get(stored),
        jax.device_put(stored, far),
        jax.device_put(stored, jax.devices()[7]),
    ):
        assert np.array_equal(array, x)
        found = wanted.put(array)
        assert found.sharding == wanted.sharding
        assert np.array_equal(md.NamedArray(found, x.dims, wanted.cuts), x)


def test_what_pads_hold_does_not_matter():
    def model(x):
        rest = [md.softmax(x, "n"), md.sum(x, over="n"), md.cumsum(x, "n"), md.max(x), x + 1]
        return [*rest, md.grad(lambda x: md.sum(md.sin(x) * md.mean(x)))(x)]

    x = random([n, m])
    found = md.jit(model, *TWO_AXES)(with_poison(placed(x)))
    for mine, other in zip(found, md.jit(model)(x), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-12, atol=1e-12)


def test_pads_that_are_not_finite_are_not_found():
    x = with_poison(placed(random([n, m])))
    checked = md.jit(lambda x: x * 2, *TWO_AXES, check_finite=True)
    assert np.isfinite(np.asarray(checked(x))).all()
    with pytest.raises(FloatingPointError, match=r"1 NaN of 15 values"):
        checked(md.named(np.where(np.arange(15) == 7, np.nan, 0.0).reshape(5, 3), [n, m]))


def test_padded_buffers_can_be_given_up():
    x = md.jit(lambda x: 2 * x, *TWO_AXES)(random([n, m]))
    held = {s.data.unsafe_buffer_pointer() for s in x.data.addressable_shards}
    y = md.jit(lambda x: x + 1, *TWO_AXES, donate="x")(x)
    assert x.data.is_deleted()
    assert {s.data.unsafe_buffer_pointer() for s in y.data.addressable_shards} == held
    assert np.array_equal(y, 2 * random([n, m]).data + 1)


def test_other_backends_take_and_give_them():
    x = random([n, m])
    stored = placed(x)
    for name in ("numpy", "jax_auto"):
        assert np.array_equal(md.jit(lambda x: x * 2, *TWO_AXES, name)(stored), 2 * x.data)


@pytest.mark.long
def test_as_jax_takes_and_returns_logical_arrays():
    x = random([n, m])
    function = md.jit(lambda x: (md.sin(x), md.sum(x * x)), *TWO_AXES).as_jax(x)
    for compiled in (function, jax.jit(function)):
        sines, total = compiled(x.data)
        np.testing.assert_allclose(sines, np.sin(x.data), rtol=1e-12)
        assert float(total) == pytest.approx((x.data**2).sum())
    slope = jax.grad(lambda data: function(data)[1])(x.data)
    np.testing.assert_allclose(slope, 2 * x.data, rtol=1e-12)


def test_pads_are_counted_in_memory_and_traffic():
    x = random([n, m])
    program = md.jit(lambda x: x, "c:4", "n:c").lower(x)
    assert [v.bytes for v in program.block.inputs] == [2 * 3 * 8]
    assert program.peak_bytes == 2 * 3 * 8
    program = md.jit(lambda x: {"whole": x}, "c:4", "n:c; whole/n:-").lower(x)
    (gather,) = program.collectives
    assert (gather.kind, gather.payload_bytes, gather.wire_bytes) == ("all_gather", 192, 144)
