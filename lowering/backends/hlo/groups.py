"""Groups: the devices that take part in a collective of HLO together, and the mesh axes they span.

Devices are numbered as the mesh numbers them, row-major.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from meshdsl.layouts.mesh import Mesh

Groups = frozenset[tuple[int, ...]]


def groups_of(attributes: str, devices: int) -> Groups:
    """Returns the groups of an instruction, in any of the forms in which XLA prints them.

    >>> sorted(groups_of("replica_groups=[2,2]<=[4]", 4))
    [(0, 1), (2, 3)]

    Raises:
        ValueError: a form that is not known.
    """
    text = attributes.partition("replica_groups=")[2]
    if not text or text.startswith("{}"):
        return frozenset([tuple(range(devices))])
    if text.startswith("{{"):
        rows = re.findall(r"\{([\d,]+)\}", text[: text.index("}}") + 1])
        return frozenset(tuple(int(d) for d in row.split(",")) for row in rows)
    iota = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        shape, sizes = (_numbers(part) for part in iota.groups()[:2])
        numbered = np.arange(np.prod(sizes)).reshape(sizes)
        if iota.group(3):
            numbered = numbered.transpose(_numbers(iota.group(3)))
        return frozenset(tuple(row) for row in numbered.reshape(shape).tolist())
    mesh = re.match(r"mesh\[((?:'\w+'=\d+,?)+)\] \{((?:'\w+',? ?)+)\}", text)
    if mesh:
        axes = dict(re.findall(r"'(\w+)'=(\d+)", mesh.group(1)))
        names, used = list(axes), re.findall(r"'(\w+)'", mesh.group(2))
        numbered = np.arange(devices).reshape([int(size) for size in axes.values()])
        order = [names.index(name) for name in names if name not in used]
        order += [names.index(name) for name in used]
        size = int(np.prod([int(axes[name]) for name in used]))
        return frozenset(tuple(row) for row in numbered.transpose(order).reshape(-1, size).tolist())
    raise ValueError(f"groups of unknown form: {text[:120]}")


def pairs_of(attributes: str) -> Groups:
    """Returns the pairs (source, target) of a permute."""
    match = re.search(r"source_target_pairs=\{(.*?)\}\}", attributes)
    assert match is not None, attributes[:200]
    return frozenset((int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", match.group(1)))


def spanned_axes(groups: Iterable[tuple[int, ...]], mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes along which the members of a group differ, in the order of the mesh.

    >>> spanned_axes({(0, 2), (1, 3)}, Mesh.parse("data:2,model:2"))
    ('data',)
    """
    members = [np.array(group) for group in groups if len(group) > 1]
    names = []
    for position, (name, size) in enumerate(mesh.axes):
        stride = int(np.prod([size for _, size in mesh.axes[position + 1 :]], dtype=np.int64))
        if any(np.ptp(group // stride % size) for group in members):
            names.append(name)
    return tuple(names)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))
