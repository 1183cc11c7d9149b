"""Fine-tuning with low-rank adapters (Hu et al. 2022, "LoRA"): `with_lora(model, "query:8")`.

The parameters of such a model are those of the model at the same paths, and beside them `adapters`,
with `down` and `up` of each adapted weight. So weights and layouts of the model fit as they are,
and `trainable="adapters/**"` trains nothing else. At first adapters add nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import meshdsl as md
from meshdsl.models.layers.block import Block
from meshdsl.models.layers.low_rank import LowRank
from meshdsl.models.model import Decoding, Model
from meshdsl.nn import initializers
from meshdsl.optim.masks import means, unmatched
from meshdsl.tensors.dims import Dimension
from meshdsl.tensors.module import path_of

ADAPTERS = "adapters"
_FRONT = ("layers", "experts")  # dims that count weights


class Adapter(md.Module):
    """The two matrices of a weight; their product has its dims."""

    down: md.Tensor  # layers, embed, adapter
    up: md.Tensor  # layers, adapter, heads, kv


def with_lora(model: Model, ranks: str) -> Model:
    """Returns a model with adapters: `with_lora(model, "blocks/**/query:8, blocks/**/value:8")`.

    The rows of a weight's matrix are its dim `embed`, or, without that, its first dim besides
    `layers` and `experts`; the columns are all others. The product is added as it is, without a
    factor. Decoding reads the sums.

    Args:
        ranks: globs on the parameters' paths as in layouts, each with a rank.

    Raises:
        ValueError: the text is no list of patterns with ranks. Tracing `init` raises it where a
            pattern matches no parameter or one that is no matrix, or where the rank is too large.

    Examples:
        >>> from meshdsl.models import load, with_lora
        >>> from meshdsl.training import spec_of
        >>> model = with_lora(load("gpt_mini", "layers=2"), "blocks/**/query:8")
        >>> spec_of(model.init).adapters["blocks/attention/query"].down
        f32[layers=2, embed=256, adapter=8]
    """
    wanted = _read(ranks)

    def init(key: md.Tensor) -> Any:
        first, second = md.random.split(key, 2)
        params = model.init(first)
        chosen = _chosen(params, wanted)
        keys = iter(md.random.split(second, max(len(chosen), 1)))
        adapters = {
            path: _drawn(next(keys), path, weight, rank) for path, (weight, rank) in chosen.items()
        }
        return _extended(params, adapters)

    def loss(params: Any, batch: Mapping[str, md.Tensor]) -> Any:
        return model.loss(_merged(params), batch)

    rebuild = model.rebuild
    return dataclasses.replace(
        model,
        init=init,
        loss=loss,
        decoding=_decoding_sums(model.decoding),
        rebuild=None if rebuild is None else lambda config: with_lora(rebuild(config), ranks),
    )


def _decoding_sums(decoding: Decoding | None) -> Decoding | None:
    """Returns the decoding of a model with adapters."""
    if decoding is None:
        return None
    encode = decoding.encode
    return dataclasses.replace(
        decoding,
        prepare=functools.partial(_with_sums, decoding.prepare),
        step=functools.partial(_with_sums, decoding.step),
        encode=None if encode is None else functools.partial(_with_sums, encode),
        unrolled=_decoding_sums(decoding.unrolled),
    )


def _with_sums(read: Any, params: Any, *given: Any, **options: Any) -> Any:
    return read(_merged(params, at_once=True), *given, **options)


def _read(ranks: str) -> dict[str, int]:
    """Returns the ranks by pattern."""
    wanted, problems = dict[str, int](), list[str]()
    for text in filter(None, (part.strip() for part in ranks.split(","))):
        pattern, _, rank = text.rpartition(":")
        if not pattern or not rank.isdecimal() or int(rank) < 1:
            problems.append(f"{text!r}: needs a pattern and a rank, as in 'blocks/**/query:8'")
        elif pattern in wanted:
            problems.append(f"{pattern!r} is there twice")
        else:
            wanted[pattern] = int(rank)
    if not wanted and not problems:
        problems.append("needs patterns with ranks, as in 'blocks/**/query:8'")
    if problems:
        raise ValueError(f"adapters: {'; '.join(problems)}")
    return wanted


def _chosen(params: Any, wanted: Mapping[str, int]) -> dict[str, tuple[md.Tensor, int]]:
    """Returns the weights that get adapters, and their ranks, by path: the last pattern counts."""
    leaves = {path_of(keys): leaf for keys, leaf in _leaves(params)[0]}
    problems = unmatched(list(wanted), list(leaves))
    chosen = {}
    for path, leaf in leaves.items():
        found = [rank for pattern, rank in wanted.items() if means(pattern, path)]
        if not found:
            continue
        chosen[path] = leaf, found[-1]
        _, rows, columns = _split(leaf)
        least = min(math.prod(dim.size for dim in dims) for dims in (rows, columns))
        if not columns:
            problems.append(f"{path} {leaf.shape} is no matrix; choose weights with two dims")
        elif found[-1] > least:
            problems.append(f"{path}: rank {found[-1]} is more than that of the weight, {least}")
    if problems:
        raise ValueError(f"adapters: {'; '.join(problems)}")
    return chosen


def _split(weight: md.Tensor) -> tuple[list[Dimension], list[Dimension], list[Dimension]]:
    """Returns the dims that count weights, and those of rows and columns."""
    front = [dim for dim in weight.shape if dim.name in _FRONT]
    rest = [dim for dim in weight.shape if dim.name not in _FRONT]
    rows = [dim for dim in rest if dim.name == "embed"] or rest[:1]
    return front, rows, [dim for dim in rest if dim not in rows]


def _drawn(key: md.Tensor, path: str, weight: md.Tensor, rank: int) -> Adapter:
    front, rows, columns = _split(weight)
    thin = Dimension("adapter", rank)
    down = initializers.fan_in(rows)(key, [*front, *rows, thin], weight.dtype)
    return Adapter(down=down, up=md.zeros([*front, thin, *columns], weight.dtype))


@functools.cache
def _class_of(kind: Any) -> Any:
    """Returns the class of the parameters of a kind together with adapters."""
    fields = {"__annotations__": {ADAPTERS: Any}, ADAPTERS: None, "__module__": kind.__module__}
    return type(f"{kind.__name__}WithAdapters", (kind,), fields)


def _extended(params: Any, adapters: Mapping[str, Adapter]) -> Any:
    if isinstance(params, dict):
        return {**params, ADAPTERS: dict(adapters)}
    if not isinstance(params, md.Module):
        raise ValueError(
            f"adapters: parameters are a {type(params).__name__}; an md.Module or a dict can have "
            "adapters beside its own"
        )
    kind: Any = type(params)
    own = {one.name: getattr(params, one.name) for one in dataclasses.fields(kind)}
    return _class_of(kind)(**own, **{ADAPTERS: dict(adapters)})


def _merged(params: Any, at_once: bool = False) -> Any:
    """Returns the parameters of the model, with the sums of weights and adapters.

    Args:
        at_once: whether those of blocks are made here, too, and not where a block is computed.
    """
    if isinstance(params, dict):
        if ADAPTERS not in params:
            return params
        plain, adapters = dict(params), params[ADAPTERS]
        del plain[ADAPTERS]
    else:
        adapters = getattr(params, ADAPTERS, None)
        if adapters is None:
            return params
        kind = type(params).__bases__[0]
        plain = kind(**{one.name: getattr(params, one.name) for one in dataclasses.fields(kind)})
    keyed, tree = _leaves(plain)
    leaves = []
    for keys, leaf in keyed:
        adapter = adapters.get(path_of(keys))
        if adapter is not None:
            leaf = LowRank(leaf, adapter.down, adapter.up)
            leaf = leaf if not at_once and _in_block(plain, keys) else leaf.merged()
        leaves.append(leaf)
    return jax.tree.unflatten(tree, leaves)


def _leaves(params: Any) -> tuple[Sequence[tuple[Any, Any]], Any]:
    return jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: hasattr(x, "dtype"))


def _in_block(params: Any, keys: Sequence[Any]) -> bool:
    """Whether a leaf is of layers that `run_blocks` computes one by one."""
    for key in keys:
        if isinstance(params, Block):
            return True
        params = getattr(params, key.name) if hasattr(key, "name") else params[_index(key)]
    return False


def _index(key: Any) -> Any:
    return key.key if hasattr(key, "key") else key.idx
