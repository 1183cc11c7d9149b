"""Notes on trees that look like an argument, but that no scoped rule places as it places that.

`meshdsl.mirrors` gives returned trees and states the paths of what they mirror. Where that cannot
be known (parameters that are not called `params`, bare tensors, two arguments of one structure) a
tensor may lie elsewhere than the user expects: replicated, say, beside parameters that are split.
Each such case is one note with the paths and the rule; nothing is changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from meshdsl.graph import Graph
from meshdsl.layouts.layout import Layout, Rule
from meshdsl.mirrors import End, Tree, alike, below, trees


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
    # One argument stands for all that follow the same rules: a model may have thousands alike.
    likes: dict[tuple, dict[tuple, Tree]] = defaultdict(dict)
    for tree in arguments:
        likes[tree.keys].setdefault((tree.dims, tuple(_rules(tree, layout))), tree)
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
    return list(found)


def _ends(tensors: Sequence, paths: Sequence[str]) -> list[End]:
    rows = zip(tensors, paths, strict=False)
    return [(path, (tensor.shape, tensor.dtype)) for tensor, path in rows]


def _bare(ends: Sequence[End]) -> Iterator[Tree]:
    """Yields the arguments or results that are tensors, in no tree but a tuple."""
    for path, aval in ends:
        if aval is not None and all(part.isdigit() for part in path.split("/")[1:]):
            yield Tree(path, (("", (frozenset(aval[0]), aval[1])),))


def _rules(tree: Tree, layout: Layout) -> Iterator[Rule | None]:
    """Yields the rule of each dim of each leaf."""
    for key, dims in zip(tree.keys, tree.dims, strict=True):
        for name in sorted(dim.name for dim in dims or ()):
            yield layout.rule_for(name, below(tree.path, key))


def _misses(tree: Tree, other: Tree, layout: Layout) -> Rule | None:
    """Returns the rule by which `other` lies elsewhere than `tree`, if none is meant for `tree`."""
    if not alike(tree, other):
        return None
    missed = None
    for key, dims in zip(tree.keys, tree.dims, strict=True):
        for name in sorted(dim.name for dim in dims or ()):
            mine = layout.rule_for(name, below(tree.path, key))
            theirs = layout.rule_for(name, below(other.path, key))
            if mine is not None and mine.scope and not _anonymous(tree):
                return None
            if theirs is not None and theirs.scope and theirs.axes != (mine.axes if mine else ()):
                missed = missed or theirs
    return missed


def _anonymous(tree: Tree) -> bool:
    """Whether only its place in the result names a tree, so that no rule can be meant for it."""
    return not tree.path or tree.parts[0].isdigit()


def _note(paths: Sequence[str], other: Tree, rule: Rule, returned: bool) -> str:
    first = f"`{paths[0] or 'the result'}`"
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    have = "have the structure and dims" if len(paths) > 1 else "has the dims"
    name = other.path.rpartition("/")[2]
    fix = (
        f'Return it by its name, as in `return {{"{name}": ...}}`, to have it follow the rule'
        if returned
        else f"Add a rule such as `{paths[0].split('/')[0]}/{rule.dim}:{'+'.join(rule.axes)}`, or "
        "call the parameters `params`: what mirrors these follows their rules"
    )
    return (
        f"{first}{more} {have} of `{other.path}`, but not the layout: "
        f"`{rule}` does not apply. {fix}"
    )
