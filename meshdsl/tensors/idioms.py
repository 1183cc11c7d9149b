"""Idioms: errors for what people write in Python, numpy and JAX, with meshdsl's way to write it.

`Idioms` gives tensors those methods and protocols of other arrays that have another meaning here,
or none. Each raises an error of one sentence, with the fix and the user's line. A missing attribute
stays an `AttributeError`, so that `hasattr` is right.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any, NoReturn

from meshdsl.late import late
from meshdsl.tensors.dims import did_you_mean
from meshdsl.tracing.source import caller, raiser

_REORDER = "dims have names, so no product needs it; to reorder them, write x.transpose({turned})"
_RESIZE = "dims have names; write x.merge({dims}, 'name'), or x.split({last!r}, [first, second])"
_UPDATE = "write md.scatter(x, indices, values, {first!r}) or md.where(mask, values, x)"
_NUMBERS = "return the tensor from the traced function, then write np.asarray(x)"
_ADVICE = {
    "T": _REORDER,
    "mT": _REORDER,
    "swapaxes": _REORDER,
    "moveaxis": _REORDER,
    "permute": _REORDER,
    "t": _REORDER,
    "reshape": _RESIZE,
    "flatten": _RESIZE,
    "ravel": _RESIZE,
    "view": _RESIZE,
    "at": _UPDATE,
    "dot": "write md.einsum(x, y, over='dim')",
    "matmul": "write md.einsum(x, y, over='dim')",
    "astype": "write x.cast('float32')",
    "to": "write x.cast('float32'); for devices, md.place(x, mesh, layout)",
    "ndim": "write len(x.dims)",
    "size": "write x.dims.volume",
    "squeeze": "write x[{first!r}, 0]",
    "unsqueeze": "a dim of size 1 is not needed: operations broadcast by name",
    "expand_dims": "a dim of size 1 is not needed: operations broadcast by name",
    "expand": "write x.broadcast([..., dim])",
    "numpy": "write np.asarray(x)",
    "tolist": "write np.asarray(x).tolist()",
    "block_until_ready": "write jax.block_until_ready(x)",
    "copy": "tensors never change, so x itself will do",
    "clone": "tensors never change, so x itself will do",
    "cuda": "devices are those of md.jit's mesh; for arrays, md.place(x, mesh, layout)",
    "cpu": "write np.asarray(x)",
    "device": "write x.data.devices()",
    "devices": "write x.data.devices()",
    "requires_grad": "write md.grad(loss)(params)",
    "detach": "write md.stop_gradient(x)",
    "backward": "write md.grad(loss)(params)",
    "grad": "write md.grad(loss)(params)",
    "sharding": "write x.layout or x.data.sharding",
}
_OF_TRACED = {
    "item": _NUMBERS,
    "tolist": _NUMBERS,
    "numpy": _NUMBERS,
    "data": _NUMBERS,
    "unpadded": _NUMBERS,
    "layout": "see it in md.jit(f, mesh, layout).lower(x)",
    "device": "see the mesh of md.jit(f, mesh, layout)",
    "devices": "see the mesh of md.jit(f, mesh, layout)",
    "cpu": _NUMBERS,
    "sharding": "see it in md.jit(f, mesh, layout).lower(x)",
    "block_until_ready": "a traced tensor is not computed yet",
}
_UFUNCS = {
    "absolute": "abs",
    "invert": "bit_not",
    "bitwise_and": "bit_and",
    "bitwise_or": "bit_or",
    "bitwise_xor": "bit_xor",
    "left_shift": "shift_left",
    "right_shift": "shift_right",
    "true_divide": "divide",
    "conjugate": "conj",
}
_NAMES = {
    "array": "named(data, dims)",
    "asarray": "named(data, dims)",
    "tensor": "named(data, dims)",
    "astype": "cast(x, 'float32')",
    "cat": "concat([x, y], 'dim')",
    "concatenate": "concat([x, y], 'dim')",
    "reshape": "merge(x, dims, 'name') or md.split(x, 'name', dims)",
    "flatten": "merge(x, dims, 'name')",
    "gather": "take(x, indices, 'dim')",
    "inner": "einsum(x, y, over='dim')",
    "tensordot": "einsum(x, y, over='dim')",
    "bmm": "einsum(x, y, over='dim')",
    "mm": "einsum(x, y, over='dim')",
    "permute": "transpose(x, dims)",
    "roll": "shift(x, 'dim', 1)",
    "vmap": "map(f, x, 'dim'), or nothing: operations work along all dims",
    "remat": "checkpoint(f)",
    "fori_loop": "scan or md.while_loop",
    "pmap": "jit(f, mesh, layout)",
    "pjit": "jit(f, mesh, layout)",
    "shard_map": "jit(f, mesh, layout)",
    "zeros_like": "zeros(x.dims, x.dtype)",
    "ones_like": "ones(x.dims, x.dtype)",
    "full_like": "full(x.dims, value, x.dtype)",
    "linspace": "arange(dim) * step + start",
}
_CONVERSIONS = ("array", "asarray")  # of jax.numpy, which read the data of a NamedArray
_PRIMITIVES = ("bind", "canonicalize_value")  # of jax, where primitives look at their operands
_FILLS = "full_like"  # of jax.lax: it reads shape, dtype and sharding, and drops the names of dims
_TREES = "tree_util"  # of jax, whose functions call those of users


@functools.cache
def ops() -> ModuleType:
    """Returns the operations. They import tensors, so they are imported late here."""
    return late("operations")


def refuse(text: str) -> NoReturn:
    """Raises a ValueError with a text and the user's line."""
    raise ValueError(_with_line(text))


def need_names(axis: dict[str, Any], method: str) -> None:
    """Raises ValueError if a method is given numpy's arguments, such as `axis=0`."""
    if axis:
        refuse(
            f"dims have names, not numbers: write md.{method}(x, 'dim'), not {next(iter(axis))}="
        )


def answer_jax(what: str, numbers: str) -> Any:
    """Raises the error for JAX, which asks objects that it does not know for `__jax_array__`."""
    asking = sys._getframe(2)
    asking = asking.f_back if asking.f_code.co_name == "<listcomp>" and asking.f_back else asking
    if _is_primitive(asking) or _is_conversion(asking):
        raise AttributeError("__jax_array__")
    _refuse_jax(what, numbers)


def refuse_primitive(what: str, numbers: str) -> None:
    """Raises the error if a primitive of JAX prints an object that it does not take.

    Primitives ask for `__jax_array__` so that no error gets through, and print the object in their
    own. The error of printing is what the user sees.
    """
    if _is_primitive(sys._getframe(2)):
        _refuse_jax(what, numbers)


def refuse_numpy(name: str, what: str, numbers: str) -> NoReturn:
    """Raises the error for a function of numpy on traced tensors, also where JAX calls it."""
    if _is_of_jax(sys._getframe(2)):  # numpy, which asks `__array_function__`, has no frame
        _refuse_jax(what, numbers)
    refuse(f"np.{name} does not know traced tensors: see md's operations")


def _is_primitive(asking: FrameType) -> bool:
    return asking.f_code.co_name in _PRIMITIVES and _is_of_jax(asking)


def _is_conversion(asking: FrameType) -> bool:
    """Returns whether the user converts a tensor, rather than a function of JAX that takes it."""
    while asking.f_code.co_name in _CONVERSIONS and _is_of_jax(asking):
        if asking.f_back is None or not _is_of_jax(asking.f_back):
            return True
        asking = asking.f_back
    return _module(asking).endswith(_TREES)  # jax.tree.map(jnp.asarray, tree, is_leaf=...)


def _is_of_jax(asking: FrameType) -> bool:
    return _module(asking).partition(".")[0] == "jax"


def _module(asking: FrameType) -> str:
    return str(asking.f_globals.get("__name__"))


def _refuse_jax(what: str, numbers: str) -> NoReturn:
    refuse(_not_taken(what, numbers))


def _not_taken(what: str, numbers: str) -> str:
    return (
        f"functions of JAX do not take {what}: write md's, as in md.sin(x), md.grad(f), md.jit(f), "
        f"or {numbers}"
    )


@contextmanager
def answered() -> Iterator[None]:
    """Replaces JAX's error for a tensor that the user's code passes to a function of JAX.

    JAX's newer checks do not ask the object, and `jax.pmap` takes a dim's size for a number. So the
    error is replaced where it arrives.
    """
    try:
        yield
    except TypeError as error:
        if not _is_of_passing(error):
            raise
        source = raiser(error)
        raise ValueError(
            "functions of JAX do not take tensors with named dims: write md's, as in md.sin(x), "
            f"or md.jit(f).as_jax(...) for JAX around it\n  at {source}  {source.code}".rstrip()
        ) from None


def _is_of_passing(error: TypeError) -> bool:
    """Whether JAX raised an error because it was passed a tensor."""
    text, trace = str(error), error.__traceback__
    if "interpreting argument" in text and "<class 'meshdsl." in text:
        return True
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and _is_of_jax(trace.tb_frame) and text.endswith("not 'Dimension'")


def _with_line(text: str) -> str:
    source = caller(of_layer=True)
    return f"{text}\n  at {source}  {source.code}".rstrip()


def missing(name: str, known: Collection[str]) -> AttributeError:
    """Returns the error for a name that meshdsl lacks: `md.matmul`, `md.softmx`.

    An AttributeError with name=None gets no second hint from Python.
    """
    if name in known:  # listed in `__all__`, but no module defines it
        return AttributeError(
            f"module 'meshdsl' has no attribute {name!r}, though its __all__ lists it: add it to "
            "__all__ of the file in meshdsl/ops/elementwise that has it, or to the imports and "
            "__all__ of meshdsl/ops/__init__.py",
            name=None,
        )
    alias = _NAMES.get(name)
    advice = f"write md.{alias}" if alias else _ADVICE.get(name, "")
    if advice and "{" not in advice and not advice.startswith("write x"):
        hint = f": {advice}"
    else:
        hint = did_you_mean(name, known)
    return AttributeError(f"module 'meshdsl' has no attribute {name!r}{hint}", name=None)


class Idioms:
    """The methods of other arrays, which raise an error with the fix."""

    __slots__ = ()
    dims: Any

    def _of_jax(self) -> tuple[str, str]:
        """Returns what functions of JAX do not take, and how to give them its numbers."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in type(self).__slots__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if hasattr(type(self), name):  # a property that its data cannot answer
            data = type(getattr(self, "data", None)).__name__
            raise AttributeError(f"{type(self).__name__} has no `.{name}`: its data is a {data}")
        asking = sys._getframe(1)
        if name in _ADVICE and _is_of_jax(asking):
            if asking.f_code.co_name == _FILLS:
                _refuse_jax(*self._of_jax())
            raise AttributeError(_with_line(_not_taken(*self._of_jax())), name=None)
        names = list(self.dims.names)
        advice = _ADVICE.get(name)
        if not hasattr(type(self), "cuts"):
            advice = _OF_TRACED.get(name, advice)
        if advice is None and callable(getattr(ops(), name, None)) and not name.startswith("_"):
            advice = f"write md.{name}(x, ...)"
        if advice is None:
            known = [n for n in dir(type(self)) if not n.startswith("_")]
            hint = did_you_mean(name, known)
            text = f"{type(self).__name__} has no attribute {name!r}{hint}"
            raise AttributeError(text, name=None)
        first, last = (names[0], names[-1]) if names else ("dim", "dim")
        advice = advice.format(dims=names, turned=names[::-1], first=first, last=last)
        raise AttributeError(_with_line(f"{self!r} has no `.{name}`: {advice}"), name=None)

    def __matmul__(self, other: Any) -> Any:
        _no_matmul(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        _no_matmul(other, self)

    def __len__(self) -> int:
        raise TypeError(
            _with_line(f"{self!r} has no first dim to count: write x.dims.get('dim').size")
        )

    def __contains__(self, value: Any) -> bool:
        refuse("`in` goes through a first dim, which there is not: write md.any(x == value)")

    def __setitem__(self, key: Any, value: Any) -> None:
        names = self.dims.names
        refuse(f"tensors never change: {_UPDATE.format(first=names[0] if names else 'dim')}")

    def __round__(self, digits: int | None = None) -> Any:
        if digits:
            refuse("tensors round to whole numbers: write md.round(x * 100) / 100")
        return ops().round(self)


def _no_matmul(x: Any, y: Any) -> NoReturn:
    shared = [d.name for d in getattr(x, "dims", ()) if d in tuple(getattr(y, "dims", ()))]
    over = repr(shared[-1]) if shared else "'dim'"
    refuse(f"`@` does not say which dim is summed over: write md.einsum(x, y, over={over})")


def by_name(
    function: Any, method: str, inputs: tuple, kwargs: dict, what: str = "traced tensors"
) -> Any:
    """Returns the result of a ufunc of numpy on named dims: that of the operation of that name.

    Args:
        what: a description of the arguments, for the message.

    Raises:
        ValueError: there is no such operation, or the call has further arguments.
    """
    if function.__name__ == "matmul":
        _no_matmul(*inputs)
    name = _UFUNCS.get(function.__name__, function.__name__)
    operation = getattr(ops(), name, None)
    if method != "__call__" or kwargs or operation is None:
        refuse(f"np.{function.__name__} does not know {what}: see md's operations")
    return operation(*inputs)
