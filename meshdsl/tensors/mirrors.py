"""Paths of results and states that mirror an argument: one tree, one layout.

A layout knows a tensor by its path. The path of a result follows from the returned tree, so the
parameters in `return loss, params` would be `1/w`, and the rule `params/embed:data` would not
apply. Therefore three rules, in this order, make the paths of inputs and outputs. A tree is a
container: a dict, a tuple, a Module; a bare tensor is none.

1. A result that has the path, structure, dims and dtypes of an argument keeps that path. A tree of
   tensors that have names, as gradients have, keeps these: `return loss, gradients` gives
   `gradients/params/w`.
2. A tree of results that has the structure, dims and dtypes of exactly one remaining argument (or
   tree inside of one), and is the only such tree, takes its path, behind the names above it:
   `return loss, params` gives `params/w`, `return {"new": params}` gives `new/params/w`.
3. A tree of arguments or results that has the structure and dims of the tree of parameters (one
   whose name is `params`, wherever it is) gets `params` into its paths: `optimizer/m/w` becomes
   `optimizer/m/params/w`. It may have None where it keeps nothing of a parameter.

Paths depend on names, structure, dims and dtypes alone: not on the layout, not on what the function
computes. Two inputs or two outputs never share a path because of these rules.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import numpy as np

from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tracing.graph import Aval

PARAMS = "params"
End: TypeAlias = tuple[str, Aval | None]  # the path of a leaf; None where a tree has None


# Only the dims and dtype of a leaf count. Layouts do not depend on the order of dims.
_Aval: TypeAlias = tuple[frozenset[Dimension], np.dtype]
Leaf: TypeAlias = tuple[str, _Aval | None]  # the path below its tree's


@dataclass(frozen=True)
class Tree:
    """A part of the arguments or results: all leaves whose paths begin alike.

    Attributes:
        path: what their paths begin with; empty for all results.
        leaves: what follows in each, with dims and dtype.
    """

    path: str
    leaves: tuple[Leaf, ...]

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The structure."""
        return tuple(path for path, _ in self.leaves)

    @cached_property
    def dims(self) -> tuple[frozenset[Dimension] | None, ...]:
        """The dims of each leaf."""
        return tuple(aval and aval[0] for _, aval in self.leaves)

    @property
    def parts(self) -> list[str]:
        """The components of the path."""
        return self.path.split("/") if self.path else []

    @cached_property
    def places(self) -> tuple[str, ...]:
        """The path of each leaf."""
        return tuple([below(self.path, key) for key in self.keys])

    def paths(self, before: str) -> Iterator[tuple[str, str]]:
        """Yields the path of each leaf, with its path below `before`."""
        yield from zip(self.places, [below(before, key) for key in self.keys], strict=True)


def below(path: str, key: str) -> str:
    """Returns the path of the leaf `key` of the tree at `path`."""
    return f"{path}/{key}" if path and key else path or key


def trees(entries: Sequence[End]) -> list[Tree]:
    """Returns all trees that contain leaves; a tree comes before the trees inside of it."""
    leaves_of: dict[str, list[Leaf]] = defaultdict(list)
    for path, type_ in entries:
        if not path:
            continue
        aval = type_ and (_without_order(type_[0]), type_[1])
        leaves_of[""].append((path, aval))
        end = path.find("/")
        while end >= 0:
            leaves_of[path[:end]].append((path[end + 1 :], aval))
            end = path.find("/", end + 1)
    made = [Tree(path, tuple(leaves)) for path, leaves in leaves_of.items()]
    full = [tree for tree in made if any(aval for _, aval in tree.leaves)]
    return sorted(full, key=lambda tree: len(tree.parts))


@lru_cache(maxsize=1 << 12)
def _without_order(dims: Shape) -> frozenset[Dimension]:
    # The leaves of most trees share few shapes; one object for each makes trees quick to compare.
    return frozenset(dims)


def paths(
    inputs: Sequence[End], outputs: Sequence[End], names: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the paths of the inputs and of the outputs, Nones left out.

    Args:
        inputs: leaves of the arguments, each below the name of its parameter.
        outputs: leaves of the results, by their place in the returned tree.
        names: the names of results, by `md.name` or differentiation, by their place in the
            returned tree.
    """
    arguments = [tree for tree in trees(inputs) if tree.path]
    results = trees(outputs)
    roots = [tree for tree in (*arguments, *results) if tree.parts[-1:] == [PARAMS]]
    parameters: dict[tuple[str, ...], list[Tree]] = defaultdict(list)
    for tree in roots:
        parameters[tree.keys].append(tree)

    new_in = dict(_mirroring(arguments, parameters, {}))
    new_out = dict(_returned(arguments, results, new_in, names))
    new_out |= _mirroring(results, parameters, new_out)
    return _unique(inputs, new_in), _unique(outputs, new_out)


def alike(tree: Tree, other: Tree) -> bool:
    """Whether a tree has the structure and dims of another, or None for some of its leaves."""
    return tree.keys == other.keys and all(
        mine is None or mine == theirs for mine, theirs in zip(tree.dims, other.dims, strict=True)
    )


def _returned(
    arguments: Sequence[Tree],
    results: Sequence[Tree],
    new_in: Mapping[str, str],
    names: Mapping[str, str],
) -> Iterator[tuple[str, str]]:
    """Yields the paths of results that are those of arguments: rules 1 and 2."""

    def renamed(result: Tree, argument: Tree, before: str) -> Iterator[tuple[str, str]]:
        for path, own in result.paths(argument.path):
            yield path, below(before, new_in.get(own, own))

    named = {tree.path: tree for tree in arguments}
    claimed: set[str] = set()
    for tree in results:
        if _same(tree, named.get(tree.path)) and not _inside(tree, claimed):
            claimed.add(tree.path)
            yield from renamed(tree, named[tree.path], "")
    matched = set(claimed)
    for tree in results:
        if not _inside(tree, matched) and (name := _name(tree, names)):
            matched.add(tree.path)
            yield from tree.paths(name)
    rest = [tree for tree in results if not _inside(tree, matched)]
    candidates: dict[Any, list[Tree]] = defaultdict(list)
    for tree in arguments:
        if not _inside(tree, claimed):
            candidates[tree.leaves].append(tree)
    counts = Counter(tree.leaves for tree in rest)
    done: set[str] = set()
    for tree in rest:
        matching = candidates.get(tree.leaves, ())
        if len(matching) == 1 and counts[tree.leaves] == 1 and not _inside(tree, done):
            done.add(tree.path)
            before = "/".join(part for part in tree.parts if not part.isdigit())
            yield from renamed(tree, matching[0], before)


def _mirroring(
    candidates: Sequence[Tree],
    parameters: Mapping[tuple[str, ...], Sequence[Tree]],
    without: Mapping[str, str],
) -> Iterator[tuple[str, str]]:
    """Yields the paths of leaves in trees that mirror the parameters: rule 3."""
    done: set[str] = set()
    for tree in candidates:
        if PARAMS in tree.parts or _inside(tree, done) or below(tree.path, tree.keys[0]) in without:
            continue
        if any(alike(tree, root) for root in parameters.get(tree.keys, ())):
            done.add(tree.path)
            yield from tree.paths(below(tree.path, PARAMS))


def _name(tree: Tree, names: Mapping[str, str]) -> str:
    """Returns the name of a tree if all its leaves have names below that name, else ""."""
    own = [(key, names.get(below(tree.path, key), "")) for key, aval in tree.leaves if aval]
    names_of_tree = {
        name.removesuffix(f"/{key}") if name.endswith(f"/{key}") else "" for key, name in own
    }
    return names_of_tree.pop() if len(names_of_tree) == 1 else ""


def _same(tree: Tree, other: Tree | None) -> bool:
    return other is not None and tree.leaves == other.leaves


def _inside(tree: Tree, roots: set[str]) -> bool:
    """Whether a tree is at one of some paths, or inside of a tree there."""
    parts = tree.parts
    return bool(roots) and any("/".join(parts[:n]) in roots for n in range(len(parts) + 1))


def _unique(entries: Sequence[End], renamed: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the paths of leaves; a path is not renamed if two leaves would have it."""
    own = [path for path, aval in entries if aval is not None]
    count = Counter(renamed.get(path, path) for path in own)
    return tuple(path if count[new := renamed.get(path, path)] > 1 else new for path in own)
