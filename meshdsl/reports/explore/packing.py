"""Packing: the figures of many plans as compact JSON, compressed.

Texts, tensors, collectives and the like stand once, in pools; plans have their numbers in a pool.
The page is to stay below a number of bytes: if it would not, the plans that are least likely to be
looked at keep their figures, but not their details. `explore.js` reads what this module writes.

Each plan is `[mesh, layout, microbatches, remat, figures, details]`. Of a plan that cannot be,
`figures` is the reason; `details` is 0 where they were left out.
"""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from meshdsl.reports.explain.explanation import PARTS
from meshdsl.reports.explain.values import seven
from meshdsl.reports.explore.choices import Choice

FIGURES = (
    "seconds",
    "work_seconds",
    "exposed_seconds",
    "hidden_seconds",
    "peak_bytes",
    "wire_bytes",
    "collectives",
    "flops",
)
_BESIDE = ("limit", "memory", "waits")  # figures that are no single numbers
MOST_HELD = 12  # buffers of a plan; the others are one row
_NARROW = 0.004  # of the step: shorter intervals are joined with their neighbours
_PROBE = 100  # plans that show how much room details take
_MORE = 1.5  # plans share many details, so more of them fit than these say
_CLOSER = 0.95  # the share of plans that is kept again, if an estimate was too high


class Pool:
    """Values that stand once; a value is known by its number."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._at: dict[str, int] = {}

    def at(self, value: Any) -> int:
        """Returns the number of a value."""
        key = value if isinstance(value, str) else json.dumps(value)
        known = self._at.get(key)
        if known is None:
            known = self._at[key] = len(self.values)
            self.values.append(value)
        return known


class Packing:
    """The plans of a page.

    Args:
        head: what the page says of all plans.

    Attributes:
        choices: all choices, in the order in which they came.
        reasons: why some of them are no plans, by their numbers.
        places: the seconds and the bytes at the peak of the others.
    """

    def __init__(self, head: Mapping[str, Any]) -> None:
        self.head = dict(head)
        self.choices: list[Choice] = []
        self.reasons: dict[int, str] = {}
        self._figures: dict[int, dict[str, Any]] = {}
        self._kept: dict[int, bytes] = {}
        self.places: dict[int, tuple[float, int]] = {}

    def add(self, choice: Choice, values: Mapping[str, Any]) -> None:
        """Adds a plan with its figures, those of `explain.values`."""
        number = len(self.choices)
        self.choices.append(choice)
        self.places[number] = values["seconds"], values["peak_bytes"]
        self._figures[number] = {name: values[name] for name in (*FIGURES, *_BESIDE)}
        self._kept[number] = zlib.compress(json.dumps(values).encode(), 1)

    def refuse(self, choice: Choice, reason: str) -> None:
        """Adds a choice that is no plan, with the reason."""
        self.reasons[len(self.choices)] = reason
        self.choices.append(choice)

    @property
    def front(self) -> list[int]:
        """The plans that are smaller than every faster one, the fastest first."""
        found: list[int] = []
        least = float("inf")
        for number in sorted(self.places, key=lambda number: (*self.places[number], number)):
            if self.places[number][1] < least:
                least = self.places[number][1]
                found.append(number)
        return found

    def document(self) -> dict[str, Any]:
        """Returns all plans with all details, as the page reads them."""
        return self._document(frozenset(self._kept))

    def text(self, most_bytes: int) -> tuple[str, int]:
        """Returns the plans as text of at most so many bytes, and how many have details."""
        front = self.front
        order = [*front, *(number for number in self._kept if number not in set(front))]
        count = len(order)
        bare = self._written(order[:0])
        room = max(most_bytes - len(bare), 0)
        if count > _PROBE:
            each = (len(self._written(order[:_PROBE])) - len(bare)) / _PROBE
            count = min(count, int(_MORE * room / max(each, 1)))
        while count:
            text = self._written(order[:count])
            if len(text) <= most_bytes:
                return text, count
            count = int(_CLOSER * count * room / (len(text) - len(bare)))
        return bare, 0

    def _written(self, detailed: Sequence[int]) -> str:
        return _encoded(self._document(frozenset(detailed)))

    def _document(self, detailed: frozenset[int]) -> dict[str, Any]:
        pools = _Pools()
        plans = []
        for number, one in enumerate(self.choices):
            texts = pools.texts
            row: list[Any] = [texts.at(one.mesh), texts.at(one.layout), one.microbatches]
            row.append(texts.at(one.remat))
            if number in self.reasons:
                plans.append([*row, texts.at(self.reasons[number]), 0])
                continue
            details: list[Any] | int = 0
            if number in detailed:
                details = pools.details(json.loads(zlib.decompress(self._kept[number])))
            plans.append([*row, pools.figures(self._figures[number]), details])
        return {
            **self.head,
            "fields": FIGURES,
            "parts": PARTS,
            "front": self.front,
            "texts": pools.texts.values,
            "tensors": pools.tensors.values,
            "lists": pools.lists.values,
            "collectives": pools.collectives.values,
            "intervals": pools.intervals.values,
            "pipelines": pools.pipelines.values,
            "plans": plans,
        }


def _encoded(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


class _Pools:
    """Writes the figures of plans, and pools what they have in common."""

    def __init__(self) -> None:
        self.texts, self.tensors, self.lists = Pool(), Pool(), Pool()
        self.collectives, self.intervals, self.pipelines = Pool(), Pool(), Pool()

    def figures(self, values: Mapping[str, Any]) -> list[Any]:
        at = self.texts.at
        waits = [
            [at(f"{one['collective']} over {one['axes']}"), one["seconds"]]
            for one in values["waits"]
        ]
        memory = [values["memory"][part] for part in PARTS]
        return [*(values[name] for name in FIGURES), at(values["limit"]), memory, waits]

    def details(self, values: Mapping[str, Any]) -> list[Any]:
        at = self.texts.at
        peaks, pipeline = values["at_peaks"], values["pipeline"]
        held, rest = values["held"][:MOST_HELD], values["held"][MOST_HELD:]
        return [
            [self._sent(one) for one in values["sent"]],
            self.lists.at([self._tensor(one) for one in values["inputs"]]),
            [self._tensor(one) for one in held],
            [len(rest), sum(one["bytes"] for one in rest)],
            [
                self._interval(one)
                for one in merged(values["intervals"], _NARROW * peaks["seconds"])
            ],
            -1 if pipeline is None else self.pipelines.at(pipeline),
            at(values["peak_at"]),
            at(values["faster"]),
            at(values["smaller"]),
            [at(note) for note in values["notes"]],
            [peaks["seconds"], peaks["overlapped_seconds"]],
            [[at(what), seconds] for what, seconds in peaks["times"].items()],
        ]

    def _sent(self, one: Mapping[str, Any]) -> list[Any]:
        texts = [one["phase"], one["collective"], ", ".join(one["tensors"])]
        texts += [", ".join(one["dims"]), "+".join(one["axes"]), one["line"]]
        kind = self.collectives.at([self.texts.at(text) for text in texts])
        return [kind, one["count"], one["payload_bytes"], one["wire_bytes"]]

    def _tensor(self, one: Mapping[str, Any]) -> int:
        at = self.texts.at
        dims = [
            [at(dim["name"]), dim["size"], dim["local"], at("+".join(dim["axes"]))]
            for dim in one["dims"]
        ]
        texts = [at(text) for text in (one["part"], one["path"], one["dtype"], one.get("line", ""))]
        return self.tensors.at([*texts, one["bytes"], dims])

    def _interval(self, one: Mapping[str, Any]) -> list[Any]:
        name = f"{one['name']} ×{one['count']:,}" if one["count"] > 1 else one["name"]
        texts = [one["phase"], one["kind"], name, one["limit"], one["line"]]
        kind = self.intervals.at([self.texts.at(text) for text in texts])
        return [kind, one["seconds"], one["memory_bytes"] or 0]


def merged(intervals: Sequence[dict[str, Any]], least: float) -> list[dict[str, Any]]:
    """Returns intervals of which neighbours that take less than `least` seconds are one.

    A joint interval has the time of all, the name of the longest, and the most memory.
    """
    found: list[dict[str, Any]] = []
    for is_brief, run in itertools.groupby(intervals, lambda one: one["seconds"] < least):
        several = list(run)
        found += [_joint(several)] if is_brief else several
    return found


def _joint(several: Sequence[dict[str, Any]]) -> dict[str, Any]:
    longest = max(several, key=lambda one: one["seconds"])
    more = f" + {len(several) - 1} more" if len(several) > 1 else ""
    return {
        **longest,
        "name": f"{longest['name']}{more}",
        "seconds": seven(sum(one["seconds"] for one in several)),
        "memory_bytes": max(one["memory_bytes"] or 0 for one in several) or None,
    }
