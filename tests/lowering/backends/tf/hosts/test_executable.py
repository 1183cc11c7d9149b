"""Programs on host devices: what is traced, what stays where it is, and what is told."""

import jax
import numpy as np
import pytest
import tensorflow as tf

import meshdsl as md
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends.tf.arguments import Shards
from meshdsl.lowering.backends.tf.hosts import devices as host_devices
from meshdsl.lowering.backends.tf.hosts.executable import Executable

batch, embed = md.dims(batch=8, embed=6)
LAYOUT = "batch:data; params/embed:model"
X = md.named(np.random.default_rng(0).normal(size=(8, 6)), [batch, embed])


def layered(layers):
    """Returns a training step of as many layers, and its parameters."""
    layer = md.Dimension("layer", layers)
    shape = (layers, embed.size, embed.size)
    w = md.named(np.random.default_rng(1).normal(size=shape) / 4, [layer, embed, "out"])

    def step(params, x):
        def body(h, w):
            return md.tanh(md.rename(md.einsum(h, w, over="embed"), out="embed")), None

        def loss(w):
            return md.mean(md.square(md.scan(body, x, w, "layer")[0]))

        value, gradient = md.value_and_grad(loss)(params["w"])
        return {"loss": value, "params": {"w": params["w"] - 0.1 * gradient}}

    return md.jit(step, "data:2,model:2", LAYOUT, "tf", donate="params"), {"w": w}


def nodes(executable):
    """Returns how many nodes the graph of a device has, functions and all."""
    graph = executable.replica.graph.as_graph_def()
    return len(graph.node) + sum(len(f.node_def) for f in graph.library.function)


def test_a_graph_is_as_large_for_many_layers_and_devices_as_for_few():
    def size(layers, mesh):
        run, params = layered(layers)
        program = md.jit(run.function, mesh, LAYOUT, "tf").lower(params, X)
        return nodes(Executable(program))

    assert size(2, "data:2,model:2") == size(48, "data:2,model:2")
    assert size(2, "data:4,model:2") < 1.1 * size(2, "data:2,model:2")


def test_a_signature_is_traced_once_and_its_state_stays_where_it_is(monkeypatch):
    run, params = layered(2)
    first = run(params, X)["params"]
    (compiled,) = run._compiled.values()
    monkeypatch.setattr(tf, "function", None)  # nothing is traced from here on
    put = []
    monkeypatch.setattr(
        tf, "constant", lambda *args: put.append(args) or tf.convert_to_tensor(*args)
    )
    second = run(first, X)["params"]
    assert len(put) == 2  # the two shards of x
    assert isinstance(second["w"].data, Shards)
    assert compiled.executable.inputs[0].put(first["w"], compiled.executable.devices) is (
        first["w"].data.tensors
    )


def test_results_are_named_arrays_like_all_others():
    run, params = layered(2)
    result = run(params, X)["params"]["w"]
    expected = md.jit(run.function, backend="numpy")(params, X)["params"]["w"]
    np.testing.assert_allclose(result, expected, rtol=1e-12)
    np.testing.assert_allclose(result + 1, np.asarray(expected) + 1, rtol=1e-12)  # outside of jit
    assert result.dtype == np.float64 and result.dims == expected.dims
    assert result.data.layout.axes("embed") == ("model",)
    on_jax = md.jit(lambda w: md.sum(w), "x:2", "embed:x")(result)
    np.testing.assert_allclose(on_jax, np.asarray(expected).sum(), rtol=1e-12)


@pytest.mark.long
def test_random_numbers_are_the_same_bits():
    def draw(key):
        return md.random.normal(key, [batch, embed], "float32"), md.random.bits(key, [batch, embed])

    found = md.jit(draw, "x:4", "batch:x", "tf")(md.random.key(3))
    expected = md.jit(draw, backend="numpy")(md.random.key(3))
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_in_every_part_of_a_step(dtype):
    run, params = layered(2)
    half = [
        md.named(np.asarray(a).astype(md.spec([], dtype).dtype), a.dims) for a in (params["w"], X)
    ]
    found = run({"w": half[0]}, half[1])
    expected = md.jit(run.function, backend="numpy")({"w": half[0]}, half[1])
    assert found["params"]["w"].dtype == half[0].dtype
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        mine, other = np.asarray(mine).astype("f8"), np.asarray(other).astype("f8")
        np.testing.assert_allclose(mine, other, atol=0.02)


def test_a_mesh_that_is_larger_than_the_machine_is_reported(monkeypatch):
    monkeypatch.setattr(host_devices, "_started", lambda share: ("CPU", 8))
    with pytest.raises(ValueError) as error:
        host_devices.host_devices(Mesh.parse("data:16"))
    assert str(error.value) == (
        "mesh data:16 needs 16 devices in a process, but TensorFlow has been started with 8 (CPU). "
        "Use a smaller mesh, or make virtual CPU devices: --host_devices=16, or in Python, before "
        "the first function runs, jax.config.update('jax_num_cpu_devices', 16)"
    )


def test_processes_that_cannot_share_a_mesh_are_reported(monkeypatch):
    config = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
    monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(
        ValueError, match="has 5 devices, which the 2 processes of TF_CONFIG cannot"
    ):
        host_devices.host_devices(Mesh.parse("data:5"))


@pytest.mark.parametrize("text", ["soon", "", "0", "-1", "nan", "-inf"])
def test_a_timeout_that_is_no_number_above_zero_is_reported(text, monkeypatch):
    monkeypatch.setenv(host_devices.TIMEOUT, text)
    with pytest.raises(ValueError) as error:
        host_devices.timeout()
    assert str(error.value) == (
        f"MESHDSL_COLLECTIVE_TIMEOUT needs a number of seconds, more than 0, got {text!r}; with "
        "inf a collective waits for ever"
    )


def test_a_timeout_may_be_infinite(monkeypatch):
    monkeypatch.setenv(host_devices.TIMEOUT, "inf")
    assert host_devices.timeout() == float("inf")
