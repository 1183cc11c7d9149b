"""What a user says of dims: `names={"params/**/query": "embed (heads kv)", "x": "batch length"}`.

A key is the path of an argument's leaf, or a pattern of it: `*` is one component, `**` any number.
Of several that match, the one with most components without wildcards decides, then the later one.
A value has a name for each position. `_` leaves a position to inference, `...` any number of them.
`(heads kv)` is one dim, `heads_kv`, which the program may split into `heads` and `kv`. A value may
also be a `PartitionSpec` of names (of fewer positions than there are, as JAX's), a tensor or a
`md.spec` with these names, a tree of such values, or a function of (path, sizes) that returns one,
or None.

Flax keeps arrays in boxes with an attribute `value`. The name of that attribute, at the end of a
path, may be left out of a key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshdsl.tensors.dims import Dimension, did_you_mean
from meshdsl.tensors.module import path_of
from meshdsl.tensors.named_array import is_named

_TOKEN = re.compile(r"\(([^()]*)\)|([^\s,()]+)|([()])")
BOX = "value"  # the attribute that has the array, in the boxes of Flax
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Word:
    """The name of one position, and those of the dims that it is split into, if they are said."""

    name: str
    parts: tuple[str, ...] = ()


Words = tuple[Word | None, ...]


def annotate(
    names: Any,
    leaves: Sequence[tuple[str, tuple[int, ...]]],
    boxed: Collection[str] = (),
    results: bool = False,
) -> list[Words]:
    """Returns a word, or None, for each position of each leaf.

    Args:
        names: see the module.
        leaves: paths and sizes.
        boxed: paths of boxes, which stand for the `value` in them.
        results: whether the leaves are results; keys of these begin with `return`.

    Raises:
        ValueError: a key matches no path, names do not fit a rank or are not valid, or one leaf has
            a name twice; it lists all of these.
    """
    problems: list[str] = []
    if callable(names):
        names = {"**": names}
    entries = list(_entries(names if names is not None else {}, ""))
    used = set()
    chosen = []
    for path, sizes in leaves:
        spellings = [path, f"{path}/{BOX}"] if path in boxed else [path]
        fitting = [
            number
            for number, (pattern, _) in enumerate(entries)
            if any(matches(pattern, spelling) for spelling in spellings)
        ]
        used.update(fitting)
        value: Any = None
        if fitting:
            value = entries[max(fitting, key=lambda n: (_weight(entries[n][0]), n))][1]
        if callable(value):
            value = value(path, sizes)
        try:
            chosen.append(_words(value, sizes))
        except ValueError as error:
            problems.append(f"{path} {list(sizes)}: {error}")
    paths = [path for path, _ in leaves]
    for number, (pattern, _) in enumerate(entries):
        if number not in used and pattern.startswith("return") == results and pattern != "**":
            hint = did_you_mean(pattern, paths) or f"; there are {', '.join(paths[:8])}"
            what = "result" if results else "argument"
            problems.append(f"names[{pattern!r}] matches no {what}{hint}")
    if problems:
        what = "results" if results else "arguments"
        raise ValueError(f"names do not fit the {what}: " + "; ".join(problems))
    return chosen


def annotate_results(names: Any, leaves: Sequence[tuple[str, tuple[int, ...]]]) -> list[Words]:
    """Returns as `annotate`, for results: their keys begin with `return`."""
    if not isinstance(names, Mapping):
        return [(None,) * len(sizes) for _, sizes in leaves]
    own = {k: v for k, v in names.items() if str(k).startswith("return")}
    return annotate(own, leaves, results=True)


def _entries(names: Any, start: str) -> Iterator[tuple[str, Any]]:
    """Yields patterns with their values; trees are written out."""
    if isinstance(names, Mapping):
        for key, value in names.items():
            yield from _entries(value, f"{start}/{key}" if start else str(key))
    elif _is_tree(names):
        for number, value in enumerate(names):
            yield from _entries(value, f"{start}/{number}")
    elif isinstance(names, list | tuple | PartitionSpec):
        yield start, names
    elif names is not None:
        leaves = jax.tree_util.tree_flatten_with_path(names, is_leaf=is_named)[0]
        for keys, value in leaves:
            path = without_box(keys)
            yield path_of(path, start) if path else start, value


def without_box(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the keys of a leaf, of a box those of the box."""
    last = keys[-1] if keys else None
    return keys[:-1] if isinstance(last, jax.tree_util.GetAttrKey) and last.name == BOX else keys


def _is_tree(value: Any) -> bool:
    """Whether a list is one of values, not of names."""
    listed = isinstance(value, list | tuple)
    return listed and any(not isinstance(v, str | Dimension) or " " in str(v) for v in value)


def matches(pattern: str, path: str) -> bool:
    """Whether a path fits a pattern."""
    return _match(pattern.split("/"), path.split("/"))


def _match(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_match(pattern[1:], parts[n:]) for n in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _match(pattern[1:], parts[1:])


def _weight(pattern: str) -> tuple[int, int]:
    parts = pattern.split("/")
    return sum(not set(part) & set("*?[") for part in parts), sum(part != "**" for part in parts)


def _words(value: Any, sizes: Sequence[int]) -> Words:
    if value is None:
        return (None,) * len(sizes)
    words = list(_parsed(value))
    if isinstance(value, PartitionSpec):
        words += [None] * (len(sizes) - len(words))
    if words.count("...") > 1:
        raise ValueError("`...` occurs twice")
    if "..." in words:
        at = words.index("...")
        words[at : at + 1] = [None] * (len(sizes) - len(words) + 1)
    if len(words) != len(sizes):
        raise ValueError(f"{value!r} names {len(words)} dims, but it has {len(sizes)}")
    known = [word.name for word in words if isinstance(word, Word)]
    if twice := sorted({name for name in known if known.count(name) > 1}):
        raise ValueError(f"{value!r} has `{', '.join(twice)}` twice; give one another name")
    return tuple(word if isinstance(word, Word) else None for word in words)


def _parsed(value: Any) -> Iterator[Word | str | None]:
    if isinstance(value, PartitionSpec):
        for each in value:
            parts = each if isinstance(each, tuple) else ()
            yield from _parsed(f"({' '.join(parts)})") if parts else [each and Word(_checked(each))]
        return
    if not isinstance(value, str):
        for each in value.dims if is_named(value) else value:
            yield Word(_checked(each.name if isinstance(each, Dimension) else each))
        return
    for group, name, stray in _TOKEN.findall(value):
        if stray:
            raise ValueError(f"{value!r} has a `{stray}` without its other half")
        if name:
            yield None if name == "_" else name if name == "..." else Word(_checked(name))
        else:
            parts = tuple(_checked(part) for part in group.replace(",", " ").split())
            yield Word("_".join(parts), parts)


def _checked(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot name a dim: use letters, digits and underscores")
    return name


Names = Mapping[str, Any] | Callable[[str, tuple[int, ...]], Any] | None
