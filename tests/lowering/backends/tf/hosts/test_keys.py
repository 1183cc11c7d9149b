"""The numbers of groups and collectives; `test_cluster` has what several processes make of them."""

import itertools

import numpy as np

import meshdsl as md
from meshdsl.lowering.backends.tf.arguments import Devices
from meshdsl.lowering.backends.tf.hosts.cluster import Cluster
from meshdsl.lowering.backends.tf.hosts.keys import NOBODY, group_key, instance_keys

PLACE = "/job:worker/replica:0/task:{}/device:CPU:{}".format
X = md.named(np.arange(8.0), ["a"])


def test_a_group_is_known_by_its_devices_and_not_by_their_numbers():
    """(0, 1) on x:2 are one device of each process; on x:2,y:2 they are both of the first."""
    cluster = Cluster(("a:1", "b:1"), 1)
    two = Devices((PLACE(1, 0),), (1,), cluster)
    four = Devices((PLACE(1, 0), PLACE(1, 1)), (2, 3), cluster)
    assert two.everywhere == (PLACE(0, 0), PLACE(1, 0))
    assert four.everywhere == (PLACE(0, 0), PLACE(0, 1), PLACE(1, 0), PLACE(1, 1))
    assert group_key(two.everywhere) != group_key(four.everywhere[:2])
    assert group_key(two.everywhere) == group_key(four.everywhere[::2])


def test_groups_have_numbers_of_their_own():
    names = [PLACE(task, device) for task in range(8) for device in range(8)]
    keys = [group_key(pair) for pair in itertools.combinations(names, 2)]
    assert len(set(keys)) == len(keys)
    assert all(0 < key < NOBODY for key in keys)


def lowered(function, mesh="x:2", layout="a:x"):
    return md.jit(function, mesh, layout).lower(X)


def test_programs_that_send_other_things_have_other_numbers():
    names = [PLACE(0, device) for device in range(2)]
    functions = [
        lambda x: md.sum(x, "a"),
        lambda x: md.max(x, "a"),
        lambda x: md.sum(md.cast(x, "float32"), "a"),
        lambda x: md.shift(x, "a", 1),
        lambda x: md.shift(x, "a", -1),
    ]
    programs = [lowered(function) for function in functions]
    taken = [set(itertools.islice(instance_keys(one, names), 2000)) for one in programs]
    for one, other in itertools.combinations(taken, 2):
        assert not one & other
    assert all(0 < key < 2**31 for keys in taken for key in keys)
    same = instance_keys(lowered(functions[0]), names)
    assert set(itertools.islice(same, 2000)) == taken[0]
