"""The marker of public operations: errors name the operands and the user's line."""

from __future__ import annotations

import copyreg
import functools
import inspect
import numbers
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from meshdsl.late import late
from meshdsl.ops.literal import as_traced, literal
from meshdsl.tensors.dims import Dimension
from meshdsl.tensors.dtypes import short
from meshdsl.tensors.named_array import NamedArray
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import TracedTensor
from meshdsl.tracing.source import Source, caller, is_of_user
from meshdsl.tracing.trace import here, is_derived, is_tracing, open_traces

P = ParamSpec("P")
R = TypeVar("R")
_ALIASES = ("axis", "axes", "dim", "dims", "over")  # keywords for dims in other libraries


class OperationError(ValueError):
    """A user's mistake in one operation, with its operands and source line.

    Attributes:
        name: of the operation that the user called.
        reason: what is wrong, without the name.
        user: the line of the call.
        part: the operation inside of it that noticed; the operation itself if it did.
        source: the line of that, in a layer or in the user's code.
    """

    part: str
    source: Source

    def __init__(
        self,
        name: str,
        reason: str,
        arguments: Iterable[Any],
        noticed: OperationError | None = None,
    ) -> None:
        line = here()
        self.name, self.reason = name, reason
        self.user = line if is_derived() else caller(of_layer=True)
        self.part, self.source = (noticed.part, noticed.source) if noticed else (name, line)
        super().__init__(self._text(arguments))

    def __reduce__(self) -> tuple[Any, ...]:  # copies and pickles have the text, not the tensors
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]

    def _text(self, arguments: Iterable[Any]) -> str:
        lines = [f"{self.name}: {self.reason}"]
        leaves = jax.tree.leaves(list(arguments), is_leaf=_is_operand)
        for number, operand in enumerate(filter(_is_operand, leaves), 1):
            made = f"  made at {operand.source}" if isinstance(operand, TracedTensor) else ""
            lines.append(f"  operand {number}: {short(operand.dtype)}{operand.dims}{made}")
        if self.part != self.name:
            lines.append(f"  where it calls {self.part}")
        for place in dict.fromkeys((self.source, self.user)):
            word = "at" if place == self.user else "in"
            lines.append(f"  {word} {place}  {place.code}".rstrip())
        return "\n".join(lines)


def operation(
    function: Callable[P, R], of_user: bool = False, by_parts: bool = False
) -> Callable[P, R]:
    """Marks a public operation: a ValueError inside it is raised again with what the user needs.

    The message names the operation, every tensor operand with the line it was made at, and the
    user's own line. It is the operation that the user called: mistakes that others notice, of which
    it is made, are its own. A function of the user's that it calls keeps its errors, as they are.
    NamedArrays among the operands become literals of the program; where nothing is being traced,
    the operation runs at once.

    Args:
        of_user: the function runs code of the user's that is part of the operation, such as the
            shape rule of `md.primitive`: its errors are the operation's.
        by_parts: see `layer`.
    """

    def apart(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (ValueError, AttributeError, TypeError) as error:
            _tell(error, function, of_user, args, kwargs)
            raise

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not open_traces or not is_tracing():
            if by_parts and any(map(_is_of_others, (*args, *kwargs.values()))):
                return apart(*args, **kwargs)
            return late("run at once")(checked, args, kwargs, True)
        try:  # as `reported_as` does, which is slow for thousands of operations
            operands: list[Any] = [literal(x) if isinstance(x, NamedArray) else x for x in args]
            named: dict[str, Any] = {}
            for key, x in kwargs.items():
                named[key] = literal(x) if isinstance(x, NamedArray) else x
            return function(*operands, **named)
        except (ValueError, AttributeError, TypeError) as error:
            _tell(error, function, of_user, args, kwargs)
            raise

    _operations.add(checked)
    return checked


def layer(function: Callable[P, R]) -> Callable[P, R]:
    """Marks an operation, made of others, that takes a function of tensors.

    Where nothing is being traced, it runs at once, as one program, if that function is an operation
    too. A function of the user's may read values, so it gets NamedArrays: the operations of the
    layer then run one by one.
    """
    return operation(function, by_parts=True)


_operations: weakref.WeakSet[Callable] = weakref.WeakSet()


def is_operation(value: Any) -> bool:
    """Whether a value is a function that `operation` made: it depends on its arguments alone."""
    return isinstance(value, FunctionType) and value in _operations


def _is_of_others(value: Any) -> bool:
    return callable(value) and not is_operation(value)


def _tell(
    error: Exception, function: Callable, of_user: bool, args: tuple, kwargs: Mapping[str, Any]
) -> None:
    """Raises an error as the operation's own; returns if it is to stay as it is."""
    if not isinstance(error, OperationError) and not of_user and is_of_user(error):
        return
    name, arguments = function.__name__.lstrip("_"), (*args, *kwargs.values())
    if isinstance(error, ValueError):
        if isinstance(error, OperationError) and error.name != name:
            with reported_as(name, arguments):
                _need_types(function, args, kwargs)
        raise _as_mistake_of(name, error, arguments) from None
    with reported_as(name, arguments):
        _need_fit(function, name, args, kwargs)
        _need_types(function, args, kwargs)


def _need_fit(function: Callable, name: str, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError, with how an operation is called, if arguments do not fit it."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        own = [p.name for p in signature.parameters.values() if p.name in ("over", "dim", "dims")]
        names = [each for each in args if isinstance(each, str | Dimension)]
        fix = ""
        if own and len(names) > 1:
            listed = ", ".join(repr(n if isinstance(n, str) else n.name) for n in names)
            fix = f"; several dims are one list: {own[0]}=[{listed}]"
        elif own and (alias := next(filter(_ALIASES.__contains__, kwargs), None)):
            fix = f"; the dims are {own[0]}=, by name, not {alias}="
        raise ValueError(
            f"{error}; it is called as md.{name}({_parameters(signature)}){fix}"
        ) from None


# What arguments are, by the words of annotations.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "Tensor": ("tensors", lambda x: isinstance(x, Tensor)),
    "md.Tensor": ("tensors", lambda x: isinstance(x, Tensor)),
    "int": ("a whole number", lambda x: isinstance(x, numbers.Integral) or _is_scalar(x)),
    "float": ("a number", lambda x: isinstance(x, numbers.Real) or _is_scalar(x)),
    "complex": ("a number", lambda x: isinstance(x, numbers.Complex) or _is_scalar(x)),
    "str": ("a name", lambda x: isinstance(x, str)),
    "Dimension": ("a md.Dimension", lambda x: isinstance(x, Dimension)),
    "DimLike": ("a dim", lambda x: isinstance(x, str | Dimension)),
    "Sequence[int]": ("a list of whole numbers", lambda x: _is_list(x, numbers.Integral)),
    "Sequence[str]": ("a list of names", lambda x: _is_list(x, str)),
    "bool": ("True or False", lambda x: isinstance(x, bool) or _is_scalar(x)),
    "None": ("None", lambda x: x is None),
}


def _is_scalar(value: Any) -> bool:
    """Whether a value is a number with a dtype, or a tensor without dims."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and not len(value.shape) and np.dtype(dtype).kind not in "SUO"


def _is_list(value: Any, kind: type) -> bool:
    is_list = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)
    items = list(value) if is_list and np.ndim(value) else [None]
    return all(isinstance(item, kind) for item in items)


def _need_types(function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError if an argument is of another type than its annotation says.

    Annotations of other words than those in `_KINDS` are not looked at.
    """
    signature = inspect.signature(function)
    for name, given in signature.bind(*args, **kwargs).arguments.items():
        parameter = signature.parameters[name]
        annotation = parameter.annotation
        text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
        words = [word.strip() for word in text.split("|")]
        if not all(word in _KINDS for word in words):
            continue
        for value in given if parameter.kind is parameter.VAR_POSITIONAL else (given,):
            if not any(_KINDS[word][1](value) for word in words):
                wanted = " or ".join(dict.fromkeys(_KINDS[word][0] for word in words))
                fix = ""
                is_array = hasattr(value, "shape") and not isinstance(value, Tensor)
                if wanted == "tensors" or ("tensors" in wanted and is_array):
                    fix = "; name the dims of an array, as in md.named(array, dims)"
                raise ValueError(f"`{name}` takes {wanted}, not {type(value).__name__}{fix}")


def _parameters(signature: inspect.Signature) -> str:
    """Returns the parameters without their types."""
    every = signature.parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in every]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))[1:-1]


def checked_by(check: Callable[P, None]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Marks an operation whose arguments are checked before each call, even of a cached program.

    `check` gets the operation's arguments as the user passes them, so it sees their data. Its
    ValueError is raised again as the operation's own.
    """

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def checking(*args: P.args, **kwargs: P.kwargs) -> R:
            with reported_as(function.__name__, (*args, *kwargs.values())):
                check(*args, **kwargs)
            return function(*args, **kwargs)

        return checking

    return mark


def at_once(function: Callable[P, R]) -> Callable[P, R]:
    """Marks a function that runs the user's own code: it runs at once where nothing is traced."""

    @functools.wraps(function)
    def running(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_tracing():
            return function(*args, **kwargs)
        return late("run at once")(function, args, kwargs, pure=False)

    return running


def of_trees(
    prepare: Callable[..., tuple[Any, ...]],
    like: Callable[[Sequence[Any], Any], Sequence[Any]] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Marks a function of trees of tensors, such as an optimizer's method.

    NamedArrays in its trees become tensors of the program; where nothing is being traced, the
    function runs at once, as one program.

    Args:
        prepare: gets the arguments as the user passes them, all by position, checks them, and
            returns them. Its ValueError is raised again as the function's own, with the user's
            line.
        like: gets these arguments and the result, where the function runs at once. It returns for
            each leaf of the result the argument whose layout the leaf has, or None.
    """

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def traced(*args: Any) -> R:
            return function(*as_traced(args))  # type: ignore[call-arg]

        @functools.wraps(function)
        def running(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return function(*args, **kwargs)  # Python says what is missing
            bound.apply_defaults()
            with reported_as(function.__qualname__):
                given = prepare(*bound.args)
            if is_tracing():
                return traced(*given)
            return late("run at once")(traced, given, {}, pure=False, like=like)

        return running

    return mark


@contextmanager
def reported_as(name: str, arguments: Iterable[Any] = ()) -> Iterator[None]:
    """Raises a ValueError again, as a mistake in the operation `name`.

    Operations that run the user's own code use it around their checks only, so that an error in
    that code keeps its traceback.
    """
    try:
        yield
    except ValueError as error:
        raise _as_mistake_of(name, error, arguments) from None


def _as_mistake_of(name: str, error: ValueError, arguments: Iterable[Any]) -> OperationError:
    """Returns an error as that of the operation `name`, or itself if other code made it.

    That is code of the user's that the operation runs: its lines are not those of the call.
    """
    if not isinstance(error, OperationError):
        return OperationError(name, str(error), arguments)
    outer = OperationError(name, error.reason, arguments, error)
    return outer if error.name != name and error.user == outer.user else error


def _is_operand(value: Any) -> bool:
    return isinstance(value, Tensor)
