"""Optimizers of optax in meshdsl's programs: `Recipe(init, loss, optax.adamw(1e-3))`.

Their `init` and `update` are JAX functions of trees of arrays. They are traced to jaxprs, and
`optim.jaxprs` translates these into the language. So they are planned, costed and explained with
the step, on every layout and backend. The state is optax's own tree, with named dims and with None
for optax's `MaskedNode`. Trees in it that mirror the parameters follow their layout rules; see
`meshdsl.tensors.mirrors`.

optax itself is not imported: any object with its `init` and `update` works.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import jax

import meshdsl.ops as ops
from meshdsl.ops.literal import as_traced
from meshdsl.optim.checks import bad_rate
from meshdsl.optim.jaxprs import Array, Refused, run
from meshdsl.optim.methods import init_method, update_method
from meshdsl.optim.optimizer import Optimizer
from meshdsl.optim.schedules import Schedule
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.dtypes import is_float
from meshdsl.tensors.module import path_of
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import TracedTensor
from meshdsl.tracing.trace import Trace, current, is_tracing, tracing


class Transformation(Protocol):
    """The protocol of optax's optimizers: a pair of functions."""

    @property
    def init(self) -> Callable[[Any], Any]:
        """From the parameters to the state."""

    @property
    def update(self) -> Callable[..., Any]:
        """From gradients, state and parameters to updates and the state."""


def from_optax(
    transformation: Transformation, learning_rate: float | Schedule | None = None
) -> FromOptax:
    """Returns an optimizer of optax as one of meshdsl's: `from_optax(optax.adamw(1e-3))`.

    Elementwise steps, reductions (such as norms), schedules, masks, conditions and accumulation are
    translated. Products of matrices, sorting, random numbers and loops are refused by name when the
    step is traced. So are optimizers that need more than gradients and parameters, such as the
    loss.

    Args:
        transformation: an object with optax's `init(params)` and `update(grads, state, params)`.
        learning_rate: for the metrics only, since optax does not reveal its own.

    Raises:
        ValueError: it has no such methods, or the rate is out of range.

    Examples:
        >>> import optax
        >>> optimizer = md.optim.from_optax(optax.adam(0.5))
        >>> params, g = md.named([1.0, 1.0], ["embed"]), md.named([5.0, -0.1], ["embed"])
        >>> state = md.jit(optimizer.init)(params)
        >>> params, state = md.jit(optimizer.update)(g, state, params, 0)
        >>> print(params)
        f32[embed=2] [0.5 1.5]
    """
    return FromOptax(transformation, learning_rate)


def as_optimizer(optimizer: Optimizer | Transformation) -> Optimizer:
    """Returns an optimizer of meshdsl as it is, and one of optax translated.

    Raises:
        ValueError: it is neither, or a class of them.

    Examples:
        >>> import optax
        >>> md.optim.as_optimizer(md.optim.Sgd(0.1)).learning_rate
        0.1
        >>> type(md.optim.as_optimizer(optax.adam(1e-3))).__name__
        'FromOptax'
    """
    if isinstance(optimizer, type):
        name = optimizer.__name__
        raise ValueError(
            f"an optimizer is made from its class {name} first, as in optim.AdamW(1e-3): write "
            f"{name}(...)"
        )
    if hasattr(optimizer, "learning_rate") and hasattr(optimizer, "update"):
        return cast(Optimizer, optimizer)
    return FromOptax(optimizer)


@dataclass(frozen=True)
class FromOptax:
    """See `from_optax`.

    Raises:
        ValueError: as of `from_optax`.

    Examples:
        >>> import optax
        >>> optimizer = md.optim.from_optax(optax.sgd(0.1), learning_rate=0.1)
        >>> type(optimizer) is md.optim.FromOptax, optimizer.learning_rate
        (True, 0.1)
    """

    transformation: Transformation
    learning_rate: float | Schedule | None = None

    def __post_init__(self) -> None:
        optimizer = self.transformation
        problems = []
        if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
            problems.append(
                f"an optimizer is one of meshdsl.optim or of optax, with `init` and `update`; got "
                f"{optimizer!r}"
            )
        if self.learning_rate is not None:
            problems += filter(None, [bad_rate(self.learning_rate)])
        if problems:
            raise ValueError("; ".join(problems))

    @init_method
    def init(self, params: Any) -> Any:
        """Returns optax's state, with named dims.

        Raises:
            ValueError: it cannot be translated.
        """
        live = _live(as_traced(params))
        program, like = _traced(self.transformation.init, _specs(live))
        arrays = _translated("init", program, _arrays(live))
        keyed, tree = jax.tree_util.tree_flatten_with_path(like)
        own = jax.tree_util.tree_flatten_with_path(live)[0]
        known = {path_of(keys): leaf.shape for keys, leaf in own}
        fits = [_fits(path_of(keys), a, known) for (keys, _), a in zip(keyed, arrays, strict=True)]
        if any(len(choices) > 1 for choices in fits):
            after = self._after_one_update(live, like, arrays)
            fits = [
                [dims for dims in choices if _agree(dims, axes)] if len(choices) > 1 else choices
                for choices, axes in zip(fits, after, strict=True)
            ]
        leaves = [a.settled(_named(a, choices)) for a, choices in zip(arrays, fits, strict=True)]
        return _ours(jax.tree.unflatten(tree, leaves))

    def _after_one_update(
        self, live: Any, like: Any, arrays: Sequence[Array]
    ) -> list[tuple[str | None, ...]]:
        """Returns the names of the dims that the first update gives the leaves of a state.

        In `init`, two dims of one size cannot be distinguished: a factored second moment starts as
        zeros. An update reduces the gradient over one of them, by its name.
        """
        program, _ = _traced(self.transformation.update, _specs(live), like, _specs(live))
        own = _arrays(live)
        # A trace of its own: only the names of dims are read from it.
        with tracing(Trace(current() if is_tracing() else None)):
            results = _translated("update", program, [*own, *arrays, *own])
        return [array.axes for array in results[len(results) - len(arrays) :]]

    @update_method(None)
    def update(self, grads: Any, state: Any, params: Any, step: Tensor) -> tuple[Any, Any]:
        """Returns the parameters and the state after one step; see `Optimizer.update`.

        Raises:
            ValueError: it cannot be translated.
        """
        grads, state, params = as_traced((grads, state, params))
        live = _live(params)
        gradients = jax.tree.map(lambda p, g: _zeros(p) if g is None else g, live, grads)
        fresh = jax.eval_shape(self.transformation.init, _specs(live))
        count, tree = len(jax.tree.leaves(fresh)), jax.tree.structure(fresh)
        leaves = jax.tree.leaves(state)
        if len(leaves) != count:
            raise ValueError(
                f"from_optax: the state has {len(leaves)} arrays, and that of this transformation "
                f"{count}; give what its `init` returns for these parameters"
            )
        theirs = jax.tree.unflatten(tree, leaves)
        program, like = _traced(self.transformation.update, *map(_specs, (gradients, theirs, live)))
        arrays = _translated("update", program, _arrays((gradients, theirs, live)))
        if repr(jax.tree.structure(like[1])) != repr(tree):
            raise ValueError("from_optax: `update` returns a state of another structure")
        count = len(jax.tree.leaves(like[0]))
        with_dims = zip(arrays[count:], leaves, strict=True)
        try:
            updates = [
                array.settled(p.shape)
                for array, p in zip(arrays[:count], jax.tree.leaves(live), strict=True)
            ]
            after = [ops.cast(array.settled(old.shape), old.dtype) for array, old in with_dims]
        except Refused as error:
            raise _refusal("update", error) from error
        changes = jax.tree.unflatten(jax.tree.structure(live), updates)
        state = jax.tree.unflatten(jax.tree.structure(state), after)
        return jax.tree.map(_applied, params, grads, _spread(changes, params)), state


def _applied(p: Tensor, g: Tensor | None, u: Tensor | None) -> Tensor:
    """Returns a parameter after its update, as `optax.apply_updates`; itself without a gradient."""
    if g is None or u is None:
        return p
    dtype = u.dtype if u.dtype.itemsize > p.dtype.itemsize else p.dtype
    return ops.cast(ops.cast(p, dtype) + ops.cast(u, dtype), p.dtype)


def _live(params: Any) -> Any:
    """Returns the parameters that are floating-point, and None for the others."""
    return jax.tree.map(lambda p: p if is_float(p.dtype) else None, params)


def _spread(part: Any, params: Any) -> Any:
    return jax.tree.map(lambda _, new: new, params, part)


def _zeros(p: Tensor) -> Tensor:
    return ops.zeros(p.shape, p.dtype)


def _arrays(tree: Any) -> list[Array]:
    return [Array.of(leaf) for leaf in jax.tree.leaves(tree)]


def _specs(tree: Any) -> Any:
    return jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape.sizes, t.dtype), tree)


def _traced(function: Callable, *specs: Any) -> tuple[Any, Any]:
    """Returns the jaxpr of a function of optax, and its results' tree of shapes."""
    try:
        return jax.make_jaxpr(function, return_shape=True)(*specs)
    except jax.errors.ConcretizationTypeError as error:
        raise ValueError(
            f"from_optax: this transformation decides in Python by a value that is known only when "
            f"it runs, so jax.jit refuses it too ({_first_line(error)}). A number that is no rate, "
            "such as adafactor's min_dim_size_to_factor, is to be listed in static_args of "
            "inject_hyperparams"
        ) from error
    except (TypeError, AttributeError) as error:
        raise ValueError(
            f"from_optax: this transformation cannot be called with gradients, state and "
            f"parameters alone ({_first_line(error)})"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _translated(which: str, program: Any, arguments: Sequence[Array]) -> list[Array]:
    try:
        return run(program, arguments)
    except Refused as error:
        raise _refusal(which, error) from error


def _refusal(which: str, error: Refused) -> ValueError:
    return ValueError(
        f"from_optax: the `{which}` of this transformation cannot be translated so that it is the "
        f"same on every layout: {error}. meshdsl.optim has Adafactor, AdamW, Lion, Muon and Sgd; "
        "update_each and zeros_like write others"
    )


def _fits(path: str, array: Array, known: dict[str, Shape]) -> list[tuple[Dimension, ...]]:
    """Returns the selections of a parameter's dims, in order, that a leaf of the state may have.

    The parameter is the one whose path is a part of the leaf's. Of several, it is the last of those
    with most keys. Parameters that are one tensor have the path "".
    """

    def closeness(name: str) -> tuple[int, int]:
        return len(name.split("/")), f"/{path}/".rfind(f"/{name}/")

    matching = [name for name in known if not name or f"/{name}/" in f"/{path}/"]
    shape = known[max(matching, key=closeness)] if matching else Shape()
    return [
        dims
        for dims in itertools.combinations(shape, len(array.sizes))
        if tuple(dim.size for dim in dims) == array.sizes and _agree(dims, array.axes)
    ]


def _agree(dims: Sequence[Dimension], names: Sequence[str | None]) -> bool:
    """Whether the dims have these names; unknown names match."""
    return all(name in (None, dim.name) for dim, name in zip(dims, names, strict=True))


def _named(array: Array, fits: Sequence[Sequence[Dimension]]) -> Shape:
    """Returns the dims of a leaf of the state.

    They are those of the parameter if only one selection fits, else those that tracing shows, else
    dims with names of their own.
    """
    names: Sequence[str | None] = array.axes
    if len(fits) == 1:
        names = [dim.name for dim in fits[0]]
    rows = zip(names, array.sizes, strict=True)
    return Shape(
        Dimension(name or f"optax_{n}_{size}", size) for n, (name, size) in enumerate(rows)
    )


def _ours(state: Any) -> Any:
    """Returns a state with None for the nodes of optax that hold nothing, such as `MaskedNode`."""
    return jax.tree.map(
        lambda node: node if isinstance(node, TracedTensor) else None, state, is_leaf=_is_masked
    )


def _is_masked(node: Any) -> bool:
    return isinstance(node, TracedTensor) or type(node).__name__ == "MaskedNode"
