"""Space: the points of a search, as structures with sizes.

A `Structure` says what each axis of a mesh does and how the state is stored. With sizes of the
axes, a number of microbatches and a remat it is a `Point`, which has a mesh and a layout. Equal
points occur once: no axis has size 1, axes have one order, and no two axes of a mesh do the same,
but for those that a rule of the user, or the mesh, has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from meshdsl.layouts.layout import Layout, Rule
from meshdsl.layouts.mesh import Mesh
from meshdsl.search.facts import Facts
from meshdsl.search.roles import Kind, Role, numbered

SLICE = "slice"
Storage = Literal["", "optimizer", "params"]
_ORDER = {"stack": 0, "data": 1, "context": 2, "weights": 3}  # major first: the least is sent there
_COVERED = 0.95  # the share of the parameters that rules of storage should split


@dataclass(frozen=True)
class Structure:
    """What the axes of a mesh do.

    Attributes:
        roles: the role of each axis, major first.
        axes: the names of the axes.
        storage: the part of the state that is split over the axes of the batch: nothing, the state
            of the optimizer (ZeRO-1), or the complete state (FSDP). Each slice stores a copy.
        stored: the dims of the state that are split so.
        pinned: the user's rules; no other rule of the layout has one of their targets.
        slow: the axes that cross the slow network.
        storing_only: further axes of a given mesh, which only rules with a scope name, and their
            sizes.
    """

    roles: tuple[Role, ...]
    axes: tuple[str, ...]
    storage: Storage = ""
    stored: tuple[str, ...] = ()
    pinned: Layout = field(default_factory=Layout)
    slow: frozenset[str] = frozenset()
    storing_only: tuple[tuple[str, int], ...] = ()

    @cached_property
    def of_dim(self) -> dict[str, tuple[tuple[str, ...], bool]]:
        """The axes of each dim, major first, and whether the rule is optional."""
        rules: dict[str, tuple[list[str], bool]] = {}
        rows = sorted(zip(self.roles, self.axes, strict=True), key=lambda row: _minor(row[0]))
        for role, axis in rows:
            for dim in role.dims:
                axes, optional = rules.get(dim, ([], False))
                rules[dim] = [*axes, axis], optional or dim in role.optional
        return {dim: (tuple(axes), optional) for dim, (axes, optional) in rules.items()}

    @cached_property
    def storing(self) -> tuple[tuple[str, ...], bool]:
        """The axes that the state is stored over, and whether one may split parameters anyway."""
        axes = [
            axis
            for role, axis in zip(self.roles, self.axes, strict=True)
            if axis not in self.slow
            if role.kind in ("data", "context") or _splits_data(role, self.roles)
        ]
        return tuple(axes), any(
            role.kind == "weights" and axis in axes
            for role, axis in zip(self.roles, self.axes, strict=True)
        )

    @cached_property
    def layout(self) -> Layout:
        """The layout, with the pinned rules first."""
        rules = [Rule("", dim, *row) for dim, row in self.of_dim.items()]
        if self.storage:
            axes, shared = self.storing
            optional = shared or len(self.stored) > 1
            rules += [Rule(self.storage, dim, axes, optional) for dim in self.stored]
        pinned = {rule.target for rule in self.pinned.rules}
        return Layout((*self.pinned.rules, *(r for r in rules if r.target not in pinned)))

    def mesh(self, sizes: Sequence[int]) -> Mesh:
        """Returns the mesh with some sizes of the axes."""
        return Mesh(tuple(zip(self.axes, map(int, sizes), strict=True)), self.slow)


@dataclass(frozen=True)
class Variant:
    """A variant of a step: its microbatches, and its remat ("": what the step itself does)."""

    microbatches: int = 1
    remat: str = ""


@dataclass(frozen=True)
class Point:
    """A point of the space."""

    structure: Structure
    sizes: tuple[int, ...]
    variant: Variant

    @property
    def mesh(self) -> Mesh:
        return self.structure.mesh(self.sizes)

    @property
    def layout(self) -> Layout:
        return self.structure.layout


def structures(
    roles: Sequence[Role],
    pinned: Layout | None = None,
    slices: int = 1,
    most_axes: int = 4,
) -> Iterator[Structure]:
    """Yields the structures of meshes of any shape, without their storage.

    Args:
        pinned: the user's rules; all meshes have their axes.
        slices: if there are several, the first axis goes across them, and splits the batch.
        most_axes: the most axes of a structure, without those of slices and of rules.
    """
    by_kind = {kind: [role for role in roles if role.kind == kind] for kind in _ORDER}
    weights: list[tuple[Role, ...]] = [(), *((role,) for role in by_kind["weights"])]
    for pair in itertools.combinations(by_kind["weights"], 2):
        disjoint = not set(pair[0].dims) & set(pair[1].dims)
        # Two axes for parameters are worth it where one of them moves the batch, as for experts.
        if disjoint and any(_splits_data(role, by_kind["data"]) for role in pair):
            weights.append(pair)
    made: set[Structure] = set()
    for data, context, sets, stack in itertools.product(
        ((), *((role,) for role in by_kind["data"])),
        ((), *((role,) for role in by_kind["context"])),
        weights,
        ((), *((role,) for role in by_kind["stack"])),
    ):
        chosen = (*stack, *data, *context, *sets)
        if len(chosen) > most_axes or not _agree(chosen):
            continue
        structure = Structure(chosen, tuple(role.name for role in chosen))
        if pinned is not None and pinned.rules:
            complete = _with_axes_of(structure, pinned)
            if complete is None:
                continue
            structure = complete
        if slices > 1:
            if not by_kind["data"]:
                return
            structure = replace(
                structure,
                roles=(by_kind["data"][0], *structure.roles),
                axes=(SLICE, *structure.axes),
                slow=frozenset([SLICE]),
            )
        if structure.roles and structure not in made:
            made.add(structure)
            yield structure


def _with_axes_of(structure: Structure, pinned: Layout) -> Structure | None:
    """Returns a structure that has all axes of some rules; None if they contradict it."""
    roles, names = list(structure.roles), [""] * len(structure.roles)
    axes = list(dict.fromkeys(axis for rule in pinned.rules for axis in rule.axes))
    scoped = [a for a in axes if not any(a in r.axes and not r.scope for r in pinned.rules)]
    for axis in axes:
        if axis in scoped:
            continue
        dims = {rule.dim for rule in pinned.rules if axis in rule.axes and not rule.scope}
        fitting = [n for n, role in enumerate(roles) if not names[n] and dims <= set(role.dims)]
        # The last axis to which a rule gives one of these dims beside this axis.
        beside = [a for rule in pinned.rules if axis in rule.axes for a in rule.axes if a != axis]
        same = [n for n, role in enumerate(roles) if names[n] in beside and dims <= set(role.dims)]
        if same:  # it has the same role; axes of one role stand side by side
            roles.insert(same[-1] + 1, roles[same[-1]])
            names.insert(same[-1] + 1, axis)
        elif fitting:
            names[fitting[0]] = axis
        else:
            role = Role(axis, "weights", tuple(sorted(dims)))
            if not _agree(tuple(dict.fromkeys([*roles, role]))):
                return None
            roles.append(role)
            names.append(axis)
    for axis in scoped:  # an axis that stores the state also has another role
        free = [n for n, role in enumerate(roles) if not names[n]]
        free.sort(key=lambda n: roles[n].kind != "data")
        if not free:
            return None
        names[free[0]] = axis
    for number, role in enumerate(roles):
        if not names[number]:
            used = {*names, *axes}
            names[number] = next(name for name in numbered(role.name) if name not in used)
    return replace(structure, roles=tuple(roles), axes=tuple(names), pinned=pinned)


def structures_on(mesh: Mesh, roles: Sequence[Role], pinned: Layout) -> Iterator[Structure]:
    """Yields the structures of a given mesh, without their storage.

    An axis that the user's rules name keeps their dims.
    """
    axes = [(name, size) for name, size in mesh.axes if size > 1]
    if not axes:
        yield Structure((), (), pinned=pinned)
        return
    allowed = []
    for name, _ in axes:
        dims = {rule.dim for rule in pinned.rules if name in rule.axes and not rule.scope}
        scoped = any(name in rule.axes for rule in pinned.rules)
        fitting: list[Role | None] = [role for role in roles if dims <= set(role.dims)]
        if dims and not fitting:
            fitting = [Role(name, "weights", tuple(sorted(dims)))]
        allowed.append(fitting if dims or not scoped else [*fitting, None])
    for chosen in itertools.product(*allowed):
        used = [(role, name) for role, (name, _) in zip(chosen, axes, strict=True) if role]
        each = tuple(role for role, _ in used)
        if len({role for role in each if role.kind in ("weights", "context")}) > 2:
            continue
        if each and _agree(tuple(dict.fromkeys(each))):
            names = tuple(name for _, name in used)
            slow = mesh.slow & frozenset(names)
            rest = tuple(row for row in axes if row[0] not in names)
            yield Structure(each, names, pinned=pinned, slow=slow, storing_only=rest)


def structure_of(mesh: Mesh | None, layout: Layout, facts: Facts) -> Structure:
    """Returns what the axes of a complete layout do.

    Args:
        mesh: the mesh of the layout; None: the sizes of its axes are not known.
    """
    named = list(dict.fromkeys(axis for rule in layout.rules for axis in rule.axes))
    axes = named if mesh is None else [axis for axis, size in mesh.axes if size > 1]
    roles, used = [], []
    for axis in axes:
        plain = [rule for rule in layout.rules if axis in rule.axes and not rule.scope]
        splits = tuple(rule.dim for rule in plain if not rule.optional)
        optional = tuple(rule.dim for rule in plain if rule.optional)
        if not splits:  # `batch:data+expert?` is optional for the sake of one of its axes
            splits, optional = optional, ()
        if not any(axis in rule.axes for rule in layout.rules):
            continue
        kind: Kind = "weights"
        if not set(splits).isdisjoint(facts.stacks):
            kind = "stack"
        elif not set(splits).isdisjoint(facts.data[:1]) or not plain:
            kind = "data"
        elif splits and set(splits) <= set(facts.data):
            kind = "context"
        roles.append(Role(axis, kind, splits, optional))
        used.append(axis)
    storage: Storage = ""
    stored: tuple[str, ...] = ()
    scopes: tuple[Storage, ...] = ("params", "optimizer")
    for scope in scopes:
        if dims := tuple(rule.dim for rule in layout.rules if rule.scope == scope and rule.axes):
            storage, stored = scope, dims
            break
    slow = frozenset() if mesh is None else mesh.slow & frozenset(used)
    return Structure(tuple(roles), tuple(used), storage, stored, layout, slow)


def across_slices(structure: Structure) -> Iterator[Structure]:
    """Yields a structure with each of its axes over the slices, and first."""
    for number, axis in enumerate(structure.axes):
        order = sorted(range(len(structure.axes)), key=lambda at: at != number)
        yield replace(
            structure,
            roles=tuple(structure.roles[at] for at in order),
            axes=tuple(structure.axes[at] for at in order),
            slow=frozenset([axis]),
        )


def stored_ways(structure: Structure, facts: Facts) -> Iterator[Structure]:
    """Yields a structure with each way to store the state."""
    yield structure
    axes, _ = structure.storing
    split = {dim for role in structure.roles for dim in role.splits}
    free = [dim for dim in _dims_of(facts) if dim not in split and dim not in facts.stacks]
    chosen = _cover(facts, free)
    if not axes or not chosen:
        return
    for storage in ("optimizer", "params"):
        if storage == "optimizer" and not any("optimizer" in row.path for row in facts.inputs):
            continue
        yield replace(structure, storage=storage, stored=chosen)


def factorisations(devices: int, count: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields the ways to write a number as a product of `count` factors of at least 2.

    >>> list(factorisations(8, 2, (8, 2)))
    [(4, 2)]
    """
    if count == 1:
        if 2 <= devices <= most[0]:
            yield (devices,)
        return
    for first in range(2, min(devices // 2, most[0]) + 1):
        if devices % first == 0:
            for rest in factorisations(devices // first, count - 1, most[1:]):
                yield (first, *rest)


def largest(role: Role, facts: Facts) -> int:
    """Returns the largest size of an axis of a role: that of its smallest dim that matters."""
    sizes = [facts.size(dim) for dim in role.splits]
    if role.kind == "stack":
        return sizes[0]
    matter = [
        size for dim, size in zip(role.splits, sizes, strict=True) if facts.coverage([dim]) > 0.05
    ]
    return min(matter or sizes)


def _minor(role: Role) -> int:
    # Of several axes of one dim, those of the batch are major.
    return {"data": 0, "context": 1, "weights": 2, "stack": 3}[role.kind]


def _splits_data(role: Role, others: Sequence[Role]) -> bool:
    """Whether an axis of parameters splits the batch where it can, as that of experts does."""
    batch = {dim for role in others if role.kind == "data" for dim in role.splits[:1]}
    return role.kind == "weights" and not batch.isdisjoint(role.optional)


def _agree(roles: Sequence[Role]) -> bool:
    """Whether different axes may have these roles: no dim is in two of them."""
    dims = [dim for role in roles for dim in role.splits if role.kind != "stack"]
    context = {role.splits[0] for role in roles if role.kind == "context"}
    optional = {dim for role in roles if role.kind == "weights" for dim in role.optional}
    return len(set(dims)) == len(dims) and not context & optional


def _dims_of(facts: Facts) -> list[str]:
    return sorted({dim for row in facts.parameters for dim, size in row.dims.items() if size > 1})


def _cover(facts: Facts, dims: Sequence[str]) -> tuple[str, ...]:
    """Returns a few dims such that most of the parameters have one of them, by descending bytes."""
    chosen: list[str] = []
    left = list(facts.parameters)
    total = sum(row.bytes for row in left)
    while left and sum(row.bytes for row in left) > (1 - _COVERED) * total:
        covered = {dim: sum(r.bytes for r in left if dim in r.dims) for dim in dims}
        best = max(covered, key=lambda dim: (covered[dim], dim), default="")
        if not best or not covered[best]:
            break
        chosen.append(best)
        left = [row for row in left if best not in row.dims]
    return tuple(chosen)
