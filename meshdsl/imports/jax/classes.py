"""Classes of positions: which positions of a jaxpr's arrays are one dim.

Each position of an array has a node; nodes that are one dim are in one class (union-find). A class
has one size and at most one name that the user said.

Invariant: two positions of one array are never in one class. `unify` refuses to join such classes;
the conversion renames there, as the language asks for: `k.rename(length="memory_length")`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshdsl.tracing.source import UNKNOWN, Source

_ECHO = re.compile(r"(.+)_out|memory_(.+?)(?:_\d+)?")


@dataclass(frozen=True)
class Said:
    """A name that the user gave to a position.

    Attributes:
        where: the argument's path and the position.
        node: the node of that position, whose first use has a line.
    """

    name: str
    where: str
    node: int


@dataclass
class _Facts:
    """What is known of a class.

    Attributes:
        arrays: those that have it.
        parts: the names of the dims that it is split into, if the user said them.
        copies: nodes of which it is a second occurrence in an array.
        like: nodes that it is a part of, as a slice is; `liked`: nodes that are its parts.
        near: nodes that the program pairs it up with, though an array has both.
        hint: a telling name.
    """

    size: int
    arrays: set[int] = field(default_factory=set)
    said: Said | None = None
    parts: tuple[str, ...] = ()
    copies: list[int] = field(default_factory=list)
    like: list[int] = field(default_factory=list)
    liked: list[int] = field(default_factory=list)
    near: list[int] = field(default_factory=list)
    hint: str = ""


@dataclass(frozen=True)
class Regrouped:
    """A reshape: the parts, major first, make the whole."""

    whole: int
    parts: tuple[int, ...]


def base_of(name: str) -> str:
    """Returns the dim that a name such as `embed_out` or `memory_length` is another occurrence of.

    `Naming` gives such names. So tensors that a program has named, and whose dims have these names
    from then on, may meet as they did before.
    """
    while match := _ECHO.fullmatch(name):
        name = match[1] or match[2]
    return name


class Classes:
    """Classes of positions, and what the program says of them.

    Attributes:
        used: the line that first reads the position of an argument, by node.
        conflicts: the messages of names that contradict each other.
    """

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._facts: dict[int, _Facts] = {}
        self._arrays = 0
        self._regrouped: dict[Regrouped, None] = {}
        self._later: list[tuple[int, int]] = []
        self._last: list[tuple[int, str, str]] = []
        self._pairs: list[tuple[int, int, int]] = []
        self._read: list[tuple[int, int]] = []
        self.used: dict[int, Source] = {}
        self.conflicts: dict[str, None] = {}

    def new(self, size: int, hint: str = "", like: int | None = None) -> int:
        """Returns a node in a class of its own.

        Args:
            hint: a telling name, if nothing gives it another.
            like: a node whose name it takes if nothing else names it, as a slice does.
        """
        node = len(self._parents)
        self._parents.append(node)
        self._facts[node] = _Facts(size, hint=hint, like=[] if like is None else [like])
        if like is not None:
            self.facts(like).liked.append(node)
        return node

    def root(self, node: int) -> int:
        """Returns the node that stands for the class of another."""
        parents = self._parents
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    def facts(self, node: int) -> _Facts:
        """Returns what is known of the class of a node."""
        return self._facts[self.root(node)]

    def size(self, node: int) -> int:
        """Returns the size of a class."""
        return self.facts(node).size

    def array(self, nodes: Sequence[int]) -> None:
        """Says that positions are those of one array, and so never one dim."""
        self._arrays += 1
        for node in nodes:
            self.facts(node).arrays.add(self._arrays)

    def say(self, node: int, name: str, where: str, parts: tuple[str, ...] = ()) -> None:
        """Names a position, in the words of the user."""
        facts = self.facts(node)
        facts.said = facts.said or Said(name, where, node)
        facts.parts = facts.parts or parts

    def say_last(self, node: int, name: str, where: str) -> None:
        """Names a position if nothing else names it by the time that classes are settled."""
        self._last.append((node, name, where))

    def copies(self, base: int, count: int) -> list[int]:
        """Returns nodes for the positions of an array that would all be in one class."""
        size = self.size(base)
        nodes = [self.new(size) for _ in range(count)]
        for node in nodes:
            self._facts[node].copies.append(base)
        self._pairs.extend((one, other, base) for one, other in itertools.pairwise(nodes))
        return nodes

    def apart(self, one: int, other: int) -> bool:
        """Whether an array has both classes."""
        a, b = self.facts(one), self.facts(other)
        return a is not b and not a.arrays.isdisjoint(b.arrays)

    def unify(self, one: int, other: int, source: Source = UNKNOWN, what: str = "") -> None:
        """Joins the classes of two positions that the program pairs up."""
        a, b = self.root(one), self.root(other)
        if a == b:
            return
        mine, theirs = self._facts[a], self._facts[b]
        if mine.size != theirs.size:
            return
        if self.apart(a, b):
            mine.near.append(b)
            theirs.near.append(a)
            return
        if mine.said and theirs.said and mine.said.name != theirs.said.name:
            echo = base_of(mine.said.name) == base_of(theirs.said.name)
            if not (echo or self._is_copy(a, b) or self._is_copy(b, a)):
                self._conflict(mine.said, theirs.said, source, what)
            return
        self._join(a, b)

    def contract(self, one: int, other: int, source: Source, what: str) -> None:
        """Joins the classes of positions that are summed over together.

        A copy is not joined with what it copies: in attention it is the memory, which the queries'
        own dim must differ from.
        """
        if self._is_copy(one, other) or self._is_copy(other, one):
            self._read.append((one, other))
        else:
            self.unify(one, other, source, what)

    def later(self, one: int, other: int) -> None:
        """Joins two classes at the end, unless something forbids it."""
        self._later.append((one, other))

    def regroup(self, whole: int, parts: Sequence[int]) -> None:
        """Says that a reshape splits a position into others, or merges these into it."""
        facts = self.facts(whole)
        if len(facts.parts) == len(parts):
            for part, name in zip(parts, facts.parts, strict=True):
                if facts.said is not None and self.facts(part).said is None:
                    self.say(part, name, facts.said.where)
        self._regrouped[Regrouped(whole, tuple(parts))] = None

    def settle(self) -> None:
        """Joins classes that are alike though no equation pairs them up."""
        for node, name, where in self._last:
            if self.facts(node).said is None:
                self.say(node, name, where)
        self._join_regrouped()
        readers: dict[int, set[int]] = {}
        for one, other in self._read:
            readers.setdefault(self.root(one), set()).add(self.root(other))
            readers.setdefault(self.root(other), set()).add(self.root(one))
        for one, other, base in self._pairs:
            root = self.root(base)
            if root in (self.root(one), self.root(other)):
                continue
            first = [n for n in (one, other) if root not in readers.get(self.root(n), ())]
            for node in first:
                if self._join_if_free(node, base):
                    break
        for one, other in self._later:
            self._join_if_free(one, other)
        self._join_regrouped()

    def regrouped(self) -> list[Regrouped]:
        """Returns the reshapes, by classes."""
        rooted = (
            Regrouped(self.root(each.whole), tuple(map(self.root, each.parts)))
            for each in self._regrouped
        )
        return list(dict.fromkeys(rooted))

    def _join_regrouped(self) -> None:
        """Joins wholes of equal parts, and equal parts of one whole, until nothing changes."""
        changed = True
        while changed:
            changed = False
            wholes: dict[tuple[int, ...], int] = {}
            parts: dict[tuple[int, ...], tuple[int, ...]] = {}
            for each in self.regrouped():
                other = wholes.setdefault(each.parts, each.whole)
                changed |= self._join_if_free(other, each.whole)
                sizes = (self.root(each.whole), *map(self.size, each.parts))
                for a, b in zip(parts.setdefault(sizes, each.parts), each.parts, strict=True):
                    changed |= self._join_if_free(a, b)

    def _join_if_free(self, one: int, other: int) -> bool:
        """Joins two classes unless something forbids it; returns whether it did."""
        a, b = self.root(one), self.root(other)
        mine, theirs = self._facts[a], self._facts[b]
        named_apart = mine.said and theirs.said and mine.said.name != theirs.said.name
        if a == b or mine.size != theirs.size or named_apart or self.apart(a, b):
            return False
        self._join(a, b)
        return True

    def _is_copy(self, one: int, other: int) -> bool:
        root = self.root(other)
        return any(self.root(base) == root for base in self.facts(one).copies)

    def _join(self, a: int, b: int) -> None:
        mine, theirs = self._facts[a], self._facts[b]
        if len(mine.arrays) < len(theirs.arrays):
            a, b, mine, theirs = b, a, theirs, mine
        self._parents[b] = a
        mine.arrays |= theirs.arrays
        mine.said = mine.said or theirs.said
        mine.parts = mine.parts or theirs.parts
        mine.copies += theirs.copies
        mine.like += theirs.like
        mine.liked += theirs.liked
        mine.near += theirs.near
        mine.hint = mine.hint or theirs.hint
        del self._facts[b]

    def _conflict(self, one: Said, other: Said, source: Source, what: str) -> None:
        text = (
            f"`{one.name}` ({one.where}{self._first(one)}) and `{other.name}` "
            f"({other.where}{self._first(other)}) are one dim in `{what}`{source.at}"
        )
        self.conflicts[text] = None

    def _first(self, said: Said) -> str:
        source = self.used.get(said.node)
        return f", first used{source.at}" if source is not None else ""
