"""Samples: the operations and collectives that a calibration measures, as blocks of instructions.

The emitters of the backend write them, as they write a program. Each family of `layouts.fits` has
samples of several sizes:

* Products [batch, rows, inner] x [batch, inner, columns], with the names `rows` and, where the
  first dims of both operands are contracted, as for the gradient of a weight, `leading`.
* Elementwise work `x * y + z` by the bytes that it moves; functions by elements, one at a time;
  `functions/step` is one addition or multiplication among many.
* Reductions of the last dim (`minor`) and of the first (`leading`), by the bytes that they read.
* Look-ups and scatters of rows of a table. `gathers/later` and `scatters/later` are along the last
  dim of the table: what is moved for an index is strided, or transposed.
* Attention and its gradient.
* Collectives by the devices of a group and the payload. All groups send at once. Gathers and
  scatters along the first dim (`first`) and along another one (`later`), whose blocks are strided.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshdsl.layouts.costs import Sizes
from meshdsl.layouts.fits import BINARY, STEPS, of_attention
from meshdsl.layouts.hardware import COLLECTIVES
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.backends.jax.calibrating.ranges import (
    BFLOAT16,
    FLOAT32,
    OF_CPUS,
    Ranges,
)
from meshdsl.lowering.program import Block, Instruction, Value
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.dtypes import as_dtype

_BATCH = 8
_SHARED = (256, 256, 64)
FUNCTIONS = (
    "exp expm1 log log1p sqrt rsqrt sin cos tanh sigmoid erf divide power remainder cast".split()
)
_WIDTH = 256  # elements of a row of what a collective moves
ATTENTION = ("attention", "attention_gradient")
GROUP = "group"  # the axis of collectives
_PLACES = {"all_gather": ("first", "later"), "reduce_scatter": ("first", "later")}
SENDING = tuple(
    "/".join(filter(None, (kind, place)))
    for kind in COLLECTIVES
    for place in _PLACES.get(kind, ("",))
)


@dataclass(frozen=True)
class Sample:
    """One operation: its family and sizes, the block to run, and the mesh that it runs on."""

    family: str
    sizes: Sizes
    block: Block
    mesh: Mesh


def families(devices: int, ranges: Ranges = OF_CPUS) -> list[str]:
    """Returns the names of all families, those that matter most first."""
    products = itertools.product(ranges.products, ("rows", "leading"))
    names = [f"products/{dtype}/{form}" for dtype, form in products]
    names += ["elementwise", "functions/step", *(f"functions/{name}" for name in FUNCTIONS)]
    names += ["reductions/minor", "reductions/leading"]
    names += ["gathers", "scatters"]
    names += [of_attention(op, dtype) for dtype in ranges.attention for op in ATTENTION]
    names += ["gathers/later", "scatters/later"]
    return names + ([*SENDING, "sharing"] if devices > 1 else [])


def samples(family: str, devices: int, ranges: Ranges = OF_CPUS) -> Iterator[Sample]:
    """Yields the samples of a family."""
    kind, _, rest = family.partition("/")
    if kind in COLLECTIVES:
        yield from _collectives(family, devices, ranges)
        return
    if kind == "sharing":
        for count in divisors(devices):
            block = _block(product(FLOAT32, "rows", 1, *_SHARED))
            yield Sample(family, (count,), block, Mesh.parse(f"all:{count}"))
        return
    alone = Mesh.parse(f"all:{devices}")
    if kind == "products":
        made = _products(ranges, *rest.split("/"))
    elif kind == "functions":
        made = iter([((ranges.elements,), _function(rest, ranges.elements))])
    elif kind == "reductions":
        made = _reductions(ranges, rest)
    elif kind in ATTENTION:
        made = _attention(ranges, rest or FLOAT32, kind != ATTENTION[0])
    else:
        made = {
            "elementwise": lambda: _elementwise(ranges),
            "gathers": lambda: _gathers(ranges, rest == "later"),
            "scatters": lambda: _scatters(ranges, rest == "later"),
        }[kind]()
    for sizes, block in made:
        yield Sample(family, sizes, block, alone)


def product(dtype: str, form: str, batch: int, rows: int, inner: int, columns: int) -> Instruction:
    """Returns a product. As batch and length, two dims are its rows, or what it contracts."""
    several = {"batch": batch} if batch > 1 else {}
    long = rows if form == "rows" else inner
    outer = max(1, long // 64)
    parts = {"outer": outer, "row": long // outer}
    if form == "rows":
        first = _value(dtype, **several, **parts, inner=inner)
        second = _value(dtype, **several, inner=inner, column=columns)
        result = _value(dtype, **several, **parts, column=columns)
    else:
        first = _value(dtype, **several, **parts, left=rows)
        second = _value(dtype, **several, **parts, column=columns)
        result = _value(dtype, **several, left=rows, column=columns)
    return Instruction("einsum", (first, second), (result,))


def _products(ranges: Ranges, dtype: str, form: str) -> Iterator[tuple[Sizes, Block]]:
    for sizes in itertools.product(ranges.products[dtype], repeat=3):
        if 2 * math.prod(sizes) <= ranges.most_flops:
            yield (1, *sizes), _block(product(dtype, form, 1, *sizes))
    for size in ranges.batched.get(dtype, ()):
        yield (_BATCH, *[size] * 3), _block(product(dtype, form, _BATCH, *[size] * 3))


def _elementwise(ranges: Ranges) -> Iterator[tuple[Sizes, Block]]:
    for moved in ranges.moved:
        # Three operands and a result, of 4 bytes an element.
        x, y, z, product, result = (_rows(moved // 16) for _ in range(5))
        steps = (
            Instruction("multiply", (x, y), (product,)),
            Instruction("add", (product, z), (result,)),
        )
        yield (moved,), Block((x, y, z), steps, (result,))


def _function(name: str, elements: int) -> Block:
    x, y = _rows(elements), _rows(elements)
    if name == "step":
        steps, last = [], x
        for number in range(STEPS):
            result = _rows(elements)
            steps.append(Instruction(("multiply", "add")[number % 2], (last, y), (result,)))
            last = result
        return Block((x, y), tuple(steps), (last,))
    if name == "cast":
        narrow, result = _rows(elements, BFLOAT16), _rows(elements)
        return Block(
            (x,),
            (
                Instruction("cast", (x,), (narrow,), {"dtype": narrow.dtype}),
                Instruction("cast", (narrow,), (result,), {"dtype": result.dtype}),
            ),
            (result,),
        )
    return _block(Instruction(name, (x, y) if name in BINARY else (x,), (_rows(elements),)))


def _reductions(ranges: Ranges, form: str) -> Iterator[tuple[Sizes, Block]]:
    for moved in ranges.read:
        x = _rows(moved // 4)
        over, kept = ("column", "row") if form == "minor" else ("row", "column")
        result = _value(FLOAT32, **{kept: x.local.get(kept).size})
        yield (moved,), _block(Instruction("sum", (x,), (result,), {"over": (over,)}))


def _gathers(ranges: Ranges, later: bool) -> Iterator[tuple[Sizes, Block]]:
    for count, row_bytes in itertools.product(ranges.row_counts, ranges.row_bytes):
        table = _table(later, entry=max(ranges.table_rows), column=row_bytes // 4)
        indices = _value("int32", position=count)
        result = _table(later, position=count, column=row_bytes // 4)
        params = {"dim": "entry", "pairs": ()}
        yield (count, row_bytes), _block(Instruction("take", (table, indices), (result,), params))


def _scatters(ranges: Ranges, later: bool) -> Iterator[tuple[Sizes, Block]]:
    sizes = itertools.product(ranges.row_counts, ranges.row_bytes, ranges.table_rows)
    for count, row_bytes, entries in sizes:
        updates = _table(later, position=count, column=row_bytes // 4)
        indices = _value("int32", position=count)
        result = _table(later, entry=entries, column=row_bytes // 4)
        params = {"dim": "entry", "pairs": ()}
        one = Instruction("scatter_add", (updates, indices), (result,), params)
        yield (count, row_bytes, entries), _block(one)


def _table(later: bool, **sizes: int) -> Value:
    """Returns a table of rows; if what names a row comes later, it is the last dim."""
    return _value(FLOAT32, **dict(reversed(sizes.items()) if later else sizes.items()))


def _attention(ranges: Ranges, dtype: str, gradient: bool) -> Iterator[tuple[Sizes, Block]]:
    for count, length, features in ranges.attention[dtype]:
        if count * length * length > ranges.most_scores:
            continue
        heads = min(count, 4)
        lead = {"batch": count // heads, "length": length, "heads": heads}
        memory = {"batch": count // heads, "memory": length, "heads": heads}
        q, grad, result = (_value(dtype, **lead, feature=features) for _ in range(3))
        k, v = (_value(dtype, **memory, feature=features) for _ in range(2))
        sums = _value(FLOAT32, **lead)
        params = {
            "length": "length",
            "memory": "memory",
            "features": "feature",
            "scale": features**-0.5,
            "soft_cap": None,
            "causal": True,
            "window": None,
            "offset": 0,
            "given": (),
        }
        sizes = (count, length, length, features)
        if not gradient:
            yield sizes, _block(Instruction("attention", (q, k, v), (result, sums), params))
            continue
        operands = (q, k, v, result, sums, grad)
        results = tuple(_value(dtype, **{d.name: d.size for d in x.shape}) for x in (q, k, v))
        params |= {"bias_gradient": False}
        yield sizes, _block(Instruction("attention_gradient", operands, results, params))


def _collectives(family: str, devices: int, ranges: Ranges) -> Iterator[Sample]:
    for group, payload in itertools.product(divisors(devices)[1:], ranges.payloads):
        mesh = Mesh.parse(f"others:{devices // group},{GROUP}:{group}")
        yield Sample(family, (group, payload), _block(collective(family, mesh, payload)), mesh)


def collective(family: str, mesh: Mesh, payload: int) -> Instruction:
    """Returns a collective over the axis `GROUP`, which moves about a payload of float32."""
    kind, _, place = family.partition("/")
    dim = "column" if place == "later" else "row"
    devices = mesh.sizes[GROUP]
    rows = max(devices, payload // 4 // _WIDTH)
    shape = Shape([Dimension("row", rows), Dimension("column", _WIDTH)])
    partial = TensorLayout((), ((GROUP, "sum"),))
    replicated = TensorLayout()
    split, across = (TensorLayout.of({dim: (GROUP,)}) for dim in ("row", "column"))
    params: dict[str, Any] = {"axes": (GROUP,)}
    if kind == "permute":
        order = np.arange(mesh.size).reshape(-1, devices)
        targets = np.roll(order, 1, axis=1)
        pairs = tuple(
            sorted((int(s), int(t)) for s, t in zip(order.flat, targets.flat, strict=True))
        )
        before = after = replicated
        params |= {"pairs": pairs, "mesh_axes": mesh.names}
    elif kind == "all_reduce":
        before, after = partial, replicated
        params["kind"] = "sum"
    elif kind == "reduce_scatter":
        before, after = partial, TensorLayout.of({dim: (GROUP,)})
        params["dim"] = dim
    elif kind == "all_gather":
        before, after = TensorLayout.of({dim: (GROUP,)}), replicated
        params["dim"] = dim
    else:
        # Each device has the payload, so the global tensor is larger.
        shape = Shape([Dimension("row", rows * devices), Dimension("column", _WIDTH)])
        before, after = split, across
        params |= {"concat": "row", "split": "column"}
    dtype = as_dtype(FLOAT32)
    x, result = (Value(shape, dtype, here, here.local(shape, mesh)) for here in (before, after))
    return Instruction(kind, (x,), (result,), params)


def beside(kind: str, mesh: Mesh, payload: int, work: Instruction) -> Block:
    """Returns a collective and a product that do not depend on each other."""
    one = collective(kind, mesh, payload)
    inputs, outputs = (*work.inputs, *one.inputs), (*work.outputs, *one.outputs)
    return Block(inputs, (one, work), outputs)


def divisors(count: int) -> list[int]:
    """Returns the numbers that divide a count, 1 and itself among them."""
    return [n for n in range(1, count + 1) if count % n == 0]


def _block(instruction: Instruction) -> Block:
    return Block(instruction.inputs, (instruction,), instruction.outputs)


def _rows(elements: int, dtype: str = FLOAT32) -> Value:
    """Returns a value of some rows."""
    columns = min(elements, 256)
    return _value(dtype, row=elements // columns, column=columns)


def _value(dtype: str, **sizes: int) -> Value:
    """Returns a value that is the same on all devices."""
    shape = Shape(Dimension(name, size) for name, size in sizes.items())
    return Value(shape, np.dtype(as_dtype(dtype)), TensorLayout(), shape)
