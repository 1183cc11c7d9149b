"""Trees: a module, or any tree of arrays, as lists that fold, with the sizes of every part.

Only the outermost level is unfolded, and a large tree is cut: a node shows at most `_CHILDREN`
children, and a tree at most `_NODES` nodes, the outer levels first. What is left out is counted.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.costs.units import show_bytes
from meshdsl.reports.explain.html.elements import Child, Html, tag
from meshdsl.reports.notebook.cells import cell, quiet
from meshdsl.reports.notebook.chips import dim_chip
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.dtypes import short
from meshdsl.tensors.module import path_of
from meshdsl.tensors.named_array import NamedArray, Spec
from meshdsl.tensors.tensor import Tensor

_CHILDREN, _NODES = 40, 300
_TEXT = 60  # characters of what is no array
Placing: TypeAlias = Callable[[Any, str], tuple[TensorLayout, Mesh] | None]


@dataclass(frozen=True)
class Node:
    """One value of a tree.

    Attributes:
        key: its name in its parent: a field, a key or a number.
        path: the keys from the root to it.
        count: the elements of all arrays below.
        bytes: the bytes of all arrays below.
        local_bytes: what one device holds of them.
        arrays: how many arrays are below.
        where: of an array, its layout on its mesh, if that is known.
    """

    key: str
    path: str
    value: Any
    children: tuple[Node, ...] = ()
    count: int = 0
    bytes: int = 0
    local_bytes: int = 0
    arrays: int = 0
    where: tuple[TensorLayout, Mesh] | None = None


def placed(value: Any, path: str) -> tuple[TensorLayout, Mesh] | None:
    """Returns where an array is; None for one that is on no mesh."""
    layout = value.layout if isinstance(value, NamedArray) else None
    if layout is None:
        return None
    return layout, Mesh(tuple(value.data.sharding.mesh.shape.items()))


def tree(value: Any, placing: Placing = placed, key: str = "", path: str = "") -> Node:
    """Returns a tree with the sizes of all its parts.

    Args:
        placing: says where an array with a path is.
        path: what the paths start with.
    """
    if isinstance(value, Tensor | Spec):
        return _leaf(value, placing, key, path)
    keyed, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda v: v is not value)
    if len(keyed) == 1 and not keyed[0][0]:
        return _leaf(value, placing, key, path)
    children = []
    for keys, child in keyed:
        name = path_of(keys)
        children.append(tree(child, placing, name, f"{path}/{name}" if path else name))
    return Node(
        key,
        path,
        value,
        tuple(children),
        count=sum(child.count for child in children),
        bytes=sum(child.bytes for child in children),
        local_bytes=sum(child.local_bytes for child in children),
        arrays=sum(child.arrays for child in children),
    )


def _leaf(value: Any, placing: Placing, key: str, path: str) -> Node:
    if isinstance(value, Tensor | Spec):
        if not hasattr(getattr(value, "data", value), "dtype"):
            return Node(key, path, value)
        where = placing(value, path)
        dims, width = value.dims, value.dtype.itemsize
        local = where[0].local(dims, where[1]) if where else dims
        return Node(
            key, path, value, (), dims.volume, dims.volume * width, local.volume * width, 1, where
        )
    if hasattr(value, "dtype") and hasattr(value, "nbytes"):
        return Node(key, path, value, (), value.size, value.nbytes, value.nbytes, 1)
    return Node(key, path, value)


def leaves(root: Node) -> list[Node]:
    """Returns the nodes without children, in order."""
    if not root.children:
        return [root]
    return [leaf for child in root.children for leaf in leaves(child)]


def show(value: Any) -> str:
    """Returns a tree as a cell."""
    return cell(drawing(tree(value)))


def drawing(root: Node) -> Html:
    """Returns a tree as lists that fold."""
    shown, todo = {id(root)}, collections.deque([root])
    while todo and len(shown) < _NODES:
        for child in todo.popleft().children[:_CHILDREN]:
            shown.add(id(child))
            todo.append(child)
    return tag("div", _node(root, shown, True), class_="tree")


def _node(node: Node, shown: set[int], unfolded: bool = False) -> Html:
    if not node.children:
        return tag("div", _name(node), leaf_line(node), class_="leaf")
    kept = [child for child in node.children if id(child) in shown]
    rest = len(node.children) - len(kept)
    more = tag("div", f"… and {rest:,} more", class_="leaf quiet") if rest else None
    head = tag("summary", _name(node), _summary(node))
    return tag("details", head, [_node(child, shown) for child in kept], more, open=unfolded)


def _name(node: Node) -> Html | None:
    return tag("span", node.key, class_="key") if node.key else None


def _summary(node: Node) -> list[Child]:
    kind = type(node.value).__name__
    parts: list[Child] = [tag("b", kind), quiet(f" {_static(node.value)}")]
    if not node.arrays:
        return parts
    arrays = f"{node.arrays:,} array{'s' if node.arrays > 1 else ''}"
    text = f"{arrays}, {node.count:,} elements, {show_bytes(node.bytes)}"
    if node.local_bytes < node.bytes:
        text += f", {show_bytes(node.local_bytes)} on a device"
    return [*parts, tag("span", text, class_="sizes")]


def _static(value: Any) -> str:
    """Returns the fields of a dataclass that are no children, and their values."""
    if not dataclasses.is_dataclass(value):
        return ""
    static = [f.name for f in dataclasses.fields(value) if f.metadata.get("static")]
    return ", ".join(f"{name}={_short(getattr(value, name))}" for name in static)


def _short(value: Any) -> str:
    text = getattr(value, "__qualname__", None) or repr(value)
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"


def leaf_line(node: Node) -> list[Child]:
    """Returns what one value of a tree is: dtype, dims and bytes of an array."""
    value = node.value
    if not node.arrays:
        return [tag("code", _short(value))]
    if not isinstance(value, Tensor | Spec):
        sizes = " × ".join(map(str, value.shape)) or "a number"
        return [tag("code", str(value.dtype)), quiet(f" {sizes}, without names")]
    size = show_bytes(node.bytes)
    if node.local_bytes < node.bytes:
        size = f"{show_bytes(node.local_bytes)} of {size}"
    return [tag("code", short(value.dtype)), chips(value.dims, node.where), quiet(size)]


def chips(dims: Shape, where: tuple[TensorLayout, Mesh] | None) -> Html:
    """Returns the dims of an array, each with what a device has of it and the axes."""
    if not dims:
        return quiet("no dims")
    layout, mesh = where or (TensorLayout(), Mesh())
    sizes = layout.local(dims, mesh).sizes
    return tag(
        "span",
        [dim_chip(dim, size, layout.axes(dim.name)) for dim, size in zip(dims, sizes, strict=True)],
        class_="chips",
    )
