"""Which parameters are trained: the others have no gradient and no state, and never change.

A step differentiates, clips and updates the tree of parameters with None in place of those that are
not trained, and puts these back afterwards. So no optimizer needs to know of them. A None is no
leaf of the optimizer's state, of checkpoints or of reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax

from meshdsl.layouts.layout import matches
from meshdsl.optim.masks import unmatched
from meshdsl.optim.optimizer import Mask
from meshdsl.tensors.module import path_of

# Globs on paths as in layouts, separated by commas or in a list; `!` before one leaves out what it
# matches. Or (path, shape) -> whether.
Trainable: TypeAlias = str | Sequence[str] | Mask


def trained(params: Any, trainable: Trainable | None) -> Any:
    """Returns a tree of parameters with None for those that are not trained.

        trained(params, "blocks/**/lora*")
        trained(params, "!bias")  # all but the biases

    Args:
        params: a tree of tensors, of arrays, or of `md.spec`.
        trainable: patterns, of which one has to match, or a predicate. A parameter that a pattern
            after `!` matches is not trained; if all patterns have one, all others are. Paths are
            the parameters' own, as in `blocks/attention/query`. None: all are trained.

    Raises:
        ValueError: a pattern matches no parameter (all of these are reported, with the nearest
            paths), or nothing is trained.
    """
    if trainable is None:
        return params
    keyed, tree = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_leaf)
    paths = [path_of(keys) for keys, _ in keyed]
    if callable(trainable):
        chosen = [
            bool(trainable(path, leaf.dims)) for path, (_, leaf) in zip(paths, keyed, strict=True)
        ]
        asked = "the predicate"
    else:
        patterns = patterns_of(trainable)
        if problems := unmatched([pattern.lstrip("! ") for pattern in patterns], paths):
            raise ValueError(f"trainable: {'; '.join(problems)}")
        chosen = [_means(patterns, path) for path in paths]
        asked = f"`{','.join(patterns)}`" if patterns else "an empty list"
    if not any(chosen):
        raise ValueError(f"trainable: {asked} chooses no parameter, so there is nothing to train")
    leaves = [leaf if on else None for (_, leaf), on in zip(keyed, chosen, strict=True)]
    return jax.tree.unflatten(tree, leaves)


def names_nothing(trainable: Trainable) -> bool:
    """Whether patterns say only what is not trained, as `!embedding` does."""
    patterns = () if callable(trainable) else patterns_of(trainable)
    return bool(patterns) and all(pattern.startswith("!") for pattern in patterns)


def _means(patterns: Sequence[str], path: str) -> bool:
    """Whether patterns choose a parameter, some of them with `!` before what is left out."""
    wanted = [pattern for pattern in patterns if not pattern.startswith("!")]
    if any(matches(p.lstrip("! "), path) for p in patterns if p.startswith("!")):
        return False
    return any(matches(p, path) for p in wanted) or (not wanted and bool(patterns))


def merged(part: Any, params: Any) -> Any:
    """Returns `params` with the leaves of `part`, a tree as `trained` returns, in their places."""
    return jax.tree.map(
        lambda old, new: old if new is None else new, params, part, is_leaf=_is_leaf
    )


def patterns_of(trainable: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the patterns in a text or a list."""
    texts = [trainable] if isinstance(trainable, str) else trainable
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"trainable: {trainable!r} is no pattern; give globs on the parameters' paths, such as "
            "'blocks/**/lora*', a list of these, or a function of (path, dims)"
        )
    listed = trainable.split(",") if isinstance(trainable, str) else trainable
    return tuple(pattern.strip() for pattern in listed if pattern.strip())


def _is_leaf(value: Any) -> bool:
    return hasattr(value, "dtype")
