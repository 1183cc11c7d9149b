"""Notes on trees that look like an argument, but that a scoped rule of the argument misses.

`tensors.mirrors` gives returned trees and states the paths of the arguments they mirror. It cannot
know these for parameters that are not called `params`, bare tensors, or two arguments of one
structure. Then a tensor may have another layout than the user expects: replicated, say, beside
parameters that are split. Each such case is one note with the paths and the rule; no layout is
changed. Notes are also written for

- a result that has all leaves of an argument in another structure (a list of new parameters), and
  an argument that is such a list (a state held as `jax.tree.leaves` gives it);
- a rule whose scope no path has, although a tree of the program has its dim;
- a tree with some of the leaves of an argument, such as a mean of a few parameters.

Parameters need not follow a rule for the optimizer's state or for gradients: such a rule means
these alone, as in ZeRO-1 and ZeRO-2. Nor need a result without a name, where the state of that rule
is returned beside it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from meshdsl.layouts.layout import Layout, Rule
from meshdsl.tensors.mirrors import PARAMS, End, Leaf, Tree, alike, below, trees
from meshdsl.tracing.graph import Graph

_GRADIENTS = "gradients"  # the first part of the paths of gradients
_COPIES = frozenset(["optimizer", _GRADIENTS])  # scopes of what mirrors the parameters


def lookalikes(graph: Graph, layout: Layout) -> list[str]:
    """Returns a note for each tree, or bare tensor, that rules of an equal argument miss."""
    if not any(rule.scope for rule in layout.rules):
        return []
    inputs = _leaves(graph.inputs, graph.input_paths)
    outputs = _leaves(graph.outputs, graph.output_paths)
    known, given_back = {path for path, _ in inputs}, {path for path, _ in outputs}
    alone = (end for end in _bare(inputs) if "/" not in end.path)
    arguments = [*(tree for tree in trees(inputs) if tree.path), *alone]
    results = [*trees(outputs), *_bare(outputs)]
    # One argument represents all that are split alike: a model may have thousands of layers.
    likes: dict[tuple, dict[tuple, Tree]] = defaultdict(dict)
    distinct: dict[tuple, Tree] = {}
    for tree in arguments:
        splits = tuple(_splits(tree, layout))
        if any(scoped for scoped, _ in splits):  # else no result misses a rule that it follows
            likes[tree.keys].setdefault((tree.dims, splits), tree)
            distinct.setdefault((tree.dims, splits), tree)
    notes: dict[str, None] = {}
    done: set[str] = set()
    for tree in (*arguments, *results):
        paths = tree.places
        returned = any(path not in known for path in paths)
        if not done.isdisjoint(paths) or (tree.keys == ("",) and not returned):
            continue
        for other in likes[tree.keys].values():
            rule = other.path != tree.path and _misses(tree, other, layout)
            is_known = returned and _anonymous(tree) and _is_among(other, given_back)
            if rule and is_known and _means_copies(rule, tree):
                continue  # the state itself is returned by its name: this is another tree
            if rule:
                done.update(paths)
                notes[_note(paths, other, rule, returned)] = None
                break
    _note_subsets((*arguments, *results), distinct.values(), layout, known, done, notes)
    structures = {tree.keys for tree in arguments}
    unnamed = (tree for tree in results if tree.keys not in structures and _without_names(tree))
    parts = _Parts(distinct.values())
    for tree in (*(tree for tree in arguments if _listed(tree)), *unnamed):
        paths = tree.places
        if done.isdisjoint(paths):
            for other in parts.maybe_of(tree):
                leaves = _rearranged(tree, other) if tree is not other else ()
                missed = _missed(tree, leaves, other, layout) if leaves else None
                if missed:
                    done.update(paths)
                    ours = [below(tree.path, key) for key, _ in leaves]
                    returned = any(path not in known for path in paths)
                    notes[_note(ours, other, missed, returned, structure=False)] = None
                    break
    return [*notes, *_unmatched(layout, inputs, [*known, *(path for path, _ in outputs)])]


def _note_subsets(
    trees_to_check: Iterable[Tree],
    arguments: Iterable[Tree],
    layout: Layout,
    known: Collection[str],
    done: set[str],
    notes: dict[str, None],
) -> None:
    """Adds notes on trees with some leaves of an argument, by keys and dims, but not its layout.

    An argument inside of another one counts only if it is called `params`, so that each tree is
    compared with few arguments, however many layers a model has.
    """
    roots = [tree for tree in arguments if len(tree.parts) == 1 or tree.parts[-1] == PARAMS]
    leaves = [(root, dict(root.leaves)) for root in roots if len(root.leaves) > 1]
    for tree in trees_to_check:
        paths = tree.places
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
                notes[_note_of_subset(paths, part, rule, returned)] = None
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
    """Arguments, indexed by the leaf of each whose dims are the rarest.

    If a tree has all leaves of an argument, one of its leaves leads to the argument. So a tree is
    compared with few arguments.
    """

    def __init__(self, arguments: Iterable[Tree]) -> None:
        self._arguments = tuple(arguments)
        times = Counter(dims for tree in self._arguments for dims in set(tree.dims))
        self._by_dims: dict[Any, list[int]] = defaultdict(list)
        for number, tree in enumerate(self._arguments):
            self._by_dims[min(tree.dims, key=times.__getitem__)].append(number)

    def maybe_of(self, tree: Tree) -> Iterator[Tree]:
        """Yields the arguments all of whose leaves a tree may have, in order."""
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

    Rules of the optimizer and of gradients do not count: most programs of a job have neither.
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


def _leaves(tensors: Sequence, paths: Sequence[str]) -> list[End]:
    rows = zip(tensors, paths, strict=False)
    return [(path, (tensor.shape, tensor.dtype)) for tensor, path in rows]


def _bare(leaves: Sequence[End]) -> Iterator[Tree]:
    """Yields the arguments or results that are bare tensors, or parts of a tuple."""
    for path, aval in leaves:
        if aval is not None and all(part.isdigit() for part in path.split("/")[1:]):
            yield Tree(path, (("", (frozenset(aval[0]), aval[1])),))


def _splits(tree: Tree, layout: Layout) -> Iterator[tuple[bool, tuple[str, ...]]]:
    """Yields the axes of each dim of each leaf, with whether a scoped rule gives them."""
    for key, dims in zip(tree.keys, tree.dims, strict=True):
        for name in sorted(dim.name for dim in dims or ()):
            rule = layout.rule_for(name, below(tree.path, key))
            yield (rule.scope != "", rule.axes) if rule else (False, ())


def _misses(tree: Tree, other: Tree, layout: Layout) -> Rule | None:
    """Returns a rule of `other` that misses `tree`, unless `tree` has a rule of its own."""
    return _missed(tree, tree.leaves, other, layout) if alike(tree, other) else None


def _missed(tree: Tree, leaves: Sequence[Leaf], other: Tree, layout: Layout) -> Rule | None:
    """Returns what `_misses` does, for leaves of a tree that match those of `other`, in order."""
    missed = None
    for (key, aval), like in zip(leaves, other.keys, strict=True):
        for name in sorted(dim.name for dim in (aval[0] if aval else ())):
            mine = layout.rule_for(name, below(tree.path, key))
            theirs = layout.rule_for(name, below(other.path, like))
            if mine is not None and mine.scope and not _anonymous(tree):
                return None
            if theirs is None or (PARAMS in tree.parts and _means_copies(theirs, tree)):
                continue
            if theirs.scope and theirs.axes != (mine.axes if mine else ()):
                missed = missed or theirs
    return missed


def _means_copies(rule: Rule, tree: Tree) -> bool:
    """Whether a rule is for the optimizer's state or for gradients, and a tree is neither."""
    return not _COPIES.isdisjoint(rule.scope.split("/")) and _COPIES.isdisjoint(tree.parts)


def _is_among(tree: Tree, paths: Collection[str]) -> bool:
    """Whether all leaves of a tree have one of some paths."""
    return all(path in paths for path in tree.places)


def _without_names(tree: Tree) -> bool:
    """Whether the paths of all leaves begin with an index in the result."""
    return all(path.split("/")[0].isdigit() for path in tree.places)


def _listed(tree: Tree) -> bool:
    """Whether a tree is a list or a tuple of tensors, which have indices for names."""
    return len(tree.keys) > 1 and all(key.isdigit() for key in tree.keys)


def _anonymous(tree: Tree) -> bool:
    """Whether a tree has only an index in the result, so that no rule can name it."""
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
        other_way = (
            "call the parameters `params`: what mirrors these follows their rules"
            if structure
            else f"give it the structure of `{other.path}`, as `optim.zeros_like` does"
        )
        fix = f"Add a rule such as `{own}`, or {other_way}"
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
