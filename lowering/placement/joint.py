"""Joint strategies: products that share an operand, or whose results add up, choose together.

The strategies that `choosing` takes are the cheapest product by product. They may not be the
cheapest together. If two products read the same operand, a gather of it pays for both. If their
results are added, one reduction pays for both.

Products are in a group if they share an operand, or if partial sums can pass from one to another.
Within a group, moves change the strategies of several products:

- all products split the same dim over an axis;
- all readers of a tensor read it in the same layout;
- one product takes another strategy.

Each outcome is costed as it would be written: the cut decides where partial sums are reduced, and
the bytes of all collectives are counted, those of the group's neighbours included. A move stays if
the group then costs less. The search is bounded: it makes few moves in large groups.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.prices import LinkPrices
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.choices import Lowered, cost_of
from meshdsl.lowering.communication.reshard import cost_of_sending
from meshdsl.lowering.partition import Strategy
from meshdsl.lowering.placement.open_products import Product, Share, open_products, shares
from meshdsl.lowering.placement.partial_sums import place_reductions
from meshdsl.lowering.placement.placing import blocks_of
from meshdsl.lowering.placement.reads import START
from meshdsl.lowering.program import Block, wire_of
from meshdsl.lowering.stages import Given, Placed, Planned, Reduced
from meshdsl.lowering.writing.scope import Scope
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation

# How many operations the search writes for one group, and how many outcomes it always tries.
_WRITTEN = 3_000
_TRIED = 4
# A change that saves less is not worth another plan, and a group that may at best save `_HOPED` of
# its cost is not searched: most groups are of this kind.
_GAIN = 0.001
_HOPED = 0.05

_Numbers = dict[Operation, int]  # the number of the strategy of each product of a group
_Split = tuple[str, str]  # an axis and the dim that it splits


def choose_jointly(placed: Placed) -> Placed:
    """Returns a placed graph whose products have strategies that are cheaper together.

    It is `placed` itself if nothing is cheaper.
    """
    strategies: dict[Operation, Strategy] = {}
    for block in blocks_of(placed.graph):
        products = open_products(block, placed)
        if len(products) > 1:
            shared = shares(block, placed, products)
            if any(share.gain > 0 for share in shared.values()):
                for group in _groups(block, placed, products, shared):
                    strategies.update(group.solve())
    if not strategies:
        return placed
    return replace(placed, strategies={**placed.strategies, **strategies}, joint=True)


def better_of(
    write: Callable[[Placed], Lowered],
    usual: Placed,
    joint: Placed,
    prices: LinkPrices | None = None,
) -> Lowered:
    """Returns the lowering of joint strategies, if it sends less; else that of the usual.

    Rewrites of the graph follow strategies, so the whole program decides. Whether it fits into
    memory, and whether it is faster, decide those who know (`Choice.joint`).

    Args:
        prices: what sends count; None: their bytes.

    Raises:
        ValueError: a `Placement` fits neither.
    """
    try:
        other = write(joint)
    except ValueError:  # a placement may say where the usual strategies leave partial sums
        return write(usual)
    try:
        ours = write(usual)
    except ValueError:
        return other
    return other if cost_of(other.program, prices) < cost_of(ours.program, prices) else ours


def _groups(
    block: Graph,
    placed: Placed,
    products: Mapping[Operation, Product],
    shared: Mapping[Operation, Share],
) -> Iterator[_Group]:
    """Yields the groups of products that may gain, with the operations around them."""
    joined = _Joined()
    maker: dict[Tensor, Operation] = {}
    can: set[Tensor] = set()  # tensors that are partial by some strategy
    readers: dict[Tensor, Operation] = {}  # the first product that reads a tensor
    for op in block.operations:
        if op.bodies or op not in placed.strategies:
            continue
        maker.update(dict.fromkeys(op.outputs, op))
        product = products.get(op)
        ways = product.strategies if product else [placed.strategies[op]]
        passed = [op.inputs[i] for i in ways[0].linear if op.inputs[i] in can]
        for tensor in passed:
            joined.join(op, maker[tensor])
        if passed or any(layout.partial for way in ways for layout in way.results):
            can.update(op.outputs)
        for tensor in op.inputs if product else ():
            joined.join(op, readers.setdefault(tensor, op))
    _join_readers(block, placed, joined, readers)
    members: dict[Operation, list[Operation]] = defaultdict(list)
    for op in block.operations:
        if op in joined:
            members[joined.first(op)].append(op)
    for operations in members.values():
        chosen = [products[op] for op in operations if op in products]
        cost = sum(shared[product.op].cost for product in chosen)
        gain = sum(shared[product.op].gain for product in chosen)
        if gain > _HOPED * cost:
            yield _Group(block, placed, _with_constants(operations, maker, placed), chosen)


def _with_constants(
    operations: Iterable[Operation], maker: Mapping[Tensor, Operation], placed: Placed
) -> set[Operation]:
    """Returns operations, and those that make the constants which they read."""
    needed = set(operations)
    reached = list(needed)
    while reached:
        made_by = [maker[t] for t in reached.pop().inputs if t in placed.constant and t in maker]
        reached += [op for op in made_by if op not in needed]
        needed.update(made_by)
    return needed


def _join_readers(
    block: Graph, placed: Placed, joined: _Joined, readers: Mapping[Tensor, Operation]
) -> None:
    """Joins other operations that move what products read: they share these moves."""
    for op in block.operations:
        if op in placed.strategies:
            for tensor, layout in zip(op.inputs, placed.strategies[op].operands, strict=True):
                if tensor in readers and layout != placed.layouts[tensor]:
                    joined.join(op, readers[tensor])


class _Joined:
    """Sets of operations, by the one that was first joined with another (union-find)."""

    def __init__(self) -> None:
        self._up: dict[Operation, Operation] = {}

    def __contains__(self, op: Operation) -> bool:
        return op in self._up

    def first(self, op: Operation) -> Operation:
        """Returns the operation that stands for the set of an operation."""
        up = self._up.setdefault(op, op)
        while up is not self._up[up]:
            self._up[op] = up = self._up[up]
        return up

    def join(self, one: Operation, other: Operation) -> None:
        """Joins the sets of two operations."""
        self._up[self.first(one)] = self.first(other)


class _Group:
    """Products that choose together, and the operations that share moves or sums with them."""

    def __init__(
        self, block: Graph, placed: Placed, operations: set[Operation], products: list[Product]
    ) -> None:
        self.placed = placed
        self.products = {product.op: product for product in products}
        inside = tuple(op for op in block.operations if op in operations)
        made = {t for op in inside for t in op.outputs}
        read = dict.fromkeys(t for op in inside for t in op.inputs if t not in made)
        outside = {t for op in block.operations if op not in operations for t in op.inputs}
        needed = outside | set(block.outputs)
        outputs = tuple(t for op in inside for t in op.outputs if t in needed)
        self.graph = Graph(tuple(read), inside, outputs)
        self.strategies = {op: placed.strategies[op] for op in inside}
        self.left = max(_WRITTEN // len(inside), _TRIED)
        self.costs: dict[tuple[int, ...], float] = {}

    def solve(self) -> dict[Operation, Strategy]:
        """Returns other strategies for products that cost less; empty if none do."""
        usual = {op: product.usual for op, product in self.products.items()}
        cost = self.cost(usual)
        starts = [usual, *self._all_moved(usual)]
        starts.sort(key=self.cost)  # stable: among equals, the usual strategies
        best = min((self._improved(start) for start in starts[:2]), key=self.cost)
        if self.cost(best) > (1 - _GAIN) * cost:
            return {}
        return {
            op: self.products[op].strategies[number]
            for op, number in best.items()
            if number != usual[op]
        }

    def cost(self, numbers: _Numbers) -> float:
        """Returns the cost of the group, in bytes that one device sends; infinite if untried."""
        key = tuple(numbers.values())
        if key not in self.costs:
            if not self.left:
                return float("inf")
            self.left -= 1
            self.costs[key] = self._cost(numbers)
        return self.costs[key]

    def _cost(self, numbers: _Numbers) -> float:
        products, chooser = self.products, self.placed.chooser
        chosen = {op: products[op].strategies[number] for op, number in numbers.items()}
        planned = Planned(
            **{
                **vars(self.placed),
                "graph": self.graph,
                "given": Given(),
                "strategies": {**self.strategies, **chosen},
            }
        )
        scope = Scope(Reduced(planned, place_reductions(planned)), phased=True)
        for tensor in self.graph.inputs:
            layout = planned.layouts[tensor]
            scope.define(tensor, scope.builder.value(tensor.shape, tensor.dtype, layout))
        scope.run(self.graph.operations)
        for tensor in self.graph.outputs:
            scope.get(tensor, planned.layouts[tensor])
        flops = sum(products[op].work[number].flops for op, number in numbers.items())
        sent = _sent(Block((), tuple(scope.builder.instructions), ()), planned.mesh)
        return sent + flops / chooser.flops_per_wire_byte

    def _splits(self) -> list[_Split]:
        """Returns what an axis may split in some product."""
        splits: dict[_Split, None] = {}
        for product in self.products.values():
            for of_one in product.splits:
                splits.update(dict.fromkeys(of_one.items()))
        return list(splits)

    def _improved(self, start: _Numbers) -> _Numbers:
        """Returns what moves make of strategies, each move the best of its round."""
        best = start
        while self.left:
            other = min(self._tried(self._moves(best)), key=self.cost, default=best)
            if self.cost(other) >= self.cost(best):
                break
            best = other
        return best

    def _tried(self, moves: Iterator[_Numbers]) -> Iterator[_Numbers]:
        """Yields moves while the search may write."""
        return itertools.takewhile(lambda _: self.left, moves)

    def _moves(self, numbers: _Numbers) -> Iterator[_Numbers]:
        yield from self._all_moved(numbers)
        axes = dict.fromkeys(axis for axis, _ in self._splits())
        for tensor, ops in self._readers().items():
            for axis in axes:
                dims = dict.fromkeys(
                    layout.dim_of(axis) for op in ops for layout in self._read(op, tensor)
                )
                for dim in dims:
                    yield self._reading(numbers, ops, tensor, axis, dim)
        for op, product in self.products.items():
            for number in range(len(product.strategies)):
                yield {**numbers, op: number}

    def _readers(self) -> dict[Tensor, list[Operation]]:
        """Returns the tensors that several products read, with these products."""
        readers: dict[Tensor, list[Operation]] = defaultdict(list)
        for op in self.products:
            for tensor in dict.fromkeys(op.inputs):
                readers[tensor].append(op)
        return {tensor: ops for tensor, ops in readers.items() if len(ops) > 1}

    def _read(self, op: Operation, tensor: Tensor) -> Iterator[TensorLayout]:
        """Yields the layouts in which a product may read a tensor, by its strategies' numbers."""
        position = next(i for i, operand in enumerate(op.inputs) if operand is tensor)
        return (strategy.operands[position] for strategy in self.products[op].strategies)

    def _all_moved(self, numbers: _Numbers) -> Iterator[_Numbers]:
        """Yields strategies in which one axis, or all, split the same dim wherever they may."""
        splits = self._splits()
        for axis, dim in splits:
            changed = dict(numbers)
            for op, product in self.products.items():
                fits = [i for i, at in enumerate(product.splits) if at.get(axis) == dim]
                changed[op] = self._nearest(product, numbers[op], fits, axis)
            yield changed
        for dim in dict.fromkeys(dim for _, dim in splits):
            yield {
                op: self._along(product, numbers[op], dim) for op, product in self.products.items()
            }

    def _along(self, product: Product, number: int, dim: str) -> int:
        """Returns the strategy of a product with most axes along a dim; its own if none are."""
        cost = self.placed.chooser.cost

        def order(i: int) -> tuple[int, bool, float]:
            along = [axis for axis, at in product.splits[i].items() if at == dim]
            return -len(along), i != number, cost(product.work[i])

        best = min(range(len(product.work)), key=order)
        return best if dim in product.splits[best].values() else number

    def _reading(
        self,
        numbers: _Numbers,
        ops: Sequence[Operation],
        tensor: Tensor,
        axis: str,
        dim: str | None,
    ) -> _Numbers:
        """Returns strategies in which products read a tensor with an axis along a dim, or none."""
        changed = dict(numbers)
        for op in ops:
            fits = [i for i, at in enumerate(self._read(op, tensor)) if at.dim_of(axis) == dim]
            changed[op] = self._nearest(self.products[op], numbers[op], fits, axis)
        return changed

    def _nearest(self, product: Product, number: int, fits: Sequence[int], axis: str) -> int:
        """Returns the cheapest of some strategies that does the same along other axes."""

        def others(i: int) -> dict[str, str]:
            return {a: dim for a, dim in product.splits[i].items() if a != axis}

        alike = [i for i in fits if others(i) == others(number)]
        cost = self.placed.chooser.cost
        return min(alike, key=lambda i: cost(product.work[i]), default=number)


def _sent(block: Block, mesh: Mesh) -> float:
    """Returns the cost of a block's collectives, and of their starts; see `cost_of_sending`."""
    total = 0.0
    for instruction, times in block.walk():
        if instruction.is_collective:
            axes, sent = instruction.params["axes"], wire_of(instruction, mesh)
            total += (START + cost_of_sending(instruction.op, sent, axes, mesh)) * times
    return total
