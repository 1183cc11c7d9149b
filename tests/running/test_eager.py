"""Operations outside of a trace: they run at once, where their operands are, as under md.jit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl import nn
from meshdsl.running import eager
from tests.ops.agreement import random

a, b, c = md.dims(a=8, b=4, c=6)


def calls():
    return len(eager._calls), len(eager._programs)


@pytest.fixture(autouse=True)
def _nothing_is_known():
    eager.clear_cache()


def test_operators_and_methods_give_arrays():
    x = random([a, b])
    y = md.softmax(x + 1, "b")
    assert isinstance(y, md.NamedArray)
    expected = np.exp(x.data) / np.exp(x.data).sum(1, keepdims=True)
    assert np.allclose(y, expected, rtol=1e-12)
    assert np.allclose(x.mean("a"), x.data.mean(0))
    assert np.array_equal(x["b", 1], x.data[:, 1])
    assert np.array_equal(x["a", 2:5], x.data[2:5])
    assert np.array_equal(-x.transpose(["b", "a"]), -x.data.T)
    assert np.array_equal(2 - x, 2 - x.data)
    assert np.array_equal(x.rename(a="q").dims.names, ("q", "b"))
    assert np.array_equal((x > 0) & (x < 0.5), (x.data > 0) & (x.data < 0.5))


OPERATIONS = {
    "add": lambda x, y: x + y,
    "number": lambda x, y: x * 0.3,
    "power": lambda x, y: x**3,
    "quotient": lambda x, y: x / 0.3,
    "sum": lambda x, y: x.sum("a"),
    "einsum": lambda x, y: md.einsum(x, y, over="b"),
    "softmax": lambda x, y: md.softmax(x, "b"),
    "norm": lambda x, y: nn.rms_norm(x, "b"),
    "merge": lambda x, y: x.merge(["a", "b"], "k"),
    "take": lambda x, y: md.take(x, md.arange(c) % 4, "b"),
    "gradient": lambda x, y: md.grad(lambda x: md.sum(md.sin(x) * y))(x),
    "scan": lambda x, y: md.scan(lambda s, row: (s + row, s * row), y * 0, x, "a"),
    "drawn": lambda x, y: md.random.uniform(md.random.key(3), x.dims, "float64") + x,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_are_those_of_jit(name):
    """To the last bit, on one device and on a mesh."""
    function, inputs = OPERATIONS[name], (random([a, b]), random([b], seed=1))
    for mesh, layout in ((None, ""), ("x:2,y:2", "a:x; b:y")):
        placed = md.place(inputs, mesh, layout) if mesh else inputs
        rules = f"{layout}; k:x+y" if mesh and name == "merge" else layout
        expected = jax.tree.leaves(md.jit(function, mesh, rules)(*placed), is_leaf=_is_array)
        found = jax.tree.leaves(function(*placed), is_leaf=_is_array)
        for mine, other in zip(found, expected, strict=True):
            assert mine.dims == other.dims
            assert mine.dtype == other.dtype
            if name == "norm":  # several operations, which jit compiles together
                assert np.allclose(mine, other, rtol=1e-14, atol=0)
            else:
                assert np.array_equal(mine, other)


def _is_array(value):
    return isinstance(value, md.NamedArray)


# Where results are.


def placed(mesh="x:2,y:2", layout="a:x; b:y", dims=(a, b), seed=0):
    return md.place(random(list(dims), seed=seed), mesh, layout)


def test_arrays_on_a_mesh_stay_there():
    x = placed()
    for result, layout in (
        (x + 1, "a:x; b:y"),
        (x.sum("b"), "a:x"),
        (x.rename(a="q"), "b:y; q:x"),
        (x.split("a", md.dims(p=2, q=4)), "b:y; p:x"),
        (x.merge(["a", "b"], "k"), "k:x+y"),
        (md.softmax(x, "a"), "a:x; b:y"),
        (md.grad(lambda x: md.sum(x * x))(x), "a:x; b:y"),
        (md.einsum(x, x.rename(a="q"), over="b"), "a:x"),
    ):
        assert str(result.layout) == layout
        assert dict(result.data.sharding.mesh.shape) == {"x": 2, "y": 2}


def test_arrays_of_a_mesh_with_explicit_axes_are_operands_beside_others():
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=kinds)
    numbers = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))
    x = md.named(jax.device_put(numbers, where), ["a", "b"])
    for result in (x + 1, x + md.place(md.named(np.ones((8, 4), "f"), ["a", "b"]), "x:2,y:2")):
        np.testing.assert_array_equal(np.asarray(result), numbers + 1)
        assert str(result.layout) == "a:x; b:y"


def test_data_of_no_mesh_is_laid_out_like_that_of_the_others():
    assert str((random([b]) + placed()).layout) == "a:x; b:y"
    assert str(md.outer(md.multiply, placed(), md.ones([c], "float64")).layout) == "a:x; b:y"
    assert (random([a]) + 1).layout is None


def test_later_operands_yield():
    x, other = placed(), placed(layout="a:y", seed=1)
    assert str((x + other).layout) == "a:x; b:y"
    assert str((other + x).layout) == "a:y"
    assert np.array_equal(x + other, x.data + other.data)
    crosswise = placed(layout="c:x", dims=(c,), seed=2)
    assert str(md.outer(md.multiply, x, crosswise).layout) == "a:x; b:y"
    assert str(md.outer(md.multiply, crosswise, x).layout) == "b:y; c:x"
    whole = md.place(random([a]), "x:2,y:2")
    assert str((x.sum("b") + whole).layout) == "a:x"


def test_sizes_that_do_not_divide_stay_whole():
    odd = md.Dimension("odd", 5)
    y = md.outer(md.multiply, placed(), md.arange(odd, "float64"))
    assert str(y.layout) == "a:x; b:y"
    assert np.array_equal(y["odd", 1:], placed().data[..., None] * np.arange(1.0, 5))


def test_what_yields_everywhere_is_no_rule():
    """Lowering would warn of one that takes no axis."""
    given = {"x": placed(layout="a:y"), "y": placed()}
    graph = md.jit(lambda x, y: x + y).trace(*given.values())
    found = eager.layout_of(
        [array.layout for array in given.values()], graph, md.Mesh.parse("x:2,y:2")
    )
    assert str(found) == "a:y; y/a:x; y/b:y"


def test_operands_on_two_meshes_are_told():
    with pytest.raises(ValueError) as error:
        placed() + placed("x:4", "a:x")
    assert str(error.value).splitlines()[0] == (
        "add: the operands are on different meshes: x:2 y:2 (devices 0, 1, 2, 3) and x:4 (devices "
        "0, 1, 2, 3); move one with md.place(x, mesh, layout), or give it as np.asarray(x) with "
        "its dims"
    )


def test_another_device_or_other_devices_are_kept():
    third = jax.device_put(np.arange(4.0), jax.devices()[3])
    y = md.named(third, [b]) * 2
    assert y.data.devices() == {jax.devices()[3]}
    devices = np.array(jax.devices()[4:6])
    spec = jax.sharding.PartitionSpec("z")
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(devices, ("z",)), spec)
    z = md.named(jax.device_put(np.arange(4.0), sharding), [b]) + 1
    assert z.data.devices() == set(devices)
    assert str(z.layout) == "b:z"


def test_place_puts_a_tree_on_a_mesh():
    tree = {"params": {"w": random([a, b])}, "x": random([a])}
    found = md.place(tree, "x:2,y:2", "a:x; params/b:y; unused:x")
    assert str(found["params"]["w"].layout) == "a:x; b:y"
    assert str(found["x"].layout) == "a:x"
    with pytest.raises(ValueError, match=r"no axis `z` in mesh `x:2 y:2`"):
        md.place(tree, "x:2,y:2", "a:z")
    with pytest.raises(ValueError, match="both claim mesh axis `x`"):
        md.place(tree, "x:2,y:2", "a:x; b:x")


# What is kept.


def test_a_call_like_an_earlier_one_is_not_traced_again():
    x, y = random([a]), random([a], seed=1)
    x + y
    known = calls()
    y + x
    assert calls() == known
    x + x  # one array twice is another program
    assert calls() == (known[0] + 1, known[1] + 1)


def test_another_number_is_another_call_of_the_same_program():
    x = random([a])
    for number in (0.5, 0.25, -0.0, 0.0):
        assert np.array_equal(np.signbit(x * number), np.signbit(x.data * number))
    assert calls() == (4, 1)
    assert np.array_equal(x * 1, x.data)
    for at in range(-2, a.size):
        assert float(x["a", at]) == x.data[at]
    assert calls()[1] == 2
    with pytest.raises(ValueError, match="the bool True meets a tensor of numbers"):
        x * True  # equal to 1, but not the same


@pytest.mark.parametrize(
    ("names", "x", "numbers"),
    [
        ("bit_and bit_or bit_xor", np.array([-7, 0, 3, 127], np.int32), [1, 12, -3]),
        ("shift_left shift_right", np.array([-7, 0, 3, 127], np.int32), [1, 12, 31]),
        ("logical_and logical_or logical_xor", np.array([True, False] * 2), [False, True]),
        ("complex", np.array([-0.0, 0.5, 1e-40, np.inf], np.float32), [0.5, -0.0, 1e-40]),
    ],
)
def test_numbers_beside_tensors_are_operands_of_one_program(names, x, numbers):
    """For every operation of one step; the results are those of constants, to the last bit."""
    x = md.named(x, [b])
    for name in names.split():
        operation = getattr(md, name)
        before = calls()[1]
        for number in numbers:
            expected = md.jit(lambda x, number=number, run=operation: run(x, number))(x)
            assert np.asarray(operation(x, number)).tobytes() == np.asarray(expected).tobytes()
        assert calls()[1] == before + 1


def test_a_number_alone_is_a_constant_as_under_jit():
    """XLA's sign of a constant differs from that of an argument in zeros and in tiny numbers."""
    for number in (-0.0, 1e-40, -2.5):
        expected = md.jit(lambda number=number: md.sign(number))()
        assert np.asarray(md.sign(number)).tobytes() == np.asarray(expected).tobytes()


def test_what_runs_a_users_function_reads_what_it_reads_now():
    x, held = random([a]), {"scale": 2.0, "array": random([a], seed=1)}
    gradient = md.grad(lambda x: md.sum(x * held["scale"] * held["array"]))
    assert np.allclose(gradient(x), 2 * held["array"].data)
    held.update(scale=3.0)
    assert np.allclose(gradient(x), 3 * held["array"].data)
    known = calls()
    held.update(array=random([a], seed=2))  # an operand of the program, not a part of it
    assert np.allclose(gradient(x), 3 * held["array"].data)
    assert calls() == known


def test_old_calls_make_room(monkeypatch):
    monkeypatch.setattr(eager, "_LIMIT", 4)
    x = random([a])
    for number in range(10):
        x + float(number)
    assert len(eager._calls) <= 4


def test_equal_graphs_have_equal_fingerprints():
    def graph(scale, power=2):
        def body(x):
            s, _ = md.scan(lambda s, row: (s + row * scale, None), md.zeros([b], "float64"), x, "a")
            return md.checkpoint(lambda s: s**power)(s)

        return md.jit(body).trace(random([a, b]))

    one = eager.fingerprint(graph(2.0))
    assert hash(one) == hash(eager.fingerprint(graph(2.0)))
    assert one == eager.fingerprint(graph(2.0))
    assert one != eager.fingerprint(graph(-2.0))
    assert one != eager.fingerprint(graph(2.0, power=3))
    assert eager.fingerprint(graph(0.0)) != eager.fingerprint(graph(-0.0))


# Python around it.


def test_python_decides_on_numbers():
    x = md.named(np.arange(4.0), [b])
    total = x.sum()
    assert float(total) == 6.0
    assert int(total) == 6
    assert complex(total) == 6
    assert total.item() == 6.0
    assert ("more" if total > 5 else "less") == "more"
    assert not md.any(x > 3)
    assert range(8)[md.argmax(x, "b")] == 3
    assert f"{float(x.mean()):.1f}" == "1.5"
    assert md.named([[2.5]], ["p", "q"]).item() == 2.5


def test_more_numbers_than_one_decide_nothing():
    x = md.named(np.arange(4.0), [b])
    for ask in (bool, float, int, complex):
        with pytest.raises(ValueError) as error:
            ask(x)
        assert str(error.value) == (
            "NamedArray(f64[b=4]) is 4 numbers, not one; reduce it first, as in md.sum(x), "
            "md.any(x) or md.all(x)"
        )
    with pytest.raises(TypeError, match="only a whole number is an index, not NamedArray"):
        range(8)[x.sum()]


def test_arrays_have_no_first_dim():
    x = md.named(np.arange(4.0), [b])
    with pytest.raises(TypeError) as error:
        list(x)
    assert str(error.value) == (
        "NamedArray(f64[b=4]) has no first dim to go through; name one, as in "
        "md.unstack(x, 'batch')"
    )
    with pytest.raises(TypeError, match="has no first dim to count"):
        len(x)
    assert [float(one) for one in md.unstack(x, "b")] == [0, 1, 2, 3]


def test_numpy_leaves_operators_to_us():
    x = md.named(np.arange(4.0), [b])
    assert np.array_equal(np.float64(2) * x, 2 * x.data)
    with pytest.raises(ValueError, match=r"ndarray is not an operand; use a tensor"):
        np.ones(4) * x


def test_arrays_can_be_keys_and_are_compared_by_element():
    x = md.named(np.arange(4.0), [b])
    assert {x: "found"}[x] == "found"
    assert np.array_equal(x == 2, [False, False, True, False])


def test_mistakes_are_told_with_the_operands_and_the_line():
    x = random([a, b])
    with pytest.raises(ValueError) as error:
        x + md.named(np.zeros(5), ["a"])
    lines = str(error.value).splitlines()
    assert lines[0].startswith("add: dim `a` has size 8 in f64[a=8, b=4]")
    assert lines[-1].strip().startswith("at tests/running/test_eager.py")


def test_a_training_loop_can_be_written_without_jit():
    x = md.place(random([a, b]), "x:4", "a:x")
    target, w = md.einsum(x, md.ones([b], "float64"), over="b"), md.zeros([b], "float64")

    def loss(w):
        return md.mean(md.square(md.einsum(x, w, over="b") - target))

    for _ in range(100):
        value, slope = md.value_and_grad(loss)(w)
        w = w - 0.5 * slope
        if value < 1e-3:
            break
    assert float(loss(w)) < 1e-2


def test_control_flow_and_custom_gradients_run_at_once():
    x = random([b])
    assert np.allclose(md.cond(md.sum(x) > 100, lambda x: x, lambda x: -x, x), -x.data)
    steps = md.while_loop(lambda n: n < 5, lambda n: n + 2, md.full([], 0, "int32"))
    assert int(steps) == 6
    assert np.allclose(md.checkpoint(md.sin)(x), np.sin(x.data))
    half = md.custom_gradient(lambda x: (x, lambda g: 0.5 * g))
    assert np.allclose(half(x), x.data)
    assert np.allclose(md.grad(lambda x: md.sum(half(x)))(x), 0.5)
    assert np.allclose(md.map(lambda v: v * 2, x, "b"), 2 * x.data)


@pytest.mark.long
def test_inside_jax_they_are_part_of_what_jax_traces():
    x = random([a, b])

    def f(x):
        return md.sum(md.softmax(x, "b") * md.arange(b, "float64")).data

    assert np.allclose(jax.jit(f)(x), f(x))
    slope = jax.grad(lambda data: f(md.named(data, [a, b])))(x.data)
    expected = md.grad(lambda x: md.sum(md.softmax(x, "b") * md.arange(b, "float64")))(x)
    assert np.allclose(slope, expected)


def test_what_needs_a_trace_says_so():
    from meshdsl.ops.creation import as_tensor

    with pytest.raises(ValueError) as error:
        as_tensor(random([a]))
    assert str(error.value) == (
        "this runs inside a traced function only: wrap the function around it in md.jit(...) and "
        "call it with NamedArrays"
    )


def test_padded_arrays_stay_where_they_are():
    n, m = md.dims(n=5, m=3)
    data = np.arange(15.0).reshape(5, 3)
    x = md.place(md.named(data, [n, m]), "x:2,y:2", "n:x+y")
    for found, expected in (
        (x + 1, data + 1),
        (x * md.named(data, [n, m]), data * data),
        (md.softmax(x, "n"), np.exp(data) / np.exp(data).sum(0)),
        (md.grad(lambda t: md.sum(md.square(t)))(x), 2 * data),
        (x + md.place(md.named(data, [n, m]), "x:2,y:2", "n:y"), 2 * data),
    ):
        assert str(found.layout) == "n:x+y"
        assert found.cuts == x.cuts
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(md.sum(x, over="n"), data.sum(0))
    assert float(x.max()) == 14
    assert np.array_equal(x["n", 1:4], data[1:4])
    assert float(jax.jit(lambda x: md.sum(x * x).data)(x)) == (data**2).sum()


def test_padded_arrays_can_be_constants_of_a_program():
    n = md.Dimension("n", 5)
    x = md.place(md.named(np.arange(5.0), [n]), "x:2", "n:x")
    found = md.jit(lambda y: y + x)(md.named(np.ones(5), [n]))
    assert np.array_equal(found, np.arange(5.0) + 1)


def test_one_operation_on_data_of_the_host_of_a_device_of_a_mesh_and_with_pads():
    odd = md.Dimension("odd", 5)
    host = md.named(np.arange(5, dtype=np.float32), [odd])
    device = md.named(jnp.arange(5, dtype=np.float32), [odd])
    elsewhere = md.named(jax.device_put(device.data, jax.devices()[2]), [odd])
    meshes = [md.place(host, f"a:{n}", "odd:a") for n in (2, 3, 4)]
    for _ in range(2):
        for x in (host, device, elsewhere, *meshes):
            found = md.sum(x * 2)
            assert float(found) == 20
            np.testing.assert_array_equal(x * x, np.arange(5) ** 2)
            if isinstance(x.data, jax.Array):
                assert (x * x).data.sharding.device_set == x.data.sharding.device_set


def layers(activation):
    x, w = random([a, b]), random([b, c], seed=1)
    back = random([c, b], seed=2)
    yield lambda: nn.mlp(x, w, back, over="b", hidden="c", activation=activation)
    yield lambda: nn.gated_mlp(x, w, w, back, "b", "c", activation)


def test_a_layer_with_an_operation_as_its_activation_is_one_cached_program(monkeypatch):
    for layer in layers(md.relu):
        eager.clear_cache()
        first = layer()
        assert calls() == (1, 1)
        with monkeypatch.context() as patched:
            patched.setattr(eager, "_prepare", None)  # it is not traced again
            assert np.array_equal(layer(), first)
        assert np.allclose(first, md.jit(layer)(), rtol=1e-12)


def test_operations_as_arguments_have_programs_of_their_own():
    found = [next(layers(operation))() for operation in (md.relu, md.tanh, md.relu)]
    assert np.array_equal(found[0], found[2])
    assert not np.allclose(found[0], found[1])
    assert calls() == (2, 2)


def test_an_activation_of_the_users_gets_arrays_and_may_read_their_values(monkeypatch):
    seen = []

    def mine(h):
        seen.append(h)
        return h * (1 / float(md.max(h, ["a", "c"])))

    for layer in layers(mine):
        first = layer()
        assert type(seen[-1]) is md.NamedArray
        with monkeypatch.context() as patched:
            patched.setattr(eager, "_prepare", None)  # its operations are cached, one by one
            assert np.array_equal(layer(), first)


def test_a_copy_of_an_operations_name_and_attributes_is_no_operation():
    @functools.wraps(md.relu)
    def mine(h):
        return md.relu(h) * factor

    factor = 1.0
    layer = next(layers(mine))
    first = np.asarray(layer())
    factor = 2.0
    assert np.allclose(layer(), 2 * first, rtol=1e-12)
