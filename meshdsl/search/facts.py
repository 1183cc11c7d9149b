"""Facts: what a program of one device shows about splitting it, without lowering it again.

`Facts.of` reads the program of a step on one device, where nothing is split and nothing is sent.
They are the work, with the dims that can split it; the buffers at the peak; and the parameters. The
bounds of a search divide them by the axes that a layout splits their dims over (`search.bounds`).

A step in two microbatches stands for steps in other numbers of them: tensors with a part of the
batch shrink with this number, and the rest of the loop is repeated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshdsl.layouts.costs import PRODUCTS, Costs, costs_of
from meshdsl.layouts.hardware import Hardware
from meshdsl.layouts.layout import matches
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.costs.flops import instruction_flops
from meshdsl.lowering.costs.products import GROUPED
from meshdsl.lowering.costs.roofline import convolution_bytes
from meshdsl.lowering.costs.simulation import priced_work
from meshdsl.lowering.program import Block, Instruction, SpmdProgram, Value
from meshdsl.search.ends import End, ends_of
from meshdsl.search.gradients import summed_dims
from meshdsl.tensors.dtypes import is_float
from meshdsl.training.microbatches import MICROBATCH

PARTS = 2  # microbatches of the program that stands for all with an even number
_MATTERS = 0.0005  # the share of the flops and of the parameters from which a dim matters


def stand_in(microbatches: int) -> int:
    """Returns the microbatches of the program whose facts are used for a number of them.

    A batch in an even number of parts can also be computed in `PARTS`. An odd number stands for
    itself, since its batch may be odd.
    """
    return PARTS if microbatches % PARTS == 0 else microbatches


@dataclass(frozen=True)
class Work:
    """Work of one instruction.

    Attributes:
        dims: the sizes of the dims of its operands and results.
        seconds: the time of one run.
        runs: how often a step runs it; what is the same in all microbatches runs once.
        flops: the flops of one run.
        stacks: the dims that the loops around it go through, without microbatches.
        repeated: whether it runs for each microbatch, and differs between them.
        product: for a product of matrices, the kind of each dim: batch, rows, inner or columns.
        width: for a product, the bytes of an element, at most 2.
        bytes: what a run moves to and from memory, if that bounds its time; else 0.
        moves: for a convolution, the dims and least bytes of each operand and of its result.
    """

    dims: Mapping[str, int]
    seconds: float
    runs: int
    flops: int
    stacks: frozenset[str]
    repeated: bool
    product: Mapping[str, str] | None = None
    width: int = 2
    bytes: int = 0
    moves: tuple[tuple[tuple[tuple[str, int], ...], int], ...] = ()


@dataclass(frozen=True)
class Stored:
    """A buffer at the peak, or an input.

    Attributes:
        path: the path of an input; empty for other buffers.
        frozen: whether the step returns the input unchanged.
    """

    dims: Mapping[str, int]
    bytes: int
    path: str = ""
    frozen: bool = False

    @property
    def is_parameter(self) -> bool:
        return matches("params", self.path) and not matches("optimizer", self.path)


@dataclass(frozen=True)
class Leaf:
    """A block without loops or branches in it.

    Attributes:
        work: the work of those of its instructions that take time.
    """

    block: Block
    work: Mapping[Instruction, Work]


@dataclass(frozen=True)
class Facts:
    """The facts of a program on one device; see above.

    Attributes:
        instructions: the number of instructions of the program.
        microbatches: how many parts of a batch the program has; see `stand_in`.
        inputs: the inputs of the step, with their paths.
        peak: the buffers when the program needs the most memory.
        paired: pairs of dims between which the program renames: length and memory_length.
        together: pairs of dims that occur in one tensor.
        companions: for each dim, the dims of all tensors that have it: head_size has heads.
        parted: the dims that microbatches divide: the batch.
        leaves: the blocks without loops in them, each with its work.
        outer: for each row of work, the instruction of the program's outer block that it is in.
        ends: what the new values of parameters need (see `ends_of`).
        width: the least bytes of a floating-point number of the program.
        summed: for the path of each parameter, the dims that its gradient is summed over.
        bubble: the least share of a round's bubble that a pipeline waits.
    """

    hardware: Hardware
    instructions: int
    microbatches: int
    work: tuple[Work, ...]
    inputs: tuple[Stored, ...]
    peak: tuple[Stored, ...]
    paired: frozenset[tuple[str, str]]
    together: frozenset[frozenset[str]]
    companions: Mapping[str, frozenset[str]]
    parted: frozenset[str]
    leaves: tuple[Leaf, ...]
    outer: tuple[Instruction, ...]
    ends: tuple[End, ...]
    width: int
    summed: Mapping[str, frozenset[str]]
    bubble: float = 1.0

    @staticmethod
    def of(program: SpmdProgram, hardware: Hardware) -> Facts:
        """Returns the facts of a program that is lowered for one device."""
        assert program.mesh.size == 1
        rows = priced_work(program, hardware)
        blocks = [*_blocks(program.block)]
        moves = {
            instruction: _moves(instruction, *row)
            for block in blocks
            for instruction, row in convolution_bytes(block, hardware.products).items()
        }
        alike = set(_alike_in_parts(program.block))
        work = tuple(
            replace(_work(*row, row[0] in alike), moves=moves.get(row[0], ())) for row in rows
        )
        known = {row[0]: one for row, one in zip(rows, work, strict=True)}
        leaves = tuple(
            Leaf(block, {i: known[i] for i in block.instructions if i in known})
            for block in blocks
            if not any(i.bodies for i in block.instructions)
        )
        paths = dict(zip(program.block.inputs, program.input_paths, strict=True))
        kept = set(program.block.outputs)
        inputs = tuple(
            replace(_stored(value, value.bytes, path), frozen=value in kept)
            for value, path in paths.items()
        )
        peak = tuple(
            _stored(buffer.value, buffer.bytes, buffer.path) for buffer in program.memory.buffers
        )
        paired: set[tuple[str, str]] = set()
        together: set[frozenset[str]] = set()
        companions: dict[str, frozenset[str]] = {}
        for instruction, _ in program.block.walk():
            for value in (*instruction.inputs, *instruction.outputs):
                names = [dim.name for dim in value.shape if dim.size > 1]
                together |= {frozenset((a, b)) for a in names for b in names if a != b}
                for name in names:
                    companions[name] = companions.get(name, frozenset(names)).intersection(names)
            if instruction.op == "rename":
                (value,), (result,) = instruction.inputs, instruction.outputs
                old, new = value.shape.names, result.shape.names
                paired |= {(a, b) for a, b in zip(old, new, strict=True) if a != b}
        loops = (i for i, _ in program.block.walk() if i.op == "scan")
        parts = next((i.runs for i in loops if i.params["dim"] == MICROBATCH), 1)
        return Facts(
            hardware,
            sum(1 for _ in program.block.walk()),
            parts,
            work,
            inputs,
            peak,
            frozenset(paired),
            frozenset(together),
            companions,
            _parted(program, inputs, parts),
            leaves,
            tuple((*loops, instruction)[0] for instruction, loops, _, _ in rows),
            ends_of(program),
            min(_widths(program), default=4),
            summed_dims(program),
        )

    @cached_property
    def costs(self) -> Costs | None:
        """The table of measured costs of the hardware, if it has one with products."""
        table = costs_of(self.hardware.name)
        return table.on(self.hardware) if table and PRODUCTS in table.families else None

    @cached_property
    def parameters(self) -> tuple[Stored, ...]:
        """The inputs that are parameters; all inputs if none has such a path."""
        return tuple(stored for stored in self.inputs if stored.is_parameter) or self.inputs

    @cached_property
    def shapes(self) -> frozenset[frozenset[str]]:
        """The sets of dims of parameters, and of their slices that loops read."""
        found = {frozenset(row.dims) for row in self.parameters}
        return frozenset(found | {shape - {stack} for shape in found for stack in self.stacks})

    @cached_property
    def stacks(self) -> tuple[str, ...]:
        """The dims that loops go through and that parameters have: the layers."""
        inside = {dim for row in self.work for dim in row.stacks}
        return tuple(sorted(inside & {dim for row in self.parameters for dim in row.dims}))

    @cached_property
    def data(self) -> tuple[str, ...]:
        """Dims of the batch that matter and that no large parameter has, by descending work."""
        others = [stored for stored in self.inputs if not stored.path.startswith("state/")]
        parameters = set(map(id, self.parameters))
        mine = [row for row in others if id(row) not in parameters] or others
        names = {dim for row in mine for dim, size in row.dims.items() if size > 1}
        return self._by_flops(names - self._large)

    @cached_property
    def weights(self) -> tuple[str, ...]:
        """Dims of parameters that matter, without the stacks, by descending work."""
        return self._by_flops(self._large - {*self.stacks, *self.data})

    @cached_property
    def _large(self) -> set[str]:
        """The dims of a share of the parameters that matters."""
        total = sum(stored.bytes for stored in self.parameters)
        bytes_of: Counter[str] = Counter()
        for stored in self.parameters:
            bytes_of.update(dict.fromkeys(stored.dims, stored.bytes))
        return {dim for dim, count in bytes_of.items() if count >= _MATTERS * total}

    def renamed(self, dims: Sequence[str]) -> frozenset[str]:
        """Returns dims, and all others that they are renamed to or from, by any way."""
        found = set(dims)
        while more := {b for pair in self.paired for b in pair if found & set(pair)} - found:
            found |= more
        return frozenset(found)

    @cached_property
    def separate(self) -> frozenset[str]:
        """Dims of parameters that are batch dims of products, such as that of experts."""
        products = [row.product for row in self.work if row.product is not None]
        dims = {dim for kinds in products for dim, kind in kinds.items() if kind == "batch"}
        return frozenset(dims & set(self.weights))

    def alike(self, first: str, second: str) -> bool:
        """Whether work with one of two dims always has the other, of equal size: height, width."""
        rows = [row.dims for row in self.work if not {first, second}.isdisjoint(row.dims)]
        return all(dims.get(first) == dims.get(second) for dims in rows)

    def _by_flops(self, names: set[str]) -> tuple[str, ...]:
        shares = {name: self.coverage([name]) for name in names}
        matter = [name for name in names if shares[name] >= _MATTERS]
        return tuple(sorted(matter, key=lambda name: (-shares[name], name)))

    def coverage(self, dims: Sequence[str]) -> float:
        """Returns the share of the flops that is in work with any of some dims."""
        total = covered = 0
        for row in self.work:
            total += row.flops * row.runs
            covered += 0 if row.dims.keys().isdisjoint(dims) else row.flops * row.runs
        return covered / total if total else 0.0

    def size(self, dim: str) -> int:
        """Returns the size of a dim: the largest that any work or input has."""
        rows = [row.dims for row in self.inputs] + [row.dims for row in self.work]
        return max((dims[dim] for dims in rows if dim in dims), default=1)


def _alike_in_parts(block: Block, known: Collection[Value] | None = None) -> Iterator[Instruction]:
    """Yields the instructions that compute the same in every microbatch.

    Casts of parameters are such work. A program that keeps gathered weights does it once per step.

    Args:
        known: the inputs of the block that are the same; None: it is in no loop over microbatches.
    """
    same = set(known or ())
    for one in block.instructions:
        for body in one.bodies if one.op == "scan" else ():
            fixed = one.params["consts"] + one.params["carries"]
            pairs = [*zip(one.inputs, body.inputs, strict=True)]
            if known is not None:
                pairs = [*pairs[: one.params["consts"]], *pairs[fixed:]]
                yield from _alike_in_parts(body, {b for a, b in pairs if a in same})
            elif one.params["dim"] == MICROBATCH:
                yield from _alike_in_parts(body, body.inputs[: one.params["consts"]])
            else:
                yield from _alike_in_parts(body)
        if known is not None and not one.bodies and one.inputs and same.issuperset(one.inputs):
            same.update(one.outputs)
            yield one


def _widths(program: SpmdProgram) -> Iterator[int]:
    for instruction, _ in program.block.walk():
        for value in (*instruction.inputs, *instruction.outputs):
            if is_float(value.dtype):
                yield value.dtype.itemsize


def _blocks(block: Block) -> Iterator[Block]:
    """Yields a block and those inside of its loops, without branches."""
    yield block
    for instruction in block.instructions:
        for body in instruction.bodies if instruction.op == "scan" else ():
            yield from _blocks(body)


def _parted(program: SpmdProgram, inputs: Sequence[Stored], parts: int) -> frozenset[str]:
    """Returns the dims that are smaller by the number of parts wherever there are parts."""
    sizes: dict[str, int] = {}
    for row in inputs:
        for name, size in row.dims.items():
            sizes[name] = max(size, sizes.get(name, 1))
    found: dict[str, bool] = {}
    for instruction, _ in program.block.walk():
        for value in instruction.outputs:
            if MICROBATCH in value.shape.names:
                for dim in value.shape:
                    fits = parts * dim.size == sizes.get(dim.name)
                    found[dim.name] = fits and found.get(dim.name, True)
    return frozenset(name for name, fits in found.items() if fits)


def _stored(value: Value, count: int, path: str) -> Stored:
    return Stored({dim.name: dim.size for dim in value.shape}, count, path)


def _work(
    instruction: Instruction,
    loops: tuple[Instruction, ...],
    seconds: float,
    moved: int,
    alike: bool,
) -> Work:
    values = (*instruction.inputs, *instruction.outputs)
    dims: dict[str, int] = {}
    for value in values:
        for dim in value.shape:
            dims[dim.name] = max(dim.size, dims.get(dim.name, 1))
    if alike:
        loops = tuple(loop for loop in loops if loop.params.get("dim", "") != MICROBATCH)
    over = [loop.params.get("dim", "") for loop in loops]
    runs = math.prod(loop.runs for loop in loops)
    is_product = instruction.op == "einsum" and len(instruction.inputs) == 2
    flops = instruction_flops(instruction) if _multiplies(instruction) else 0
    return Work(
        dims,
        seconds,
        runs,
        flops,
        frozenset(name for name in over if name and name != MICROBATCH),
        MICROBATCH in over,
        _classes(instruction) if is_product else None,
        min(instruction.inputs[0].dtype.itemsize, 2) if instruction.inputs else 2,
        moved,
    )


def _moves(
    instruction: Instruction, read: Sequence[int], written: int
) -> tuple[tuple[tuple[tuple[str, int], ...], int], ...]:
    """Returns the dims and bytes of the operands of an instruction, and of its result."""
    values = (*instruction.inputs, instruction.outputs[0])
    rows = zip(values, (*read, written), strict=True)
    return tuple((tuple((d.name, d.size) for d in value.shape), count) for value, count in rows)


def _multiplies(instruction: Instruction) -> bool:
    return instruction.op in ("einsum", "convolve", "attention", "attention_gradient", *GROUPED)


def _classes(instruction: Instruction) -> dict[str, str]:
    first, second = (value.shape.names for value in instruction.inputs)
    result = instruction.outputs[0].shape.names
    classes = {}
    for name in dict.fromkeys((*first, *second)):
        if name in first and name in second:
            classes[name] = "batch" if name in result else "inner"
        else:
            classes[name] = "rows" if name in first else "columns"
    return classes


ONE_DEVICE = Mesh((("one", 1),))
