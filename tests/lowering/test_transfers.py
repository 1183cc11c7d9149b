"""What is sent for a collective, against the plan's bytes and libtpu's own program."""

from collections import Counter
from importlib.util import find_spec

import jax
import pytest

import meshdsl as md
from meshdsl.layouts.hardware import hardware
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topologies import Topology
from meshdsl.lowering.costs.simulation import simulate
from meshdsl.lowering.program import wire_of
from meshdsl.lowering.transfers import TILE, chains_of, steps_of

V5P = hardware("v5p")
KIB = 2**10


def reduced(mesh, layout, **sizes):
    """Returns the program of the sums over `batch` of tensors of some elements, in float32."""

    def sums(tensors):
        return {name: md.sum(x, "batch") for name, x in tensors.items()}

    batch = md.Dimension("batch", 64)
    given = {name: md.spec([batch, md.Dimension(name, n)]) for name, n in sizes.items()}
    return md.jit(sums, mesh, layout).lower(given)


def collectives(program):
    return [one for one, _ in program.block.walk() if one.is_collective]


def gathered(mesh, layout, **rows):
    """Returns the program that gathers tensors of some rows of 128 numbers, each split by rows."""

    def all_of(tensors):
        return {name: x.rename({name: "all"}) * 1.0 for name, x in tensors.items()}

    columns = md.Dimension("columns", 128)
    given = {name: md.spec([md.Dimension(name, n), columns]) for name, n in rows.items()}
    return md.jit(all_of, mesh, layout).lower(given)


def test_the_first_step_is_among_neighbours():
    (near, far) = steps_of(Mesh.parse("data:64"), ["data"])
    assert (near.devices, near.stride, far.devices, far.stride) == (8, 1, 8, 8)
    (whole,) = steps_of(Mesh.parse("data:32,model:2"), ["data"])
    assert (whole.axes, whole.devices) == (("data",), 32)
    two = steps_of(Mesh.parse("slice:1,data:16,model:4"), ["slice", "data", "model"])
    assert [step.axes for step in two] == [("model",), ("data",)]


@pytest.mark.parametrize("mesh", ["data:64", "data:32", "data:8,model:8", "data:128"])
@pytest.mark.parametrize("name", ["v5p", "v4", "h100"])
def test_the_transfers_of_a_collective_send_its_bytes(mesh, name):
    axes = "+".join(Mesh.parse(mesh).names)
    layout = f"large:{axes}; small:{axes}; tiny:{axes}"
    program = gathered(mesh, layout, large=4096, small=512, tiny=128)
    assert collectives(program)
    for one in collectives(program):
        chains = chains_of(one, program.mesh, hardware(name))
        sent = sum(transfer.wire_bytes for chain in chains for transfer in chain.transfers)
        assert sent == pytest.approx(wire_of(one, program.mesh))
        carried = [value for chain in chains for value in chain.outputs]
        assert sorted(map(id, carried)) == sorted(map(id, one.outputs))


def test_small_sums_make_the_device_wait_and_large_ones_travel():
    program = reduced("data:64", "batch:data", one=16 * KIB, two=16 * KIB - 1, three=2**20)
    (joined,) = collectives(program)
    sent = [one for chain in chains_of(joined, program.mesh, V5P) for one in chain.transfers]
    alone = {one.wire_bytes < 2 * 63 / 64 * 64 * KIB: one.alone for one in sent}
    assert len(sent) == 3 and alone == {True: True, False: False}
    (whole,) = chains_of(joined, program.mesh, hardware("h100"))
    assert len(whole.transfers) == 1
    events = simulate(program, V5P).collectives
    assert Counter(event.asynchronous for event, _ in events) == {True: 2, False: 1}


def test_small_sums_share_a_buffer():
    program = reduced("data:64", "batch:data", one=KIB, two=2 * KIB, three=2**20, four=16 * KIB)
    (joined,) = collectives(program)
    chains = chains_of(joined, program.mesh, V5P)
    assert sorted(len(chain.outputs) for chain in chains) == [1, 1, 2]
    (small,) = (chain for chain in chains if len(chain.outputs) == 2)
    (sent,) = small.transfers
    assert sent.alone and sent.wire_bytes == 2 * 63 / 64 * 3 * 4 * KIB


def test_a_step_with_less_than_a_tile_is_no_gather():
    program = gathered("data:64", "tiny:data", tiny=64)
    (one,) = collectives(program)
    (chain,) = chains_of(one, program.mesh, V5P)
    assert one.inputs[0].bytes * 8 == TILE
    assert [transfer.alone for transfer in chain.transfers] == [False, False]
    program = md.jit(lambda x: x.rename(tiny="all") * 1.0, "data:64", "tiny:data").lower(
        md.spec(md.dims(tiny=2048), "bfloat16")
    )
    ((one,), mesh) = collectives(program), program.mesh
    (chain,) = chains_of(one, mesh, V5P)
    assert [transfer.alone for transfer in chain.transfers] == [True, False]


@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.slow
def test_libtpu_writes_these_transfers():
    from meshdsl.lowering.backends.compiler_flags import RECOMMENDED
    from meshdsl.lowering.backends.jax.ahead import compile_ahead

    topology = Topology.parse("v5p:4x4x4")
    gathers = gathered("data:64", "large:data; small:data", large=65536, small=8192)
    sums = reduced("data:64", "batch:data", one=8 * KIB, two=4 * KIB, three=2**20)
    for program in (gathers, sums):
        with jax.enable_x64(False):
            compiled = compile_ahead(program, topology, RECOMMENDED["v5p"])
        assert compiled.schedule is not None, compiled.untimed

        def of(schedule):
            return Counter(
                (event.kind, event.asynchronous, round(event.wire_bytes))
                for event, _ in schedule.collectives
            )

        assert of(simulate(program, V5P)) == of(compiled.schedule)
