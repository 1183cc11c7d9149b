"""NamedArray: data with named dims; `named` and `spec` make arguments of traced functions.

A `NamedArray` is a pytree node with one leaf, so trees of them pass through JAX's own functions. On
the JAX backends `data` is an ordinary `jax.Array` with its sharding.

A dim split over devices that do not divide its size is stored with pads: `data` then has more
elements than `dims` say, and `cuts` says where the pads are (see `tensors.cuts`). Their contents
are undefined. Names and printed text of an array are about its logical dims. `np.asarray` returns
the logical values, and `unpadded` the logical array on its devices. Elementwise functions may be
used on `data` directly; others, such as a sum, need `unpadded`.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from meshdsl.late import late
from meshdsl.layouts.mesh import Mesh
from meshdsl.tensors import numpy_calls
from meshdsl.tensors.cuts import Cuts, unpad
from meshdsl.tensors.dims import RANDOM_KEY, Dimension, DimsLike, Shape, as_list
from meshdsl.tensors.dtypes import as_dtype, short
from meshdsl.tensors.idioms import answer_jax, refuse, refuse_primitive
from meshdsl.tensors.static import without_static
from meshdsl.tensors.tensor import Tensor

if TYPE_CHECKING:
    from meshdsl.layouts.tensor_layout import TensorLayout


# Dtypes of Python numbers.
_DEFAULT = {"float64": "float32", "int64": "int32", "complex128": "complex64"}


# Plain Python numbers stand for tensors without dims, of these dtypes.
NUMBERS = {bool: np.dtype("bool"), int: np.dtype("int32"), float: np.dtype("float32")}


class NamedArray(Tensor):
    """An array whose dims have names: `NamedArray(data, [batch, embed])`.

    It has the operators and methods of tensors. Outside of traced functions they run at once; see
    `meshdsl.running.eager`.

    Attributes:
        data: a numpy or JAX array whose shape is that of `dims`, pads added.
        dims: the dims, in the order of `data`'s.
        cuts: how dims are cut into padded blocks; `()` for data without pads. Results of programs
            have zeros in pads, but an argument that is returned keeps its own.

    Examples:
        >>> x = md.named([[1.0, 2.0], [3.0, 4.0]], ["row", "column"])
        >>> print(x + md.named([10.0, 20.0], ["row"]))  # operands meet by name
        f32[row=2, column=2] [[11. 12.]
         [23. 24.]]
        >>> np.asarray(x.sum("column"))
        array([3., 7.], dtype=float32)
    """

    __slots__ = ("cuts", "data", "dims")
    dims: Shape

    def __init__(self, data: Any, dims: Shape, cuts: Cuts = ()) -> None:
        self.data = data
        self.dims = dims if isinstance(dims, Shape) else Shape(dims)
        self.cuts = cuts

    @property
    def shape(self) -> Shape:
        return self.dims

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.data.dtype)

    @property
    def layout(self) -> TensorLayout | None:
        """Where the data is on its mesh; None for data that is on no mesh."""
        where = None if isinstance(self.data, jax.core.Tracer) else self.data
        where = getattr(where, "sharding", None)
        if not isinstance(where, NamedSharding) or where.mesh.size == 1:
            return None
        return _layout(self.dims, where)

    def unpadded(self) -> Any:
        """Returns the data without pads, as an array of the dims' sizes: `x.unpadded()`.

        It is `data` itself where there are none. On a mesh it stays there, split as far as the
        sizes divide.
        """
        if not self.cuts:
            return self.data
        if not isinstance(self.data, jax.Array):
            return unpad(np, np.asarray(self.data), self.cuts, self.dims.sizes)
        where = None if isinstance(self.data, jax.core.Tracer) else self.data.sharding
        return _unpadding(self.dims, self.cuts, where)(self.data)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if not self.cuts:
            return np.array(self.data, dtype=dtype, copy=copy)
        if copy is False:
            raise ValueError(f"{self!r} is stored with pads: without them, it is a copy")
        unpadded = unpad(np, np.asarray(self.data), self.cuts, self.dims.sizes)
        return np.array(unpadded, dtype=dtype, order="C")

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return numpy_calls.ufunc(function, method, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return numpy_calls.function(function, args, kwargs)

    def __float__(self) -> float:
        return float(self._number().item())

    def __int__(self) -> int:
        return int(self._number().item())

    def __complex__(self) -> complex:
        return complex(self._number().item())

    def __index__(self) -> int:
        if self.dtype.kind not in "iu":
            raise TypeError(f"only a whole number is an index, not {self!r}")
        return int(self._number().item())

    def __bool__(self) -> bool:
        return bool(self._number())

    def __format__(self, form: str) -> str:
        return format(self.item(), form) if form else str(self)

    @property
    def __jax_array__(self) -> Any:
        return answer_jax(*self._of_jax())

    def _of_jax(self) -> tuple[str, str]:
        return f"{self!r}, whose dims have names", "give its data: x.unpadded()"

    def item(self) -> Any:
        """Returns the only element as a Python number."""
        return self._number().item()

    def _number(self) -> np.ndarray:
        """Returns the data of an array with one element.

        Raises:
            ValueError: there are more.
        """
        if self.dims.volume != 1:
            raise ValueError(
                f"{self!r} is {self.dims.volume} numbers, not one; reduce it first, as in "
                "md.sum(x), md.any(x) or md.all(x)"
            )
        return np.asarray(self)

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        if not hasattr(self.data, "dtype"):  # `jax.tree.map` may put anything in place of data
            return f"NamedArray({self.data!r}, {self.dims})"
        where = f"; {self.layout}" if self.layout is not None else ""
        return f"NamedArray({short(self.dtype)}{self.dims}{where})"

    def __str__(self) -> str:
        """Returns the dims with the numbers; of large arrays, only the outermost numbers."""
        refuse_primitive(*self._of_jax())
        if not getattr(self.data, "is_fully_addressable", True):
            return repr(self)
        if isinstance(self.data, jax.core.Tracer) or not hasattr(self.data, "dtype"):
            return repr(self)
        numbers = np.array2string(np.asarray(self), threshold=200, precision=4)
        return f"{short(self.dtype)}{self.dims} {numbers}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Shows the numbers where IPython shows text."""
        printer.text(str(self))

    def _repr_html_(self) -> str | None:
        """Returns the array for notebooks: dims, statistics, a few numbers, what devices hold."""
        return late("value in a notebook")(self)


def need_every_dim(array: NamedArray) -> None:
    """Raises ValueError unless the data have the dims that are named, as under `jax.vmap`."""
    if len(array.data.shape) != len(array.dims):
        refuse(
            f"the data of {array!r} have shape {tuple(array.data.shape)} here: jax.vmap hides a "
            "dim or adds one, which names do not see; leave it out, as operations work along all "
            "dims, or map over x.data and name it inside: md.named(data, dims)"
        )


def number(value: Any) -> NamedArray:
    """Returns a plain number as an array without dims; numpy's numbers keep their dtype."""
    return NamedArray(np.asarray(value, NUMBERS.get(type(value))), _NO_DIMS)


_NO_DIMS = Shape()


class Spec:
    """The dims and dtype of an argument, without data; made by `spec`.

    Examples:
        >>> x = md.spec(md.dims(batch=8, embed=4), "bfloat16")
        >>> x
        bf16[batch=8, embed=4]
        >>> x.dims.names
        ('batch', 'embed')
    """

    __slots__ = ("dims", "dtype")

    def __init__(self, dims: Shape, dtype: np.dtype) -> None:
        self.dims = dims
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"{short(self.dtype)}{self.dims}"

    def _repr_html_(self) -> str | None:
        """Returns dtype and dims for notebooks."""
        return late("value in a notebook")(self)


def named(data: Any, dims: DimsLike) -> NamedArray:
    """Gives the dims of an array their names: `x = md.named(array, ["batch", "embed"])`.

    Args:
        data: an array, which keeps its dtype, or Python numbers, which become float32 or int32. A
            numpy array is copied, so later changes to it do not reach the result, which is
            read-only. Views of `bytes` and of files mapped for reading are shared instead;
            what is written to such a file later shows in the result.
        dims: one per dim of the array, in order; a plain name takes its size from the data.

    Raises:
        ValueError: count or sizes do not fit (the error names every misfit), or the data are no
            numbers.

    Examples:
        >>> x = md.named([[1.0, 2.0], [3.0, 4.0]], ["row", "column"])
        >>> print(x)
        f32[row=2, column=2] [[1. 2.]
         [3. 4.]]
        >>> md.named([[1, 2, 3]], ["row", md.Dimension("column", 2)])
        Traceback (most recent call last):
        ValueError: named: dim 1 of the data has size 3, but column=2 was given
    """
    if not hasattr(data, "shape") or not hasattr(data, "dtype"):
        data = _plain(data)
    _need_numbers(data)
    if isinstance(data, np.ndarray) and not (data.dtype.isnative and _is_constant(data)):
        data = np.array(data, data.dtype.newbyteorder("="))
        data.flags.writeable = False
    listed = as_list(dims)
    unknown = [dim for dim in listed if not isinstance(dim, Dimension | str)]
    if unknown:
        names = ", ".join(map(repr, unknown))
        raise ValueError(
            f"named: {names} cannot name a dim; give a name, whose size is that of the data, or a "
            "md.Dimension, as in md.named(x, ['row'])"
        )
    if len(listed) != len(data.shape):
        raise ValueError(
            f"named: the data has {len(data.shape)} dims {tuple(data.shape)}, "
            f"but {len(listed)} dims were given: {', '.join(map(str, listed))}"
        )
    shape = []
    problems = []
    for position, (dim, size) in enumerate(zip(listed, data.shape, strict=True)):
        shape.append(Dimension(dim, size) if isinstance(dim, str) else dim)
        if shape[-1].size != size:
            problems.append(f"dim {position} of the data has size {size}, but {dim} was given")
    if problems:
        raise ValueError("named: " + "; ".join(problems))
    return NamedArray(data, Shape(shape))


def is_named(value: Any) -> bool:
    """Whether a value is a tensor, or a spec of one."""
    return isinstance(value, Tensor | Spec)


def is_key(leaf: Tensor | Spec) -> bool:
    """Whether a tensor has keys of random numbers, by its last dim."""
    return leaf.dims.names[-1:] == (RANDOM_KEY.name,) and leaf.dtype == np.uint32


def unnamed(tree: Any) -> Any:
    """Returns a tree with plain arrays for NamedArrays: `variables = md.unnamed(params)`.

    It is for what goes back to Flax, Equinox, or any other function of JAX. Arrays on a mesh stay
    there, and have no pads; see `NamedArray.unpadded`. Keys of random numbers become JAX's typed
    keys, and models of `md.from_equinox` are whole again. Other leaves stay as they are.

    Examples:
        >>> step = md.jit(lambda params: {"w": 2 * params["w"]})
        >>> params = step({"w": md.named([1.0, 2.0], ["embed"])})
        >>> md.unnamed(params)
        {'w': Array([2., 4.], dtype=float32)}
    """

    def plain(leaf: Any) -> Any:
        if not isinstance(leaf, NamedArray):
            return leaf
        array = leaf.unpadded()
        return jax.random.wrap_key_data(array, impl="threefry2x32") if is_key(leaf) else array

    arrays = jax.tree.map(plain, tree, is_leaf=lambda leaf: isinstance(leaf, Tensor))
    return without_static(arrays)


def _plain(data: Any) -> np.ndarray:
    """Returns Python numbers as an array."""
    try:
        array = np.asarray(data)
    except ValueError:  # numpy speaks of an inhomogeneous shape
        raise ValueError(
            f"named: the rows of {type(data).__name__} differ in length; an array has rows of one"
        ) from None
    return array.astype(_DEFAULT.get(array.dtype.name, array.dtype))


def _need_numbers(data: Any) -> None:
    """Raises ValueError unless an array's dtype is one of the language's."""
    if isinstance(data, NamedArray):
        raise ValueError(f"named: {data!r} has names; rename its dims, as in x.rename(old='new')")
    dtype = data.dtype
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        raise ValueError(
            "named: a key of jax.random is no array of numbers; make one with md.random.key(seed)"
        )
    kind = getattr(dtype, "kind", None)
    if kind in ("U", "S", "O", "T", "M", "m") or getattr(dtype, "names", None):
        raise ValueError(
            f"named: the data has dtype {dtype}, which is not of numbers; map each value to "
            "one first, as in np.unique(x, return_inverse=True)"
        )
    if kind is None:
        kind = type(data).__module__.partition(".")[0]
        raise ValueError(f"named: give an array of {kind} as one of numpy's: np.asarray(x)")
    try:
        as_dtype(np.dtype(dtype).newbyteorder("="))
    except ValueError as error:
        raise ValueError(f"named: {error}") from None


def _is_constant(data: np.ndarray) -> bool:
    """Whether an array views bytes, or a file that is mapped for reading.

    Any other array may change: the owner of its memory can make it writable again, may have given
    out writable views before, or hides who can write it (a buffer of another library).
    """
    part: Any = data
    while isinstance(part, np.ndarray | memoryview):
        if isinstance(part, np.ndarray) and part.flags.writeable:
            return False
        part = part.base if isinstance(part, np.ndarray) else part.obj
    if isinstance(part, mmap.mmap):
        with memoryview(part) as mapped:
            return mapped.readonly
    return isinstance(part, bytes)


def spec(dims: DimsLike, dtype: Any = "float32") -> Spec:
    """Describes an argument by dims and dtype, for use ahead of time: `md.spec([batch, embed])`.

    Raises:
        ValueError: a dim is given by name only, or the dtype is unknown.

    Examples:
        >>> x = md.spec(md.dims(batch=8, embed=4))
        >>> md.jit(md.tanh).lower(x).peak_bytes  # x and the result, 128 bytes each; nothing runs
        256
    """
    listed = as_list(dims)
    unsized = [dim for dim in listed if not isinstance(dim, Dimension)]
    if unsized:
        raise ValueError(
            f"spec: {', '.join(map(repr, unsized))} has no size; give a md.Dimension(name, size)"
        )
    return Spec(Shape(dim for dim in listed if isinstance(dim, Dimension)), as_dtype(dtype))


@functools.lru_cache(maxsize=1024)
def _unpadding(dims: Shape, cuts: Cuts, where: Sharding | None) -> Callable[[Any], Any]:
    """Returns a function that drops pads from data on its devices, or from traced data."""

    def logical(data: Any) -> Any:
        return unpad(jnp, data, cuts, dims.sizes)

    if not isinstance(where, NamedSharding):
        return jax.jit(logical)
    even = _layout(dims, where).even(dims, Mesh(tuple(where.mesh.shape.items())))
    spec = PartitionSpec(*(even.axes(name) or None for name in dims.names))
    return jax.jit(logical, out_shardings=NamedSharding(where.mesh, spec))


def _layout(dims: Shape, where: NamedSharding) -> TensorLayout:
    from meshdsl.layouts.tensor_layout import TensorLayout

    axes = [(part,) if isinstance(part, str) else tuple(part or ()) for part in where.spec]
    return TensorLayout.of(dict(zip(dims.names, axes, strict=False)))


def _flatten(array: NamedArray) -> tuple[tuple[Any], Any]:
    return (array.data,), ((array.dims, array.cuts) if array.cuts else array.dims)


def _unflatten(static: Any, children: Any) -> NamedArray:
    array = _new(NamedArray)
    (array.data,) = children
    if type(static) is tuple:
        array.dims, array.cuts = static
    else:
        array.dims, array.cuts = static, ()
    return array


_new = object.__new__


jax.tree_util.register_pytree_node(NamedArray, _flatten, _unflatten)
