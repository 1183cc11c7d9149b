"""Schedule: how long a compiled TPU program takes, by the schedule that the compiler wrote.

The lines of an optimised module stand in the order in which a device runs them. The compiler's own
estimate gives the cycles of a fusion, a product or a copy ("estimated_cycles"); the link model of
`layouts.hardware` gives the time of a collective. `schedule` lets one device run through them:

* Work takes its cycles.
* A collective begins when its line is reached and the links of its axes are free. A permute
  uses one direction of the links, every other kind both.
* A synchronous collective makes the device wait. An asynchronous one makes it wait at its end, if
  it still runs then: this wait is *exposed*, the rest of its time is *hidden*. So the time of the
  program is that of its work and what is exposed.
* A loop takes its body's time as often as it runs; of a conditional, the longest branch counts.
  What is on its way around a loop does not slow down what the loop sends.

What is not known: the time of kernels and other work without cycles (`Schedule.unknown` names it),
of transfers between a chip's memories, and of the host.

Run: python -m meshdsl.lowering.backends.hlo.schedule FILE MESH HARDWARE
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshdsl.layouts.hardware import Hardware, hardware
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends.hlo.groups import spanned_axes
from meshdsl.lowering.backends.hlo.loops import trips
from meshdsl.lowering.backends.hlo.text import Line, Module
from meshdsl.lowering.backends.hlo.wire import KINDS, Sent, Walk, marked
from meshdsl.lowering.costs.schedule import WORK, Event, Schedule

# Lines that work on arrays: without cycles, their time is not known. All other lines without cycles
# rename, wait, or calculate with scalars.
_WORKING = frozenset(
    "fusion convolution dot custom-call copy reduce reduce-window select-and-scatter sort scatter "
    "gather concatenate pad slice dynamic-slice dynamic-update-slice transpose fft cholesky "
    "triangular-solve rng-bit-generator".split()
)
_PRODUCTS = ("convolution", "dot")
_WITHOUT_WORK = ("AllocateBuffer", "Sharding", "AssumeGatherIndicesInBound", "GetGlobalId")
_PLACE = re.compile(r"~([^/~]+)-(\d+)(?=/|$)")  # as `backends.jax.machine` writes it
_HIDDEN_FRAMES = re.compile(r"site-packages|/meshdsl/(?:ops|gradients|running|tensors|tracing)/")


def schedule(text: str, mesh: Mesh, kind: Hardware) -> Schedule:
    """Returns the time of a compiled program on some hardware.

        schedule(compiled.as_text(), Mesh.parse("data:16,model:4"), hardware("v5p"))

    Args:
        mesh: whose devices are numbered as those of the program, row-major.

    Raises:
        ValueError: the hardware has no clock, or the text has a collective, a form of groups or a
            loop that is not known.
    """
    if not kind.clock:
        raise ValueError(f"the compiler of {kind.title} writes no cycles; there is no schedule")
    module = Module.parse(text)
    run = _Run(module, mesh, kind, Walk(module, mesh.size))
    entry = run.computation(module.entry)
    run.check()
    return Schedule(entry.seconds, tuple(entry.events), dict(entry.unknown), run.timed)


@dataclass(frozen=True)
class _Result:
    """One run of a computation; `unknown` as in `Schedule`."""

    seconds: float
    events: Sequence[Event]
    unknown: Mapping[str, int]


@dataclass
class _Flight:
    """An asynchronous collective on its way.

    Attributes:
        end: when it has arrived.
        position: that of its event.
    """

    end: float
    position: int
    product: bool = False


@dataclass
class _Run:
    """A run of one device through the computations of a module; `timed` as in `Schedule`."""

    module: Module
    mesh: Mesh
    hardware: Hardware
    wire: Walk
    timed: bool = False

    def computation(self, name: str) -> _Result:
        """Returns one run of a computation."""
        self.wire.reached.add(name)
        return _Device(self, name).run()

    def check(self) -> None:
        """Checks that no collective was passed over."""
        self.wire.check()

    def source(self, line: Line) -> str:
        """Returns the user's file and line, as our programs say it, or of the innermost frame."""
        places = _PLACE.findall(line.scope)
        if places:
            file, number = places[-1]  # the innermost scope
            return f"{file}:{number}"
        for frame in self.module.callers(line):
            if not _HIDDEN_FRAMES.search(frame.file):
                return f"{frame.file.rsplit('/', 1)[-1]}:{frame.line}"
        return ""


class _Device:
    """One device in one computation.

    Attributes:
        now: seconds since it began.
        free: when the links of an axis are free, by direction (+1, -1).
        flights: collectives on their way, by the name of the line that stands for them.
        prepared: starts of collectives that have no operands yet, by name.
    """

    def __init__(self, run: _Run, computation: str) -> None:
        self.outer = run
        self.computation = computation
        self.now = 0.0
        self.events: list[Event] = []
        self.free: dict[tuple[str, int], float] = {}
        self.flights: dict[str, _Flight] = {}
        self.prepared: dict[str, Line] = {}
        self.unknown: Counter[str] = Counter()

    def run(self) -> _Result:
        for line in self.outer.module.computations[self.computation].values():
            if line.op == "while":
                self._loop(line)
            elif line.op == "conditional":
                self._branches(line)
            elif line.op == "call":
                self._calls(line)
            elif not (self._continues(line) or self._collective(line)):
                self._work(line)
        for name in list(self.flights):  # what the caller waits for
            self._arrives(name)
        return _Result(self.now, self.events, self.unknown)

    # Loops and branches.

    def _loop(self, line: Line) -> None:
        (body,) = line.named("body")
        inside = self.outer.computation(body)
        # How often a loop runs matters only if something in it does.
        if inside.events or inside.unknown:
            self._nested(line, inside, trips(self.outer.module, self.computation, line))

    def _branches(self, line: Line) -> None:
        runs = [self.outer.computation(name) for name in line.branches]
        self._nested(line, max(runs, key=lambda run: run.seconds), 1)

    def _calls(self, line: Line) -> None:
        for name in line.called:
            inside = self.outer.computation(name)
            self.events += [replace(event, start=event.start + self.now) for event in inside.events]
            self._counts_unknown(inside, 1)
            self.now += inside.seconds

    def _nested(self, line: Line, inside: _Result, count: int) -> None:
        self._counts_unknown(inside, count)
        if not inside.events:
            return
        seconds = inside.seconds * count
        exposed = sum(event.exposed for event in inside.events) * count
        event = self._event(line, line.op, seconds)
        product = any(one.product for one in inside.events)
        self.events.append(
            replace(
                event, exposed=exposed, count=count, inside=tuple(inside.events), product=product
            )
        )
        self._passes(seconds, product)

    def _counts_unknown(self, inside: _Result, count: int) -> None:
        for name, times in inside.unknown.items():
            if count:
                self.unknown[name] += times * count

    # Work.

    def _work(self, line: Line) -> None:
        if line.cycles is None:
            if self._is_unknown(line):
                self.unknown[line.scope or line.name] += 1
            return
        self.outer.timed = True
        seconds = line.cycles / self.outer.hardware.clock
        product = self._has_product(line)
        self.events.append(replace(self._event(line, WORK, seconds), product=product))
        self._passes(seconds, product)

    def _is_unknown(self, line: Line) -> bool:
        """Whether a line without cycles takes time."""
        if line.op == "copy" and re.match(r"\w+\[\]", line.result):
            return False  # a scalar
        free = line.op == "custom-call" and any(
            f'"{target}"' in line.attributes for target in _WITHOUT_WORK
        )
        return line.op in _WORKING and not free

    def _has_product(self, line: Line) -> bool:
        if line.op in _PRODUCTS:
            return True
        computations = self.outer.module.computations
        return any(
            self._has_product(one)
            for name in (line.called if line.op == "fusion" else ())
            for one in computations.get(name, {}).values()
        )

    def _passes(self, seconds: float, product: bool) -> None:
        self.now += seconds
        for flight in self.flights.values():
            flight.product |= product

    # Collectives.

    def _collective(self, line: Line) -> bool:
        """Begins the collective of a line; returns whether the line is nothing else."""
        sent = self._sent(line)
        if not sent:
            return False
        if line.op.endswith("-start") and not line.operands:  # its `-update` gives the operands
            self.prepared[line.name] = line
            return True
        asynchronous = line.op.endswith("-start") or line.op == "send"
        key = line.name
        if line.op == "fusion" and marked(
            self.outer.module, line.called[0], "AsyncCollectiveStart"
        ):
            asynchronous, key = True, self._channel(line.called[0])
        for one in sent:
            self._begin(line, one, key, asynchronous)
        return line.op != "fusion" or not asynchronous

    def _sent(self, line: Line) -> list[Sent]:
        return list(self.outer.wire.line(self.computation, line))

    def _begin(self, line: Line, sent: Sent, key: str, asynchronous: bool) -> None:
        axes = spanned_axes(sent.groups, self.outer.mesh)
        seconds = self.outer.hardware.seconds(sent.kind, sent.wire_bytes, axes, self.outer.mesh)
        links = self._links(sent, axes)
        begin = max([self.now, *(self.free.get(link, 0.0) for link in links)])
        end = begin + seconds
        self.free.update(dict.fromkeys(links, end))
        event = replace(
            self._event(line, sent.kind, seconds),
            start=begin,
            axes=axes,
            wire_bytes=sent.wire_bytes,
            asynchronous=asynchronous,
        )
        self.events.append(event)
        # Several collectives of one line arrive together.
        before = self.flights.get(key)
        if before is not None:
            self._arrives(key)
        self.flights[key] = _Flight(end, len(self.events) - 1)
        if not asynchronous:
            self._arrives(key)

    def _links(self, sent: Sent, axes: tuple[str, ...]) -> list[tuple[str, int]]:
        """Returns the links that a collective uses: both directions, or that of a permute."""
        if sent.kind == "permute" and len(axes) == 1:
            position = self.outer.mesh.names.index(axes[0])
            sizes = [size for _, size in self.outer.mesh.axes]
            stride, size = 1, sizes[position]
            for after in sizes[position + 1 :]:
                stride *= after
            source, target = next(iter(sent.groups))
            steps = (target // stride - source // stride) % size
            return [(axes[0], 1 if steps <= size // 2 else -1)]
        return [(axis, direction) for axis in axes for direction in (1, -1)]

    def _continues(self, line: Line) -> bool:
        """Whether a line moves a collective on its way, or waits for it, and nothing else."""
        operand = line.operands[0] if line.operands else ""
        if line.op.endswith("-update") and operand in self.prepared:
            for sent in self._sent(self.prepared.pop(operand)):
                self._begin(line, sent, line.name, asynchronous=True)
            return True
        if line.op.endswith("-update") and operand in self.flights:
            self.flights[line.name] = self.flights.pop(operand)
            return True
        if line.op.endswith("-done") and operand in self.flights:
            self._arrives(operand)
            return True
        module = self.outer.module
        if line.op == "fusion" and marked(module, line.called[0], "AsyncCollectiveDone"):
            self.outer.wire.reached.add(line.called[0])
            self._work(line)  # which may have a product, too
            self._arrives(self._channel(line.called[0]))
            return True
        return False

    def _arrives(self, key: str) -> None:
        flight = self.flights.pop(key, None)
        if flight is None:
            return
        waited = max(0.0, flight.end - self.now)
        event = self.events[flight.position]
        self.events[flight.position] = replace(event, exposed=waited, product=flight.product)
        self.now = max(self.now, flight.end)

    def _channel(self, computation: str) -> str:
        """Returns what the fusions of one collective have in common."""
        for line in self.outer.module.computations[computation].values():
            if line.op.removesuffix("-start") in KINDS:
                match = re.search(r"channel_id=(\d+)", line.attributes)
                return f"channel {match.group(1) if match else line.name}"
        return computation

    def _event(self, line: Line, kind: str, seconds: float) -> Event:
        source = self.outer.source(line)
        return Event(kind, line.name, line.scope, source, self.now, seconds)


def main() -> None:
    """Prints the totals of a program, by axes and by source."""
    path, mesh, kind = sys.argv[1:4]
    result = schedule(Path(path).read_text(), Mesh.parse(mesh), hardware(kind))
    mib, times = 2**20, result.times
    print(
        f"work {times.work * 1e3:.2f} ms + exposed {times.exposed * 1e3:.2f} ms = "
        f"{result.seconds * 1e3:.2f} ms; hidden {times.hidden * 1e3:.2f} ms; "
        f"{times.wire_bytes / mib:,.0f} MiB on the wire, asynchronous "
        f"{result.asynchronous_bytes / mib:,.0f}, beside products "
        f"{result.bytes_beside_products / mib:,.0f}"
    )
    for key in (lambda event: "+".join(event.axes), lambda event: event.source):
        print(f"{'':40} {'work':>9} {'exposed':>9} {'hidden':>9}")
        for name, part in result.by(key)[:20]:
            seconds = (part.work, part.exposed, part.hidden)
            print(f"{name:40} {' '.join(f'{1e3 * each:9.3f}' for each in seconds)}")


if __name__ == "__main__":
    main()
