"""Wire: what a compiled program sends, read from its optimised HLO text (CPU, GPU and TPU).

`sent(text, devices)` lists the collectives with their groups, payloads and executions per run;
`wire_bytes(text, devices)` is what one device sends in all, by the formulas of
`meshdsl.lowering.program.wire_bytes`. Compilers write collectives in several forms:

* An asynchronous collective is a pair `-start`, `-done`, whose start gives operands and results, or
  an `async-start` or `custom-call-start` that calls a computation. It counts once.
* XLA:TPU writes a reduce_scatter as a fusion that calls `all-reduce-scatter...`: an all-reduce, of
  which each device keeps a slice.
* A gather that XLA:TPU runs in steps beside products stands in the fusion that starts it, in each
  `async_collective_fusion...` that continues it, and in the one that ends it. The first counts.
* Collectives merged into one with a tuple of results count by their parts.
* Across slices, XLA:TPU sends through the hosts; see `megascale`, which also numbers the devices.

A collective in any other form is an error, never a zero: each computation that has one must be
reached.

Run: python -m meshdsl.lowering.backends.hlo.wire FILE [DEVICES]
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshdsl.lowering.backends.hlo.groups import Groups, groups_of, pairs_of
from meshdsl.lowering.backends.hlo.loops import trips
from meshdsl.lowering.backends.hlo.megascale import transfer
from meshdsl.lowering.backends.hlo.text import Line, Module, parts_of, sizes_of
from meshdsl.lowering.program import wire_bytes as wire_bytes_of

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "permute",
}
UNKNOWN_KINDS = ("ragged-all-to-all", "collective-broadcast")
# What any collective says of the devices that take part.
_AMONG = re.compile(r"\b(replica_groups|source_target_pairs)=")
# What runs a computation as a part of itself, once.
_CALLS = ("call", "fusion", "async-start", "custom-call-start", "custom-call")


@dataclass(frozen=True)
class Sent:
    """One collective: payloads in bytes by parts, and its executions per run of the program.

    `groups` are the devices that take part together; of a permute, the pairs (source, target). Of a
    collective across slices they are members, as `megascale` numbers them.
    """

    kind: str
    groups: Groups
    payloads: tuple[int, ...]
    count: int
    line: str
    across_slices: bool = False

    @property
    def wire_bytes(self) -> float:
        """The bytes that a device sends per execution."""
        devices = len(next(iter(self.groups)))
        return sum(wire_bytes_of(self.kind, payload, devices) for payload in self.payloads)


def sent(text: str, devices: int) -> list[Sent]:
    """Returns the collectives of a program, those in loops with their executions.

    Of a conditional, those of the branch that sends most.

    Raises:
        ValueError: a kind or form of collective, of groups, of an array, or a loop that is not
            known.
    """
    walk = Walk(Module.parse(text), devices)
    collectives = list(walk.computation(walk.module.entry, 1))
    walk.check()
    return collectives


def wire_bytes(text: str, devices: int) -> float:
    """Returns the bytes that one device sends per run of the program."""
    return sum(one.wire_bytes * one.count for one in sent(text, devices))


class Walk:
    """A walk through the computations that run.

    Attributes:
        reached: the computations that were walked through.
    """

    def __init__(self, module: Module, devices: int) -> None:
        self.module = module
        self.devices = devices
        self.reached: set[str] = set()

    def computation(self, name: str, times: int) -> Iterator[Sent]:
        """Yields what a computation sends when it runs so many times."""
        self.reached.add(name)
        if continues(self.module, name):
            return
        for line in self.module.computations[name].values():
            if line.op == "while":
                (body,) = line.named("body")
                inside = list(self.computation(body, 1))
                runs = times * trips(self.module, name, line) if inside else 0
                yield from (replace(one, count=one.count * runs) for one in inside)
            elif line.op == "conditional":
                branches = [list(self.computation(callee, times)) for callee in line.branches]
                yield from max(branches, key=lambda all_: sum(s.wire_bytes * s.count for s in all_))
            else:
                yield from self.line(name, line, times)

    def line(self, computation: str, line: Line, times: int = 1) -> Iterator[Sent]:
        """Yields what one line sends, by itself or in a computation that it calls.

        Raises:
            ValueError: a kind of collective or a form of groups that is not known.
        """
        base = line.op.removesuffix("-start")
        if base in UNKNOWN_KINDS:
            raise ValueError(f"a collective of unknown kind: {line.op} {line.attributes[:200]}")
        if base in KINDS:
            yield _collective(computation, line, times, self.devices)
        elif line.op == "send":
            hosts = transfer(line.attributes, sizes_of(line.result)[0])
            if hosts is not None:
                yield Sent(hosts.kind, hosts.groups, (hosts.payload,), times, line.name, True)
        elif line.op in _CALLS:
            for callee in line.called:
                yield from self.computation(callee, times)
        elif not line.op.endswith("-done") and _AMONG.search(line.attributes):
            raise ValueError(f"a collective of unknown kind: {line.op} {line.attributes[:200]}")

    def check(self) -> None:
        """Checks that no computation with a collective was passed over.

        Raises:
            ValueError: one was.
        """
        for name, lines in self.module.computations.items():
            if name in self.reached:
                continue
            for line in lines.values():
                if line.op.removesuffix("-start") in (*KINDS, *UNKNOWN_KINDS):
                    raise ValueError(
                        f"a collective in a form that is not known: {line.op} {line.name} in "
                        f"{name}, which {self._caller(name)}"
                    )

    def _caller(self, name: str) -> str:
        for computation, lines in self.module.computations.items():
            for line in lines.values():
                if name in (*line.called, *line.branches, *line.named("condition", "body")):
                    return f"{line.op} {line.name} in {computation} calls"
        return "nothing calls"


def continues(module: Module, name: str) -> bool:
    """Whether a computation continues, or ends, a collective that another one has started."""
    if name.startswith("async_collective_fusion"):
        return True
    return marked(module, name, "AsyncCollectiveDone")


def marked(module: Module, name: str, target: str) -> bool:
    """Whether a computation has a custom call of some target."""
    lines = module.computations[name].values()
    return any(f'target="{target}"' in line.attributes for line in lines)


def _collective(computation: str, line: Line, times: int, devices: int) -> Sent:
    base = line.op.removesuffix("-start")
    kind, sizes = KINDS[base], _results(line)
    if kind == "permute":
        pairs = pairs_of(line.attributes)
        moving = frozenset(pair for pair in pairs if pair[0] != pair[1])
        return Sent(kind, moving or pairs, tuple(sizes) if moving else (0,), times, line.name)
    groups = groups_of(line.attributes, devices)
    if base == "all-reduce" and computation.startswith("all-reduce-scatter"):
        kind = "reduce_scatter"
    elif base == "reduce-scatter":
        sizes = [size * len(next(iter(groups))) for size in sizes]
    elif base == "all-to-all":
        sizes = [sum(sizes)]
    return Sent(kind, groups, tuple(sizes), times, line.name)


def _results(line: Line) -> list[int]:
    """Returns the bytes of the results of a collective, by parts.

    Raises:
        ValueError: the form of the results is not known.
    """
    if not line.op.endswith("-start") or line.op == "all-reduce-start":
        return sizes_of(line.result)
    # Operands, then results, then counters; several operands are a tuple, or stand side by side.
    parts = parts_of(line.result[1:-1]) if line.result.startswith("(") else []
    if len(parts) > 1 and parts[0].startswith("("):
        return sizes_of(parts[1])
    operands = max(1, len(line.operands))
    if len(parts) < 2 * operands:
        raise ValueError(f"a collective whose results are not known: {line.op} {line.result[:120]}")
    return sizes_of(", ".join(parts[operands : 2 * operands]))


def main() -> None:
    """Prints a table."""
    with open(sys.argv[1]) as file:
        collectives = sent(file.read(), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    rows: Counter[tuple[str, int, float]] = Counter()
    for one in collectives:
        rows[one.kind, len(next(iter(one.groups))), one.wire_bytes] += one.count
    for (kind, group, each), count in sorted(rows.items(), key=lambda row: -row[0][2] * row[1]):
        total = each * count / 2**20
        print(
            f"{kind:15} among {group:3}  {each / 2**20:10.3f} MiB x {count:5} = {total:11.2f} MiB"
        )
    print(f"{sum(one.wire_bytes * one.count for one in collectives) / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
