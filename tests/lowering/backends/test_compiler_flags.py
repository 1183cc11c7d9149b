"""Compiler flags: read from text, known to the compilers they are for, and handed to them."""

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshdsl as md
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topologies import FAMILIES, Topology
from meshdsl.lowering.backends.compiler_flags import (
    RECOMMENDED,
    chosen,
    of_any_program,
    parse,
    recommended,
    show,
    without_offloading,
)
from meshdsl.lowering.backends.jax import executable
from meshdsl.lowering.backends.jax.ahead import devices
from meshdsl.lowering.backends.jax.torus import arrange_devices
from meshdsl.lowering.options import Options

DEFAULT = {"a": True, "b": 1}


def test_values_are_what_they_look_like():
    text = "a=true,--b=False c=3;d=0.5,e=ENABLED"
    assert dict(parse(text)) == {"a": True, "b": False, "c": 3, "d": 0.5, "e": "ENABLED"}
    assert show(dict(parse(text))) == ["a=true", "b=false", "c=3", "d=0.5", "e=ENABLED"]
    assert parse("") == ()


def test_flags_stand_beside_those_recommended_or_for_them():
    assert chosen(parse(""), DEFAULT) == DEFAULT
    assert chosen(parse("b=2,c=3"), DEFAULT) == {"a": True, "b": 2, "c": 3}
    assert chosen(parse("none"), DEFAULT) == {}
    assert chosen(parse("none,c=3"), DEFAULT) == {"c": 3}


@pytest.mark.parametrize("text", ["a", "a=", "=1", "a=1,none"])
def test_what_is_no_flag_is_reported(text):
    with pytest.raises(ValueError, match="needs name=value pairs, as in xla_tpu_enable"):
        parse(text)


def test_a_flag_given_twice_is_reported():
    with pytest.raises(ValueError, match="a is given twice"):
        parse("a=1,a=2")


def test_collectives_are_kept_off_sparse_cores_unless_a_user_wants_them_there():
    name = "xla_tpu_enable_sparse_core_collective_offload_all_gather"
    left = without_offloading(RECOMMENDED["v5p"])
    assert left == RECOMMENDED["v4"]  # which has no SparseCores that collectives can use
    kept = without_offloading(RECOMMENDED["v5p"], ((name, True),))
    assert kept == {**RECOMMENDED["v4"], name: True}
    assert without_offloading(RECOMMENDED["v5e"]) is None


def test_a_program_that_does_not_fit_with_hidden_collectives_is_compiled_without(monkeypatch):
    dim = md.Dimension("dim", 4)
    program = md.jit(lambda x: x + 1, backend="jax").lower(md.spec([dim]))
    asked = []

    def compiled(lower, program, emitted, mesh, options):
        asked.append(options)
        if len(asked) == 1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: CompileTimeHbmOom: 102G of 95G")
        return "compiled"

    monkeypatch.setattr(executable.kept, "compiled", compiled)
    with pytest.warns(UserWarning, match="compiled without them, so the steps wait"):
        made = executable.Executable(program, compiler_options=RECOMMENDED["v5p"])
    assert made.compiled == "compiled"
    assert {*asked[1]} < {*asked[0]} and len(asked) == 2
    for options in (RECOMMENDED["v5e"], {}):  # nothing can be left out
        asked.clear()
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            executable.Executable(program, compiler_options=options)


def test_every_machine_has_its_flags():
    assert RECOMMENDED.keys() == FAMILIES.keys()
    assert recommended("cpu", "cpu") == {}
    assert (
        "cse_barrier_expander,small-while-loop-hoisting"
        in recommended("cpu", "cpu", replays=True).values()
    )
    assert recommended("NVIDIA H200", "gpu", replays=True) == RECOMMENDED["h200"]
    assert recommended("NVIDIA H200", "gpu") == RECOMMENDED["h200"]


def test_only_programs_that_join_collectives_themselves_keep_xla_from_it():
    flags = RECOMMENDED["v5p"]
    assert flags["xla_jf_crs_combiner_threshold_in_bytes"] == 0
    rest = of_any_program(flags)
    assert set(flags) - set(rest) == {"xla_jf_crs_combiner_threshold_in_bytes"}
    assert all(rest[name] == flags[name] for name in rest)


@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.parametrize("text", ["v3:2x2", "v4:2x2x2", "v5e:2x4", "v5p:2x2x2", "v6e:2x4"])
def test_the_tpu_compiler_takes_those_of_its_chips(text):
    topology = Topology.parse(text)
    found = devices(topology)
    flags = recommended(found[0].device_kind, found[0].platform)
    assert flags == RECOMMENDED[topology.name]

    def local(x):
        def step(y, _):
            wide = y @ lax.all_gather(x, "model", tiled=True)
            narrow = lax.psum_scatter(wide, "model", scatter_dimension=1, tiled=True)
            sent = lax.ppermute(narrow, "model", [(i, (i + 1) % 4) for i in range(4)])
            whole = lax.all_gather(sent, "model", axis=1, tiled=True)
            dealt = lax.all_to_all(whole, "model", 1, 0, tiled=True)
            return lax.all_to_all(dealt, "model", 0, 1, tiled=True), None

        return lax.psum(lax.scan(step, x, length=3)[0], "data")

    mesh = arrange_devices(Mesh.parse("data:2,model:4"), found)
    run = jax.shard_map(
        local, mesh=mesh, in_specs=P("model"), out_specs=P("model"), check_vma=False
    )
    lowered = jax.jit(run).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32))
    compiled = lowered.compile(dict(flags))
    assert compiled.memory_analysis().peak_memory_in_bytes > 0


def test_jaxlib_knows_those_of_gpus():
    """They are fields of the options that all of XLA's compilers share."""
    jax.jit(lambda x: x + 1).lower(1.0).compile(dict(RECOMMENDED["h100"]))


def test_flags_reach_the_compiler_of_a_jitted_function():
    x = md.named(jnp.ones(8), "batch")

    def run(text):
        return md.jit(lambda x: x + 1, options=Options(compiler_flags=parse(text)))(x)

    assert run("xla_llvm_disable_expensive_passes=true").data.tolist() == [2.0] * 8
    with pytest.raises(ValueError) as error:
        run("xla_gpu_enable_latency_hiding_schedule=true")
    assert str(error.value) == (
        "the compiler knows no flag 'xla_gpu_enable_latency_hiding_schedule'. Did you mean "
        "`xla_gpu_enable_latency_hiding_scheduler` or `xla_tpu_enable_latency_hiding_scheduler`?"
    )
