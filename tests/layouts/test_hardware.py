"""Named hardware: published peaks, and what collectives take on rings, lines and switches."""

import itertools

import numpy as np
import pytest

from meshdsl.layouts.hardware import COLLECTIVES as KINDS
from meshdsl.layouts.hardware import HARDWARE, hardware, sent_bytes
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.program import COLLECTIVES, wire_bytes

MESH = Mesh.parse("slice@dcn:2,data:8,model:4,pair:2,one:1")
V5P = hardware("v5p")
KNOWN = ["v3", "v4", "v5e", "v5p", "v6e", "a100", "h100", "h200", "b200", "cpu"]


def test_the_names_are_these_and_others_are_refused():
    assert list(HARDWARE) == KNOWN
    assert all(one.name == name for name, one in HARDWARE.items())
    with pytest.raises(ValueError) as error:
        hardware("h10")
    assert str(error.value) == (
        f"unknown hardware 'h10'; choose one of {', '.join(KNOWN)}. Did you mean `h100`?"
    )


def test_hosts_have_the_devices_that_are_lost_together():
    hosts = {name: HARDWARE[name].host for name in KNOWN}
    assert hosts == {
        **dict.fromkeys(KNOWN, 8),  # eight GPUs, and eight cores of TPU v3
        **dict.fromkeys(("v4", "v5e", "v5p", "v6e"), 4),
        "cpu": 1,
    }


def test_collectives_send_here_what_they_send_in_programs():
    assert set(KINDS) == set(COLLECTIVES)
    for kind, devices in itertools.product(KINDS, (2, 3, 8)):
        assert sent_bytes(kind, devices, 1000) == pytest.approx(wire_bytes(kind, 1000, devices))


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("v5p", "bfloat16", 459),
        ("v5p", "float32", 459),  # one pass of bfloat16
        ("v5p", "complex64", 459),
        ("v5e", "int8", 394),
        ("h100", "float32", 494.7),
        ("h100", "bfloat16", 989.4),
        ("h100", "float64", 66.9),
        ("h100", "complex128", 66.9),
        ("a100", "float16", 312),
        ("h200", "bfloat16", 989.4),
        ("b200", "bfloat16", 2250),
        ("v3", "bfloat16", 61.5),  # one of two cores
        ("v3", "int8", 61.5),
        ("v5p", "int8", 918),
        ("v5p", "float8_e4m3fn", 459),  # computed as bfloat16
        ("a100", "float8_e5m2", 312),
        ("h100", "float8_e5m2", 1978.9),
        ("cpu", "float32", 0.08),
        ("cpu", "bfloat16", 0.08),  # computed as float32
        ("cpu", "float64", 0.04),
    ],
)
def test_the_peak_is_that_of_the_dtype_or_of_the_nearest(name, dtype, tflops):
    from meshdsl.tensors.dtypes import as_dtype

    assert hardware(name).peak(as_dtype(dtype)) == pytest.approx(tflops * 1e12)


def test_an_axis_is_slow_if_marked_or_if_it_reaches_past_the_fast_network():
    assert V5P.slow_axes(MESH) == {"slice"}
    h100 = hardware("h100")
    assert h100.slow_axes(Mesh.parse("data:64,model:8")) == {"data"}
    assert h100.slow_axes(Mesh.parse("data:2,model:16")) == {"data", "model"}
    assert h100.slow_axes(Mesh.parse("data:1,model:8")) == frozenset()
    assert h100.slow_axes(Mesh.parse("slice@dcn:4,model:8")) == {"slice"}
    assert hardware("v5e").slow_axes(Mesh.parse("data:64,model:8")) == {"data"}


def busiest_link(size, closed, pairs):
    """Returns the number of messages on the busiest link, one way, each on its shortest path."""
    load = {}
    for source, target in pairs:
        ways = [(1, (target - source) % size), (-1, (source - target) % size)]
        if not closed:
            ways = [(1 if target > source else -1, abs(target - source))]
        least = min(hops for _, hops in ways)
        best = [way for way in ways if way[1] == least]
        for step, hops in best:
            for hop in range(hops):
                link = ((source + step * hop) % size, step)
                load[link] = load.get(link, 0) + 1 / len(best)
    return max(load.values())


@pytest.mark.parametrize("size", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("name", ["v5p", "v5e"])
def test_an_all_to_all_takes_as_long_as_the_busiest_link(name, size):
    one, mesh = hardware(name), Mesh.parse(f"a:{size}")
    closed = size % one.ring == 0
    each = 1e9  # bytes from every device to every other
    load = busiest_link(size, closed, itertools.permutations(range(size), 2))
    found = one.seconds("all_to_all", each * (size - 1), ["a"], mesh)
    assert found == pytest.approx(load * each / one.link_bandwidth)


def test_a_ring_uses_both_directions_and_a_line_is_half_as_fast():
    sent = 1e9
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        assert V5P.seconds(kind, sent, ["model"], MESH) == pytest.approx(sent / 180e9)
        assert V5P.seconds(kind, sent, ["pair"], MESH) == pytest.approx(sent / 90e9)
    assert V5P.seconds("permute", sent, ["model"], MESH) == pytest.approx(sent / 90e9)


def test_axes_of_a_torus_work_side_by_side_and_those_of_a_switch_do_not():
    sent = 1e9
    assert V5P.seconds("all_gather", sent, ["data", "model"], MESH) == pytest.approx(sent / 360e9)
    h100 = hardware("h100")
    small = Mesh.parse("a:2,b:4")
    for axes in (["a"], ["b"], ["a", "b"]):
        assert h100.seconds("all_gather", sent, axes, small) == pytest.approx(sent / 450e9)


def test_what_crosses_the_slow_network_takes_its_time():
    assert V5P.seconds("all_reduce", 1e9, ["slice"], MESH) == pytest.approx(1e9 / 6.25e9)
    wide = Mesh.parse("data:4,model:8")
    assert hardware("a100").seconds("all_reduce", 1e9, ["data"], wide) == pytest.approx(1 / 25)


@pytest.mark.parametrize("nodes", [2, 16])
def test_the_devices_of_a_node_share_what_crosses_between_nodes(nodes):
    h100, mesh = hardware("h100"), Mesh.parse(f"data:{8 * nodes}")
    devices, payload = 8 * nodes, 1e9
    # A node receives what the others have, by all of its cards.
    missing = payload * (nodes - 1) / nodes
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        ways = 2 if kind == "all_reduce" else 1
        sent = ways * payload * (devices - 1) / devices
        expected = max(ways * missing / (8 * 50e9), sent / 450e9)
        assert h100.seconds(kind, sent, ["data"], mesh) == pytest.approx(expected)
    # Of an all_to_all, each device sends to all that are on other nodes.
    sent = payload * (devices - 1) / devices
    assert h100.seconds("all_to_all", sent, ["data"], mesh) == pytest.approx(missing / 50e9)
    assert h100.seconds("permute", payload, ["data"], mesh) == pytest.approx(payload / 50e9)


def test_slices_share_what_crosses_between_them():
    sent = 2 * 1e9 * 15 / 16  # of an all_reduce over 2 slices of 8
    found = V5P.seconds("all_reduce", sent, ["slice", "data"], MESH)
    across, within = 1e9 / 8 / 6.25e9, sent / 180e9
    assert found == pytest.approx(across + within)  # TPUs do one after the other
    least = V5P.least_seconds("all_reduce", sent, ["slice", "data"], MESH)
    assert least == pytest.approx(across)


def test_nodes_of_gpus_use_both_networks_at_the_same_time():
    h100, sent = hardware("h100"), 2 * 1e9 * 15 / 16
    mesh = Mesh.parse("node@dcn:2,data:8")
    found = h100.seconds("all_reduce", sent, ["node", "data"], mesh)
    assert found == pytest.approx(max(1e9 / 8 / 50e9, sent / 450e9))
    assert found == h100.least_seconds("all_reduce", sent, ["node", "data"], mesh)


def test_two_axes_of_a_node_and_one_across_nodes():
    mesh = Mesh.parse("data:4,pair:2,model:4")  # nodes of 8: pair and model
    sent = 1e9 * 7 / 8  # of an all_gather over data and pair: two devices of each node
    found = hardware("h100").seconds("all_gather", sent, ["data", "pair"], mesh)
    assert found == pytest.approx(1e9 * 3 / 4 / (2 * 50e9))


def test_a_small_collective_takes_a_microsecond_per_hop():
    assert V5P.seconds("all_gather", 1, ["data"], MESH) == pytest.approx(4e-6)
    assert V5P.seconds("all_gather", 1, ["data", "model"], MESH) == pytest.approx(6e-6)
    assert V5P.seconds("permute", 1, ["data"], MESH) == pytest.approx(1e-6)
    assert hardware("h100").seconds("all_gather", 1, ["data"], Mesh.parse("data:8")) == 6.6e-6


def test_one_device_sends_nothing():
    assert V5P.seconds("all_reduce", 1e9, ["one"], MESH) == 0
    assert V5P.seconds("all_reduce", 1e9, [], MESH) == 0


def test_every_figure_is_there():
    for one in HARDWARE.values():
        figures = (one.memory_bytes, one.memory_bandwidth, one.link_bandwidth)
        assert all(figure > 0 for figure in (*figures, one.network_bandwidth, one.joined))
        assert one.network_bandwidth <= one.link_bandwidth
        assert one.peak(np.dtype("float32")) > 0 and one.title
