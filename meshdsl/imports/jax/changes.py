"""Which parts of its arguments a function changes in place, and does not return.

Identity tells at once that nothing is changed. Else the jaxpr decides: transforms of JAX inside of
the function, as `nnx.jit` and `nnx.remat` are, put equal arrays back that are other objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from meshdsl.imports.jax.annotations import without_box
from meshdsl.imports.jax.inference import bodies
from meshdsl.tensors.module import path_of

Keyed = Sequence[tuple[tuple[Any, ...], Any]]  # leaves with their paths
_FORWARDING = ("checkpoint", "closed_call", "core_call", "jit", "pjit", "remat2")
_Leaves = dict[str, Any]


def replaced(before: Keyed, after: Keyed, result: Any) -> _Leaves:
    """Returns the leaves of arguments that are other objects after a call, by their paths.

    Those that the result has are left out, and so are entries that are added to a dict: they are
    working values, which a function under `jax.jit` may keep there as well.
    """
    kept = {id(leaf) for leaf in (*(leaf for _, leaf in before), *jax.tree.leaves(result))}
    known = dict(before)
    found = {}
    for keys, leaf in after:
        added = keys not in known and isinstance(keys[-1], jax.tree_util.DictKey)
        if id(leaf) in kept or added or _equal(known.get(keys), leaf):
            continue
        found[path_of(without_box(keys))] = leaf
    return found


def _equal(before: Any, after: Any) -> bool:
    """Whether leaves that are no arrays are equal."""
    plain = (bool, int, float, complex, str, bytes)
    return isinstance(after, plain) and type(before) is type(after) and before == after


def lost(
    function: Callable[..., Any], specs: Sequence[Any], changed: Callable[[], _Leaves]
) -> list[str]:
    """Returns the paths of replaced leaves whose values are new, and in no result.

    Args:
        function: of arrays as in `specs`; returns the results.
        changed: returns what the latest call has replaced.
    """

    def with_changed(*arrays: Any) -> Any:
        result = function(*arrays)
        return result, {path: leaf for path, leaf in changed().items() if _is_array(leaf)}

    closed, (results, arrays) = jax.make_jaxpr(with_changed, return_shape=True)(*specs)
    jaxpr = closed.jaxpr
    origins = _origins(jaxpr)
    count = len(jax.tree.leaves(results))
    safe = {origins.get(v, v) for v in (*jaxpr.invars, *jaxpr.outvars[:count]) if _is_var(v)}
    same = {
        path
        for path, variable in zip(sorted(arrays), jaxpr.outvars[count:], strict=True)
        if _is_var(variable) and origins.get(variable, variable) in safe
    }
    return [path for path in changed() if path not in same]


def _origins(jaxpr: Any) -> dict[Any, Any]:
    """Returns, of variables that a call only hands on, those that it is given."""
    origins: dict[Any, Any] = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name not in _FORWARDING:
            continue
        for body in bodies(equation.params):
            inner = getattr(body, "jaxpr", body)
            within = _origins(inner)
            given = dict(zip(inner.invars, equation.invars, strict=True))
            for outer, result in zip(equation.outvars, inner.outvars, strict=True):
                source = given.get(within.get(result, result)) if _is_var(result) else None
                if _is_var(source):
                    origins[outer] = origins.get(source, source)
    return origins


def _is_var(atom: Any) -> bool:
    return atom is not None and not isinstance(atom, jex.Literal)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)
