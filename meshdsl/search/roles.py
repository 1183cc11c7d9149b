"""Roles: what one axis of a mesh may do for a program.

A role says which dims an axis splits. Roles follow from the program's facts, by the share of the
work that has their dims; the names of dims do not matter.

* `data`: a dim of the batch; `context`: another one, such as the length, together with its other
  names where the program renames it.
* `weights`: dims of parameters of which no tensor has two, as many as fit together, since an axis
  splits one dim of a tensor. Beside them it may split a dim of the batch where it is free.
* `stack`: the dim of the layers, which makes a pipeline, with dims of parameters outside of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from meshdsl.search.facts import Facts

Kind = Literal["data", "context", "weights", "stack"]
_COVERS = 0.3  # the share of the flops from which a role is worth an axis
_MOST_SETS = 4
_MOST_DIMS = 8


@dataclass(frozen=True)
class Role:
    """What an axis does.

    Attributes:
        name: the name of such an axis in meshes that the search makes.
        splits: the dims that it splits; no tensor has two of them.
        optional: the dims that it splits in tensors that have none of `splits`.
    """

    name: str
    kind: Kind
    splits: tuple[str, ...]
    optional: tuple[str, ...] = ()

    @property
    def dims(self) -> tuple[str, ...]:
        return (*self.splits, *self.optional)


def roles_of(facts: Facts) -> tuple[Role, ...]:
    """Returns the roles that axes may have in a program; deterministic."""
    return (*_of_data(facts), *_of_weights(facts), *_of_stacks(facts))


def main_roles(roles: Sequence[Role]) -> tuple[Role, ...]:
    """Returns the roles with the most work: one of each kind, with and without optional dims."""
    first: dict[str, Role] = {}
    for role in roles:
        first.setdefault(role.kind, role)
    return tuple(role for role in roles if role.splits == first[role.kind].splits)


def _of_data(facts: Facts) -> Iterator[Role]:
    for number, dim in enumerate(facts.data[:_MOST_SETS]):
        if facts.coverage([dim]) < _COVERS:
            continue
        if any(facts.alike(dim, other) for other in facts.data[:number]):
            continue
        others = sorted(b for a, b in facts.paired if a == dim and b not in facts.data)
        same = [other for other in others if facts.size(other) == facts.size(dim)]
        if number == 0:
            yield Role("data", "data", (dim,), tuple(same))
        else:
            name = "context" if same else f"{dim}_parts"
            yield Role(name, "context", (dim,), tuple(same))


def _of_weights(facts: Facts) -> Iterator[Role]:
    chosen = []
    for dims in _independent(facts):
        covered = facts.coverage(dims)
        if covered >= _COVERS:
            chosen.append((covered, dims))
    chosen.sort(key=lambda row: (-row[0], row[1]))
    names: set[str] = set()
    separate: set[str] = set()
    for number, (covered, dims) in enumerate(chosen[:_MOST_SETS]):
        main = _main(dims, facts)
        base = "model" if number == 0 else _singular(main)
        name = next(n for n in numbered(base) if n not in names)
        names.add(name)
        yield Role(name, "weights", dims)
        # Where the dims are absent, a dim of the batch takes the axis.
        beside = facts.data[1:2] or facts.data[:1]
        if covered < 1 - _COVERS / 2:
            beside = facts.data[:1]
        for dim in beside:
            yield Role(name, "weights", dims, (dim,))
        # This is for experts, whose tokens come from all devices.
        if facts.data and main in facts.separate - separate:
            separate.add(main)
            yield Role(name, "weights", (main,), facts.data[:1])


def _main(dims: tuple[str, ...], facts: Facts) -> str:
    """Returns the dim after which an axis is named: one of separate products, or the largest."""
    return max(dims, key=lambda dim: (dim in facts.separate, facts.coverage([dim])))


def _of_stacks(facts: Facts) -> Iterator[Role]:
    inside = {
        dim
        for row in facts.parameters
        if facts.stacks and not row.dims.keys().isdisjoint(facts.stacks)
        for dim in row.dims
    }
    for stack in facts.stacks:
        outside = tuple(dim for dim in facts.weights if dim not in inside)
        yield Role("pipe", "stack", (stack, *outside[:1]))


def _independent(facts: Facts) -> list[tuple[str, ...]]:
    """Returns the largest sets of dims of parameters of which no tensor has two."""
    dims: list[str] = []
    for dim in facts.weights:
        # One is enough of several dims that occur only together, in the same work.
        same = [d for d in dims if facts.coverage([d, dim]) == facts.coverage([d])]
        alike = [d for d in same if facts.coverage([d]) == facts.coverage([dim])]
        needless = any(d in facts.companions.get(dim, ()) for d in alike)
        if len(dims) < _MOST_DIMS and (dim in facts.separate or not needless):
            dims.append(dim)

    def fits(chosen: tuple[str, ...]) -> bool:
        pairs = itertools.combinations(chosen, 2)
        return not any(frozenset(pair) in facts.together for pair in pairs)

    sets = [
        chosen
        for count in range(1, len(dims) + 1)
        for chosen in itertools.combinations(dims, count)
        if fits(chosen)
    ]
    return [chosen for chosen in sets if not any(set(chosen) < set(other) for other in sets)]


def _singular(dim: str) -> str:
    return dim[:-1] if dim.endswith("s") else f"{dim}_parts"


def numbered(name: str) -> Iterator[str]:
    """Yields a name, and then the name with numbers: model, model2, model3."""
    yield name
    for number in itertools.count(2):
        yield f"{name}{number}"
