"""SpmdProgram: what one device does, as a flat list of typed instructions on local tensors.

A `Value` is a global tensor together with where it is (its `TensorLayout`); what a device holds is
the local shard. An `Instruction` maps values to values; its `op` is a local primitive or one of the
five collectives. Programs nest only through the `Block`s of `scan`, `while` and `cond`. Everything
is immutable, and every instruction keeps the source line it came from.

`lowering.instructions` declares every kind of instruction, and `lowering.collectives` what each
collective does to layouts. Resharding uses one local instruction beside them:
    slice           axes, dim             replicated axes -> appended, minor, to dim

A `scan` has `consts` operands that its body reads whole, `carries` that start its carries, and then
stacks that it reads slice by slice. Those listed as `ahead`, the last ones, by their numbers among
the stacks, are read one iteration ahead; after the last slice comes the first again.

A collective may be joined: it moves several tensors of one dtype at once, each with a result of its
own. What differs between them is then listed, `dims` instead of `dim` and so on, and `sources`
tells the line of each; `Instruction.parts` takes it apart, `joined` puts it together.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdsl.late import late
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.collectives import COLLECTIVES
from meshdsl.lowering.instructions import named
from meshdsl.tensors.dims import Shape
from meshdsl.tracing.source import UNKNOWN, Source

if TYPE_CHECKING:
    from meshdsl.layouts.layout import Layout
    from meshdsl.lowering.costs.memory import Memory

# The parameters of collectives that name a dim, and how a joined one lists them.
_LISTED = {name: f"{name}s" for kind in COLLECTIVES.values() for name in kind.dims}
EFFECTS = named(lambda kind: kind.effect)  # done each time, in order, whoever needs their results


class Pairs(tuple[tuple[int, int], ...]):
    """Which device sends to which, of a permute; a tuple that is hashed once."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


def exact(value: Any) -> Hashable:
    """Returns what tells a parameter from every other: 0.0 from -0.0, 1 from True and 1.0."""
    if isinstance(value, Mapping):
        return tuple((name, exact(value[name])) for name in sorted(value))
    if isinstance(value, float | complex | np.generic):
        return type(value), repr(value)
    if type(value) is Pairs:
        return value
    if type(value) is tuple and not all(type(item) is int for item in value):
        return tuple, tuple(map(exact, value))
    return type(value), value


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """A tensor at one place of the program: global shape, dtype, and where it is."""

    shape: Shape
    dtype: np.dtype
    layout: TensorLayout
    local: Shape

    @property
    def bytes(self) -> int:
        """Bytes of one device's shard."""
        return self.local.volume * self.dtype.itemsize


@dataclass(frozen=True, eq=False, slots=True)
class Instruction:
    """One step of every device: `outputs = op(inputs, **params)`.

    Attributes:
        bodies: the blocks that it runs: a loop's body, the branches of a `cond`.
    """

    op: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    source: Source = UNKNOWN
    # Worked out once: passes ask for it some thirty times.
    bodies: tuple[Block, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        bodies = [value for value in self.params.values() if isinstance(value, Block)]
        if bodies:
            object.__setattr__(self, "bodies", tuple(bodies))

    @property
    def body(self) -> Block | None:
        """The block that a `scan` or `while` repeats."""
        return self.params.get("body")

    @property
    def runs(self) -> int:
        """How often it runs its bodies; of a `while`, one iteration counts."""
        return self.params.get("length", 1)

    @property
    def has_effect(self) -> bool:
        """Whether it, or something that it runs, does more than make its results."""
        if not self.bodies:  # as of most instructions
            return self.op in EFFECTS
        return self.op in EFFECTS or any(body.has_effect for body in self.bodies)

    @property
    def is_collective(self) -> bool:
        return self.op in COLLECTIVES

    @property
    def parts(self) -> tuple[Instruction, ...]:
        """The collectives of one tensor each that a joined one stands for; else itself."""
        if "sources" not in self.params:
            return (self,)
        own = {one: self.params[many] for one, many in _LISTED.items() if many in self.params}
        found = zip(self.inputs, self.outputs, self.params["sources"], strict=True)
        return tuple(
            Instruction(
                self.op,
                (value,),
                (result,),
                {**shared(self), **{name: listed[at] for name, listed in own.items()}},
                source,
            )
            for at, (value, result, source) in enumerate(found)
        )


def shared(collective: Instruction) -> dict[str, Any]:
    """Returns the parameters of a collective that are not of one tensor alone."""
    own = (*_LISTED, *_LISTED.values(), "sources")
    return {name: value for name, value in collective.params.items() if name not in own}


def joined(collectives: Sequence[Instruction], mesh: Mesh) -> Instruction:
    """Returns one collective that does what several do, told with the line of the largest.

    They are of one op, dtype and kind, over the same axes, and none needs what another makes.
    """
    parts = [part for one in collectives for part in one.parts]
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    params = shared(first)
    for name, listed in _LISTED.items():
        if name in first.params:
            params[listed] = tuple(part.params[name] for part in parts)
    params["sources"] = tuple(part.source for part in parts)
    inputs = tuple(value for part in parts for value in part.inputs)
    outputs = tuple(value for part in parts for value in part.outputs)
    largest = max(parts, key=lambda part: payload_bytes(part, mesh))
    return Instruction(first.op, inputs, outputs, params, largest.source)


@dataclass(frozen=True, eq=False, slots=True)
class Block:
    """A straight list of instructions from inputs to outputs."""

    inputs: tuple[Value, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Value, ...]

    @property
    def has_effect(self) -> bool:
        """Whether an instruction of this block does more than make its results."""
        return any(instruction.has_effect for instruction in self.instructions)

    @property
    def replays(self) -> bool:
        """Whether something is computed again, behind a barrier that keeps it apart."""
        return any(instruction.op == "barrier" for instruction, _ in self.walk())

    def walk(self, times: int = 1) -> Iterator[tuple[Instruction, int]]:
        """Yields every instruction with its executions per run of the program.

        Those of a `while` count once, and those of both branches of a `cond` are there.
        """
        for instruction in self.instructions:
            yield instruction, times
            for body in instruction.bodies:
                yield from body.walk(times * instruction.runs)

    def counted(
        self, cost: Callable[[Instruction], float], times: int = 1
    ) -> Iterator[tuple[Instruction, int]]:
        """Yields as `walk` does, but of every `cond` only the branch that costs more."""

        def total(body: Block) -> float:
            return sum(cost(instruction) * n for instruction, n in body.counted(cost))

        for instruction in self.instructions:
            yield instruction, times
            bodies = instruction.bodies
            for body in [max(bodies, key=total)] if instruction.op == "cond" else bodies:
                yield from body.counted(cost, times * instruction.runs)


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a program; bytes are per device and execution.

    `payload_bytes` is the larger of the local operand and the local result; `wire_bytes` is what a
    device sends under the bandwidth-optimal algorithm (see `wire_bytes`). `groups` lists the
    devices that take part together; for a permute, the pairs (source, target). One that moves
    several tensors at once lists them as `parts`; its `dims` and `source` are those of the largest.
    """

    kind: str
    axes: tuple[str, ...]
    payload_bytes: int
    wire_bytes: float
    count: int
    source: Source
    dims: Shape
    groups: tuple[tuple[int, ...], ...]
    parts: tuple[Collective, ...] = ()


def payload_bytes(instruction: Instruction, mesh: Mesh) -> int:
    """Returns the larger of a collective's local operand and result, as sent: with all pads."""
    parts = instruction.parts
    if len(parts) > 1:
        return sum(payload_bytes(part, mesh) for part in parts)
    (value,), (result,) = instruction.inputs, instruction.outputs
    params = instruction.params
    return COLLECTIVES[instruction.op].payload(value, result, params, mesh.extent(params["axes"]))


def wire_bytes(kind: str, payload: float, devices: int) -> float:
    """Returns what a device sends, as `lowering.collectives` says for each kind.

    Args:
        payload: the larger of local operand and local result, in bytes.
        devices: the size n of one group.
    """
    if devices <= 1:  # nothing is sent; a local slice is no collective
        return 0.0
    return COLLECTIVES[kind].wire(devices) * payload


def wire_of(instruction: Instruction, mesh: Mesh) -> float:
    """Returns what a device sends for one execution of an instruction: 0 if it sends nothing."""
    if not instruction.is_collective:
        return 0.0
    payload = payload_bytes(instruction, mesh)
    return wire_bytes(instruction.op, payload, mesh.extent(instruction.params["axes"]))


# Functions of the caller's, and trees whose nodes are classes of the caller's.
def _unpicklable(definition: Any) -> str | None:
    """Returns why the functions of an operation of the user's own cannot be pickled, if so."""
    try:
        pickle.dumps(definition)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        return f"operation `{definition.name}` has a function without a name of its own ({error})"
    return None


@dataclass(frozen=True, eq=False)
class Origin:
    """What a program knows of the function that it was lowered from, in this process only.

    Attributes:
        results: the structure of what the function returns.
        compile: makes the executable; None for a program that was lowered from a graph.
        blame: says which operation made the first value that is not finite, from the arguments;
            None for a program without such checks.
    """

    results: Any = None
    compile: Callable[[SpmdProgram], Any] | None = None
    blame: Callable[[Sequence[Any]], str] | None = None


@dataclass(frozen=True, eq=False)
class SpmdProgram:
    """A lowered program: the block all devices run, and how its ends meet the user's arguments.

    Attributes:
        donated: for each input, whether its buffer is given up.
        scopes: the paths that the scopes of a layout may name.
        unused: what was asked for and changes nothing.
        notes: what a user should know, for reports.
        kept: the weights that are kept gathered for the backward pass.
        partitioner: who decides what is sent, where it is not this program.
        compiler_flags: what the user asks of the compiler.
        origin: the function that it was lowered from; it is not pickled.
    """

    name: str
    mesh: Mesh
    layout: Layout
    block: Block
    input_paths: tuple[str, ...]
    output_paths: tuple[str, ...]
    donated: tuple[bool, ...] = ()
    scopes: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    kept: tuple[Any, ...] = ()
    partitioner: str = ""
    compiler_flags: tuple[tuple[str, bool | int | float | str], ...] = ()
    origin: Origin = field(default_factory=Origin, repr=False)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective in program order.

        `count` multiplies enclosing scan lengths; how often a `while` runs is not known, so it
        counts once. Those of both branches of a `cond` are listed.
        """
        found = []
        for instruction, times in self.block.walk():
            if instruction.is_collective:
                found.append(self._collective(instruction, times))
        return tuple(found)

    def compile(self) -> Any:
        """Compiles the program with the backend it was lowered for; see `meshdsl.running.jit`.

        Raises:
            ValueError: no function is known: the program was lowered from a graph, or unpickled.
        """
        if self.origin.compile is None:
            raise ValueError(
                f"program `{self.name}` has no function to compile for: it was lowered from a "
                "graph, or unpickled. Write md.jit(f, mesh, layout).lower(x).compile(), "
                "or run the program on flat arrays: "
                'meshdsl.lowering.backends.load("jax").Executable(program).call_flat(arrays)'
            )
        return self.origin.compile(self)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is pickled: all but what belongs to this process, and what is cached.

        Raises:
            ValueError: a function of the user's has no name that it could be imported by.
        """
        for instruction, _ in self.block.walk():
            if problem := _unpicklable(instruction.params.get("definition")):
                raise ValueError(
                    f"program `{self.name}` cannot be pickled: {problem}, at {instruction.source}. "
                    "Functions are pickled by name: define it with `def`, outside of any function"
                )
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"origin": Origin()}

    def _collective(self, instruction: Instruction, times: int) -> Collective:
        axes = tuple(instruction.params["axes"])
        payload = payload_bytes(instruction, self.mesh)
        parts = instruction.parts if len(instruction.outputs) > 1 else ()
        found = tuple(self._collective(part, times) for part in parts)
        largest = max(found, key=lambda part: part.payload_bytes, default=None)
        return Collective(
            kind=instruction.op,
            axes=axes,
            payload_bytes=payload,
            wire_bytes=wire_bytes(instruction.op, payload, self.mesh.extent(axes)),
            count=times,
            source=instruction.source,
            dims=largest.dims if largest else instruction.outputs[0].shape,
            groups=instruction.params.get("pairs") or self.mesh.groups(*axes),
            parts=found,
        )

    @cached_property
    def wire_bytes(self) -> float:
        """Bytes one device sends per run: of a `while` one iteration, of a `cond` the worse."""

        def sent(instruction: Instruction) -> float:
            return wire_of(instruction, self.mesh)

        return math.fsum(sent(one) * times for one, times in self.block.counted(sent))

    @cached_property
    def memory(self) -> Memory:
        """What one device holds at the moment it holds most; the model is in `costs.memory`."""
        return late("memory of a program")(self)

    @property
    def peak_bytes(self) -> int:
        """The most bytes one device holds at once."""
        return self.memory.peak_bytes

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of one device per run; see `lowering.costs.flops`."""
        return late("flops of a program")(self)

    def __str__(self) -> str:
        return late("program as text")(self)

    def _repr_html_(self) -> str:
        """Returns the report of `meshdsl explain --html` for a notebook's cell."""
        return late("program explained")(self)._repr_html_()
