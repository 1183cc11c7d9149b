"""Which leaves of a function's arguments are stacks, where its equal layers are one loop.

The stack of a parameter takes the place of the one that comes first among the leaves; the others
are None, which trees of JAX leave out. So arguments keep their structure:
`params["layers"][0]["w"]` is [layers, ...], `params["layers"][1]["w"]` None. A stack has leaves of
one argument alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshdsl import ops
from meshdsl.imports.jax.annotations import Word, Words
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.named_array import Spec, named
from meshdsl.tensors.tensor import Tensor


@dataclass(frozen=True)
class Leaf:
    """An array among the arguments; `dims` has its names, if it has any.

    Attributes:
        boxed: whether it is the `value` of a box, which the path is of.
    """

    path: str
    boxed: bool
    sizes: tuple[int, ...]
    dtype: Any
    dims: tuple[str, ...] | None


@dataclass(frozen=True)
class Stacking:
    """How leaves become stacks, and stacks leaves.

    Attributes:
        paths: of the leaves without stacks, and whether each is in a box.
        groups: the leaves of each stack, by their numbers, in the order of the layers.
        dims: the name of the first dim of each stack.
    """

    paths: tuple[tuple[str, bool], ...]
    groups: tuple[tuple[int, ...], ...]
    dims: tuple[str, ...]

    def within(self, first: int, end: int) -> Stacking:
        """Returns that of some of the leaves, whose stacks are theirs alone."""
        inside = [n for n, group in enumerate(self.groups) if first <= min(group) < end]
        groups = tuple(tuple(k - first for k in self.groups[n]) for n in inside)
        dims = tuple(self.dims[n] for n in inside)
        return Stacking(self.paths[first:end], groups, dims)

    def stacked(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns leaves with stacks; None in place of what is in the stack of another leaf."""
        result = list(leaves)
        for group, name in zip(self.groups, self.dims, strict=True):
            for number in group:
                result[number] = None
            result[min(group)] = _stack([leaves[n] for n in group], Dimension(name, len(group)))
        return result

    def arguments(
        self, leaves: Sequence[Any], words: Sequence[Words]
    ) -> tuple[list[Leaf], list[Words], list[str]]:
        """Returns the arrays with stacks, what is said of their dims, and their paths to be shown.

        Args:
            words: of each array among the leaves.
        """
        given = iter(words)
        said = [next(given) if isinstance(leaf, Leaf) else () for leaf in leaves]
        pairs = zip(self.groups, self.dims, strict=True)
        stacks = {min(group): (group, dim) for group, dim in pairs}
        gone = {number for group in self.groups for number in group} - stacks.keys()
        arrays: list[Leaf] = []
        kept: list[Words] = []
        shown: list[str] = []
        for number, leaf in enumerate(leaves):
            if number in gone or not isinstance(leaf, Leaf):
                continue
            if number in stacks:
                group, dim = stacks[number]
                paths = [leaves[n].path for n in group]
                own = merged([known_of(leaves[n], said[n]) for n in group])
                assert own is not None  # else they would be no stack
                dims = None if leaf.dims is None else (dim, *leaf.dims)
                arrays.append(replace(leaf, sizes=(len(group), *leaf.sizes), dims=dims))
                kept.append((Word(dim), *own))
                shown.append(_joined(paths))
            else:
                arrays.append(leaf)
                kept.append(said[number])
                shown.append(leaf.path)
        return arrays, kept, shown

    def spread(self, leaves: Sequence[Any], part: Callable[[Any, int], Any]) -> list[Any]:
        """Returns the leaves without stacks, of those with them and without a None.

        Args:
            part: from a stack and a number to the element of it.
        """
        homes = {number: group for group in self.groups for number in group}
        numbers = [n for n in range(len(self.paths)) if n not in homes or n == min(homes[n])]
        given = dict(zip(numbers, leaves, strict=True))
        result = []
        for number in range(len(self.paths)):
            group = homes.get(number)
            if group is None:
                result.append(given[number])
            else:
                result.append(part(given[min(group)], group.index(number)))
        return result


@dataclass(frozen=True)
class Part:
    """The stacks of one argument.

    Attributes:
        tree: of it without stacks.
    """

    tree: Any
    stacking: Stacking


def stacking_of(
    loops: Sequence[Sequence[Sequence[int]]], leaves: Sequence[Any], dim: str
) -> Stacking:
    """Returns the stacking of a function with loops.

    Args:
        loops: for each, the arrays of each stack, by their numbers among the arrays.
        leaves: of the arguments; arrays are `Leaf`s.
        dim: the name of the first loop's dim; the others have a number.
    """
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Leaf)]
    groups, dims = [], []
    for number, own in enumerate(filter(None, loops), 1):
        groups += [tuple(places[n] for n in group) for group in own]
        dims += [dim if number == 1 else f"{dim}_{number}"] * len(own)
    known = [(leaf.path, leaf.boxed) if isinstance(leaf, Leaf) else ("", False) for leaf in leaves]
    return Stacking(tuple(known), tuple(groups), tuple(dims))


def without_stack(leaf: Any, number: int) -> Any:
    """Returns what one layer of a stack is known by."""
    dims = None if leaf.dims is None else leaf.dims[1:]
    return replace(leaf, sizes=leaf.sizes[1:], dims=dims)


def _stack(values: Sequence[Any], dim: Dimension) -> Any:
    named_ones = [value for value in values if isinstance(value, Tensor)]
    if named_ones:
        dims = named_ones[0].shape
        tensors = [v if isinstance(v, Tensor) else named(v, list(dims)) for v in values]
        return ops.stack(tensors, dim)
    first = values[0]
    if isinstance(first, Spec):
        return Spec(Shape([dim, *first.dims]), first.dtype)
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((dim.size, *first.shape), first.dtype)
    return (jnp if any(isinstance(v, jax.Array) for v in values) else np).stack(values)


def layer_of(stack: Any, number: int) -> Any:
    """Returns an element of a stack."""
    if isinstance(stack, Tensor):
        return ops.index(stack, stack.shape[0].name, number)
    if isinstance(stack, Spec):
        return Spec(Shape(list(stack.dims)[1:]), stack.dtype)
    return stack[number]


def known_of(leaf: Leaf, words: Words) -> Words:
    """Returns what is known of the dims of an array: by its names, else by what is said.

    Names do not tell of the dims that one is split into; what is said does.
    """
    if leaf.dims is None:
        return words
    parts = [word.parts if word is not None else () for word in words]
    return tuple(Word(name, own) for name, own in zip(leaf.dims, parts, strict=True))


def merged(words: Sequence[Words]) -> Words | None:
    """Returns what is known of the dims of layers; None: they have other names."""
    result: list[Word | None] = []
    for said in zip(*words, strict=True):
        if len({word.name for word in said if word}) > 1:
            return None
        result.append(next((word for word in said if word), None))
    return tuple(result)


def are_alike(leaves: Sequence[Leaf], words: Sequence[Words]) -> bool:
    """Whether arrays may be one stack: of one argument, in one place of layers, and with one name.

    Places are alike if one part of the path differs, as in `params/layers/0/w`.
    """
    parts = [leaf.path.split("/") for leaf in leaves]
    if len({(len(each), each[0]) for each in parts}) > 1:
        return False
    differing = sum(len(set(column)) > 1 for column in zip(*parts, strict=True))
    known = [known_of(leaf, said) for leaf, said in zip(leaves, words, strict=True)]
    return differing <= 1 and merged(known) is not None


def _joined(paths: Sequence[str]) -> str:
    """Returns the paths of layers as one: `params/layers/*/w`."""
    parts = [path.split("/") for path in paths]
    columns = zip(*parts, strict=True)
    return "/".join(c[0] if len(set(c)) == 1 else "*" for c in columns)
