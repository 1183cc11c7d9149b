"""What slices send each other: the forms in which it is written, and what libtpu makes of each."""

from importlib.util import find_spec
from math import prod

import jax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshdsl.layouts.hardware import hardware
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topologies import Topology
from meshdsl.lowering.backends.hlo.megascale import numbered, transfer
from meshdsl.lowering.backends.hlo.schedule import schedule
from meshdsl.lowering.backends.hlo.wire import sent
from meshdsl.lowering.backends.jax.ahead import devices
from meshdsl.lowering.backends.jax.torus import arrange_devices

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu")


def attributes(kind, members):
    return (
        "channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="
        f'"xla_megascale_runtime",_xla_megascale_target={members},'
        f'_xla_megascale_transfer_type="{kind}"}}'
    )


def test_members_are_places_of_slices_or_listed():
    one = transfer(attributes("ALL_REDUCE", '"{1,3}x{0:1,7}"'), 40)
    assert (one.kind, one.payload) == ("all_reduce", 40)
    assert one.groups == {(100000, 300000), (100001, 300001), (100007, 300007)}
    listed = transfer(attributes("ALL_TO_ALL", "{{100000,200000},{100001,200001}}"), 40)
    assert listed.groups == {(100000, 200000), (100001, 200001)}
    pairs = transfer(attributes("ONE_TO_ONE", "{{100000->200000},{200000->100000}}"), 40)
    assert (pairs.kind, pairs.groups) == ("permute", {(100000, 200000), (200000, 100000)})


def test_slices_and_chips_have_numbers_in_the_mesh():
    members = frozenset([(100000, 200000), (100002, 200002)])
    assert numbered(members, Mesh.parse("slice@dcn:2,data:4")) == {(0, 4), (2, 6)}
    assert numbered(members, Mesh.parse("data:4,slice@dcn:2")) == {(0, 1), (4, 5)}
    with pytest.raises(ValueError, match=r"member 30000\d is no chip of the 2 slices of 4 chips"):
        numbered(frozenset([(100000, 300001)]), Mesh.parse("slice@dcn:2,data:4"))


def test_other_transfers_to_a_host_are_no_matter_between_slices():
    assert transfer("channel_id=2, is_host_transfer=true", 40) is None


def test_unknown_kinds_and_members_are_reported():
    with pytest.raises(ValueError, match="a collective across slices of unknown kind: ALL_TO_ONE"):
        transfer(attributes("ALL_TO_ONE", '"{1,2}x{0:7}"'), 40)
    with pytest.raises(ValueError, match="members of unknown form across slices: "):
        transfer(attributes("ALL_REDUCE", "<1,2>"), 40)


SHAPE = (256, 128)  # floats on each device
BYTES = prod(SHAPE) * 4


@needs_libtpu
@pytest.mark.parametrize(
    ("send", "kind", "wire"),
    [
        (lambda x: lax.psum(x, "slice"), "all_reduce", 2 * 3 / 4 * BYTES),
        (lambda x: lax.all_gather(x, "slice", tiled=True), "all_gather", 3 * BYTES),
        (lambda x: lax.psum_scatter(x, "slice", tiled=True), "reduce_scatter", 3 / 4 * BYTES),
        (lambda x: lax.all_to_all(x, "slice", 0, 1, tiled=True), "all_to_all", 3 / 4 * BYTES),
        (lambda x: lax.ppermute(x, "slice", [(0, 1), (2, 3)]), "permute", BYTES),
        (
            lambda x: lax.fori_loop(0, 5, lambda _, y: lax.psum(y * 2, "slice"), x),
            "all_reduce",
            5 * 2 * 3 / 4 * BYTES,
        ),
    ],
    ids=["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "loop"],
)
def test_what_libtpu_sends_across_slices_is_counted(send, kind, wire, tmp_path):
    topology = Topology.parse("v5e:2x4", slices=4)
    axes = Mesh.parse("slice@dcn:4,data:8")
    mesh = arrange_devices(axes, devices(topology))
    split = P(("slice", "data"))
    run = jax.shard_map(
        lambda x: send(x * 2), mesh=mesh, in_specs=split, out_specs=split, check_vma=False
    )
    sizes = 32 * SHAPE[0], SHAPE[1]
    x = jax.ShapeDtypeStruct(sizes, "float32", sharding=NamedSharding(mesh, split))
    with jax.enable_x64(False):  # counters of loops, as the command line has them
        jax.jit(run).lower(x).compile(compiler_options={"xla_dump_to": str(tmp_path)})
    (file,) = tmp_path.glob("*.after_optimizations.txt")
    found = sent(file.read_text(), 32)
    assert {one.kind for one in found} == {kind}
    assert sum(one.wire_bytes * one.count for one in found) == wire

    (file,) = tmp_path.glob("*.after_codegen.txt")
    result = schedule(file.read_text(), axes, hardware("v5e"))
    assert {(event.kind, event.axes) for event, _ in result.collectives} == {(kind, ("slice",))}
    assert result.times.wire_bytes == wire
    assert result.times.exposed == pytest.approx(wire / hardware("v5e").network_bandwidth)
    assert result.seconds == pytest.approx(result.times.work + result.times.exposed)
