"""Open products: those that may split other dims than by the strategies that cost least alone.

A product is open if an axis splits different dims of its tensors. It has a strategy for each of
these dims, also for those that its tensors do not agree on (`partition.splits`): they may cost less
if other products share what they move.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshdsl.lowering.partition import Case, Strategies, Strategy, Work
from meshdsl.lowering.partition.products.einsum import every_strategy
from meshdsl.lowering.partition.strategy import bytes_moved
from meshdsl.lowering.stages import Placed
from meshdsl.tracing.graph import Graph, Operation

# A strategy is tried if by itself it costs at most this many times the usual one.
_DEARER = 2.0


@dataclass(frozen=True)
class Product:
    """A product with more than one strategy.

    Attributes:
        op: the product.
        work: what each strategy sends and computes.
        strategies: the strategies that are tried.
        splits: for each strategy, the axes with the dims that they split.
        usual: the number of the strategy that is cheapest by itself.
    """

    op: Operation
    work: Sequence[Work]
    strategies: Sequence[Strategy]
    splits: Sequence[Mapping[str, str]]
    usual: int


class Share(NamedTuple):
    """The part of a product in the cost of its group.

    Attributes:
        cost: of its usual strategy.
        gain: how much less another strategy costs if all readers of a tensor share its moves, and
            all products of one shape add up; an estimate, by which groups are left out.
    """

    cost: float
    gain: float


def open_products(block: Graph, placed: Placed) -> dict[Operation, Product]:
    """Returns the products of a block that have more than one strategy worth trying."""
    products: dict[Operation, Product] = {}
    for op in block.operations:
        if op.name == "einsum" and _is_open(op, placed):
            product = _product(op, placed)
            if len(product.work) > 1:
                products[op] = product
    return products


def _is_open(op: Operation, placed: Placed) -> bool:
    """Whether an axis splits different dims of a product's tensors."""
    if op.outputs[0] in placed.constant:
        return False
    return any(len(dims) > 1 for dims in _split_dims(op, placed).values())


def _split_dims(op: Operation, placed: Placed) -> dict[str, set[str]]:
    """Returns the dims of a product that each axis splits.

    Stored tensors do not count: they are moved to where they are used in any case.
    """
    dims: dict[str, set[str]] = defaultdict(set)
    for tensor in (*op.inputs, *op.outputs):
        if tensor not in placed.stored:
            for dim, axes in placed.layouts[tensor].splits:
                for axis in axes:
                    dims[axis].add(dim)
    return dims


def _product(op: Operation, placed: Placed) -> Product:
    """Returns a product with the strategies that may pay if other products share their moves.

    Where its tensors agree on a dim, a product keeps it even if another dim sends less. So what
    is cheaper by itself does not count.
    """
    chooser, layouts = placed.chooser, placed.layouts
    operands = tuple(layouts[t] for t in op.inputs)
    results = (layouts[op.outputs[0]],)
    every = every_strategy(Case(op, operands, results, chooser.mesh, chooser.options))
    number = _number(every, placed.strategies[op])
    cost = chooser.cost(every.work[number])
    split_dims = _split_dims(op, placed)
    kept = []
    for i, work in enumerate(every.work):
        if cost <= chooser.cost(work) <= _DEARER * cost:
            splits = _splits(every.strategy(i)).items()
            if i == number or all(dim in split_dims[axis] for axis, dim in splits):
                kept.append(i)
    strategies = [every.strategy(i) for i in kept]
    works = [every.work[i] for i in kept]
    return Product(op, works, strategies, list(map(_splits, strategies)), kept.index(number))


def _number(every: Strategies, usual: Strategy) -> int:
    """Returns the number of the strategy that a product has."""
    for i in range(len(every.work)):
        strategy = every.strategy(i)
        if strategy.operands == usual.operands and strategy.results == usual.results:
            return i
    raise AssertionError("the strategy of a product is one of its strategies")


def _splits(strategy: Strategy) -> dict[str, str]:
    """Returns the axes that a strategy uses, with the dims that they split."""
    layouts = (*strategy.operands, *strategy.results)
    return {axis: dim for layout in layouts for dim, axes in layout.splits for axis in axes}


def shares(
    block: Graph, placed: Placed, products: Mapping[Operation, Product]
) -> dict[Operation, Share]:
    """Returns what products cost, and what they would if all others shared the moves of one.

    The usual strategies cost what they do now: their moves are shared by those that read the same.
    If no product gains by this account, a search would find nothing, but for sums that are reduced
    after they have become smaller.
    """
    layouts, mesh, chooser = placed.layouts, placed.mesh, placed.chooser
    readers = Counter(t for op in products for t in set(op.inputs))
    now = Counter(
        row
        for op in block.operations
        if op in placed.strategies and any(t in readers for t in op.inputs)
        for row in set(zip(op.inputs, placed.strategies[op].operands, strict=True))
    )
    # Results that add up have the same shape, mostly.
    sums = Counter(
        op.outputs[0].shape
        for op, product in products.items()
        if any(strategy.results[0].partial for strategy in product.strategies)
    )

    def share(product: Product, number: int) -> float:
        op, strategy, usual = product.op, product.strategies[number], number == product.usual
        total = product.work[number].flops / chooser.flops_per_wire_byte
        for tensor, layout in zip(op.inputs, strategy.operands, strict=True):
            sent = bytes_moved([(tensor, layouts[tensor], layout)], mesh)
            total += sent / (now[tensor, layout] if usual else readers[tensor])
        (result,), (left,) = op.outputs, strategy.results
        sent = bytes_moved([(result, left, layouts[result])], mesh)
        return total + (sent / sums[result.shape] if left.partial and not usual else sent)

    by_product = {}
    for op, product in products.items():
        costs = [share(product, number) for number in range(len(product.strategies))]
        by_product[op] = Share(costs[product.usual], costs[product.usual] - min(costs))
    return by_product
