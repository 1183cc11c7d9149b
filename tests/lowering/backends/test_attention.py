"""Fused attention kernels: what they compute, where they are taken, that compilers take them.

No GPU or TPU is needed: splash attention runs in Pallas's interpreter, and the GPU's program is
only written. The TPU's is compiled where libtpu is installed.
"""

import importlib.util
import os
import re
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.backends.jax import executable
from meshdsl.lowering.backends.jax.operations import attention as jax_attention
from meshdsl.lowering.backends.jax.operations import attention_splash
from meshdsl.lowering.options import Options
from meshdsl.ops.products.attention_reference import attention_reference

batch, length, memory, heads, group, kv, value = md.dims(
    batch=2, length=128, memory_length=256, heads=2, group=2, kv=32, value=16
)
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def thirty_two_bits():
    with jax.enable_x64(False):
        yield


def normal(*dims):
    return md.named(RNG.normal(size=[d.size for d in dims]).astype(np.float32), list(dims))


Q, K = normal(batch, length, heads, group, kv), normal(batch, memory, heads, kv)
V, WEIGHTS = normal(batch, memory, heads, value), normal(batch, length, heads, group, value)
SEGMENTS = md.named(RNG.integers(0, 3, (2, 128)).astype(np.int32), [batch, length])
OF_MEMORY = md.named(RNG.integers(0, 2, (2, 256)).astype(np.int32), [batch, memory])


def both(function, **options):
    def loss(q, k, v):
        return md.sum(function(q, k, v, **options) * WEIGHTS)

    return md.jit(lambda *x: md.value_and_grad(loss, (0, 1, 2))(*x))(Q, K, V)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "positions": 128, "window": 50},
        {"window": 20, "soft_cap": 2.0},
        {"causal": True, "segments": SEGMENTS, "memory_segments": OF_MEMORY},
    ],
)
def test_splash_attention_is_attention(options, monkeypatch):
    expected = both(attention_reference, **options)
    taken = interpreted(monkeypatch)
    found = both(md.attention, **options)
    assert len(taken) == 2
    assert None not in taken
    assert_close(found, expected)


@pytest.mark.long
@pytest.mark.parametrize(("context", "causal"), [("ring", False), ("ring", True), ("sums", False)])
def test_splash_attention_of_parts_of_a_memory_is_attention(context, causal, monkeypatch):
    """The gradients of a part are of the result and the log-sum-exp of the whole memory."""
    size, of_memory = md.dims(length=256, memory_length=256)
    q, k = normal(size, heads, group, kv), normal(of_memory, heads, kv)
    v, weights = normal(of_memory, heads, value), normal(size, heads, group, value)

    def gradients(function, **options):
        def loss(q, k, v):
            return md.sum(function(q, k, v, causal=causal) * weights)

        return md.jit(lambda *x: md.value_and_grad(loss, (0, 1, 2))(*x), **options)(q, k, v)

    expected = gradients(attention_reference)
    taken = interpreted(monkeypatch)
    layout = "memory_length:x" if context == "sums" else "length:x; memory_length:x"
    options = Options(context=context)
    found = gradients(md.attention, mesh="x:2", layout=layout, options=options)
    assert any(taken)
    assert_close(found, expected)


def interpreted(monkeypatch):
    """Lets Pallas's interpreter run attention; returns the kernels that will be asked for."""
    taken = []

    def kernel(this, platform):
        taken.append(attention_splash.splash_kernel(this, interpret=True))
        return taken[-1]

    monkeypatch.setattr(jax_attention, "kernel", kernel)
    return taken


def assert_close(found, expected):
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)


def on(platform, dtype="bfloat16", **options):
    """Returns the StableHLO of attention and its gradient for a platform, before compiling."""
    size, of_memory = md.dims(length=128, memory_length=128)
    q = md.spec([batch, size, heads, group, kv], dtype)
    k = md.spec([batch, of_memory, heads, kv], dtype)

    def loss(q, k, v):
        return md.sum(md.cast(md.attention(q, k, v, **options), "float32"))

    program = md.jit(lambda *x: md.grad(loss, (0, 1, 2))(*x)).lower(q, k, k)
    shapes = [jax.ShapeDtypeStruct(v.shape.sizes, v.dtype) for v in program.block.inputs]
    traced = jax.jit(executable.function(program, platform=platform)).trace(*shapes)
    return traced.lower(lowering_platforms=("cuda" if platform == "gpu" else platform,)).as_text()


@pytest.fixture
def cudnn(monkeypatch):
    """JAX asks for the version of cuDNN as soon as it traces; here there is none to ask."""
    where = "jax._src.cudnn.fused_attention_stablehlo."
    monkeypatch.setattr(where + "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(where + "check_compute_capability", lambda wanted: True)
    monkeypatch.setattr(where + "is_cuda_compute_capability_equal", lambda wanted: False)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 16}])
def test_gpus_run_cudnn_in_half_precision(options, cudnn):
    text = on("gpu", **options)
    assert text.count("__cudnn$fmhaSoftmax(") == 1  # the backward pass runs no forward pass
    assert text.count("__cudnn$fmhaSoftmaxBackward(") == 1


def test_gpus_keep_the_log_sum_exp_in_single_precision(cudnn):
    """JAX's own function for it returns it in half precision."""
    text = on("gpu")
    assert "tensor<2x4x128xf32>" in text
    assert "tensor<2x4x128xbf16>" not in text


def test_attention_runs_in_blocks_where_jax_keeps_nothing(cudnn, monkeypatch):
    fused = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda *x, **options: 2 * fused(*x, **options)
    )
    with pytest.warns(UserWarning, match=r"keeps no log-sum-exp .* without a fused kernel"):
        text = on("gpu")
    assert "cudnn" not in text


@pytest.mark.parametrize(
    ("dtype", "options"),
    [("float32", {}), ("bfloat16", {"soft_cap": 2.0}), ("bfloat16", {"window": 3})],
)
def test_gpus_run_blocks_where_cudnn_does_not_fit(dtype, options, cudnn):
    assert "cudnn" not in on("gpu", dtype, **options)


def test_tpus_run_splash_attention_in_32_bit_mode():
    assert "tpu_custom_call" in on("tpu", causal=True, soft_cap=2.0)
    assert "tpu_custom_call" not in on("tpu", dtype="float16")
    with jax.enable_x64(True):
        assert "tpu_custom_call" not in on("tpu")


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_the_tpu_compiler_takes_it_inside_shard_map():
    """In a process of its own: libtpu is loaded once, and tells JAX of no TPU."""
    code = """
        import jax, numpy as np, meshdsl as md
        from jax.experimental import topologies
        from meshdsl.lowering.backends.jax import Executable
        b, l, m, h, d = md.dims(batch=4, length=4096, memory_length=4096, heads=8, kv=64)
        q, k = md.spec([b, l, h, d], "bfloat16"), md.spec([b, m, h, d], "bfloat16")
        def loss(q, k, v):
            return md.sum(md.cast(md.attention(q, k, v, causal=True), "float32"))
        layout = "batch:data; heads:model"
        program = md.jit(
            lambda *x: md.grad(loss, (0, 1, 2))(*x), mesh="data:2,model:2", layout=layout
        ).lower(q, k, k)
        chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
        mesh = jax.sharding.Mesh(np.array(chips).reshape(2, 2), ("data", "model"))
        compiled = Executable(program, devices=mesh).compiled
        assert "tpu_custom_call" in compiled.as_text()
        assert compiled.memory_analysis().temp_size_in_bytes < 4096 * 4096
    """
    quiet = {"TPU_ACCELERATOR_TYPE": "v5e-256", "TPU_WORKER_HOSTNAMES": "localhost"}
    environment = {**os.environ, **quiet, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=environment)


def steps_on(platform, layout, gradient, **masks):
    """Returns the StableHLO of attention over four devices of a platform, before compiling."""
    size, of_memory = md.dims(length=512, memory_length=512)
    q, k = md.spec([size, heads, kv], "bfloat16"), md.spec([of_memory, heads, kv], "bfloat16")

    def loss(q, k, v):
        return md.sum(md.cast(md.attention(q, k, v, **masks), "float32"))

    function = (lambda *x: md.grad(loss, (0, 1, 2))(*x)) if gradient else loss
    options = Options(context="ring" if "length:x; m" in layout else "sums")
    program = md.jit(function, mesh="x:4", layout=layout, options=options).lower(q, k, k)
    shapes = [jax.ShapeDtypeStruct(v.shape.sizes, v.dtype) for v in program.block.inputs]
    traced = jax.jit(executable.function(program, platform=platform)).trace(*shapes)
    return traced.lower(lowering_platforms=("cuda" if platform == "gpu" else platform,)).as_text()


@pytest.mark.parametrize("causal", [False, True])
def test_every_step_of_a_ring_runs_the_fused_kernel(causal, cudnn):
    """The own block, those of the loop and the last one; no other step needs a mask."""
    ring = "length:x; memory_length:x"
    for platform, kernel in (("tpu", "tpu_custom_call"), ("gpu", "__cudnn$fmhaSoftmax(")):
        text = steps_on(platform, ring, False, causal=causal)
        assert kernel in text
        assert "dot_general" not in text


@pytest.mark.parametrize("layout", ["length:x; memory_length:x", "memory_length:x"])
def test_gradients_of_parts_of_a_memory_use_the_sums_of_the_whole(layout, cudnn):
    """So kernels compute them too."""
    for platform, kernel in (("tpu", "tpu_custom_call"), ("gpu", "__cudnn$fmhaSoftmaxBackward(")):
        text = steps_on(platform, layout, True)
        assert kernel in text
        assert not re.search(r"dot_general.*x(128|512)x128xf32>", text)  # a block of scores
