"""Statements: which lines of a source file belong together, and the names they assign to."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from meshdsl.tracing.source import Source


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement of a file.

    Attributes:
        line: its first line.
        names: the names of its values, at least one: those that it assigns to, else that of the
            function around it; for a method `__call__`, that of the class.
        backward: whether this is the statement's part of the backward pass.
    """

    file: str
    line: int
    names: tuple[str, ...]
    backward: bool = False


def statement_at(source: Source) -> Statement:
    """Returns the innermost statement at a source line; without its file, the line itself."""
    statement = _statements_in(source.file).get(source.line)
    first, names = statement if statement else (source.line, ())
    if not names:
        function = source.function.rpartition(".")[2]
        function = "" if function.startswith("<") else function.strip("_")
        names = (function or "value",)
    return Statement(source.file, first, names, source.backward)


def _statements_in(file: str) -> dict[int, tuple[int, tuple[str, ...]]]:
    """Returns the result of `_statements`, cached as long as linecache has the same lines."""
    lines = linecache.getlines(file)
    known = _known.get(file)
    if known is None or known[0] is not lines:
        known = _known[file] = lines, _statements("".join(lines))
    return known[1]


_known: dict[str, tuple[list[str], dict[int, tuple[int, tuple[str, ...]]]]] = {}


@lru_cache(maxsize=256)
def _statements(text: str) -> dict[int, tuple[int, tuple[str, ...]]]:
    """Returns, for the lines of a file, the first line of their statement and its names."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return {}
    statements: dict[int, tuple[int, tuple[str, ...]]] = {}

    def visit(node: ast.AST, called: tuple[str, ...]) -> None:
        names = called
        if isinstance(node, ast.Assign):
            names = tuple(_called(node.targets[0])) or called
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            names = tuple(_called(node.target)) or called
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return | ast.Expr):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            statements.update(dict.fromkeys(lines, (node.lineno, names)))
        for child in ast.iter_child_nodes(node):
            inside = called
            if isinstance(child, ast.FunctionDef):
                of_class = isinstance(node, ast.ClassDef) and child.name == "__call__"
                inside = (_snake(node.name),) if of_class else ()  # type: ignore[attr-defined]
            visit(child, inside)

    visit(tree, ())
    return statements


def _called(target: ast.expr) -> Iterator[str]:
    """Yields the names in the target of an assignment."""
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _called(element)
    elif isinstance(target, ast.Starred):
        yield from _called(target.value)
    elif isinstance(target, ast.Attribute):
        yield target.attr
    elif isinstance(target, ast.Name):
        yield target.id


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
