"""Names of classes: those that the user said, those that follow from them, and telling ones.

A name follows where the program makes a dim of a named one: a whole of its parts (`heads_kv`), a
slice of what it is cut from, the second occurrence of a dim in one array (`memory_length`). What
remains is called after its argument (`mlp_w_out_1`) or the function that makes it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from meshdsl.imports.jax.classes import Classes

_LONGEST = 48  # a longer name of parts is not readable


class Origin(Enum):
    """Where a name is from."""

    SAID = "said"
    DERIVED = "derived"
    TELLING = "telling"


@dataclass(frozen=True)
class Name:
    text: str
    origin: Origin


class Naming:
    """The names of all classes, which must be settled."""

    def __init__(self, classes: Classes) -> None:
        self._classes = classes
        self._names: dict[int, Name] = {}
        self._wholes: dict[int, list[tuple[int, ...]]] = {}
        self._parts: dict[int, list[tuple[int, int]]] = {}
        self._open: set[int] = set()
        self._taken: dict[str, int] = {}
        for each in classes.regrouped():
            self._wholes.setdefault(each.whole, []).append(each.parts)
            for number, part in enumerate(each.parts):
                self._parts.setdefault(part, []).append((each.whole, number))

    def name(self, node: int) -> Name:
        """Returns the name of the class of a node."""
        root = self._classes.root(node)
        if root not in self._names:
            name = self._derived(root) or self._telling(root)
            if root in self._open:  # asked for by a class that this one is derived from
                return name
            self._names[root] = name
        return self._names[root]

    def of(self, nodes: Sequence[int]) -> tuple[str, ...]:
        """Returns the names of the positions of one array: distinct ones."""
        names: list[str] = []
        for node in nodes:
            text = base = self.name(node).text
            count = 1
            while text in names:
                text = f"memory_{base}" if count == 1 else f"memory_{base}_{count}"
                count += 1
            names.append(text)
        return tuple(names)

    def _derived(self, root: int) -> Name | None:
        facts = self._classes.facts(root)
        if facts.said is not None:
            return Name(facts.said.name, Origin.SAID)
        if root in self._open:
            return None
        self._open.add(root)
        try:
            for parts in self._wholes.get(root, ()):
                names = [self._known(part) for part in parts]
                text = "_".join(name for name in names if name)
                if all(names) and len(text) <= _LONGEST:
                    return Name(text, Origin.DERIVED)
            sources = (
                (facts.copies, "memory_{}"),
                (facts.like, "{}"),
                (facts.near, "{}_out"),
                (facts.liked, "{}"),
            )
            for nodes, form in sources:
                for node in nodes:
                    known = self._known(node)
                    if known is not None and self._classes.root(node) != root:
                        return Name(form.format(known), Origin.DERIVED)
        finally:
            self._open.discard(root)
        return None

    def _known(self, node: int) -> str | None:
        """Returns the name of a class if it follows from what the user said."""
        root = self._classes.root(node)
        name = self._names.get(root) or self._derived(root)
        return name.text if name is not None and name.origin is not Origin.TELLING else None

    def _telling(self, root: int) -> Name:
        facts = self._classes.facts(root)
        text = facts.hint
        for whole, number in self._parts.get(root, ()):
            known = self._known(whole)
            if known is not None:
                text = f"{known}_{number}"
                break
        for node in facts.copies + facts.like:
            other = self._classes.facts(node).hint
            if not text and other:
                text = f"memory_{other}" if node in facts.copies else other
        text = re.sub(r"\W+", "_", text or "dim").strip("_") or "dim"
        text = text if not text[0].isdigit() else f"dim_{text}"
        count, candidate = 1, text
        while self._taken.setdefault(candidate, root) != root:
            count += 1
            candidate = f"{text}_{count}"
        return Name(candidate, Origin.TELLING)
