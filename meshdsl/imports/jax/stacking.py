"""Which leaves of a function's arguments are stacks, where its equal layers are one loop.

The stack of a parameter takes the place of the first layer's; those of the others are None, which
trees of JAX leave out. So arguments keep their structure: `params["layers"][0]["w"]` is
[layers, ...], `params["layers"][1]["w"]` None.
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
from meshdsl.tensors.named_array import NamedArray, Spec, named
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
    dtype: np.dtype
    dims: tuple[str, ...] | None


@dataclass(frozen=True)
class Stacking:
    """How leaves become stacks, and stacks leaves.

    Attributes:
        tree: of the arguments without stacks.
        paths: of their leaves, and whether each is in a box.
        groups: the leaves of each stack, by their numbers.
        dims: the name of the first dim of each stack.
    """

    tree: Any
    paths: tuple[tuple[str, bool], ...]
    groups: tuple[tuple[int, ...], ...]
    dims: tuple[str, ...]

    def within(self, first: int, end: int) -> Stacking:
        """Returns that of some of the leaves, whose stacks are theirs alone."""
        inside = [n for n, group in enumerate(self.groups) if first <= group[0] < end]
        groups = tuple(tuple(k - first for k in self.groups[n]) for n in inside)
        dims = tuple(self.dims[n] for n in inside)
        return Stacking(None, self.paths[first:end], groups, dims)

    def stacked(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns leaves with stacks; None in place of what is in the stack of another leaf."""
        result = list(leaves)
        for group, name in zip(self.groups, self.dims, strict=True):
            for number in group[1:]:
                result[number] = None
            result[group[0]] = _stack([leaves[n] for n in group], Dimension(name, len(group)))
        return result

    def arguments(
        self, leaves: Sequence[Any], words: Sequence[Words]
    ) -> tuple[list[Leaf], list[Words], list[str]]:
        """Returns the arrays with stacks, what is said of their dims, and their paths to be shown.

        Args:
            words: of each array among the leaves.

        Raises:
            ValueError: layers of a stack have other names.
        """
        given = iter(words)
        said = [next(given) if isinstance(leaf, Leaf) else () for leaf in leaves]
        pairs = zip(self.groups, self.dims, strict=True)
        stacks = {group[0]: (group, dim) for group, dim in pairs}
        gone = {number for group in self.groups for number in group[1:]}
        arrays: list[Leaf] = []
        kept: list[Words] = []
        shown: list[str] = []
        for number, leaf in enumerate(leaves):
            if number in gone or not isinstance(leaf, Leaf):
                continue
            if number in stacks:
                group, dim = stacks[number]
                paths = [leaves[n].path for n in group]
                own = _merged(paths, [said[n] for n in group])
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
        first = {number: group for group in self.groups for number in group}
        given = iter(leaves)
        result: list[Any] = []
        stacks: dict[int, Any] = {}
        for number in range(len(self.paths)):
            group = first.get(number)
            if group is None:
                result.append(next(given))
                continue
            if number == group[0]:
                stacks[number] = next(given)
            result.append(part(stacks[group[0]], group.index(number)))
        return result


def stacking_of(
    loops: Sequence[Sequence[Sequence[int]]], leaves: Sequence[Any], tree: Any, dim: str
) -> Stacking:
    """Returns the stacking of a function with loops.

    Args:
        loops: for each, the arrays of each stack, by their numbers among the arrays.
        leaves: of the arguments; arrays are `Leaf`s.
        dim: the name of the first loop's dim; the others have a number.
    """
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Leaf)]
    groups, dims = [], []
    for number, own in enumerate(loops, 1):
        groups += [tuple(places[n] for n in group) for group in own]
        dims += [dim if number == 1 else f"{dim}_{number}"] * len(own)
    known = [(leaf.path, leaf.boxed) if isinstance(leaf, Leaf) else ("", False) for leaf in leaves]
    return Stacking(tree, tuple(known), tuple(groups), tuple(dims))


def without_stack(leaf: Any, number: int) -> Any:
    """Returns what one layer of a stack is known by."""
    dims = None if leaf.dims is None else leaf.dims[1:]
    return replace(leaf, sizes=leaf.sizes[1:], dims=dims)


def _stack(values: Sequence[Any], dim: Dimension) -> Any:
    first = values[0]
    if isinstance(first, NamedArray):
        data = [np.asarray(v) if isinstance(v.data, np.ndarray) else v.data for v in values]
        return named(_module(data).stack(data), [dim, *first.dims])
    if isinstance(first, Tensor):
        return ops.stack(values, dim)
    if isinstance(first, Spec):
        return Spec(Shape([dim, *first.dims]), first.dtype)
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((dim.size, *first.shape), first.dtype)
    return _module(values).stack(values)


def _module(values: Sequence[Any]) -> Any:
    return jnp if any(isinstance(value, jax.Array) for value in values) else np


def layer_of(stack: Any, number: int) -> Any:
    """Returns an element of a stack."""
    if isinstance(stack, Tensor):
        return ops.index(stack, stack.shape[0].name, number)
    if isinstance(stack, Spec):
        return Spec(Shape(list(stack.dims)[1:]), stack.dtype)
    return stack[number]


def _merged(paths: Sequence[str], words: Sequence[Words]) -> Words:
    """Returns what is said of the dims of layers that are to be one stack.

    Raises:
        ValueError: they have other names.
    """
    merged: list[Word | None] = []
    for place, said in enumerate(zip(*words, strict=True)):
        names = {word.name: path for word, path in zip(said, paths, strict=True) if word}
        if len(names) > 1:
            (one, here), (other, there) = list(names.items())[:2]
            raise ValueError(
                f"from_jax: dim {place} is `{one}` in {here} and `{other}` in {there}, but these "
                "are equal layers, which `roll` makes one stack: give them one name, such as by a "
                "pattern with *"
            )
        merged.append(next((word for word in said if word), None))
    return tuple(merged)


def _joined(paths: Sequence[str]) -> str:
    """Returns the paths of layers as one: `params/layers/*/w`."""
    parts = [path.split("/") for path in paths]
    if len({len(each) for each in parts}) > 1:
        return paths[0]
    columns = zip(*parts, strict=True)
    return "/".join(c[0] if len(set(c)) == 1 else "*" for c in columns)
