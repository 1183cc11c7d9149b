"""Whether TensorFlow has the devices of a group in the order of their numbers, as links expect.

It orders CPUs by their names. Of several GPUs in one process it may put those beside each other
that have strong links, and then what is gathered or exchanged would come in another order. So it is
asked once for each group, by a gather of the devices' numbers. Of two GPUs the first comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends.tf.hosts.keys import instance_keys
from meshdsl.lowering.backends.tf.hosts.links import HostLinks
from meshdsl.lowering.backends.tf.hosts.tokens import tokens
from meshdsl.lowering.backends.tf.placing import Devices
from meshdsl.lowering.program import Block, SpmdProgram

_seen: set[tuple[tuple[str, ...], Mesh, tuple[str, ...]]] = set()


def check_order(devices: Devices, mesh: Mesh, axes: Iterable[tuple[str, ...]]) -> None:
    """Checks the groups along some axes, those of which it has not seen, on all devices.

    Every process that has devices of the mesh calls it, in the same order.

    Raises:
        ValueError: a group is in another order.
    """
    for one in axes:
        key = devices.everywhere, mesh, one
        if key not in _seen and mesh.extent(one) > 1:
            check_found(devices, mesh, one, numbers(devices, mesh, one))
            _seen.add(key)


def numbers(devices: Devices, mesh: Mesh, axes: tuple[str, ...]) -> list[list[int]]:
    """Returns, for each device of this process, the numbers of its group as links gather them."""
    program = SpmdProgram("order", mesh, Layout(), Block((), (), ()), (), ())
    keys = instance_keys(program, (*devices.everywhere, *axes))
    instance = next(keys)

    @tf.function(input_signature=[], autograph=False)
    def gathered() -> list[tf.Tensor]:
        found = []
        for name, number, token in zip(
            devices.names, devices.numbers, tokens(devices.names), strict=True
        ):
            with tf.device(name):
                own = tf.constant(number)
                links = HostLinks(mesh, own, token.handle, devices.everywhere, iter([instance]))
                found.append(links.gather(tf.cast(own, tf.float32), axes))
        return found

    return [[int(number) for number in row.numpy()] for row in gathered()]


def check_found(
    devices: Devices, mesh: Mesh, axes: tuple[str, ...], found: Sequence[Sequence[int]]
) -> None:
    """Compares what was gathered with the order of the mesh.

    Raises:
        ValueError: they differ; the first such group is told.
    """
    groups = {member: list(group) for group in mesh.groups(*axes) for member in group}
    for number, row in zip(devices.numbers, found, strict=True):
        if list(row) != groups[number]:
            raise ValueError(
                f"TensorFlow has the devices {groups[number]} of mesh {mesh}, along "
                f"{', '.join(axes)}, in the order {list(row)}, by the strength of their links: "
                "make them visible in an order in which neighbours have strong ones, by "
                "CUDA_VISIBLE_DEVICES, or run one process for each GPU"
            )
