"""Masks: which parameters an optimizer decays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from meshdsl.layouts.layout import matches
from meshdsl.optim.optimizer import Mask, is_matrix
from meshdsl.tensors.dims import Shape, did_you_mean
from meshdsl.tensors.module import path_of


@dataclass(frozen=True)
class Excluding:
    """Chooses the parameters of another mask, except some by path.

        AdamW(1e-3, weight_decay=0.1, mask=Excluding(["embedding", "blocks/mlp/router"]))

    Attributes:
        patterns: globs as in layouts: their components occur in a row in the path; `*` is one
            component or a part of one, `**` any number.
        otherwise: the mask of all other parameters; by default all but biases and scales.

    Examples:
        >>> mask = md.optim.Excluding(["embedding", "blocks/**/router"])
        >>> dims = md.Shape(md.dims(embed=4, d_ff=8))
        >>> mask("blocks/mlp/w_in", dims), mask("blocks/mlp/router", dims)
        (True, False)
    """

    patterns: Sequence[str]
    otherwise: Mask = is_matrix

    def __call__(self, path: str, shape: Shape) -> bool:
        excluded = any(matches(pattern, path) for pattern in self.patterns)
        return not excluded and self.otherwise(path, shape)


def check_mask(mask: Mask, params: Any) -> None:
    """Checks that each pattern of a mask matches some parameter.

    Raises:
        ValueError: lists all patterns that match none, with the nearest paths.
    """
    if not isinstance(mask, Excluding):
        return
    # None stands for parameters that are not trained: those may be named as well.
    keyed, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda leaf: leaf is None)
    paths = [path_of(keys) for keys, _ in keyed]
    if problems := unmatched(mask.patterns, paths):
        raise ValueError(f"excluded from weight decay: {'; '.join(problems)}")


def means(pattern: str, path: str) -> bool:
    """Whether a parameter's path matches a glob, as those of layouts do."""
    return matches(pattern, path)


def unmatched(patterns: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Returns one text per glob that matches no path, with the nearest names."""
    known = dict.fromkeys([*paths, *(part for path in paths for part in path.split("/"))])
    return [
        f"no parameter is meant by {pattern!r}{did_you_mean(pattern, known)}"
        for pattern in patterns
        if not any(matches(pattern, path) for path in paths)
    ]
