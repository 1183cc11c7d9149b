"""Memory: the most bytes that one device uses at once, from the lifetimes of a program's values.

The model is that of a compiler that runs the instructions in the order written:

* The program's inputs are live throughout. An output is written over a donated input of the same
  dims, dtype and layout, unless that input is read later.
* Every other value has a buffer from its instruction to its last use, and the program's outputs to
  the end. Renaming, reshaping and barriers make views, which need no buffer. A value computed
  before a barrier has a buffer there: no compiler fuses it with instructions after the barrier.
* An elementwise result, or a window of a shard, needs no buffer if all its readers fuse with it:
  elementwise instructions, reductions and products. Each of these computes it again. A fused value
  keeps its operands alive until it is read. A view counts as its operand: for a slice of a stack of
  float32 weights that is cast for a product, only the cast has a buffer. An elementwise result
  may be written over an operand that is used for the last time.
* The result of a collective has a buffer beside its operand. A result that is written over a
  donated input is copied there from that buffer, one tensor after the other. Each tensor of a
  joined reduce_scatter is freed as soon as it is sent, since compilers send its parts separately.
* Where the devices are known, images of convolutions fill up their tiles (`costs.tiles`).
* Attention needs a block of scores (`lowering.attention_sizes`); its gradient needs another block,
  for the gradient of the scores, in the dtype of the queries. Where an attention is recomputed for
  its gradient, a single block is computed once for both, and lives between them.
* The results of a scan are live while it runs, and so is the peak of its body. The carry is written
  over its start if that is not used again. The body reads one slice of each stacked input at a time
  and writes one slice of each stacked result as soon as it is computed. A while loop does the same
  with its carry, beside the larger of its condition and its body.
* The results of a cond are live while it runs, since its branches write them, and so is the peak of
  the branch that needs more.

That is XLA's compiler for TPUs. The compiler for CPUs differs: joined collectives are not split,
products read their operands from memory, and a costly value (exp, tanh, divide, ...) is computed
once unless it has a single reader. `target` is the compiler.

The model does not include that compilers reorder (XLA:TPU computes gradients of weights late in the
backward pass of a layer, and keeps their operands meanwhile), copy into other orders of dims, and
prefetch. `tests.benchmarks.memory` prints this model beside the TPU compiler's own figures for
entire training steps. CPUs compute bfloat16 in float32, and need about twice the memory.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Literal, TypeAlias

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.attention_sizes import SCORES, AttentionSizes, scored_before
from meshdsl.lowering.costs.tiles import sizes
from meshdsl.lowering.instructions import Fusion, kinds_with
from meshdsl.lowering.parameters import Loop, While, parameters_of
from meshdsl.lowering.program import COLLECTIVES, Block, Instruction, SpmdProgram, Value
from meshdsl.tracing.source import UNKNOWN, Source

_FUSIBLE = kinds_with(lambda kind: kind.fusion is Fusion.FUSED)
_REDUCTIONS = kinds_with(lambda kind: kind.fusion is Fusion.REDUCTION)
_VIEWS = kinds_with(lambda kind: kind.fusion is Fusion.VIEW)
_ELSEWHERE = kinds_with(lambda kind: kind.elsewhere)
_IN_PLACE = kinds_with(lambda kind: kind.in_place)
_COSTLY = kinds_with(lambda kind: kind.costly)
_ATTENTION = kinds_with(lambda kind: kind.scores)

Target: TypeAlias = Literal["tpu", "cpu"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """One buffer at the peak; also those in the body of a running scan.

    Attributes:
        source: the line that computes the value.
        kind: "input"; "forward" or "backward", by the line.
        path: the path of an input.
    """

    value: Value
    source: Source
    bytes: int
    kind: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class Memory:
    """The moment at which a device uses the most memory.

    Attributes:
        peak_bytes: the memory in use then.
        source: the line whose instruction runs then.
        buffers: the live buffers then, largest first; their bytes add up to `peak_bytes`.
        curve: the bytes in use while each instruction runs, those of bodies included.
    """

    peak_bytes: int
    source: Source
    buffers: tuple[Buffer, ...]
    curve: Mapping[Instruction, int] = field(default_factory=dict, repr=False)

    @property
    def by_kind(self) -> Mapping[str, int]:
        """Bytes of inputs, of forward values and of backward values."""
        totals = {"input": 0, "forward": 0, "backward": 0}
        for buffer in self.buffers:
            totals[buffer.kind] += buffer.bytes
        return totals


def memory(program: SpmdProgram, target: Target = "tpu") -> Memory:
    """Returns the memory that one device uses at the program's peak.

        memory(f.lower(x), target="cpu").peak_bytes

    Args:
        target: the devices whose compiler's fusion is assumed.
    """
    block = program.block
    paths = dict(zip(block.inputs, program.input_paths, strict=True))
    known = sizes(block, program.tile)
    liveness = _Liveness(block, block.outputs, target, known)
    liveness.owned = list(block.inputs)
    liveness.permanent = set(block.inputs)
    liveness.written_over = _written_over(program)
    curve: dict[Instruction, int] = {}
    peak = liveness.run(curve)
    buffers = [
        Buffer(value, source, liveness.size(value), "input", paths[value])
        if value in paths
        else Buffer(
            value, source, liveness.size(value), "backward" if source.backward else "forward"
        )
        for value, source in peak.buffers
        if value.bytes
    ]
    ordered = sorted(buffers, key=lambda buffer: -buffer.bytes)
    return Memory(peak.bytes, peak.source, tuple(ordered), curve)


def _written_over(program: SpmdProgram) -> dict[Value, Value]:
    """Returns the outputs that can be written over a donated input, with that input."""
    free: dict[tuple, collections.deque[Value]] = collections.defaultdict(collections.deque)
    donated = program.donated
    for value, is_donated in zip(program.block.inputs, donated, strict=False):
        if is_donated:
            free[value.shape, value.dtype, value.layout].append(value)
    returned_inputs = set(program.block.inputs)
    written_over = {}
    for value in dict.fromkeys(program.block.outputs):
        inputs = free[value.shape, value.dtype, value.layout]
        if inputs and value not in returned_inputs:
            written_over[value] = inputs.popleft()
    return written_over


@dataclass(frozen=True, slots=True)
class _Peak:
    bytes: int
    source: Source
    buffers: tuple[tuple[Value, Source], ...]


_NO_BUFFERS = _Peak(0, UNKNOWN, ())


class _Liveness:
    """The lifetimes of one block's buffers.

    Attributes:
        target: the compiler that decides what is fused.
        sizes: the bytes of values whose buffers have gaps (see `costs.tiles`).
        joined: for each part of a joined collective, that collective.
        kept: values that a reader does not fuse with, and the results of the block.
        read_often: values with more than one reader, if that matters.
        hidden: instructions whose results need no buffers: views, and what readers compute.
        read_instead: for each value without a buffer of its own, the values that are read instead.
        last_reads: for each value, the position of the instruction that reads its buffers last.
            Values that are never read are not listed.
        freed: by that position, the buffers that this block or its caller makes.
        owned: inputs whose buffers count in this block; others count in an outer block.
        permanent: inputs that are never freed.
        written_over: for outputs that may be written over an input, that input.
        counted_outside: buffers that count in an outer block.
    """

    def __init__(
        self, block: Block, last: Sequence[Value], target: Target, sizes: Mapping[Value, int]
    ) -> None:
        self.target = target
        self.sizes = sizes
        self.block, self.joined = _split_joined(block, target)
        self.owned: list[Value] = []
        self.permanent: set[Value] = set()
        self.written_over: dict[Value, Value] = {}
        self.counted_outside: set[Value] = set()
        self.kept: set[Value] = set(last)
        self.read_often: Set[Value] = _read_often(block, last) if target == "cpu" else frozenset()
        self.hidden: set[Instruction] = set()
        self.read_instead: dict[Value, Sequence[Value]] = {}
        self.scores = self._scores()
        self.last_reads: dict[Value, int] = dict.fromkeys(last, len(self.block.instructions))
        self.freed: dict[int, list[Value]] = {}
        self._visit()

    @cached_property
    def maker(self) -> Mapping[Value, Instruction]:
        """For each value of the block that is no input, the instruction that makes it."""
        return {v: i for i in self.block.instructions for v in i.outputs}

    def _visit(self) -> None:
        """Finds what is fused and what is read last, from the last instruction to the first.

        Readers come before what they read, so they are known. A value without a buffer is read by
        its readers, so it passes their positions on to its operands.
        """
        kept, hidden, read_instead = self.kept, self.hidden, self.read_instead
        last_reads, scores, freed = self.last_reads, self.scores, self.freed
        # What reads operands of any size without a buffer for them; views do if their readers do.
        passing = _REDUCTIONS | {"einsum"} if self.target == "tpu" else _REDUCTIONS
        position = len(self.block.instructions)
        for instruction in reversed(self.block.instructions):
            position -= 1
            op, inputs, outputs = instruction.op, instruction.inputs, instruction.outputs
            # Entries so far are from later positions.
            if scores and instruction in scores:
                last_reads.setdefault(scores[instruction], position)
            if op in _FUSIBLE:
                is_hidden = self._needs_no_buffer(outputs[0])
            else:
                is_hidden = op in _VIEWS
                if is_hidden:
                    kept.update(
                        [v for v in inputs if v not in kept and not self._shows(instruction, v)]
                    )
                elif op not in passing:
                    kept.update(inputs)
            if not is_hidden:
                for value in inputs:
                    if value not in last_reads:
                        last_reads[value] = position
                for value in outputs:
                    if value in last_reads:
                        freed.setdefault(last_reads[value], []).append(value)
                continue
            hidden.add(instruction)
            if op == "barrier":
                shown = zip(outputs, inputs, strict=True)
                read_instead.update((out, (value,)) for out, value in shown)
            else:
                read_instead.update(dict.fromkeys(outputs, inputs))
            for output in outputs:
                if output in last_reads:
                    last = last_reads[output]
                    for value in read_instead[output]:
                        if last_reads.get(value, -1) < last:
                            last_reads[value] = last
        for value in self.block.inputs:
            if value in last_reads:
                freed.setdefault(last_reads[value], []).append(value)

    def size(self, value: Value) -> int:
        """Returns the bytes of a value's buffer."""
        return self.sizes.get(value, value.bytes) if self.sizes else value.bytes

    def _needs_no_buffer(self, value: Value) -> bool:
        """Whether all readers of a value fuse with it, so that it has no buffer.

        It may be asked once all readers have been visited.
        """
        if not value.shape:
            return True
        if value in self.kept:
            return False
        return value not in self.read_often or not _costly(self.maker.get(value))

    def _shows(self, view: Instruction, value: Value) -> bool:
        """Whether the readers of a view fuse with the value that it reads."""
        if view.op == "barrier" and self._is_computed(value):
            return False
        pairs = zip(view.inputs, view.outputs, strict=True)
        return all([self._needs_no_buffer(out) for shown, out in pairs if shown is value])

    def _is_computed(self, value: Value) -> bool:
        """Whether this block computes a value, rather than reads or moves it."""
        maker = self.maker.get(value)
        return maker is not None and maker.op not in _VIEWS and maker.op not in _ELSEWHERE

    def _reads(self, values: Sequence[Value], last: int | None = None) -> list[Value]:
        """Returns the values in memory that must be read for some values, each once, in order.

        Args:
            last: if given, only those that an instruction at this position is the last to read.
        """
        last_reads, read_instead = self.last_reads, self.read_instead
        buffers: list[Value] = []
        seen: set[Value] = set()
        front = list(values[::-1])
        while front:
            value = front.pop()
            # What reads a value for the last time reads its operands then or earlier.
            if value in seen or not (last is None or last_reads[value] == last):
                continue
            seen.add(value)
            if value in read_instead:
                front += read_instead[value][::-1]
            else:
                buffers.append(value)
        return buffers

    def _scores(self) -> dict[Instruction, Value]:
        """Returns the scores that an attention and a gradient of the same operands share."""
        scores: dict[Instruction, Value] = {}
        for gradient, same in scored_before(self.block.instructions).items():
            if AttentionSizes.of(same).at_once:
                scores[same] = scores[gradient] = scores.get(same) or _scores_of(same)
        return scores

    def _in_place(self, value: Value, position: int) -> bool:
        """Whether an output is written over an input that is not read any more."""
        return self.last_reads.get(self.written_over[value], -1) <= position

    def _extra_buffers(self, instruction: Instruction) -> _Peak:
        """Returns the buffers of an instruction besides operands and results.

        They are an attention's blocks of scores, and results of a collective before they are
        written over an input.
        """
        values: list[Value] = []
        if instruction.op in _ATTENTION:
            scores = _scores_of(instruction)
            if instruction not in self.scores:
                values.append(scores)
            if instruction.op == "attention_gradient":
                values.append(replace(scores, dtype=instruction.inputs[0].dtype))
        else:
            values = [value for value in instruction.outputs if value in self.written_over]
        extra = tuple((value, instruction.source) for value in values)
        return _Peak(sum(map(self.size, values)), instruction.source, extra)

    def _overwritten_carries(
        self, loop: Instruction, dying: Sequence[Value], position: int
    ) -> set[Value]:
        """Returns the buffers of a loop's initial carries that its carries are written over."""
        free = set(dying)
        if loop.op == "cond":
            return set()
        params = parameters_of(loop, Loop)
        first, count = params["consts"], params["carries"]
        return {
            buffer
            for start in loop.inputs[first : first + count]
            for buffer in self._reads([start], position)
            if buffer in free and buffer.bytes == start.bytes
        }

    def run(self, curve: dict[Instruction, int]) -> _Peak:
        """Visits all instructions of the block; adds to the curve."""
        live = _History(dict.fromkeys(self.owned, UNKNOWN))
        total = sum(map(self.size, live.now))
        peak, at_peak, source, at_once = total, live.moment, UNKNOWN, _NO_BUFFERS
        # Most instructions have neither scores nor inner blocks, and compute one result.
        now, permanent, scores, last_reads = live.now, self.permanent, self.scores, self.last_reads
        written_over, counted_outside = self.written_over, self.counted_outside
        size = self.size if self.sizes else attrgetter("bytes")
        hidden, freed, joined = self.hidden, self.freed, self.joined
        for position, instruction in enumerate(self.block.instructions):
            if instruction in hidden:
                continue
            op, outputs, bodies = instruction.op, instruction.outputs, instruction.bodies
            read = freed.get(position, ())
            if len(read) > 1:  # in the order in which it is read
                read = self._reads(instruction.inputs, position)
            if scores and instruction in scores and last_reads[scores[instruction]] == position:
                read = [*read, scores[instruction]]
            dying = [v for v in read if v in now and v not in permanent] if read else []
            results = _made(instruction) if bodies else dict.fromkeys(outputs, instruction.source)
            if written_over or counted_outside:
                for value in outputs:
                    in_place = value in written_over and self._in_place(value, position)
                    if in_place or value in counted_outside:
                        del results[value]
            if op == "attention" and instruction in scores:
                results[scores[instruction]] = instruction.source
            if results and dying:
                replaced: Collection[Value] = (
                    self._overwritten_carries(instruction, dying, position)
                    if bodies
                    else _replaced(instruction, dying)
                )
                for value in replaced:
                    live.drop(value)
                    total -= size(value)
            if results:
                live.add(results)
                for value in results:
                    total += size(value)
            inner = _NO_BUFFERS
            if op in COLLECTIVES or op in _ATTENTION:
                inner = self._extra_buffers(instruction)
            elif bodies:
                inner, used_inside = _peak_inside(instruction, self.target, self.sizes)
                for one, used in used_inside.items():
                    curve[one] = max(curve.get(one, 0), total + used)
            used = total + inner.bytes
            whole = joined.get(instruction, instruction) if joined else instruction
            if used >= curve.get(whole, 0):
                curve[whole] = used
            if used > peak:
                peak, at_peak, source, at_once = used, live.moment, instruction.source, inner
            for value in dying:
                if value in now:
                    live.drop(value)
                    total -= size(value)
            for value in results:
                if last_reads.get(value, -1) <= position and value in now:
                    live.drop(value)
                    total -= size(value)
        return _Peak(peak, source, (*live.at(at_peak), *at_once.buffers))


class _History:
    """The live values, `now` and at any moment before."""

    # Every instruction may be a new peak, so copies of the live values would take quadratic time.

    def __init__(self, start: Mapping[Value, Source]) -> None:
        self.now = set(start)
        self._changes: list[tuple[Value, Source | None]] = list(start.items())  # None: it is freed

    @property
    def moment(self) -> int:
        return len(self._changes)

    def add(self, made: Mapping[Value, Source]) -> None:
        self.now.update(made)
        self._changes.extend(made.items())

    def drop(self, value: Value) -> None:
        self.now.remove(value)
        self._changes.append((value, None))

    def at(self, moment: int) -> Iterable[tuple[Value, Source]]:
        """Returns the live values at a moment, with the lines that made them, in order."""
        live: dict[Value, Source] = {}
        for value, source in self._changes[:moment]:
            if source is None:
                del live[value]
            else:
                live[value] = source
        return live.items()


def _split_joined(block: Block, target: Target) -> tuple[Block, Mapping[Instruction, Instruction]]:
    """Returns a block without joined collectives, and the one that each part is part of.

    A joined collective is split into its parts. On TPU the parts of a reduce_scatter run
    separately, each as soon as its operand is computed.
    """
    several = [i for i in block.instructions if len(i.outputs) > 1 and i.op in COLLECTIVES]
    if not several:
        return block, {}
    early = {i for i in several if target == "tpu" and i.op == "reduce_scatter"}
    operands = {value for instruction in early for value in instruction.inputs}
    # Parts of the early ones, by the position after which they run.
    parts_after: dict[int, list[tuple[Instruction, Instruction]]] = collections.defaultdict(list)
    made_at = {
        value: position
        for position, instruction in enumerate(block.instructions)
        for value in instruction.outputs
        if value in operands
    }
    for instruction in several:
        if instruction in early:
            for part in instruction.parts:
                parts_after[made_at.get(part.inputs[0], -1)].append((part, instruction))
    split: dict[Instruction, Instruction] = dict(parts_after[-1])
    joined = set(several)
    for position, instruction in enumerate(block.instructions):
        if instruction not in joined:
            split[instruction] = instruction
        elif instruction not in early:
            split.update(dict.fromkeys(instruction.parts, instruction))
        if position in parts_after:
            split.update(parts_after[position])
    return replace(block, instructions=tuple(split)), split


def _read_often(block: Block, last: Sequence[Value]) -> Set[Value]:
    """Returns the values that several instructions read, or one that are results as well."""
    once, often = set(last), set()
    for instruction in block.instructions:
        inputs = set(instruction.inputs)
        often |= inputs & once
        once |= inputs
    return often


def _costly(instruction: Instruction | None) -> bool:
    """Whether a result is computed once, rather than again for every reader."""
    return instruction is not None and instruction.op in _COSTLY


def _made(instruction: Instruction) -> dict[Value, Source]:
    """Returns the results of an instruction with their lines; of bodies, with those inside."""
    if not instruction.bodies:
        return dict.fromkeys(instruction.outputs, instruction.source)
    body = instruction.body or instruction.bodies[0]
    inside = {v: s for i in body.instructions for v, s in _made(i).items()}
    results = zip(instruction.outputs, body.outputs, strict=True)
    return {outer: inside.get(inner, instruction.source) for outer, inner in results}


def _replaced(instruction: Instruction, dying: Sequence[Value]) -> set[Value]:
    """Returns the dying operand that a result is written over, if there is one."""
    if instruction.op in _IN_PLACE:
        return {value for value in instruction.inputs[:1] if value in dying}
    if instruction.op not in _FUSIBLE or instruction.op in _ELSEWHERE:
        return set()
    (out,) = instruction.outputs
    return set([value for value in dying if value.bytes == out.bytes][:1])


def _scores_of(attention: Instruction) -> Value:
    """Returns a block of the scores that an attention or its gradient computes."""
    block = AttentionSizes.of(attention).block
    return Value(block, SCORES, TensorLayout(), block)


def _peak_inside(
    instruction: Instruction, target: Target, sizes: Mapping[Value, int]
) -> tuple[_Peak, Mapping[Instruction, int]]:
    """Returns the peak inside an instruction that runs blocks, and the bytes in use there."""
    inner = _Inner.of(instruction)
    # Programs that lowering compares share most loops. Few programs have sizes with gaps.
    return inner.peak(target, sizes) if sizes else _known_peak(inner, target)


@dataclass(frozen=True)
class _Inner:
    """The blocks that a `scan`, `while` or `cond` runs, and how; see `Loop` and `While`."""

    branches: tuple[Block, ...] = ()
    condition: Block | None = None
    body: Block | None = None
    consts: int = 0
    carries: int = 0

    @staticmethod
    def of(instruction: Instruction) -> _Inner:
        """Returns those of an instruction."""
        if instruction.op == "cond":
            return _Inner(instruction.bodies)
        condition = None
        if instruction.op == "while":
            condition = parameters_of(instruction, While)["condition"]
        params = parameters_of(instruction, Loop)
        return _Inner((), condition, params["body"], params["consts"], params["carries"])

    def peak(
        self, target: Target, sizes: Mapping[Value, int]
    ) -> tuple[_Peak, Mapping[Instruction, int]]:
        """Returns the largest peak, and the bytes in use while each instruction runs."""
        curve: dict[Instruction, int] = {}
        peaks = [block.run(curve) for block in self._liveness(target, sizes)]
        return max(peaks, key=lambda peak: peak.bytes), curve

    def _liveness(self, target: Target, sizes: Mapping[Value, int]) -> Iterable[_Liveness]:
        """Yields the liveness of the blocks, without their inputs and results.

        The next value of a loop's carry is live beside the present one. A branch writes the cond's
        results.
        """
        for branch in self.branches:
            inner = _Liveness(branch, branch.outputs, target, sizes)
            written = ((out, inner._reads([out])) for out in branch.outputs)
            inner.counted_outside = {
                b for out, reads in written for b in reads if b.bytes == out.bytes
            }
            yield inner
        if self.condition is not None:
            yield _Liveness(self.condition, self.condition.outputs, target, sizes)
        if self.body is not None:
            inner = _Liveness(self.body, self.body.outputs[: self.carries], target, sizes)
            slices = self.body.inputs[self.consts + self.carries :]
            inner.owned = [value for value in slices if not inner._needs_no_buffer(value)]
            yield inner


@lru_cache(maxsize=128)
def _known_peak(inner: _Inner, target: Target) -> tuple[_Peak, Mapping[Instruction, int]]:
    return inner.peak(target, {})
