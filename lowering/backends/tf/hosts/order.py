"""Checks that TensorFlow has the devices of a group in the order of their numbers, as links expect.

TensorFlow orders CPUs by their names. It may order several GPUs of one process by the strength of
their links. The results of gathers and exchanges would then be in another order. So the order is
checked once for each group, by a gather of the devices' numbers. Of two GPUs the first comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends.tf.arguments import Devices
from meshdsl.lowering.backends.tf.hosts.keys import instance_keys
from meshdsl.lowering.backends.tf.hosts.links import HostLinks
from meshdsl.lowering.backends.tf.hosts.tokens import tokens
from meshdsl.lowering.program import Block, SpmdProgram

_checked: set[tuple[tuple[str, ...], Mesh, tuple[str, ...]]] = set()


def check_order(devices: Devices, mesh: Mesh, all_axes: Iterable[tuple[str, ...]]) -> None:
    """Checks the groups along some axes that have not been checked yet, on all devices.

    Every process that has devices of the mesh must call it, in the same order.

    Args:
        all_axes: for each kind of group, the axes along which its devices differ.

    Raises:
        ValueError: a group is in another order.
    """
    for axes in all_axes:
        key = devices.everywhere, mesh, axes
        if key not in _checked and mesh.extent(axes) > 1:
            check_numbers(devices, mesh, axes, numbers(devices, mesh, axes))
            _checked.add(key)


def numbers(devices: Devices, mesh: Mesh, axes: tuple[str, ...]) -> list[list[int]]:
    """Returns the numbers of each device's group, as links gather them on this process."""
    program = SpmdProgram("order", mesh, Layout(), Block((), (), ()), (), ())
    keys = instance_keys(program, (*devices.everywhere, *axes))
    instance = next(keys)

    @tf.function(input_signature=[], autograph=False)
    def gathered() -> list[tf.Tensor]:
        results = []
        for name, number, token in zip(
            devices.names, devices.numbers, tokens(devices.names), strict=True
        ):
            with tf.device(name):
                own_number = tf.constant(number)
                links = HostLinks(
                    mesh, own_number, token.handle, devices.everywhere, iter([instance])
                )
                results.append(links.gather(tf.cast(own_number, tf.float32), axes))
        return results

    return [[int(number) for number in row.numpy()] for row in gathered()]


def check_numbers(
    devices: Devices, mesh: Mesh, axes: tuple[str, ...], gathered: Sequence[Sequence[int]]
) -> None:
    """Compares gathered numbers with the order of the mesh.

    Raises:
        ValueError: they differ; the message has the first such group.
    """
    groups = {member: list(group) for group in mesh.groups(*axes) for member in group}
    for number, row in zip(devices.numbers, gathered, strict=True):
        if list(row) != groups[number]:
            raise ValueError(
                f"TensorFlow has the devices {groups[number]} of mesh {mesh}, along "
                f"{', '.join(axes)}, in the order {list(row)}, by the strength of their links: "
                "make them visible in an order in which neighbours have strong ones, by "
                "CUDA_VISIBLE_DEVICES, or run one process for each GPU"
            )
