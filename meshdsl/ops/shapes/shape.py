"""Operations that change dims but compute nothing: rename, split, merge, broadcast, transpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshdsl.ops.creation import as_tensor, sized
from meshdsl.ops.operation import operation
from meshdsl.ops.reductions.reduction import sum_to
from meshdsl.tensors.dims import Dimension, DimLike, DimsLike, Shape, as_list, name_of
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Form, Operation, Primitive, Work
from meshdsl.tracing.trace import bind_one


def _reshaped(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    return [(params["shape"], inputs[0].dtype)]


def _rename_dims(shape: Shape, names: Mapping[str, str]) -> Shape:
    return Shape(Dimension(names.get(dim.name, dim.name), dim.size) for dim in shape)


def _rename_back(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    return [rename(cotangents[0], {new: old for old, new in op.params["names"].items()})]


def _merge_back(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    return [merge(cotangents[0], op.params["parts"], op.params["whole"])]


def _split_back(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    return [split(cotangents[0], op.params["whole"], op.params["parts"])]


RENAME = Primitive(
    "rename",
    lambda inputs, params: [(_rename_dims(inputs[0].shape, params["names"]), inputs[0].dtype)],
    _rename_back,
    work=Work.NONE,
    form=Form.RENAMED,
    positionwise=True,
    linear=(0,),
)
BROADCAST = Primitive(
    "broadcast",
    _reshaped,
    lambda op, cotangents, wanted: [sum_to(cotangents[0], op.inputs[0].shape)],
    work=Work.NONE,
    form=Form.ARRANGED,
    positionwise=True,
    linear=(0,),
)
TRANSPOSE = Primitive(
    "transpose",
    _reshaped,
    lambda op, cotangents, wanted: list(cotangents),
    work=Work.NONE,
    form=Form.ARRANGED,
    positionwise=True,
    linear=(0,),
)
SPLIT = Primitive(
    "split",
    _reshaped,
    _merge_back,
    work=Work.NONE,
    form=Form.REGROUPED,
    positionwise=True,
    linear=(0,),
)
MERGE = Primitive(
    "merge",
    _reshaped,
    _split_back,
    work=Work.NONE,
    form=Form.REGROUPED,
    positionwise=True,
    linear=(0,),
)


def _name(dim: DimLike) -> str:
    return name_of(dim)


@operation
def rename(x: Tensor, mapping: Mapping[str, DimLike] | None = None, /, **names: DimLike) -> Tensor:
    """Returns x with dims renamed: `md.rename(x, length="memory_length")`.

    Raises:
        ValueError: x lacks a dim, has the other name as well, or a Dimension has another size.

    Examples:
        >>> x = md.named([[1, 2, 3], [4, 5, 6]], ["batch", "length"])
        >>> print(md.rename(x, length="memory_length"))
        s32[batch=2, memory_length=3] [[1 2 3]
         [4 5 6]]
    """
    asked = {**(mapping or {}), **names}
    changed = {}
    for name, other in asked.items():
        renamed = x.shape.get(name)
        if isinstance(other, Dimension) and other.size != renamed.size:
            raise ValueError(f"dim `{name}` has size {renamed.size}, but {other} is to name it")
        if _name(other) != name:
            changed[name] = _name(other)
    return bind_one(RENAME, (x,), {"names": changed}) if changed else x


@operation
def broadcast(x: Any, dims: DimsLike) -> Tensor:
    """Returns x with the dims that it lacks added, in the order of `dims`.

    Raises:
        ValueError: x has a dim that is missing in `dims`, or of another size; or a name in `dims`
            is no dim of x, so that it has no size.

    Examples:
        >>> bias = md.named([1.0, 2.0], ["embed"])
        >>> print(md.broadcast(bias, [md.Dimension("batch", 2), "embed"]))
        f32[batch=2, embed=2] [[1. 2.]
         [1. 2.]]
    """
    x = as_tensor(x)
    shape = Shape(d if isinstance(d, Dimension) else x.shape.get(d) for d in as_list(dims))
    for dim in x.shape:
        if dim.name not in shape.names:
            raise ValueError(f"dim `{dim.name}` of the tensor is missing in {shape}")
        shape.get(dim)
    return x if shape == x.shape else bind_one(BROADCAST, (x,), {"shape": shape})


@operation
def transpose(x: Tensor, dims: DimsLike) -> Tensor:
    """Returns x with its dims in another order; this changes storage, never meaning.

    Raises:
        ValueError: a dim of x is missing in `dims`, or one of `dims` in x.

    Examples:
        >>> x = md.named([[1, 2, 3], [4, 5, 6]], ["batch", "length"])
        >>> print(md.transpose(x, ["length", "batch"]))
        s32[length=3, batch=2] [[1 4]
         [2 5]
         [3 6]]
    """
    shape = x.shape.select(dims)
    if len(shape) != len(x.shape):
        missing = x.shape.without(shape.names)
        raise ValueError(f"every dim must be listed; {missing} is missing")
    return x if shape == x.shape else bind_one(TRANSPOSE, (x,), {"shape": shape})


@operation
def split(x: Tensor, dim: DimLike, into: DimsLike) -> Tensor:
    """Returns x with one dim split into several, major first.

    `md.split(x, "embed", [heads, kv])`; the sizes must multiply to that of the dim.

    Raises:
        ValueError: x lacks the dim, a part has no size, or the sizes of the parts do not multiply
            to that of the dim.

    Examples:
        >>> x = md.named([1, 2, 3, 4, 5, 6], ["embed"])
        >>> print(md.split(x, "embed", md.dims(heads=2, kv=3)))
        s32[heads=2, kv=3] [[1 2 3]
         [4 5 6]]
    """
    dim_of_x = x.shape.get(dim)
    parts = sized(into)
    if parts.volume != dim_of_x.size:
        raise ValueError(f"{parts} has {parts.volume} elements, but the dim is {dim_of_x}")
    at = x.shape.position(dim_of_x.name)
    shape = Shape([*x.shape[:at], *parts, *x.shape[at + 1 :]])
    return bind_one(SPLIT, (x,), {"whole": dim_of_x.name, "parts": parts, "shape": shape})


@operation
def merge(x: Tensor, dims: DimsLike, into: DimLike) -> Tensor:
    """Returns x with several dims merged into one, the first being the major one.

    `md.merge(x, ["heads", "kv"], "embed")`; the merged dim stands where the first of them stood.

    Raises:
        ValueError: no dims, a dim that x lacks, or an `into` of another size.

    Examples:
        >>> x = md.named([[1, 2, 3], [4, 5, 6]], ["heads", "kv"])
        >>> print(md.merge(x, ["heads", "kv"], "embed"))
        s32[embed=6] [1 2 3 4 5 6]
        >>> print(md.merge(x, ["kv", "heads"], "embed"))
        s32[embed=6] [1 4 2 5 3 6]
    """
    parts = x.shape.select(dims)
    if not parts:
        raise ValueError("give at least one dim to merge")
    merged = Dimension(_name(into), parts.volume)
    if isinstance(into, Dimension) and into != merged:
        raise ValueError(f"{parts} has {parts.volume} elements, but they are to make {into}")
    shape = Shape(merged if dim == parts[0] else dim for dim in x.shape if dim not in parts[1:])
    return bind_one(MERGE, (x,), {"whole": merged.name, "parts": parts, "shape": shape})
