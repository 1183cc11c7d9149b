"""Reads the collectives out of optimised HLO text: kind, device groups, bytes.

XLA joins collectives and takes joined ones apart, so what is told of each kind, along the same
groups of devices, is the payload of all its executions in a run. Loop trip counts come from the
`known_trip_count` that XLA:CPU writes.
"""

import collections
import re

import numpy as np

from meshdsl.lowering.backends.hlo.wire import KINDS

_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8}
_OP = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\((.*?)\), (.*)$")


def collectives(text):
    """Returns a Counter of payload bytes per run, by (kind, groups).

    `groups` is a frozenset of tuples of devices, or of pairs for a permute.
    """
    bodies, entry = _computations(text)
    found = collections.Counter()

    def visit(name, times):
        for line in bodies[name]:
            match = _OP.search(line)
            if match:
                result, kind, _, attributes = match.groups()
                groups = _pairs(attributes) if "permute" in kind else _groups(attributes)
                parts = [_size(part) for part in re.findall(r"(\w+)\[([\d,]*)\]", result)]
                if kind == "all-to-all" and result.startswith("("):
                    parts = [sum(parts)]
                for size in parts:
                    devices = len(next(iter(groups)))
                    payload = size * devices if kind == "reduce-scatter" else size
                    found[KINDS[kind], groups] += times * payload
            for callee, trips in _calls(line):
                visit(callee, times * trips)

    visit(entry, 1)
    return found


def _computations(text):
    bodies, name, entry = collections.defaultdict(list), None, None
    for line in text.splitlines():
        match = re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if match:
            name = match.group(2)
            entry = name if match.group(1) else entry
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _calls(line):
    loop = re.search(r" while\(.*body=%?([\w.\-]+)", line)
    if loop:
        trips = re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', line)
        yield loop.group(1), int(trips.group(1))
    for callee in re.findall(r" call\(.*to_apply=%?([\w.\-]+)", line):
        yield callee, 1


def _size(part):
    dtype, dims = part
    return _BYTES[dtype] * int(np.prod([int(d) for d in dims.split(",") if d], dtype=np.int64))


def _groups(attributes):
    listed = re.search(r"replica_groups=\{(\{.*?\})\}", attributes)
    if listed:
        rows = re.findall(r"\{([\d,]+)\}", listed.group(1))
        return frozenset(tuple(int(d) for d in row.split(",")) for row in rows)
    iota = re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes
    ).groups()
    shape, sizes = (tuple(int(n) for n in part.split(",")) for part in iota[:2])
    devices = np.arange(np.prod(sizes)).reshape(sizes)
    if iota[2]:
        devices = devices.transpose([int(n) for n in iota[2].split(",")])
    return frozenset(tuple(row) for row in devices.reshape(shape).tolist())


def _pairs(attributes):
    text = re.search(r"source_target_pairs=\{(.*?)\}\}", attributes).group(1)
    return frozenset(tuple(map(int, p)) for p in re.findall(r"(\d+),(\d+)", text))


def predicted(program):
    """Returns what `program.collectives` says, in the same form."""
    found = collections.Counter()
    for c in program.collectives:
        found[c.kind, frozenset(c.groups)] += c.count * c.payload_bytes
    return found
