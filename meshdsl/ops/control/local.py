"""The escape hatch: operations of a user's own, computed by functions of local arrays.

`primitive` defines an operation once, in the user's own file: its shape rule, its gradient, how it
is split, and what computes it on each backend. `local` runs one function in one place. Both are
the primitive `local` with a `Definition`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshdsl.ops.creation import as_tensor, zeros
from meshdsl.ops.operation import operation
from meshdsl.tensors.dims import DimLike, DimsLike, Shape, as_list, did_you_mean, name_of
from meshdsl.tensors.dtypes import as_dtype, is_differentiable
from meshdsl.tensors.named_array import Spec
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Operation, Primitive
from meshdsl.tracing.trace import bind

BACKENDS = ("jax", "tf", "numpy")


@dataclass(frozen=True)
class Partition:
    """How an operation may be split: `md.Partition(whole="embed")`.

    Args:
        split: dims along which positions are independent of each other; every result has them.
            The others are not split. Pads, at the end of shards, hold anything, NaN too.
        whole: dims that are not split; give these or `split`. All others that results have are.
        sums: dims that the operation sums over, so that results are partial sums. Pads along
            them are zeros.

    Examples:
        >>> swap = md.primitive(
        ...     "swap",
        ...     shape=lambda x: x.dims,
        ...     emitters={"jax": lambda x: x[:, ::-1]},
        ...     partition=md.Partition(whole="embed"),
        ... )
        >>> x = md.named([[1.0, 2.0], [3.0, 4.0]], ["batch", "embed"])
        >>> y = md.jit(swap, mesh="data:2,model:2", layout="batch:data; embed:model")(x)
        >>> print(y)
        f32[batch=2, embed=2] [[2. 1.]
         [4. 3.]]
    """

    split: DimsLike | None = None
    whole: DimsLike | None = None
    sums: DimsLike = ()

    def __post_init__(self) -> None:
        if self.split is not None and self.whole is not None:
            raise ValueError("Partition: give `split` or `whole`; the other is the rest")
        for name in ("split", "whole", "sums"):
            dims = getattr(self, name)
            if dims is not None:
                object.__setattr__(self, name, _names(dims))

    def free(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> frozenset[str]:
        """Returns the dims that are split, where the layout says so.

        Raises:
            ValueError: no tensor has a dim named here, or a result lacks a dim that is to be split.
        """
        sums = _names(self.sums)
        split = None if self.split is None else _names(self.split)
        unsplit = None if self.whole is None else _names(self.whole)
        of_operands = dict.fromkeys(name for shape in inputs for name in shape.names)
        known = dict.fromkeys([*of_operands, *(name for shape in outputs for name in shape.names)])
        problems = [
            f"no operand and no result has the dim `{name}`{did_you_mean(name, known)}"
            for name in (*(split or ()), *(unsplit or ()), *sums)
            if name not in known
        ]
        asked = split or ()
        if unsplit is not None:
            shared = (n for n in of_operands if all(n in shape.names for shape in outputs))
            asked = tuple(name for name in shared if name not in unsplit)
        for name in asked:
            if name in known and not all(name in shape.names for shape in outputs):
                problems.append(
                    f"`{name}` is split, but not every result has it; if the results are sums over "
                    f"it, write sums={name!r}"
                )
            elif name in known and name not in of_operands:
                problems.append(f"`{name}` is split, but no operand has it")
        if problems:
            raise ValueError("; ".join(dict.fromkeys(problems)))
        return frozenset([*asked, *sums])


@dataclass(frozen=True)
class _Free:
    """A partition by the dims that may be split; a result that lacks one is a partial sum."""

    dims: frozenset[str]

    def free(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> frozenset[str]:
        return self.dims


@dataclass(frozen=True)
class Definition:
    """What a user declares about an operation; see `primitive`.

    Attributes:
        emitters: pairs of a backend and a function of its arrays.
        pads: per operand, what its pads are along dims that are summed over; 0 for more operands.
    """

    name: str
    shape: Callable[..., Any]
    emitters: tuple[tuple[str, Callable], ...]
    gradient: Callable | _ByJax | None = None
    partition: Any = None
    rule: Callable | None = None
    pads: tuple[float, ...] = ()

    def emitter(self, backend: str) -> Callable:
        """Returns what computes this on a backend.

        Without one for numpy, the function for JAX's arrays is used.

        Raises:
            ValueError: there is none.
        """
        known = dict(self.emitters)
        emitter = known.get(backend) or (known.get("jax") if backend == "numpy" else None)
        if emitter is None:
            raise ValueError(
                f"{self.name} has no emitter for the backend {backend!r}, only for "
                f"{', '.join(map(repr, known))}; give one: emitters={{{backend!r}: function}}"
            )
        return emitter

    def free(self, op: Operation) -> frozenset[str]:
        """Returns the dims of an operation that may be split."""
        partition = self.partition
        if partition is None:
            return frozenset()
        if not hasattr(partition, "free"):
            partition = partition(*op.inputs, **dict(op.params["params"]))
            if not isinstance(partition, Partition):
                raise ValueError(
                    f"{self.name}: partition must return an md.Partition, not a "
                    f"{type(partition).__name__}"
                )
        return partition.free([t.shape for t in op.inputs], [t.shape for t in op.outputs])


def primitive(
    name: str,
    *,
    shape: Callable[..., Any],
    emitters: Mapping[str, Callable],
    gradient: Callable[..., Any] | None = None,
    partition: Partition | Callable[..., Partition] | None = None,
    rule: Callable | None = None,
) -> Callable[..., Any]:
    """Defines an operation of one's own and returns it, a function of tensors.

        scaled = md.primitive(
            "scaled",
            shape=lambda x, *, by: x.shape,
            emitters={"jax": lambda x, *, by: x * by},
            gradient=lambda g, y, x, *, by: scaled(g, by=by),
            partition=md.Partition(whole=()),
        )
        y = scaled(x, by=2.0)

    The operation takes tensors as positional arguments. Its keyword arguments, hashable values,
    are passed to all of these functions. They must be pure: equal operations run once.

    Args:
        name: as errors and reports call it.
        shape: (*tensors) -> the dims of the result, or a `md.spec(dims, dtype)`; a list of specs
            for several results. Without one, the dtype is that of the first operand. A ValueError
            raised here is reported with the operands and the line.
        emitters: for "jax", and if wanted "numpy" and "tf", a function of local arrays with dims
            in the order of the tensors', which returns an array, or a tuple of them. Without one
            for numpy, that for JAX gets numpy's arrays; without one for TensorFlow, JAX compiles
            its own for it.
        gradient: (g, y, *tensors) -> the gradient of every operand, or None for none; written in
            the language. `g` is the gradient of the result `y`; of several results, both are
            tuples. Without it the operation has no gradient.
        partition: which dims may be split; a function of (*tensors) if that depends on them. By
            default every operand is gathered.
        rule: instead, a rule of `meshdsl.lowering.partition`: Case -> Strategy.

    Raises:
        ValueError: a name that is no text, an unknown backend, or `partition` and `rule`
            together; when called: what
            `shape` raises; when compiled: an emitter returns other shapes or dtypes.

    Examples:
        >>> scaled = md.primitive(
        ...     "scaled",
        ...     shape=lambda x, *, by: x.shape,
        ...     emitters={"jax": lambda x, *, by: x * by},
        ...     gradient=lambda g, y, x, *, by: scaled(g, by=by),
        ...     partition=md.Partition(whole=()),
        ... )
        >>> x = md.named([1.0, 2.0], ["embed"])
        >>> print(scaled(x, by=3.0), md.grad(lambda x: md.sum(scaled(x, by=3.0)))(x))
        f32[embed=2] [3. 6.] f32[embed=2] [3. 3.]
    """
    if not isinstance(name, str):
        raise ValueError(f"primitive: the name is a text, not {name!r}")
    for backend in emitters:
        if backend not in BACKENDS:
            raise ValueError(
                f"primitive: no backend {backend!r}; known are {', '.join(BACKENDS)}"
                f"{did_you_mean(backend, BACKENDS)}"
            )
    if not emitters:
        raise ValueError(f"primitive: {name} needs an emitter, as in emitters={{'jax': function}}")
    if partition is not None and rule is not None:
        raise ValueError("primitive: give `partition` or `rule`, not both")
    items = tuple(sorted(emitters.items()))
    definition = Definition(name, shape, items, gradient, partition, rule)

    def call(*tensors: Any, **params: Any) -> Any:
        return _apply(definition, tensors, params)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = shape.__doc__
    return operation(call, of_user=True)


@operation
def local(
    function: Callable[..., Any],
    *inputs: Any,
    out: Any,
    dtype: Any = None,
    split: DimsLike = (),
    sums: DimsLike = (),
    gradient: Callable[..., Any] | str | None = "jax",
    name: str | None = None,
) -> Any:
    """Runs a function of local arrays: of the shards that one device has.

        y = md.local(lambda x: jnp.fft.fftshift(x, 1), x, out=x.dims, split="batch")

    The function takes arrays with dims in the order of the tensors', and returns an array, or a
    tuple of them; it must be pure. On the backend "numpy" it gets numpy's arrays. Dims named in
    `split` and `sums` may be split, all others are gathered. Results are then moved as the layout
    says.

    Args:
        out: the dims of the result (names will do for those of the tensors); a tuple of lists for
            several results.
        dtype: of the result, or a tuple; by default that of the first tensor.
        split: dims along which positions are independent; every result has them. Pads, at the end
            of shards, hold anything.
        sums: dims that the function sums over; pads along them are zeros.
        gradient: "jax": by `jax.vjp`, any number of times; a function as in `md.primitive`; None
            for none.
        name: as errors and reports call it; by default the function's.

    Raises:
        ValueError: a dim is unknown, or `split` names one that a result lacks; when compiled: the
            function returns other shapes or dtypes.

    Examples:
        >>> import jax.numpy as jnp
        >>> x = md.named([[1.0, 2.0], [3.0, 4.0]], ["batch", "embed"])
        >>> print(md.local(lambda x: jnp.cumsum(x, 1), x, out=x.dims, split="batch"))
        f32[batch=2, embed=2] [[1. 3.]
         [3. 7.]]
        >>> print(md.local(lambda x: jnp.sum(x, 0), x, out=["embed"], sums="batch"))
        f32[embed=2] [4. 6.]
    """
    tensors = [as_tensor(x) for x in inputs]
    if not tensors:
        raise ValueError("give at least one tensor")
    several = isinstance(out, tuple) and any(isinstance(o, list | tuple) for o in out)
    shapes = [_sized(dims, tensors) for dims in (out if several else [out])]
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,) * len(shapes)
    if len(dtypes) != len(shapes):
        raise ValueError(f"{len(dtypes)} dtypes for {len(shapes)} results")
    avals = tuple(
        (shape, tensors[0].dtype if kind is None else as_dtype(kind))
        for shape, kind in zip(shapes, dtypes, strict=True)
    )
    called = name or getattr(function, "__name__", "local").replace("<lambda>", "local")
    definition = Definition(
        called,
        _Given(avals, several),
        (("jax", function),),
        _ByJax(function) if gradient == "jax" else gradient,  # type: ignore[arg-type]
        Partition(split=split, sums=sums),
    )
    return _apply(definition, tensors, {})


def _names(dims: DimsLike) -> tuple[str, ...]:
    return tuple(name_of(dim) for dim in as_list(dims))


def _sized(dims: Any, tensors: Sequence[Tensor]) -> Shape:
    """Returns dims as a shape; names take the size that they have in the tensors."""
    known = {dim.name: dim for tensor in tensors for dim in tensor.shape}

    def sized(dim: DimLike) -> Any:
        if not isinstance(dim, str):
            return dim
        if dim not in known:
            raise ValueError(
                f"no operand has the dim `{dim}`{did_you_mean(dim, known)}; give one that is new "
                "with its size, as a md.Dimension"
            )
        return known[dim]

    return Shape(sized(dim) for dim in as_list(dims))


def _apply(definition: Definition, inputs: Sequence[Any], params: Mapping[str, Any]) -> Any:
    tensors = [as_tensor(x) for x in inputs]
    static = tuple((name, _hashable(name, params[name])) for name in sorted(params))
    op = bind(LOCAL, tensors, {"definition": definition, "params": static})
    if definition.rule is None:
        definition.free(op)  # raises here, with the operands and the line
    several = isinstance(_results(definition, tensors, dict(static)), list)
    return op.outputs if several else op.outputs[0]


def _hashable(name: str, value: Any) -> Hashable:
    value = tuple(value) if isinstance(value, list) else value
    try:
        hash(value)
    except TypeError:
        raise ValueError(
            f"the parameter `{name}` is a {type(value).__name__}; parameters are hashable, and "
            "tensors are positional arguments"
        ) from None
    return value


def _results(
    definition: Definition, inputs: Sequence[Tensor], params: Mapping[str, Any]
) -> Aval | list[Aval]:
    """Returns dims and dtype of the result by the shape rule, or a list of them for several."""
    result = definition.shape(*inputs, **params)
    if isinstance(result, list | tuple) and any(isinstance(one, Spec) for one in result):
        return [(one.dims, one.dtype) for one in result]
    if isinstance(result, Spec):
        return result.dims, result.dtype
    if not inputs:
        raise ValueError("without operands, the shape rule must return a md.spec(dims, dtype)")
    return _sized(result, inputs), inputs[0].dtype


def _rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    results = _results(params["definition"], inputs, dict(params["params"]))
    return results if isinstance(results, list) else [results]


def _gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> Sequence:
    definition: Definition = op.params["definition"]
    if definition.gradient is None:
        raise ValueError(
            f"{definition.name} has no gradient, but one is needed{op.source.at}; give it one "
            "(gradient=...), or wrap its input in md.stop_gradient(...) if it is a constant there"
        )
    seeds = tuple(
        zeros(t.shape, t.dtype) if c is None else c.transpose(t.shape.names)
        for c, t in zip(cotangents, op.outputs, strict=True)
    )
    if isinstance(definition.gradient, _ByJax):
        return definition.gradient.of(op, seeds)
    params = dict(op.params["params"])
    several = isinstance(_results(definition, op.inputs, params), list)
    g, y = (seeds, op.outputs) if several else (seeds[0], op.outputs[0])
    gradients = definition.gradient(g, y, *op.inputs, **params)
    gradients = list(gradients) if isinstance(gradients, list | tuple) else [gradients]
    if len(gradients) != len(op.inputs):
        raise ValueError(
            f"the gradient of {definition.name} returns {len(gradients)} values for "
            f"{len(op.inputs)} operands; give None for those that have none"
        )
    for number, (gradient, tensor) in enumerate(zip(gradients, op.inputs, strict=True), 1):
        if gradient is not None and (
            set(gradient.shape) != set(tensor.shape) or gradient.dtype != tensor.dtype
        ):
            raise ValueError(
                f"the gradient of {definition.name} by operand {number} is {gradient}, not {tensor}"
            )
    return gradients


LOCAL = Primitive("local", _rule, _gradient)


# Gradients by JAX.


@dataclass(frozen=True)
class _Given:
    """A shape rule that is known beforehand."""

    avals: tuple[Aval, ...]
    several: bool

    def __call__(self, *inputs: Tensor) -> Any:
        specs = [Spec(shape, dtype) for shape, dtype in self.avals]
        return specs if self.several else specs[0]


@dataclass(frozen=True)
class _ByJax:
    """The gradient of a function of local arrays: another one, by `jax.vjp`."""

    function: Callable

    def of(self, op: Operation, seeds: Sequence[Tensor]) -> list[Tensor | None]:
        definition: Definition = op.params["definition"]
        floats = tuple(i for i, t in enumerate(op.inputs) if is_differentiable(t.dtype))
        seeded = tuple(i for i, t in enumerate(op.outputs) if is_differentiable(t.dtype))
        pullback = _Pullback(self.function, len(op.inputs), floats, seeded)
        avals = tuple((op.inputs[i].shape, op.inputs[i].dtype) for i in floats)
        # Where pads are summed over, they are ones: safe to divide by and to take logarithms of.
        # Their results are multiplied by a cotangent of zero.
        pads = tuple(float(is_differentiable(t.dtype)) for t in op.inputs)
        backward = Definition(
            f"{definition.name}_grad",
            _Given(avals, True),
            (("jax", pullback),),
            _ByJax(pullback),
            _Free(definition.free(op)),
            pads=pads,
        )
        operands = [*op.inputs, *(seeds[i] for i in seeded)]
        results = bind(LOCAL, operands, {"definition": backward, "params": ()}).outputs
        gradients: list[Tensor | None] = [None] * len(op.inputs)
        for i, gradient in zip(floats, results, strict=True):
            gradients[i] = gradient
        return gradients


@dataclass(frozen=True)
class _Pullback:
    """(*inputs, *cotangents of results) -> the cotangents of the floating-point inputs."""

    function: Callable
    count: int
    floats: tuple[int, ...]
    seeded: tuple[int, ...]

    def __call__(self, *arrays: Any) -> Any:
        import jax

        inputs, seeds = list(arrays[: self.count]), arrays[self.count :]

        def of_floats(*values: Any) -> Any:
            full = list(inputs)
            for i, value in zip(self.floats, values, strict=True):
                full[i] = value
            results = self.function(*full)
            results = results if isinstance(results, list | tuple) else (results,)
            return tuple(results[i] for i in self.seeded)

        _, pull = jax.vjp(of_floats, *(inputs[i] for i in self.floats))
        return pull(tuple(seeds))
