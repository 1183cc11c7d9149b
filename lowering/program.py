"""SpmdProgram: the program of one device, a flat list of typed instructions on local tensors.

A `Value` is a global tensor with its `TensorLayout`; a device has its local shard. An `Instruction`
maps values to values; its `op` is a local primitive or one of the five collectives. Programs nest
only through the `Block`s of `scan`, `while` and `cond`. Everything is immutable, and every
instruction keeps the source line it came from.

`lowering.instructions` declares every kind of instruction, and `lowering.collectives` how each
collective changes layouts. Resharding uses one local instruction beside them:
    slice           axes, dim             replicated axes -> appended, minor, to dim

The operands of a `scan` are, in this order, `consts` values that its body reads in every iteration,
`carries` initial carries, and stacks that it reads slice by slice. The stacks listed as `ahead`, by
their numbers among the stacks, are read one iteration ahead, and the last iteration reads the first
slice again. They are the last stacks.

A collective may be joined: it moves several tensors of one dtype at once, and has a result for
each. Parameters that differ between the tensors are listed, as `dims` instead of `dim`, and
`sources` has the line of each. `Instruction.parts` splits a joined collective into its parts;
`joined` joins them.
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
from meshdsl.layouts.calibration import find_hardware
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.collectives import COLLECTIVES
from meshdsl.lowering.instructions import kinds_with
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.slots import setters
from meshdsl.tracing.source import UNKNOWN, Source

if TYPE_CHECKING:
    from meshdsl.layouts.hardware import Tile
    from meshdsl.layouts.layout import Layout
    from meshdsl.lowering.costs.memory import Memory
    from meshdsl.lowering.pipelines.running import RunningPipeline

# The parameters of collectives that name a dim, and their names in a joined collective.
_LISTED = {name: f"{name}s" for kind in COLLECTIVES.values() for name in kind.dims}
# Kinds that run each time, in order, whether or not their results are read.
EFFECTS = kinds_with(lambda kind: kind.effect)


class Pairs(tuple[tuple[int, int], ...]):
    """The (source, target) devices of a permute; a tuple that is hashed once."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


def exact_key(value: Any) -> Hashable:
    """Returns a key that differs for different parameters: 0.0 and -0.0; 1, True and 1.0."""
    if type(value) is dict or isinstance(value, Mapping):
        return tuple([(name, exact_key(value[name])) for name in sorted(value)])
    if isinstance(value, float | complex | np.generic):
        return type(value), repr(value)
    if type(value) is Pairs:
        return value
    if type(value) is tuple and not all(type(item) is int for item in value):
        return tuple, tuple(map(exact_key, value))
    return type(value), value


@dataclass(frozen=True, eq=False, slots=True, init=False)
class Value:
    """A tensor in a program: its global shape, dtype and layout, and the shape of a shard.

    Attributes:
        bytes: those of one device's shard.
    """

    shape: Shape
    dtype: np.dtype
    layout: TensorLayout
    local: Shape
    # Computed once, since costs read it some twenty times.
    bytes: int = field(init=False, repr=False)

    def __init__(self, shape: Shape, dtype: np.dtype, layout: TensorLayout, local: Shape) -> None:
        _set_shape(self, shape)
        _set_dtype(self, dtype)
        _set_layout(self, layout)
        _set_local(self, local)
        _set_bytes(self, local.volume * dtype.itemsize)


_set_shape, _set_dtype, _set_layout, _set_local, _set_bytes = setters(Value)


@dataclass(frozen=True, eq=False, slots=True, init=False)
class Instruction:
    """One step of every device: `outputs = op(inputs, **params)`.

    Attributes:
        bodies: the blocks that it runs: a loop's body, the branches of a `cond`.
    """

    op: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    params: Mapping[str, Any]
    source: Source
    # Computed once, since passes read it some thirty times.
    bodies: tuple[Block, ...] = field(init=False, repr=False)

    def __init__(
        self,
        op: str,
        inputs: tuple[Value, ...],
        outputs: tuple[Value, ...],
        params: Mapping[str, Any] | None = None,
        source: Source = UNKNOWN,
    ) -> None:
        bodies: tuple[Block, ...] = ()
        if params:
            bodies = tuple([value for value in params.values() if isinstance(value, Block)])
        _set_op(self, op)
        _set_inputs(self, inputs)
        _set_outputs(self, outputs)
        _set_params(self, {} if params is None else params)
        _set_source(self, source)
        _set_bodies(self, bodies)

    @property
    def body(self) -> Block | None:
        """The block that a `scan` or `while` repeats."""
        return self.params.get("body")

    @property
    def runs(self) -> int:
        """How often it runs its bodies; a `while` counts one iteration."""
        return self.params.get("length", 1)

    @property
    def has_effect(self) -> bool:
        """Whether it, or an instruction of its bodies, does more than compute its results."""
        if not self.bodies:  # most instructions
            return self.op in EFFECTS
        return self.op in EFFECTS or any(body.has_effect for body in self.bodies)

    @property
    def is_collective(self) -> bool:
        return self.op in COLLECTIVES

    @property
    def parts(self) -> tuple[Instruction, ...]:
        """The parts of a joined collective, of one tensor each; otherwise only itself."""
        if "sources" not in self.params:
            return (self,)
        own = {name: self.params[many] for name, many in _LISTED.items() if many in self.params}
        tensors = zip(self.inputs, self.outputs, self.params["sources"], strict=True)
        return tuple(
            Instruction(
                self.op,
                (value,),
                (result,),
                {
                    **shared_parameters(self),
                    **{name: listed[number] for name, listed in own.items()},
                },
                source,
            )
            for number, (value, result, source) in enumerate(tensors)
        )


_set_op, _set_inputs, _set_outputs, _set_params, _set_source, _set_bodies = setters(Instruction)


def shared_parameters(collective: Instruction) -> dict[str, Any]:
    """Returns the parameters of a collective that all of its tensors share."""
    own = (*_LISTED, *_LISTED.values(), "sources")
    return {name: value for name, value in collective.params.items() if name not in own}


def joined(collectives: Sequence[Instruction], mesh: Mesh) -> Instruction:
    """Returns the joined collective of several, with the line of the largest.

    They have the same op, dtype, kind and axes, and none reads the result of another.
    """
    parts = [part for collective in collectives for part in collective.parts]
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    params = shared_parameters(first)
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
        """Whether an instruction of this block does more than compute its results."""
        return any(instruction.has_effect for instruction in self.instructions)

    @property
    def replays(self) -> bool:
        """Whether it recomputes values, after a barrier."""
        return any(instruction.op == "barrier" for instruction, _ in self.walk())

    def walk(self, times: int = 1) -> Iterator[tuple[Instruction, int]]:
        """Yields every instruction with its executions per run of the program.

        Instructions of a `while` count once. Those of both branches of a `cond` are yielded.
        """
        for instruction in self.instructions:
            yield instruction, times
            for body in instruction.bodies:
                yield from body.walk(times * instruction.runs)

    def counted(
        self, cost: Callable[[Instruction], float], times: int = 1
    ) -> Iterator[tuple[Instruction, int]]:
        """Yields as `walk` does, but only the branch of each `cond` that costs more."""

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

    Attributes:
        payload_bytes: those of the larger of the local operand and the local result.
        wire_bytes: the bytes that a device sends (see the function `wire_bytes`).
        count: how often it runs.
        groups: the devices that exchange data with each other; for a permute, (source, target).
        dims: the dims of the tensor that it moves; of a joined collective, of the largest.
        parts: the parts of a joined collective, of one tensor each.
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
    """Returns the bytes that a device sends, by the formula of the kind in `COLLECTIVES`.

    Args:
        payload: the bytes of the larger of local operand and local result.
        devices: the size n of one group.
    """
    if devices <= 1:  # nothing is sent
        return 0.0
    return COLLECTIVES[kind].wire(devices) * payload


def wire_of(instruction: Instruction, mesh: Mesh) -> float:
    """Returns the bytes that a device sends for one execution of an instruction."""
    if not instruction.is_collective:
        return 0.0
    payload = payload_bytes(instruction, mesh)
    return wire_bytes(instruction.op, payload, mesh.extent(instruction.params["axes"]))


def _unpicklable(definition: Any) -> str | None:
    """Returns why the functions of the user's operation cannot be pickled; None if they can."""
    try:
        pickle.dumps(definition)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        return f"operation `{definition.name}` has a function without a name of its own ({error})"
    return None


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to write a program: `Alternative("kept", 0.0632, 2**31)`.

    Attributes:
        seconds: the time of a step by simulation.
        peak_bytes: the memory of one device.
    """

    name: str
    seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What lowering decided by simulated time.

    Attributes:
        name: what it is about: `collectives`, `weights`, `context`, `halves`, `remat` or
            `pipeline`.
        chosen, other: the ways to write the program.
        fits: whether both fit into memory.
    """

    name: str
    chosen: Alternative
    other: Alternative
    fits: bool


@dataclass(frozen=True, eq=False)
class Origin:
    """The function that a program was lowered from; known only in the process that lowered it.

    Attributes:
        results: the structure of what the function returns.
        compile: makes the executable; None for a program that was lowered from a graph.
        blame: from the arguments, names the operation that computes the first value that is not
            finite; None for a program without such checks.
    """

    results: Any = None
    compile: Callable[[SpmdProgram], Any] | None = None
    blame: Callable[[Sequence[Any]], str] | None = None


@dataclass(frozen=True, eq=False)
class SpmdProgram:
    """A lowered program: the block that all devices run, and the paths of its inputs and outputs.

    Attributes:
        donated: for each input, whether an output may be written over it.
        scopes: the paths that scopes of a layout may apply to.
        unused: messages about options without effect.
        notes: messages to the user, for reports.
        kept: the weights that are kept gathered for the backward pass.
        decisions: what lowering decided by simulated time.
        pipeline: the pipeline that it runs, if any.
        tile: how its devices store tensors, if they are known.
        partitioner: the compiler that decides what is sent; empty if this program decides.
        compiler_flags: the flags that the user sets for the compiler.
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
    decisions: tuple[Decision, ...] = ()
    pipeline: RunningPipeline | None = None
    tile: Tile | None = None
    partitioner: str = ""
    compiler_flags: tuple[tuple[str, bool | int | float | str], ...] = ()
    origin: Origin = field(default_factory=Origin, repr=False)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective in program order.

        `count` is the product of the lengths of enclosing scans. A `while` counts once, since the
        number of its iterations is not known. Both branches of a `cond` are listed.
        """
        collectives = []
        for instruction, times in self.block.walk():
            if instruction.is_collective:
                collectives.append(self._collective(instruction, times))
        return tuple(collectives)

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
        """Returns the fields that are pickled: all but the origin; nothing that is cached.

        Raises:
            ValueError: a function of the user's has no name to import it by.
        """
        for instruction, _ in self.block.walk():
            if problem := _unpicklable(instruction.params.get("definition")):
                raise ValueError(
                    f"program `{self.name}` cannot be pickled: {problem}, at {instruction.source}. "
                    "Functions are pickled by name: define it with `def`, outside of any function"
                )
        values = {field_.name: getattr(self, field_.name) for field_ in fields(self)}
        return values | {"origin": Origin()}

    def _collective(self, instruction: Instruction, times: int) -> Collective:
        axes = tuple(instruction.params["axes"])
        payload = payload_bytes(instruction, self.mesh)
        parts = instruction.parts if len(instruction.outputs) > 1 else ()
        collectives = tuple(self._collective(part, times) for part in parts)
        largest = max(collectives, key=lambda part: part.payload_bytes, default=None)
        return Collective(
            kind=instruction.op,
            axes=axes,
            payload_bytes=payload,
            wire_bytes=wire_bytes(instruction.op, payload, self.mesh.extent(axes)),
            count=times,
            source=instruction.source,
            dims=largest.dims if largest else instruction.outputs[0].shape,
            groups=instruction.params.get("pairs") or self.mesh.groups(*axes),
            parts=collectives,
        )

    @cached_property
    def wire_bytes(self) -> float:
        """The bytes that one device sends per run.

        A `while` counts one iteration, a `cond` the branch that sends more.
        """

        def sent(instruction: Instruction) -> float:
            return wire_of(instruction, self.mesh)

        counted = self.block.counted(sent)
        return math.fsum(sent(instruction) * times for instruction, times in counted)

    @cached_property
    def memory(self) -> Memory:
        """The buffers of one device at the peak; `costs.memory` has the model."""
        return late("memory of a program")(self)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that one device uses at once."""
        return self.memory.peak_bytes

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of one device per run; see `lowering.costs.flops`."""
        return late("flops of a program")(self)

    def seconds(self, hardware: str) -> float:
        """Returns the simulated time of one run: `program.seconds("v5p")`.

        Args:
            hardware: a name, or the file of a calibration. A program that time has decided about,
                by `Options(hardware="v5p")`, is the fastest there.

        Raises:
            ValueError: it is not known, or its file cannot be used.
        """
        return late("time of a program")(self, find_hardware(hardware))

    def __str__(self) -> str:
        return late("program as text")(self)

    def _repr_html_(self) -> str:
        """Returns the report of `meshdsl explain --html` for a notebook's cell."""
        return late("program explained")(self)._repr_html_()
