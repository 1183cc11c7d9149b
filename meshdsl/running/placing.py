"""Placing arrays on a mesh, before any function is called with them."""

from __future__ import annotations

from typing import Any

import jax

from meshdsl.layouts.layout import Layout, LayoutLike
from meshdsl.layouts.mesh import Mesh, MeshLike
from meshdsl.running.runnable import devices_of
from meshdsl.tensors.module import path_of
from meshdsl.tensors.named_array import NamedArray
from meshdsl.tensors.tensor import Tensor


def place(tree: Any, mesh: MeshLike, layout: LayoutLike = "") -> Any:
    """Places a tree of arrays on a mesh: `x = md.place(x, "data:2,model:4", "batch:data")`.

    Operations on them outside of traced functions then run where they are.

    Args:
        tree: NamedArrays, on a mesh or not; a leaf's path in the tree is what scopes apply to.
        layout: rules for dims that no array has are left out.

    Raises:
        ValueError: malformed mesh or layout, an unknown axis, two dims of one array on one axis, or
            fewer devices than the mesh has.

    Examples:
        >>> x = md.place(md.ones(md.dims(batch=8, embed=4)), "data:2,model:2", "batch:data")
        >>> print(x.layout, (x * 2.0).layout)
        batch:data batch:data
    """
    from meshdsl.lowering.backends import load_on_jax

    backend = load_on_jax()
    devices = devices_of(mesh)
    mesh = Mesh.of(mesh)
    devices = devices or backend.device_mesh(mesh)
    rules = Layout.of(layout)
    keyed, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_tensor)
    dims = {dim.name for _, array in keyed for dim in array.dims}
    rules = Layout(tuple(rule for rule in rules.rules if rule.dim in dims))
    placed = []
    unsplit = [axis for axis, size in mesh.axes if size == 1]
    for keys, array in keyed:
        where = rules.assign(array.dims, path_of(keys), mesh).drop(unsplit)
        stored = backend.Storage.of(array.dims, where, mesh, devices)
        placed.append(NamedArray(stored.put(array), array.dims, stored.cuts))
    return jax.tree.unflatten(structure, placed)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
