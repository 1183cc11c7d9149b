"""Measured: what the instructions of a program take by a calibration (`layouts.calibration`).

* A product, attention, a look-up, a scatter, a reduction: as measured, by its sizes.
* Elementwise work: the bytes that a fusing compiler moves, and the arithmetic of each element,
  also where an instruction is fused with its readers.
* A loop that reads slices of stacks copies those that are operands of a product, and copies into
  its stacks what a product makes.
* A collective: by the devices of its groups and its payload. On CPUs small tensors travel in one
  buffer, as `lowering.backends.jax.collectives` sends them.
* A call of the program: by the number of its arrays.

A family that was not measured is replaced by the next best: another dtype or form of the same
kind, or else the bytes that the instruction moves. `estimated` says for which instructions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from meshdsl.layouts.calibration import Calibration
from meshdsl.layouts.fits import Fit, arrays_of, of_attention, runs_of
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.attention_sizes import AttentionSizes
from meshdsl.lowering.costs.products import product_sizes
from meshdsl.lowering.costs.roofline import LocalWork
from meshdsl.lowering.instructions import Fusion, kind_of, kinds_with
from meshdsl.lowering.parameters import (
    Indexed,
    Loop,
    Reduction,
    SplitDim,
    axes_of,
    parameters_of,
)
from meshdsl.lowering.program import Block, Instruction, Value, payload_bytes, wire_bytes

_VIEWS = kinds_with(lambda kind: kind.fusion is Fusion.VIEW or kind.effect)
_MOVES = kinds_with(lambda kind: kind.moves or kind.cheap or kind.constant or kind.in_place)
_BY_BYTES = (*_MOVES, "concat", "assemble", "window", "local_slice")
_ANY = "step"  # the function whose time any cheap one takes
_PACKED = 64 * 1024  # bytes up to which CPUs send tensors in one buffer


@dataclass
class MeasuredCosts:
    """The costs of a program's instructions on a mesh, by a calibration.

    Attributes:
        estimated: the kinds of instructions that were not measured, and what stands for them.
    """

    calibration: Calibration
    mesh: Mesh
    estimated: dict[str, str] = field(default_factory=dict)

    @cached_property
    def sharing(self) -> float:
        """How long work takes on this mesh, compared with all devices that were measured.

        Fewer devices share less; more devices than were measured share more.
        """
        fit = self.calibration.fits.get("sharing")
        if fit is None:
            return 1.0
        most = self.calibration.machine.devices
        devices = min(self.mesh.size, most)
        beyond = self.mesh.size / devices if self.calibration.machine.platform == "cpu" else 1.0
        return beyond * fit.seconds([devices]) / fit.seconds([most])

    def work(self, instruction: Instruction, work: LocalWork) -> float:
        """Returns the seconds of an instruction that is no collective and no loop."""
        if instruction.op in _VIEWS:
            return 0.0
        return self.sharing * self._alone(instruction, work)

    def _alone(self, instruction: Instruction, work: LocalWork) -> float:
        op = instruction.op
        if op == "einsum" and len(instruction.inputs) == 2:
            return self._product(instruction)
        if op in ("attention", "attention_gradient"):
            return self._attention(instruction)
        if op == "take":
            return self._gather(instruction)
        if op.startswith("scatter_"):
            return self._scatter(instruction)
        if op in ("row_sums", "add_rows"):
            return self._touched(instruction)
        if kind_of(op).fusion is Fusion.REDUCTION:
            return self._reduction(instruction, work)
        if kind_of(op).elementwise:
            return self._arithmetic(instruction) + self.moved(work.bytes)
        if op in _BY_BYTES:
            return self.moved(work.bytes)
        if work.flops:
            self.estimated[op] = "products of as many flops"
            return self.moved(work.bytes) + work.flops * self._seconds_of_flop
        if work.bytes:
            self.estimated[op] = "elementwise work on as many bytes"
        return self.moved(work.bytes)

    def moved(self, count: float) -> float:
        """Returns the seconds of elementwise work that moves some bytes."""
        return self.calibration.fits["elementwise"].seconds([count]) if count else 0.0

    @cached_property
    def _seconds_of_flop(self) -> float:
        rows = self.calibration.nearest("products")
        assert rows is not None, "a calibration without products is not complete"
        rates = [s / (2 * b * m * k * n) for (b, m, k, n), s in rows.measured.items()]
        return statistics.median(rates)

    def _of(self, family: str, op: str) -> Fit | None:
        """Returns the fit of a family; notes what stands for it if it was not measured."""
        fit = self.calibration.nearest(family)
        if fit is None:
            self.estimated[op] = "elementwise work on as many bytes"
        elif fit.family != family:
            self.estimated[op] = fit.family
        return fit

    def _product(self, instruction: Instruction) -> float:
        form = "leading" if all(map(_leads, *_contracted(instruction))) else "rows"
        dtype = instruction.inputs[0].dtype.name
        fit = self._of(f"products/{dtype}/{form}", instruction.op)
        assert fit is not None, "a calibration without products is not complete"
        return fit.seconds(product_sizes(instruction))

    def _attention(self, instruction: Instruction) -> float:
        sizes = AttentionSizes.of(instruction)
        row = sizes.lead.volume, sizes.rows.size, sizes.columns.size, sizes.features.size
        family = of_attention(instruction.op, instruction.inputs[0].dtype.name)
        fit = self._of(family, instruction.op)
        if fit is not None:
            return fit.seconds(row)
        count, rows, columns, features = row
        products = self.calibration.nearest("products/float32/rows")
        assert products is not None, "a calibration without products is not complete"
        passes = 5 if instruction.op == "attention_gradient" else 2
        scores = 4 * count * rows * columns
        return passes * (
            products.seconds((count, rows, features, columns)) + self.moved(3 * scores)
        )

    def _gather(self, instruction: Instruction) -> float:
        rows, row_bytes = _rows(instruction.outputs[0], instruction.inputs[1])
        fit = self._of(_along("gathers", instruction, instruction.inputs[0]), instruction.op)
        if fit is None:
            return self.moved(2 * rows * row_bytes)
        return fit.seconds((rows, row_bytes))

    def _scatter(self, instruction: Instruction) -> float:
        rows, row_bytes = _rows(*instruction.inputs)
        table = instruction.outputs[0].bytes
        fit = self._of(_along("scatters", instruction, instruction.outputs[0]), instruction.op)
        if fit is None:
            return self.moved(2 * rows * row_bytes + table)
        return fit.seconds((rows, row_bytes, max(1, table // row_bytes)))

    def _touched(self, instruction: Instruction) -> float:
        """Returns the seconds of work with the touched rows of a table: a scatter of as many."""
        rows, row_bytes = _rows(*instruction.inputs[-2:])
        fit = self._of("scatters", instruction.op)
        return (
            self.moved(3 * rows * row_bytes)
            if fit is None
            else fit.seconds((rows, row_bytes, rows))
        )

    def _reduction(self, instruction: Instruction, work: LocalWork) -> float:
        over = parameters_of(instruction, Reduction)["over"]
        dims = instruction.inputs[0].local
        minor = not dims.names or dims.names[-1] in over
        fit = self._of(f"reductions/{'minor' if minor else 'leading'}", instruction.op)
        count = work.bytes or instruction.inputs[0].bytes
        return self.moved(count) if fit is None else fit.seconds([count])

    def _arithmetic(self, instruction: Instruction) -> float:
        elements = max(value.local.volume for value in (*instruction.inputs, *instruction.outputs))
        if instruction.outputs[0].local.volume <= 1:
            return 0.0
        return elements * self._of_element(instruction)

    def _of_element(self, instruction: Instruction) -> float:
        op, known = instruction.op, self._functions
        function = op if kind_of(op).costly or op == "cast" else _ANY
        if function in known:
            return known[function]
        costly = [seconds for name, seconds in known.items() if name not in (_ANY, "cast")]
        if not costly:
            return 0.0
        self.estimated[op] = "the other functions"
        return statistics.median(costly)

    @cached_property
    def _functions(self) -> dict[str, float]:
        """The seconds of each function for one element, without the bytes that it moves."""
        known = {}
        for family, fit in self.calibration.fits.items():
            kind, _, function = family.partition("/")
            if kind == "functions":
                ((elements,), seconds), *_ = fit.measured.items()
                arithmetic = seconds - self.moved(4 * arrays_of(function) * elements)
                known[function] = max(0.0, arithmetic) / elements / runs_of(function)
        return known

    # What does not belong to one instruction.

    def slices(self, loop: Instruction) -> float:
        """Returns the seconds of one iteration for slices of stacks that are copied."""
        if loop.op != "scan" or loop.body is None:
            return 0.0
        params = parameters_of(loop, Loop)
        read = loop.body.inputs[params["consts"] + params["carries"] :]
        made = loop.body.outputs[params["carries"] :]
        copied = [
            *filter(_read_by_others(loop.body), read),
            *filter(_made_by_others(loop.body), made),
        ]
        return self.sharing * sum(self.moved(2 * value.bytes) for value in copied)

    def dispatch(self, block: Block) -> float:
        """Returns the seconds of a call of the program, beside its work."""
        fit = self.calibration.fits.get("dispatch")
        arrays = max(len(block.inputs), len(block.outputs))
        return 0.0 if fit is None else fit.seconds([max(1, arrays)])

    def transfer(self, collective: Instruction) -> float:
        """Returns the seconds of a collective."""
        devices = self.mesh.extent(axes_of(collective))
        if devices == 1:
            return 0.0
        payloads = {part: payload_bytes(part, self.mesh) for part in collective.parts}
        if self.calibration.machine.platform != "cpu":
            return self._sending(collective.parts[0], devices, sum(payloads.values()))
        small = [part for part, payload in payloads.items() if payload <= _PACKED]
        packed = sum(payloads[part] for part in small) if len(small) > 1 else 0
        seconds = self.moved(4 * packed)
        if packed:
            seconds += self._sending(small[0], devices, packed, is_packed=True)
            payloads = {part: p for part, p in payloads.items() if part not in small}
        seconds += sum(self._sending(part, devices, p) for part, p in payloads.items())
        return self.sharing * seconds

    def _sending(
        self, collective: Instruction, devices: int, payload: int, is_packed: bool = False
    ) -> float:
        """Returns the seconds of a collective of one tensor, or of several in one buffer."""
        op, family = collective.op, collective.op
        if op in ("all_gather", "reduce_scatter"):
            shard = (collective.inputs if op == "all_gather" else collective.outputs)[0].local
            before = shard.sizes[: shard.position(parameters_of(collective, SplitDim)["dim"])]
            family += "/first" if is_packed or math.prod(before) == 1 else "/later"
        fit = self._of(family, op)
        if fit is None:
            self.estimated[op] = "the best bandwidth of collectives"
            hardware = self.calibration.hardware
            sending = wire_bytes(op, payload, devices) / hardware.link_bandwidth
            return max(hardware.latency, sending)
        return fit.seconds((devices, max(1, payload)))


def _contracted(instruction: Instruction) -> tuple[list[Value], list[frozenset[str]]]:
    """Returns the operands of a product, and for each the names of its contracted dims."""
    first, second = instruction.inputs
    both = frozenset(first.local.names) & frozenset(second.local.names)
    return [first, second], [both - frozenset(instruction.outputs[0].local.names)] * 2


def _leads(operand: Value, contracted: frozenset[str]) -> bool:
    """Whether a contracted dim comes before the free dims of an operand of a product."""
    names = operand.local.names
    return bool(names) and names[0] in contracted and names[-1] not in contracted


def _rows(moved: Value, indices: Value) -> tuple[int, int]:
    """Returns how many rows a look-up or a scatter moves, and the bytes of one."""
    rows = max(1, indices.local.volume)
    return rows, max(1, moved.bytes // rows)


def _along(kind: str, instruction: Instruction, table: Value) -> str:
    """Returns the family of a look-up or a scatter: is a row of the table in one piece?"""
    params = parameters_of(instruction, Indexed)
    first, *_ = table.local.without(params["pairs"]).names
    return kind if first == params["dim"] else f"{kind}/later"


def _is_fused(instruction: Instruction) -> bool:
    return kind_of(instruction.op).fusion in (Fusion.FUSED, Fusion.REDUCTION)


def _read_by_others(body: Block) -> Callable[[Value], bool]:
    """Returns whether a value is an operand of an instruction that is not fused with its slice."""
    through = _views_to_operands(body.instructions)
    others = {
        through.get(value, value)
        for one in body.instructions
        if one.op not in _VIEWS and not _is_fused(one)
        for value in one.inputs
    }
    return lambda value: value in others


def _made_by_others(body: Block) -> Callable[[Value], bool]:
    """Returns whether a value is made by an instruction that cannot write into a stack."""
    through = _views_to_operands(body.instructions)
    fused = {value for one in body.instructions if _is_fused(one) for value in one.outputs}
    return lambda value: through.get(value, value) not in fused


def _views_to_operands(instructions: Sequence[Instruction]) -> dict[Value, Value]:
    """Returns for each result of a view the value that it is a view of."""
    found: dict[Value, Value] = {}
    for one in instructions:
        if one.op in _VIEWS and one.inputs:
            for value, operand in zip(one.outputs, one.inputs, strict=False):
                found[value] = found.get(operand, operand)
    return found
