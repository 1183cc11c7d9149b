"""Rings: the numbers, bytes and flops of the collectives that they replace, on every backend."""

import importlib.util
import os
import subprocess
import sys
import textwrap
from collections import Counter

import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering import backends
from meshdsl.lowering.options import DEFAULT, Options
from meshdsl.lowering.passes.overlap import overlap, rings
from tests.lowering.passes.running import assert_same

RNG = np.random.default_rng(0)


def array(dtype="float64", **dims):
    data = RNG.normal(size=tuple(dims.values())).astype(dtype)
    return md.named(data, list(md.dims(**dims)))


def gated(x, w_in, w_gate, w_out):
    """Two products share a gather of x, and a third ends in a reduction, split over `length`."""
    h = md.einsum(x, w_in, over="embed") * md.tanh(md.einsum(x, w_gate, over="embed"))
    return md.einsum(h, w_out, over="d_ff")


def inputs(length=24, **stacked):
    x = array(batch=2, length=length, embed=8)
    weights = [array(**stacked, embed=8, d_ff=24) for _ in range(2)]
    return x, *weights, array(**stacked, d_ff=24, embed=8)


def kinds(program):
    return Counter(one.kind for one in program.collectives)


def both(function, arguments, mesh, layout):
    """Returns a program and the same with all the rings that it can have."""
    program = md.jit(function, mesh, layout, "numpy").lower(*arguments)
    return program, rings(program, smallest=0, intensity=0)


def check(function, arguments, mesh, layout, backends=("numpy",)):
    before, after = both(function, arguments, mesh, layout)
    for backend in backends:
        assert_same(before, after, arguments, backend)
    assert after.wire_bytes == pytest.approx(before.wire_bytes)
    products = [sum(_products(program)) for program in (before, after)]
    assert products[0] == products[1]
    return before, after


def _products(program):
    for one, times in program.block.walk():
        if one.op == "einsum":
            sizes = {dim.name: dim.size for value in one.inputs for dim in value.local}
            yield times * np.prod(list(sizes.values()))


def test_devices_that_hold_one_value_hold_the_same_bits():
    """A ring that contracts the gathered dim adds in another order on every device."""

    def function(params, y):
        return md.einsum(params["w"], y, over="embed")

    arguments = {"w": array(embed=8, few=2)}, array(embed=8, many=64)
    before, after = both(function, arguments, "data:4", "params/embed:data")
    assert kinds(before) == {"all_gather": 1} and after is before
    before, after = check(function, arguments, "data:4", "params/embed:data; many:data")
    assert kinds(before) == {"all_gather": 1} and kinds(after) == {"permute": 3}


@pytest.mark.parametrize(
    ("mesh", "layout", "devices"),
    [
        ("model:2", "d_ff:model; length:model?", 2),
        ("model:3", "d_ff:model; length:model?", 3),
        ("model:4", "d_ff:model; length:model?", 4),
        ("model:6", "d_ff:model; length:model?", 6),
        ("data:2,model:4", "batch:data; d_ff:model; length:model?", 4),
        ("a:2,b:4", "d_ff:b+a; length:b+a?", 8),
        ("b:4,a:2", "d_ff:b; length:a+b?", 4),
    ],
)
def test_sequence_parallelism_becomes_rings(mesh, layout, devices):
    backends = ("numpy", "jax") if devices in (3, 4) else ("numpy",)
    before, after = check(gated, inputs(), mesh, layout, backends)
    assert kinds(before) == {"all_gather": 1, "reduce_scatter": 1}
    assert kinds(after) == {"permute": 2 * (devices - 1)}


def test_so_it_does_with_gradients_where_the_gathered_tensor_is_read_again():
    def gradients(*arguments):
        def loss(*arguments):
            return md.sum(md.square(gated(*arguments)))

        return md.value_and_grad(loss, wrt=(0, 1, 2, 3))(*arguments)

    layout = "d_ff:model; length:model?"
    before, after = check(gradients, inputs(), "model:4", layout, ("numpy", "jax"))
    assert kinds(before) == {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 1}
    assert kinds(after) == {"permute": 4 * 3, "all_reduce": 1}


def test_so_it_does_inside_of_scans():
    def layers(x, *weights):
        return md.scan(lambda x, w: (x + gated(x, *w), None), x, weights, dim="layers")[0]

    layout = "d_ff:model; length:model?"
    _, after = check(layers, inputs(layers=3), "model:4", layout, ("numpy", "jax"))
    assert kinds(after) == {"permute": 2 * 3}
    assert {one.count for one in after.collectives} == {3}


def test_gathered_weights_are_added_up_where_they_are_contracted():
    def product(x, w):
        return md.einsum(x, w, over="embed")

    arguments = array(batch=8, embed=12), array(embed=12, out=6)
    layout = "batch:data; embed:data?"
    before, after = check(product, arguments, "data:4", layout, ("numpy", "jax"))
    assert kinds(before) == {"all_gather": 1} and kinds(after) == {"permute": 3}
    ops = [one.op for one in after.block.instructions]
    assert ops.count("einsum") == 4 and "local_update" not in ops


def test_both_directions_are_used():
    _, after = both(gated, inputs(), "model:4", "d_ff:model; length:model?")
    pairs = [one.params["pairs"] for one in after.block.instructions if one.op == "permute"]
    onwards = ((0, 1), (1, 2), (2, 3), (3, 0))
    back = ((0, 3), (1, 0), (2, 1), (3, 2))
    assert Counter(pairs) == {onwards: 4, back: 2}


def test_a_shard_travels_on_before_it_is_used():
    _, after = both(gated, inputs(), "model:4", "d_ff:model; length:model?")
    ops = [one.op for one in after.block.instructions if one.op in ("permute", "einsum")]
    gathering = ["permute"] * 2 + ["einsum"] * 2 + ["permute"] + ["einsum"] * 6
    reducing = ["einsum", "permute", "einsum", "einsum", "permute", "permute", "einsum"]
    assert ops == [*gathering, *reducing]


def test_sums_of_products_are_reduced_in_one_ring():
    def function(x, y, w):
        parts = [md.einsum(each, w, over="d_ff") for each in (x, y)]
        return (parts[0] + parts[1]) * 2.0

    arguments = array(length=8, d_ff=8), array(length=8, d_ff=8), array(d_ff=8, embed=3)
    layout = "d_ff:model; length:model?"
    before, after = check(function, arguments, "model:4", layout)
    assert kinds(before) == {"reduce_scatter": 1} and kinds(after) == {"permute": 3}


def test_a_reduction_whose_operand_is_read_elsewhere_stays():
    def function(x, w):
        y = md.einsum(x, w, over="d_ff")
        return y, md.sum(y, "embed").rename(length="all")

    arguments = array(length=8, d_ff=8), array(d_ff=8, embed=3)
    check(function, arguments, "model:4", "d_ff:model; length:model?")


def test_a_gather_that_no_product_reads_stays():
    arguments = (array(length=8, embed=4),)
    before, after = both(
        lambda x: md.exp(x.rename(length="all")), arguments, "model:4", "length:model"
    )
    assert kinds(before) == {"all_gather": 1} and after is before


def test_dims_with_pads_are_left_alone():
    layout = "d_ff:model; length:model?"
    before, after = both(gated, inputs(length=22), "model:4", layout)
    assert after is before
    assert kinds(before)["all_gather"] == 1


def test_rings_are_made_on_request_only_and_where_they_pay():
    x, w = md.spec(list(md.dims(batch=8, length=512, embed=64))), md.dims(embed=64, d_ff=4096)
    arguments = x, md.spec(list(w)), md.spec(list(w)), md.spec(list(w)[::-1])
    program = md.jit(gated, "model:4", "d_ff:model; length:model?").lower(*arguments)
    assert overlap(program, DEFAULT) is program
    assert kinds(overlap(program, Options(overlap=True))) == {"permute": 6}
    shard = 8 * 512 // 4 * 64 * 4
    assert kinds(rings(program, smallest=shard)) == {"permute": 6}
    assert rings(program, smallest=shard + 1) is program
    sent, flops = 3 * shard, 2 * 8 * 512 * 64 * 1024  # of the reduction; the gather has two such
    assert kinds(rings(program, intensity=flops / sent)) == {"permute": 6}
    assert kinds(rings(program, intensity=1.5 * flops / sent)) == {
        "permute": 3,
        "reduce_scatter": 1,
    }
    assert rings(program, intensity=2.1 * flops / sent) is program


def test_rings_keep_to_the_memory():
    x, w = md.spec(list(md.dims(batch=8, length=512, embed=64))), md.dims(embed=64, d_ff=4096)
    arguments = x, md.spec(list(w)), md.spec(list(w)), md.spec(list(w)[::-1])
    program = md.jit(gated, "model:4", "d_ff:model; length:model?").lower(*arguments)
    peak = rings(program).peak_bytes
    assert peak > program.peak_bytes
    assert overlap(program, Options(overlap=True, memory=peak - 1)) is program
    assert kinds(overlap(program, Options(overlap=True, memory=peak))) == {"permute": 6}


def test_a_program_does_not_grow_with_long_rings():
    arguments = inputs(length=34)
    before, after = both(gated, arguments, "model:17", "d_ff:model?; length:model")
    assert before.collectives and after is before


def test_the_option_reaches_the_compiled_program():
    arguments = (
        array("float32", batch=8, length=512, embed=64),
        *(
            array("float32", **dims)
            for dims in ({"embed": 64, "d_ff": 4096}, {"embed": 64, "d_ff": 4096})
        ),
        array("float32", d_ff=4096, embed=64),
    )
    layout = "d_ff:model; length:model?"
    jitted = md.jit(gated, "model:4", layout, options=Options(overlap=True))
    program = jitted.lower(*arguments)
    assert kinds(program) == {"permute": 6}
    text = program.compile().as_text()
    assert text.count(" collective-permute(") == 6 and "all-gather" not in text


def test_rings_of_rings_are_the_rings():
    _, after = both(gated, inputs(), "model:4", "d_ff:model; length:model?")
    assert rings(after, smallest=0, intensity=0) is after


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_the_tpu_compiler_multiplies_while_shards_travel():
    """In a process of its own: libtpu is loaded once, and tells JAX of no TPU."""
    code = """
        import jax, numpy as np, meshdsl as md
        from jax.experimental import topologies
        from meshdsl.lowering.backends.jax import Executable
        from meshdsl.lowering.options import Options
        b, l, e, f = md.dims(batch=4, length=1024, embed=512, d_ff=2048)
        x, w = md.spec([b, l, e], "bfloat16"), md.spec([e, f], "bfloat16")
        def mlp(x, w_in, w_out):
            return md.einsum(md.relu(md.einsum(x, w_in, over=e)), w_out, over=f)
        layout = "d_ff:model; length:model?"
        jitted = md.jit(mlp, "model:4", layout, options=Options(overlap=True))
        program = jitted.lower(x, w, md.spec([f, e], "bfloat16"))
        chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
        mesh = jax.sharding.Mesh(np.array(chips), ("model",))
        text = Executable(program, devices=mesh).compiled.as_text()
        entry = text[text.index("ENTRY"):]
        between, hidden = 0, []  # the fusions between a transfer's start and its end
        for line in entry.splitlines():
            if " collective-permute-start(" in line:
                between = 0
            elif " collective-permute-done(" in line:
                hidden.append(between)
            elif " fusion(" in line:
                between += 1
        assert len(hidden) == 6 and sum(n > 0 for n in hidden) >= 4, hidden
        assert "all-gather" not in entry and "reduce-scatter" not in entry
    """
    quiet = {"TPU_ACCELERATOR_TYPE": "v5e-256", "TPU_WORKER_HOSTNAMES": "localhost"}
    alone = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}
    environment = {**os.environ, **quiet, **alone}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=environment)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_terms_of_a_ring_are_added_up_before_they_are_rounded(dtype):
    weights = np.repeat([600.0, -600.0], 128)[:, None] * np.ones((1, 8))
    x = md.named(np.ones((8, 256), dtype), ["batch", "embed"])
    w = {"w": md.named(weights.astype(dtype), ["embed", "out"])}

    def function(params, x):
        return md.einsum(x, params["w"], over="embed")

    program = md.jit(function, "data:4", "batch:data; params/embed:data", "numpy").lower(w, x)
    after = rings(program, 0, 0)
    assert kinds(after)["permute"] and not kinds(after)["all_gather"]
    found = backends.load("numpy").Executable(after).call_flat([w["w"], x])
    assert not np.asarray(found[0]).astype(float).any()
