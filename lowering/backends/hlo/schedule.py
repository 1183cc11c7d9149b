"""Schedule: how long a compiled TPU program takes, by the schedule that the compiler wrote.

The lines of an optimised module stand in the order in which a device runs them. The compiler's own
estimate gives the cycles of a fusion, a product or a copy ("estimated_cycles"); the link model of
`layouts.hardware` gives the time of a collective. `schedule` lets one device run through them:

* Work takes its cycles.
* A collective begins when its line is reached and the links of its axes are free. A permute
  uses one direction of the links, every other kind both.
* A synchronous collective makes the device wait. An asynchronous one makes it wait at its end, if
  it still runs then: this wait is *exposed*. The work while it travels is *hidden* time. So the
  time of the program is that of its work and what is exposed.
* A collective across slices ends where its bytes have been received.
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
from meshdsl.lowering.backends.hlo.megascale import numbered
from meshdsl.lowering.backends.hlo.text import Line, Module
from meshdsl.lowering.backends.hlo.wire import KINDS, Sent, Walk, continues, marked
from meshdsl.lowering.costs.links import AxisLink, links_of
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
_MEETING = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
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
    """A collective on its way.

    Attributes:
        begin: when its links are free for it.
        end: when it has arrived.
        position: that of its event.
        hidden: the seconds of work while it travels.
        product: whether this work has a product of matrices.
        spans_product: whether a product of matrices has run since it began.
    """

    begin: float
    end: float
    position: int
    hidden: float = 0.0
    product: bool = False
    spans_product: bool = False


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
    """One device in one computation, with those that it calls.

    Attributes:
        now: seconds since it began.
        free: when the links of an axis are free, by direction (+1, -1).
        flights: collectives on their way, by the name of the line that stands for them.
        begun: the name of the line in `flights` that began the collective of a channel.
        prepared: starts of collectives that have no operands yet, by name.
        unknown: as in `Schedule`.
    """

    def __init__(self, run: _Run, computation: str) -> None:
        self.outer = run
        self.computation = computation
        self.now = 0.0
        self.events: list[Event] = []
        self.free: dict[AxisLink, float] = {}
        self.flights: dict[str, list[_Flight]] = {}
        self.begun: dict[str, str] = {}
        self.prepared: dict[str, Line] = {}
        self.unknown: Counter[str] = Counter()

    def run(self) -> _Result:
        self._lines()
        for name in list(self.flights):  # what the caller waits for
            self._arrive(name)
        if self.prepared:
            name = next(iter(self.prepared))
            raise ValueError(f"{name} in {self.computation} starts a collective without operands")
        return _Result(self.now, self.events, self.unknown)

    def _lines(self) -> None:
        for line in self.outer.module.computations[self.computation].values():
            if line.op == "while":
                self._loop(line)
            elif line.op == "conditional":
                self._branches(line)
            elif line.op == "call":
                self._calls(line)
            elif not (self._continues(line) or self._collective(line)):
                self._work(line)

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
        caller = self.computation
        for name in line.called:
            self.outer.wire.reached.add(name)
            self.computation = name
            self._lines()
        self.computation = caller

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
        self._passes(seconds, seconds - exposed, product)

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
        self._passes(seconds, seconds, product)

    def _is_unknown(self, line: Line) -> bool:
        """Whether a line without cycles takes time."""
        if line.op == "copy" and re.match(r"\w+\[\]", line.result):
            return False  # a scalar
        free = line.op == "custom-call" and any(
            f'"{target}"' in line.attributes for target in _WITHOUT_WORK
        )
        moves = line.op == "fusion" and not self._has_product(line) and self._moves(line)
        return line.op in _WORKING and not free and not moves

    def _moves(self, line: Line) -> bool:
        """Whether a fusion starts, continues or ends a collective."""
        module = self.outer.module
        return any(
            continues(module, name) or marked(module, name, "AsyncCollectiveStart")
            for name in line.called
            if name in module.computations
        )

    def _has_product(self, line: Line) -> bool:
        if line.op in _PRODUCTS:
            return True
        computations = self.outer.module.computations
        return any(
            self._has_product(one)
            for name in (line.called if line.op == "fusion" else ())
            for one in computations.get(name, {}).values()
        )

    def _passes(self, seconds: float, work: float, product: bool) -> None:
        """Lets time pass, in which the device works and perhaps waits in a loop."""
        before, self.now = self.now, self.now + seconds
        for flight in (flight for flights in self.flights.values() for flight in flights):
            flight.spans_product |= product
            beside = min(flight.end, self.now) - max(flight.begin, before)
            if beside > 0:
                flight.hidden += beside * work / seconds
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
        if line.op == "fusion" and marked(
            self.outer.module, line.called[0], "AsyncCollectiveStart"
        ):
            asynchronous = True
            self.begun[self._channel(line.called[0])] = line.name
        key = self._receiver(line) if line.op == "send" else line.name
        for one in sent:
            self._begin(line, one, key, asynchronous)
        if not asynchronous:
            self._arrive(key)
        return line.op != "fusion" or not asynchronous

    def _sent(self, line: Line) -> list[Sent]:
        return list(self.outer.wire.line(self.computation, line))

    def _begin(self, line: Line, sent: Sent, key: str, asynchronous: bool) -> None:
        if not sent.count:
            return
        mesh = self.outer.mesh
        groups = numbered(sent.groups, mesh) if sent.across_slices else sent.groups
        axes = spanned_axes(groups, mesh)
        if sent.wire_bytes and not axes:
            raise ValueError(f"{line.op} {line.name} sends along no axis of the mesh {mesh}")
        seconds = self.outer.hardware.seconds(sent.kind, sent.wire_bytes, axes, mesh) * sent.count
        links = links_of(sent.kind, axes, mesh, groups)
        begin = max([self.now, *(self.free.get(link, 0.0) for link in links)])
        end = begin + seconds
        self.free.update(dict.fromkeys(links, end))
        event = replace(
            self._event(line, sent.kind, seconds),
            start=begin,
            axes=axes,
            wire_bytes=sent.wire_bytes * sent.count,
            asynchronous=asynchronous,
        )
        self.events.append(event)
        self.flights.setdefault(key, []).append(_Flight(begin, end, len(self.events) - 1))

    def _receiver(self, send: Line) -> str:
        """Returns the name of the `recv` that gets what a `send` starts, or its own name."""
        meeting = _MEETING.search(send.attributes)
        lines = self.outer.module.computations[self.computation].values()
        for line in lines if meeting else ():
            other = _MEETING.search(line.attributes)
            if line.op == "recv" and other and meeting and other.group(1) == meeting.group(1):
                return line.name
        return send.name

    def _continues(self, line: Line) -> bool:
        """Whether a line moves a collective on its way, or waits for it, and nothing else.

        Raises:
            ValueError: the collective has not begun.
        """
        operand = line.operands[0] if line.operands else ""
        if line.op.endswith("-update") and operand in self.prepared:
            start = self.prepared.pop(operand)  # which has the scope
            for sent in self._sent(start):
                self._begin(start, sent, line.name, asynchronous=True)
            return True
        if line.op.endswith("-update") and operand in self.flights:
            self.flights[line.name] = self.flights.pop(operand)
            return True
        if line.op.endswith("-done") and operand in self.flights:
            self._arrive(operand)
            return True
        if line.op.removesuffix("-done") in KINDS and line.op not in KINDS:
            raise ValueError(f"{line.op} {line.name} ends a collective that has not begun")
        if line.op == "fusion" and continues(self.outer.module, line.called[0]):
            self._steps(line)
            return True
        return False

    def _steps(self, line: Line) -> None:
        """Runs a fusion that continues a collective, or ends it; it may have a product, too."""
        (name,) = line.called
        began = self._beginning(line)
        if began is None:
            raise ValueError(f"{line.name} calls {name} of a collective that has not begun")
        self.outer.wire.reached.add(name)
        self._work(line)
        if marked(self.outer.module, name, "AsyncCollectiveDone"):
            self._arrive(began)
        else:
            self.flights[line.name] = self.flights.pop(began)
            self.begun[self._channel(name)] = line.name

    def _beginning(self, line: Line) -> str | None:
        """Returns the line in `flights` that a fusion continues: by its operands, or channel."""
        lines = self.outer.module.computations[self.computation]
        for operand in line.operands:
            source = lines.get(operand)
            if source is not None and source.op == "get-tuple-element":
                operand = source.operands[0]
            if operand in self.flights:
                return operand
        began = self.begun.get(self._channel(line.called[0]), "")
        return began if began in self.flights else None

    def _arrive(self, key: str) -> None:
        """Lets the device wait for the collectives of a line."""
        for flight in self.flights.pop(key, ()):
            waited = max(0.0, flight.end - self.now)
            event = self.events[flight.position]
            self.events[flight.position] = replace(
                event,
                exposed=waited,
                hidden=flight.hidden,
                product=flight.product,
                spans_product=flight.spans_product,
            )
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
