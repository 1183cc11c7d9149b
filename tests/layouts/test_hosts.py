"""Who holds what, and which losses leave a holder: against a search over all sets of hosts."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshdsl.layouts.hosts import Domains, survival
from meshdsl.layouts.mesh import Mesh

AXES = ("a", "b", "c")


def by_search(mesh, of, splits):
    """Returns all sets of groups whose loss leaves some shard without a holder."""
    coordinates = list(mesh.coordinates())
    groups = sorted(set(of))
    fatal = set()
    for size in range(1, len(groups) + 1):
        for lost in itertools.combinations(groups, size):
            left = [c for c, group in zip(coordinates, of, strict=True) if group not in lost]
            for axes in splits:
                every = {tuple(c[axis] for axis in axes) for c in coordinates}
                if {tuple(c[axis] for axis in axes) for c in left} != every:
                    fatal.add(lost)
    return fatal


def host_by_search(mesh, devices_per_host):
    """Returns the host of each device: consecutive ones of a slice, counted one by one."""
    hosts, filled, slices = [], {}, {}
    for position in mesh.coordinates():
        part = tuple(position[axis] for axis in mesh.names if axis in mesh.slow)
        place = filled[part] = filled.get(part, -1) + 1
        hosts.append((slices.setdefault(part, len(slices)), place // devices_per_host))
    return hosts


@st.composite
def cases(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    slow = draw(st.sets(st.sampled_from(AXES[: len(sizes)]), max_size=1))
    mesh = Mesh(tuple(zip(AXES, sizes, strict=False)), frozenset(slow))
    axes = st.frozensets(st.sampled_from(mesh.names))
    return mesh, draw(st.integers(1, 6)), draw(st.lists(axes, min_size=1, max_size=3))


@given(cases())
@settings(deadline=None, max_examples=100)
def test_holders_and_survival_are_those_of_a_search_over_all_sets_of_hosts(case):
    mesh, devices_per_host, splits = case
    for domains in (Domains.hosts(mesh, devices_per_host), Domains.slices(mesh)):
        if domains.count > 9:
            continue  # too many sets to try
        fatal = by_search(mesh, domains.of.tolist(), splits)
        found = survival(domains, splits)
        assert found.count == len(set(domains.of.tolist()))
        assert {(one,) for one in found.fatal} == {lost for lost in fatal if len(lost) == 1}
        assert found.fatal_pairs == sum(len(lost) == 2 for lost in fatal)
        assert found.least == min(map(len, fatal))
        sets = frozenset().union(*map(domains.holders, splits))
        every = itertools.chain(
            *(itertools.combinations(range(found.count), n) for n in range(1, found.count + 1))
        )
        assert fatal == {lost for lost in every if any(one <= {*lost} for one in map(set, sets))}


@given(cases())
@settings(deadline=None, max_examples=100)
def test_a_host_has_consecutive_devices_of_one_slice(case):
    mesh, devices_per_host, splits = case
    domains = Domains.hosts(mesh, devices_per_host)
    expected = host_by_search(mesh, devices_per_host)
    pairs = set(zip(domains.of.tolist(), expected, strict=True))
    assert len(pairs) == len({one for one, _ in pairs}) == len({other for _, other in pairs})
    held = {}
    for host, position in zip(domains.of.tolist(), mesh.coordinates(), strict=True):
        held.setdefault(host, set()).add(tuple(position[axis] for axis in splits[0]))
    assert domains.shards_of_one(splits[0]) == max(map(len, held.values()))


def test_two_replicas_survive_every_host_and_the_pairs_that_are_no_two_copies():
    hosts = Domains.hosts(Mesh.parse("replica:2,data:16"), 4)
    found = survival(hosts, [frozenset({"data"}), frozenset()])
    assert (found.count, found.least, found.single_share) == (8, 2, 1.0)
    assert (found.fatal_pairs, found.pairs) == (4, 28)
    assert hosts.holders({"data"}) == {(0, 4), (1, 5), (2, 6), (3, 7)}
    assert hosts.holders(()) == {tuple(range(8))}
    assert hosts.shards_of_one({"data"}) == 4


def test_replicas_of_one_host_are_lost_with_it():
    hosts = Domains.hosts(Mesh.parse("data:16,replica:2"), 4)
    found = survival(hosts, [frozenset({"data"})])
    assert (found.least, found.single_share, found.fatal_pairs) == (1, 0.0, found.pairs)
    assert found.pair_share == 0.0


def test_a_slice_is_survived_if_the_slow_axis_splits_nothing():
    slices = Domains.slices(Mesh.parse("data:4,slice@dcn:2"))
    assert slices.of.tolist() == [0, 1, 0, 1, 0, 1, 0, 1]
    assert survival(slices, [frozenset({"data"})]).least == 2
    assert survival(slices, [frozenset({"data"}), frozenset({"slice"})]).least == 1


def test_one_host_is_all_there_is():
    found = survival(Domains.hosts(Mesh(), 8), [frozenset()])
    assert (found.count, found.fatal, found.pairs, found.pair_share) == (1, {0}, 0, 1.0)


@pytest.mark.parametrize("devices", [1024, 16384])
def test_only_positions_of_hosts_are_looked_at(devices):
    mesh = Mesh.parse(f"replica:2,data:{devices // 16},model:8")
    hosts = Domains.hosts(mesh, 8)
    assert hosts.grid == (("replica", 2), ("data", devices // 16), ("model", 1))
    found = survival(hosts, [frozenset({"data", "model"})])
    assert (found.count, found.fatal_pairs) == (devices // 8, devices // 16)
    assert found.pairs == math.comb(devices // 8, 2)
