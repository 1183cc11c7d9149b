"""Bytes on the wire of a compiled program, read from the optimised HLO of XLA:CPU, GPU and TPU.

`sent(text, devices)` lists the collectives with their groups, payloads and executions per run;
`wire_bytes(text, devices)` is the total that one device sends, by the formulas of
`meshdsl.lowering.program.wire_bytes`. Compilers write some collectives in special forms:

* An asynchronous collective is a pair `-start`, `-done`, or an `async-start` that calls a
  computation. It counts once. The result of a `-start` lists operands, then results.
* XLA:TPU writes a reduce_scatter as a fusion that calls `all-reduce-scatter...`: an all-reduce, of
  which each device keeps a slice.
* XLA:TPU may run a gather in steps beside products. It then appears in the fusion that starts it,
  in each `async_collective_fusion...` that continues it, and in the fusion that finishes it. Only
  the first counts.
* Collectives merged into one with a tuple of results count by their parts.
* Across slices, XLA:TPU sends through the hosts; see `megascale`, which also numbers the devices.
* The trip count of a loop is its `known_trip_count`. Without that it follows from the loop's
  counter: its start, the step in the body, and the limit in the condition.

Run: python -m meshdsl.lowering.backends.hlo_wire FILE [DEVICES]
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshdsl.lowering.backends.megascale import transfer
from meshdsl.lowering.program import wire_bytes as wire_bytes_of

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "permute",
}
UNKNOWN_KINDS = ("ragged-all-to-all", "collective-broadcast")
_BITS = re.compile(r"(?:pred|[a-z]+(\d+))")
_NAME = re.compile(r"%([\w.\-]+)")
Groups = frozenset[tuple[int, ...]]


@dataclass(frozen=True)
class Sent:
    """One collective of a compiled program.

    Attributes:
        groups: the devices of each group; for a permute, the pairs (source, target).
        payloads: of each part, in bytes.
        count: executions per run of the program.
        line: the name of its instruction.
    """

    kind: str
    groups: Groups
    payloads: tuple[int, ...]
    count: int
    line: str

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends per execution."""
        devices = len(next(iter(self.groups)))
        return sum(wire_bytes_of(self.kind, payload, devices) for payload in self.payloads)


def sent(text: str, devices: int) -> list[Sent]:
    """Returns the collectives of a program, with their executions per run.

    A conditional counts as the branch that sends most.

    Raises:
        ValueError: a kind of collective, a form of groups or a loop that is not known.
    """
    module = Module.parse(text)
    return list(_walk(module, module.entry, 1, devices))


def wire_bytes(text: str, devices: int) -> float:
    """Returns the bytes that one device sends per run of the program."""
    return sum(s.wire_bytes * s.count for s in sent(text, devices))


# Parsing.


@dataclass(frozen=True)
class Line:
    """An instruction: `%name = result op(operands), attributes`."""

    name: str
    result: str
    op: str
    arguments: str
    attributes: str

    @cached_property
    def operands(self) -> list[str]:
        return _NAME.findall(self.arguments)

    def called(self, *attributes: str) -> list[str]:
        """Returns the computations named by attributes: `calls=%x`, `branches={%x, %y}`."""
        names = []
        for attribute in attributes:
            match = re.search(rf"\b{attribute}=(?:\{{([^}}]*)\}}|(%?[\w.\-]+))", self.attributes)
            if match:
                names += re.findall(r"[\w.\-]+", match.group(1) or match.group(2))
        return names


@dataclass(frozen=True)
class Module:
    """The computations of a program by name; the last line of each is its root."""

    computations: Mapping[str, Mapping[str, Line]]
    roots: Mapping[str, Line]
    entry: str

    @staticmethod
    def parse(text: str) -> "Module":
        """Returns the computations of an HLO text."""
        computations: dict[str, dict[str, Line]] = {}
        roots: dict[str, Line] = {}
        name, entry = "", ""
        for row in text.splitlines():
            head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", row)
            if head:
                name = head.group(2)
                entry = name if head.group(1) else entry
                computations[name] = {}
            elif name and (line := _line(row)):
                computations[name][line.name] = line
                if row.lstrip().startswith("ROOT"):
                    roots[name] = line
        return Module(computations, roots, entry)


def _line(row: str) -> Line | None:
    """Returns the instruction of a row of text; None: the row has none."""
    head = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", row)
    if head is None:
        return None
    start = head.end()
    end = _closing(row, start) if row[start] == "(" else row.index(" ", start)
    opened = row.index("(", end)
    closed = _closing(row, opened)
    op = row[end:opened].strip()
    return Line(head.group(1), row[start:end], op, row[opened + 1 : closed - 1], row[closed:])


def _closing(row: str, start: int) -> int:
    """Returns the position after the bracket that matches the bracket at `start`."""
    depth = 0
    for position in range(start, len(row)):
        depth += (row[position] == "(") - (row[position] == ")")
        if depth == 0:
            return position + 1
    raise ValueError(f"brackets do not match: {row[:200]}")


def _sizes(result: str) -> list[int]:
    """Returns the bytes of each array of a type."""
    sizes = []
    for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", result):
        if dtype == "token":
            continue
        match = _BITS.match(dtype)
        assert match is not None, dtype
        bits = int(match.group(1) or 8)
        count = int(np.prod([int(size) for size in dims.split(",") if size], dtype=np.int64))
        sizes.append(-(-bits * count // 8))
    return sizes


# Walking over the computations that run.


def _walk(module: Module, name: str, times: int, devices: int) -> Iterator[Sent]:
    """Yields the collectives of a computation, which runs `times` per run of the program."""
    if _continues(module, name):
        return
    for line in module.computations[name].values():
        base = line.op.removesuffix("-start")
        if base in UNKNOWN_KINDS:
            raise ValueError(f"a collective of unknown kind: {line.op} {line.attributes[:200]}")
        if base in KINDS:
            yield _collective(module, name, line, times, devices)
        elif line.op == "send":
            across = transfer(line.attributes, _sizes(line.result)[0])
            if across is not None:
                yield Sent(across.kind, across.groups, (across.payload,), times, line.name)
        elif line.op == "while":
            (body,) = line.called("body")
            inside = list(_walk(module, body, 1, devices))
            trips = _trips(module, name, line) if inside else 0
            for collective in inside:
                yield _repeated(collective, times * trips)
        elif line.op == "conditional":
            names = line.called("branch_computations", "true_computation", "false_computation")
            branches = [list(_walk(module, callee, times, devices)) for callee in names]
            yield from max(branches, key=lambda branch: sum(s.wire_bytes * s.count for s in branch))
        elif line.op in ("call", "fusion", "async-start"):
            for callee in line.called("calls", "to_apply", "called_computations"):
                yield from _walk(module, callee, times, devices)


def _continues(module: Module, name: str) -> bool:
    """Whether a computation continues, or finishes, a collective that another one started."""
    if name.startswith("async_collective_fusion"):
        return True
    lines = module.computations[name].values()
    return any('target="AsyncCollectiveDone"' in line.attributes for line in lines)


def _repeated(collective: Sent, times: int) -> Sent:
    """Returns a collective whose executions are multiplied by `times`."""
    return Sent(
        collective.kind,
        collective.groups,
        collective.payloads,
        collective.count * times,
        collective.line,
    )


def _collective(module: Module, name: str, line: Line, times: int, devices: int) -> Sent:
    """Returns a collective with its payloads, from the sizes of its results."""
    base = line.op.removesuffix("-start")
    kind, sizes = KINDS[base], _sizes(line.result)
    if line.op != base and base == "all-gather":
        sizes = sizes[len(sizes) // 2 :]  # the first half are operands
    if kind == "permute":
        sizes = sizes[:1]  # a start lists its operand, its result and counters
        pairs = _pairs(line.attributes)
        moving = frozenset(pair for pair in pairs if pair[0] != pair[1])
        return Sent(kind, moving or pairs, tuple(sizes) if moving else (0,), times, line.name)
    groups = _groups(line.attributes, devices)
    if base == "all-reduce" and name.startswith("all-reduce-scatter"):
        kind = "reduce_scatter"
    elif base == "reduce-scatter":
        sizes = [size * len(next(iter(groups))) for size in sizes]
    elif base == "all-to-all":
        sizes = [sum(sizes)]
    return Sent(kind, groups, tuple(sizes), times, line.name)


def _groups(attributes: str, devices: int) -> Groups:
    """Returns the groups of devices, written in any of XLA's forms."""
    text = attributes.partition("replica_groups=")[2]
    if not text or text.startswith("{}"):
        return frozenset([tuple(range(devices))])
    if text.startswith("{{"):
        rows = re.findall(r"\{([\d,]+)\}", text[: text.index("}}") + 1])
        return frozenset(tuple(int(d) for d in row.split(",")) for row in rows)
    iota = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        shape, sizes = (_numbers(part) for part in iota.groups()[:2])
        numbered = np.arange(np.prod(sizes)).reshape(sizes)
        if iota.group(3):
            numbered = numbered.transpose(_numbers(iota.group(3)))
        return frozenset(tuple(row) for row in numbered.reshape(shape).tolist())
    mesh = re.match(r"mesh\[((?:'\w+'=\d+,?)+)\] \{((?:'\w+',? ?)+)\}", text)
    if mesh:
        axes = dict(re.findall(r"'(\w+)'=(\d+)", mesh.group(1)))
        names, used = list(axes), re.findall(r"'(\w+)'", mesh.group(2))
        numbered = np.arange(devices).reshape([int(size) for size in axes.values()])
        order = [names.index(name) for name in names if name not in used]
        order += [names.index(name) for name in used]
        size = int(np.prod([int(axes[name]) for name in used]))
        return frozenset(tuple(row) for row in numbered.transpose(order).reshape(-1, size).tolist())
    raise ValueError(f"groups of unknown form: {text[:120]}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _pairs(attributes: str) -> Groups:
    match = re.search(r"source_target_pairs=\{(.*?)\}\}", attributes)
    assert match is not None, attributes[:200]
    return frozenset((int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", match.group(1)))


# Loops.


def _trips(module: Module, name: str, loop: Line) -> int:
    """Returns the trip count of a loop.

    Raises:
        ValueError: it does not follow from the text.
    """
    known = re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', loop.attributes)
    if known:
        return int(known.group(1))
    (condition,), (body,) = loop.called("condition"), loop.called("body")
    root = module.roots[condition]
    if root.op == "compare" and "direction=LT" in root.attributes:
        counter, limit = root.operands
        index = _state_index(module, condition, counter)
        (start,) = loop.operands
        if index is not None:
            first = _number(module, name, _element(module, name, start, index))
            step = _step(module, body, index)
            last = _number(module, condition, limit)
            if last is None and (limit_index := _state_index(module, condition, limit)) is not None:
                last = _number(module, name, _element(module, name, start, limit_index))
            if first is not None and last is not None and step:
                return max(0, -(-(last - first) // step))
    raise ValueError(f"how often {loop.name} runs is not known: {root.op}({root.arguments})")


def _definition(module: Module, computation: str, name: str | None) -> Line | None:
    """Returns the line that defines a value, past copies."""
    lines = module.computations[computation]
    line = lines.get(name) if name else None
    while line is not None and line.op in ("copy", "bitcast", "copy-done", "copy-start"):
        line = lines.get(line.operands[0])
    return line


def _number(module: Module, computation: str, name: str | None) -> int | None:
    line = _definition(module, computation, name)
    return int(line.arguments) if line is not None and line.op == "constant" else None


def _state_index(module: Module, computation: str, name: str) -> int | None:
    """Returns the index of a value in the loop's state; None: it is not part of that."""
    line = _definition(module, computation, name)
    if line is None or line.op != "get-tuple-element":
        return None
    match = re.search(r"index=(\d+)", line.attributes)
    assert match is not None
    return int(match.group(1))


def _element(module: Module, computation: str, name: str, index: int) -> str | None:
    line = module.computations[computation].get(name)
    return line.operands[index] if line is not None and line.op == "tuple" else None


def _step(module: Module, body: str, index: int) -> int | None:
    """Returns the number that a loop's body adds to an element of its state; None: not known."""
    line = _definition(module, body, module.roots[body].operands[index])
    if line is None or line.op != "add":
        return None
    numbers = [_number(module, body, operand) for operand in line.operands]
    return next((number for number in numbers if number is not None), None)


def main() -> None:
    """Prints a table of the collectives, those that send most first."""
    with open(sys.argv[1]) as file:
        collectives = sent(file.read(), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    rows: Counter[tuple[str, int, float]] = Counter()
    for collective in collectives:
        key = collective.kind, len(next(iter(collective.groups))), collective.wire_bytes
        rows[key] += collective.count
    for (kind, size, wire), count in sorted(rows.items(), key=lambda row: -row[0][2] * row[1]):
        total = wire * count / 2**20
        print(f"{kind:15} among {size:3}  {wire / 2**20:10.3f} MiB x {count:5} = {total:11.2f} MiB")
    print(f"{sum(s.wire_bytes * s.count for s in collectives) / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
