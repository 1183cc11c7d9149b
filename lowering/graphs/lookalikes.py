"""Notes on trees that look like an argument, but that no scoped rule places as it places that.

`tensors.mirrors` gives returned trees and states the paths of what they mirror. Where that cannot
be known (parameters that are not called `params`, bare tensors, two arguments of one structure) a
tensor may lie elsewhere than the user expects: replicated, say, beside parameters that are split.
Each such case is one note with the paths and the rule; nothing is changed. A result that has all
leaves of an argument in another structure (a list of new parameters) is such a case; so is a rule
whose scope no path has, although a tree of the program has its dim; so is a tree
with some of the leaves of an argument, such as a mean of a few parameters.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from meshdsl.layouts.layout import Layout, Rule
from meshdsl.tensors.mirrors import PARAMS, End, Leaf, Tree, alike, below, trees
from meshdsl.tracing.graph import Graph

_GRADIENTS = "gradients"  # what the paths of gradients begin with


def lookalikes(graph: Graph, layout: Layout) -> list[str]:
    """Returns one note for each tree, or bare tensor, that follows other rules than its like."""
    if not any(rule.scope for rule in layout.rules):
        return []
    inputs = _ends(graph.inputs, graph.input_paths)
    outputs = _ends(graph.outputs, graph.output_paths)
    known = {path for path, _ in inputs}
    alone = (end for end in _bare(inputs) if "/" not in end.path)
    arguments = [*(tree for tree in trees(inputs) if tree.path), *alone]
    results = [*trees(outputs), *_bare(outputs)]
    # One argument stands for all that are split alike: a model may have thousands of layers.
    likes: dict[tuple, dict[tuple, Tree]] = defaultdict(dict)
    distinct: dict[tuple, Tree] = {}
    for tree in arguments:
        splits = tuple(_splits(tree, layout))
        if any(scoped for scoped, _ in splits):  # else no result misses a rule that it follows
            likes[tree.keys].setdefault((tree.dims, splits), tree)
            distinct.setdefault((tree.dims, splits), tree)
    found: dict[str, None] = {}
    done: set[str] = set()
    for tree in (*arguments, *results):
        paths = [path for path, _ in tree.paths("")]
        returned = any(path not in known for path in paths)
        if not done.isdisjoint(paths) or (tree.keys == ("",) and not returned):
            continue
        for other in likes[tree.keys].values():
            rule = other.path != tree.path and _misses(tree, other, layout)
            if rule:
                done.update(paths)
                found[_note(paths, other, rule, returned)] = None
                break
    _note_subsets((*arguments, *results), distinct.values(), layout, known, done, found)
    structures = {tree.keys for tree in arguments}
    parts = _Parts(distinct.values())
    for tree in results:
        paths = [path for path, _ in tree.paths("")]
        unnamed = all(path.split("/")[0].isdigit() for path in paths)
        if done.isdisjoint(paths) and unnamed and tree.keys not in structures:
            for other in parts.maybe_of(tree):
                leaves = _rearranged(tree, other)
                missed = _missed(tree, leaves, other, layout) if leaves else None
                if missed:
                    done.update(paths)
                    ours = [below(tree.path, key) for key, _ in leaves]
                    found[_note(ours, other, missed, returned=True, structure=False)] = None
                    break
    return [*found, *_unmatched(layout, inputs, [*known, *(path for path, _ in outputs)])]


def _note_subsets(
    given: Iterable[Tree],
    arguments: Iterable[Tree],
    layout: Layout,
    known: Collection[str],
    done: set[str],
    found: dict[str, None],
) -> None:
    """Notes trees that have some leaves of an argument, by keys and dims, but not its layout.

    Of arguments inside of others only those called `params` count: so each tree is compared with
    few of them, however many layers a model has.
    """
    roots = [tree for tree in arguments if len(tree.parts) == 1 or tree.parts[-1] == PARAMS]
    leaves = [(root, dict(root.leaves)) for root in roots if len(root.leaves) > 1]
    for tree in given:
        paths = [path for path, _ in tree.paths("")]
        if not done.isdisjoint(paths) or tree.keys == ("",):
            continue
        for root, of_root in leaves:
            inside = f"{tree.path}/".startswith(f"{root.path}/")
            if inside or tree.keys[0] not in of_root or len(tree.keys) >= len(of_root):
                continue
            if any(key not in of_root for key in tree.keys):
                continue
            part = Tree(root.path, tuple((key, of_root[key]) for key in tree.keys))
            rule = _misses(tree, part, layout)
            if rule:
                done.update(paths)
                returned = any(path not in known for path in paths)
                found[_note_of_subset(paths, part, rule, returned)] = None
                break


def _note_of_subset(paths: Sequence[str], part: Tree, rule: Rule, returned: bool) -> str:
    scope = paths[0].split("/")[0]
    more = f" and {len(paths) - 1} more have" if len(paths) > 1 else " has"
    if scope.isdigit():
        own = replace(rule, scope="new")
        fix = f'Return it by a name, as in `return {{"new": ...}}`, with the rule `{own}`'
    else:
        fix = f"Add the rule `{replace(rule, scope=scope)}`"
    if not returned and part.parts[-1] == PARAMS:
        fix += f", or give it every key of `{part.path}`, with None where it keeps nothing"
    return (
        f"`{paths[0]}`{more} the dims of `{below(part.path, part.keys[0])}`, but not the layout: "
        f"`{rule}` does not apply. {fix}"
    )


class _Parts:
    """Arguments, by those of their leaves whose dims the fewest of them have.

    An argument of which a tree has all leaves is among those of one of its leaves, so that a tree
    is compared with few of them.
    """

    def __init__(self, arguments: Iterable[Tree]) -> None:
        self._arguments = tuple(arguments)
        times = Counter(dims for tree in self._arguments for dims in set(tree.dims))
        self._by_dims: dict[Any, list[int]] = defaultdict(list)
        for number, tree in enumerate(self._arguments):
            self._by_dims[min(tree.dims, key=times.__getitem__)].append(number)

    def maybe_of(self, tree: Tree) -> Iterator[Tree]:
        """Yields the arguments of which a tree may have all leaves, in order."""
        numbers = [n for dims in set(tree.dims) for n in self._by_dims.get(dims, ())]
        yield from (self._arguments[number] for number in sorted(numbers))


def _rearranged(tree: Tree, other: Tree) -> tuple[Leaf, ...]:
    """Returns the leaves of a tree that have the dims of all of another's, in the other's order."""
    if len(other.leaves) < 2 or Counter(other.dims) - Counter(tree.dims):
        return ()
    left: dict[Any, deque[Leaf]] = defaultdict(deque)
    for leaf, dims in zip(tree.leaves, tree.dims, strict=True):
        left[dims].append(leaf)
    return tuple(left[wanted].popleft() for wanted in other.dims)


def _unmatched(layout: Layout, inputs: Sequence[End], paths: Sequence[str]) -> Iterator[str]:
    """Yields a note for each rule that no path follows, though some tree has its dim.

    The optimizer's and the gradients' rules are left out: most programs of a job have neither.
    """
    applied = layout.applying(paths)
    for rule in layout.rules:
        if rule in applied or not rule.scope or rule.scope in ("optimizer", "gradients"):
            continue
        for path, aval in inputs:
            if aval is None or "/" not in path or rule.dim not in {d.name for d in aval[0]}:
                continue
            deciding = layout.rule_for(rule.dim, path)
            if deciding is None or not deciding.scope:
                first = path.split("/")[0]
                rename = f", or call `{first}` `{rule.scope}`" if rule.scope.isidentifier() else ""
                yield (
                    f"`{rule}` applies to nothing here: no path has `{rule.scope}`. `{path}` has "
                    f"the dim `{rule.dim}`: write `{replace(rule, scope=first)}`{rename}"
                )
                break


def _ends(tensors: Sequence, paths: Sequence[str]) -> list[End]:
    rows = zip(tensors, paths, strict=False)
    return [(path, (tensor.shape, tensor.dtype)) for tensor, path in rows]


def _bare(ends: Sequence[End]) -> Iterator[Tree]:
    """Yields the arguments or results that are tensors, in no tree but a tuple."""
    for path, aval in ends:
        if aval is not None and all(part.isdigit() for part in path.split("/")[1:]):
            yield Tree(path, (("", (frozenset(aval[0]), aval[1])),))


def _splits(tree: Tree, layout: Layout) -> Iterator[tuple[bool, tuple[str, ...]]]:
    """Yields the axes of each dim of each leaf, with whether a scoped rule gives them."""
    for key, dims in zip(tree.keys, tree.dims, strict=True):
        for name in sorted(dim.name for dim in dims or ()):
            rule = layout.rule_for(name, below(tree.path, key))
            yield (rule.scope != "", rule.axes) if rule else (False, ())


def _misses(tree: Tree, other: Tree, layout: Layout) -> Rule | None:
    """Returns the rule by which `other` lies elsewhere than `tree`, if none is meant for `tree`."""
    return _missed(tree, tree.leaves, other, layout) if alike(tree, other) else None


def _missed(tree: Tree, leaves: Sequence[Leaf], other: Tree, layout: Layout) -> Rule | None:
    """Returns what `_misses` does, for those leaves of a tree that are like `other`'s, in order."""
    missed = None
    for (key, aval), like in zip(leaves, other.keys, strict=True):
        for name in sorted(dim.name for dim in (aval[0] if aval else ())):
            mine = layout.rule_for(name, below(tree.path, key))
            theirs = layout.rule_for(name, below(other.path, like))
            if mine is not None and mine.scope and not _anonymous(tree):
                return None
            if theirs is not None and theirs.scope and theirs.axes != (mine.axes if mine else ()):
                missed = missed or theirs
    return missed


def _anonymous(tree: Tree) -> bool:
    """Whether only its place in the result names a tree, so that no rule can be meant for it."""
    return not tree.path or tree.parts[0].isdigit()


def _note(
    paths: Sequence[str], other: Tree, rule: Rule, returned: bool, structure: bool = True
) -> str:
    first = f"`{paths[0] or 'the result'}`"
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    dims = "the structure and dims" if structure else "the dims"
    have = f"have {dims}" if len(paths) > 1 else "has the dims"
    name = other.path.rpartition("/")[2]
    scope = paths[0].split("/")[0]
    own = replace(rule, scope=scope)
    if not returned:
        fix = (
            f"Add a rule such as `{own}`, or call the parameters `params`: what mirrors these "
            "follows their rules"
        )
    elif scope == _GRADIENTS:
        fix = (
            f"Add the rule `{own}`, or call the argument that is differentiated `{name}`: the "
            "gradients of an argument have its name in their paths"
        )
    else:
        fix = f'Return it by its name, as in `return {{"{name}": ...}}`, to have it follow the rule'
    return (
        f"{first}{more} {have} of `{other.path}`, but not the layout: "
        f"`{rule}` does not apply. {fix}"
    )
