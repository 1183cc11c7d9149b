"""`md.from_jax`: a function of JAX as a function of named tensors.

It is traced by JAX once per signature. Its dims are named by what the user says and by the dims of
the tensors that it is called with; `inference` names the rest. Then it is an ordinary function of
the language: `md.jit`, `md.grad`, `md.scan` and all reports take it.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from meshdsl.imports.jax.annotations import (
    Names,
    Word,
    Words,
    annotate,
    annotate_results,
    without_box,
)
from meshdsl.imports.jax.arrays import Array, settled
from meshdsl.imports.jax.changes import lost, replaced
from meshdsl.imports.jax.classes import Classes
from meshdsl.imports.jax.conversion import Conversion
from meshdsl.imports.jax.differences import difference
from meshdsl.imports.jax.inference import Dims, Frame, Walk, check_known, labels
from meshdsl.imports.jax.keys import is_typed, key_dtype, named_keys
from meshdsl.imports.jax.listing import listing
from meshdsl.imports.jax.naming import Naming
from meshdsl.imports.jax.rolling import rolled
from meshdsl.imports.jax.rules import CONVERT, INFER
from meshdsl.imports.jax.stacking import (
    Leaf,
    Part,
    Stacking,
    are_alike,
    known_of,
    layer_of,
    stacking_of,
    without_stack,
)
from meshdsl.ops.literal import as_traced
from meshdsl.ops.random_keys import KEY
from meshdsl.running.jit import jit
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.module import path_of
from meshdsl.tensors.named_array import NamedArray, Spec, is_key, is_named, named, number
from meshdsl.tensors.paths import path_names
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import TracedTensor
from meshdsl.tracing.source import user_definition
from meshdsl.tracing.trace import is_tracing, located


def from_jax(function: Callable[..., Any], names: Names = None, roll: str | None = None) -> FromJax:
    """Makes a program over named dims of a function of JAX, to which any layout applies.

        program = md.from_jax(loss, names={"x": "batch length embed", "params/**/w_in": "_ d_ff"})
        step = md.jit(md.value_and_grad(program), mesh="data:2,model:4", layout="d_ff:model")
        value, gradients = step(*program.named(params, x))

    Dims are one where the function pairs them up: in products, elementwise operations, reshapes,
    look-ups, loops. A name that is given once holds for all of them. What stays unnamed gets a
    telling name; `print(program.listing(params, x))` shows all.

    Args:
        function: takes and returns trees of arrays; jittable by JAX. The rules of `jax.custom_jvp`
            and `jax.custom_vjp` are not used: the function itself is differentiated.
        names: the names of dims, by parameter and path: `{"x": "batch length embed"}`, with
            patterns (`"params/**/query"`), trees, or a function of (path, sizes). `_` leaves a dim
            to inference. `(heads kv)` is one dim, `heads_kv`, which the function splits. Results
            are `return/...`. A `PartitionSpec` of names will do, so a model of Flax with names of
            its own takes `{"params": flax.linen.get_partition_spec(params)}`.
        roll: makes equal layers that follow each other one loop over a dim of this name, such as
            "layers". `named` then stacks their parameters; `unrolled` is the way back. Several
            loops are over `layers`, `layers_2`, .... None: the layers stay apart.

    Returns:
        A function of trees of tensors. Its method `named` names plain arrays, as `md.jit` does of
        it and of its gradient; `md.unnamed` makes plain arrays of results.

    Warns:
        UserWarning: when called: the function changes its arguments in place, as methods of
            `flax.nnx` do, and does not return what it changed; or it has no layers to `roll`.

    Raises:
        ValueError: `function` is no function; when called: names that fit no argument or no rank,
            two names of one dim (both uses are shown), or a primitive that has no translation.

    Examples:
        >>> def layer(x, w):
        ...     return x @ w
        >>> program = md.from_jax(layer, names={"x": "batch embed", "w": "_ d_ff"})
        >>> x, w = program.named(np.ones((8, 4), "float32"), np.ones((4, 6), "float32"))
        >>> print(w.dims, md.jit(program, "data:2,model:2", "batch:data; d_ff:model")(x, w).layout)
        [embed=4, d_ff=6] batch:data; d_ff:model
    """
    return FromJax(function, names, roll)


@dataclass(frozen=True)
class Inferred:
    """A function's jaxpr for one signature, with the names of all dims.

    Attributes:
        paths: of the arguments' leaves.
        inputs, outputs: the names of the dims of leaves.
        tree: of the results.
        stacking: which arguments are stacks of equal layers; None: there are none.
    """

    frame: Frame
    naming: Naming
    paths: tuple[str, ...]
    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]
    tree: Any
    stacking: Stacking | None = None


@dataclass
class _Argument:
    """An argument of a call.

    Attributes:
        leaves, paths: as they are given, and whether a path is that of a box.
        tree: of these.
        part: its stacks, if it has them already.
    """

    name: str
    leaves: list[Any]
    paths: list[tuple[str, bool]]
    tree: Any
    part: Part | None

    @property
    def apart(self) -> Any:
        """The tree with each layer apart."""
        return self.tree if self.part is None else self.part.tree

    def known(self) -> list[Any]:
        """Returns what is known of the leaves with each layer apart."""
        own = [
            Leaf(path, boxed, *_aval(leaf)) if _is_array(leaf) else leaf
            for leaf, (path, boxed) in zip(self.leaves, self.paths, strict=True)
        ]
        if self.part is None:
            return own
        pairs = zip(
            self.part.stacking.spread(own, without_stack), self.part.stacking.paths, strict=True
        )
        return [
            replace(leaf, path=path, boxed=boxed) if isinstance(leaf, Leaf) else leaf
            for leaf, (path, boxed) in pairs
        ]


class FromJax:
    """A function of JAX over named dims; see `from_jax`.

    Where the function takes and returns arrays of JAX, it takes and returns tensors.

    Attributes:
        word: of the language, which makes such functions.
        names_static: whether `name_arguments` is for values that are no arrays too.
    """

    __name__: str
    word = "from_jax"
    names_static = False

    def __init__(
        self, function: Callable[..., Any], names: Names = None, roll: str | None = None
    ) -> None:
        if not callable(function):
            raise ValueError(f"{self.word} converts a function, not {function!r}")
        if roll is not None and not roll.isidentifier():
            raise ValueError(
                f"{self.word}: roll is the name of a dim, such as 'layers', got {roll!r}"
            )
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self.names = names
        self.roll = roll
        self._parts: dict[tuple[str, Any], Part] = {}  # by an argument's name, and tree with stacks
        self._signature = inspect.signature(function)
        self._known: dict[Any, Inferred] = {}
        self._jitted: Any = None
        if not hasattr(self, "__name__"):
            self.__name__ = type(function).__name__

    def __repr__(self) -> str:
        return f"<md.{self.word} of {self.__name__}{self._signature}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_tracing():
            self._jitted = self._jitted or jit(self)
            return self._jitted(*args, **kwargs)
        arguments = self._arguments(args, kwargs)
        for each in arguments:
            each.leaves = [as_traced(leaf) for leaf in each.leaves]
        inferred = self._inferred(arguments)
        leaves = [leaf for own in _stacked(arguments, _parts(inferred, arguments)) for leaf in own]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        conversion = Conversion(inferred.naming, CONVERT)
        with located(user_definition(self.function)):
            arrays = conversion.run(inferred.frame, [_array(t) for t in tensors])
            pairs = zip(arrays, inferred.outputs, strict=True)
            results = [settled(array, names) for array, names in pairs]
        return jax.tree.unflatten(inferred.tree, results)

    def named(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Returns the arguments with names: arrays become NamedArrays, shapes `md.spec`s.

        `program.named(params, x)`. What has names keeps them. Arguments by keyword come last.
        """
        args, kwargs = self.name_arguments(*args, **kwargs)
        return (*args, *kwargs.values())

    def name_arguments(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns as `named`, by position and by keyword; `md.jit` calls it for plain arrays."""
        arguments = self._arguments(args, kwargs)
        for each in arguments:
            each.leaves = [_bare(leaf) for leaf in each.leaves]
        inferred = self._inferred(arguments)
        names = iter(inferred.inputs)
        bound = self._bound(args, kwargs)
        parts = _parts(inferred, arguments)
        for each, leaves, part in zip(arguments, _stacked(arguments, parts), parts, strict=True):
            result = [_name(leaf, next(names)) if _is_array(leaf) else leaf for leaf in leaves]
            argument = jax.tree.unflatten(each.tree, result)
            bound.arguments[each.name] = argument
            if part is not None:
                self._parts[each.name, jax.tree.structure(argument, is_leaf=is_named)] = part
        return bound.args, bound.kwargs

    def unrolled(self, tree: Any, name: str | None = None) -> Any:
        """Returns an argument with each layer apart, as the function takes it; also its gradient.

            params = program.unrolled(gradients)

        Args:
            tree: an argument as of `named`, with stacks, or a tree of such, as the state of an
                optimizer is. All else in it stays.
            name: of the argument, where those of several have this tree.

        Raises:
            ValueError: the program was not called with the function's own arguments yet, so it
                knows no stacks; or several arguments have this tree.
        """
        if self.roll is not None and not self._known:
            raise ValueError(
                f"{self.word}: {self.__name__} knows no stacks yet: call named(...) with "
                "arguments as the function takes them, such as jax.ShapeDtypeStructs, first"
            )
        known: dict[Any, Part] = {}
        for (owner, shape), part in self._parts.items():
            if name in (None, owner) and known.setdefault(shape, part) != part:
                raise ValueError(
                    f"{self.word}: several arguments have trees like this: give `name`"
                )

        def has_stacks(value: Any) -> bool:
            return jax.tree.structure(value, is_leaf=is_named) in known

        def apart(value: Any) -> Any:
            leaves, shape = jax.tree.flatten(value, is_leaf=is_named)
            if shape not in known:
                return value
            part = known[shape]
            return jax.tree.unflatten(part.tree, part.stacking.spread(leaves, layer_of))

        return jax.tree.map(apart, tree, is_leaf=lambda x: is_named(x) or has_stacks(x))

    def listing(self, *args: Any, **kwargs: Any) -> str:
        """Returns the names of all dims as text, line by line, for arguments like these."""
        inferred = self.inferred(*args, **kwargs)
        return listing(self.__name__, inferred.naming, inferred.frame, inferred.paths)

    def inferred(self, *args: Any, **kwargs: Any) -> Inferred:
        """Returns the names of all dims, for arguments like these."""
        arguments = self._arguments(args, kwargs)
        for each in arguments:
            each.leaves = [_bare(leaf) for leaf in each.leaves]
        return self._inferred(arguments)

    def _bound(self, args: Sequence[Any], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        return self._signature.bind(*args, **kwargs)

    def _opened(self, arguments: OrderedDict[str, Any]) -> OrderedDict[str, Any]:
        """Returns arguments as the function takes them."""
        return arguments

    def _closed(self, result: Any) -> Any:
        """Returns a result as JAX can return it."""
        return result

    def _arguments(self, args: Sequence[Any], kwargs: Any) -> list[_Argument]:
        bound = self._bound(args, kwargs)
        arguments = []
        for name, value in bound.arguments.items():
            keyed, tree = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_named)
            full = [(jax.tree_util.DictKey(name), *keys) for keys, _ in keyed]
            places = [without_box(keys) for keys in full]
            pairs = zip(places, full, strict=True)
            paths = [(path_of(place), len(place) < len(keys)) for place, keys in pairs]
            leaves = [leaf for _, leaf in keyed]
            arguments.append(_Argument(name, leaves, paths, tree, self._parts.get((name, tree))))
        return arguments

    def _inferred(self, arguments: Sequence[_Argument]) -> Inferred:
        """Traces and infers, once per signature."""
        foreign = [each.name for each in arguments if each.part is None and self._stacks_in(each)]
        if foreign:
            raise ValueError(
                f"{self.word}: {self.__name__} has not made the stacks over `{self.roll}` that "
                f"are in {', '.join(foreign)}: call named(...) with arguments as the function "
                "takes them, such as jax.ShapeDtypeStructs, first"
            )
        known = [leaf for each in arguments for leaf in each.known()]
        trees = OrderedDict((each.name, each.apart) for each in arguments)
        tree = jax.tree.structure(
            OrderedDict((n, jax.tree.unflatten(t, [0] * t.num_leaves)) for n, t in trees.items())
        )
        # Numbers that are equal may be of other types: 2 is 2.0, and 1 is True.
        key = (tree, tuple((type(leaf), leaf) for leaf in known))
        try:
            inferred = self._known.get(key)
        except TypeError:  # a leaf that is neither an array nor hashable
            return self._infer(known, tree)
        if inferred is None:
            inferred = self._known[key] = self._infer(known, tree)
        return inferred

    def _stacks_in(self, argument: _Argument) -> bool:
        """Whether an argument looks like one with stacks: None stands for layers in it."""
        arrays = filter(_is_array, argument.leaves)
        stacks = any((_aval(leaf)[2] or ("",))[0] == self.roll for leaf in arrays)
        return stacks and argument.tree != jax.tree.structure(
            jax.tree.unflatten(argument.tree, [0] * argument.tree.num_leaves),
            is_leaf=lambda x: x is None,
        )

    def _check_roll(self, words: Sequence[Words]) -> None:
        """Checks that no other dim has the name of the layers.

        Raises:
            ValueError: one has.
        """
        if any(word is not None and word.name == self.roll for said in words for word in said):
            raise ValueError(
                f"{self.word}: roll={self.roll!r}: a dim of the arguments has this name already; "
                "take another one for the layers"
            )

    def _infer(self, leaves: Sequence[Any], tree: Any) -> Inferred:
        arrays = [leaf for leaf in leaves if isinstance(leaf, Leaf)]
        boxed = {leaf.path for leaf in arrays if leaf.boxed}
        words = annotate(self.names, [(leaf.path, leaf.sizes) for leaf in arrays], boxed)
        if self.roll is not None:
            self._check_roll([*words, *(_words(leaf.dims) for leaf in arrays)])
        closed, shapes = self._traced(leaves, tree)
        stacking, shown = None, [leaf.path for leaf in arrays]
        rolling = self._rolled(closed, arrays, words) if self.roll is not None else None
        if self.roll is not None and rolling is not None:
            closed = rolling.jaxpr
            stacking = stacking_of(rolling.groups, leaves, self.roll)
            if not stacking.groups:
                self._warn_of_roll(
                    "reads the parameters of its equal layers elsewhere too, as a step with its "
                    "gradient inside does: they stay apart, and are stacked in each call. Roll the "
                    "loss, and take md.value_and_grad of the program"
                )
            arrays, words, shown = stacking.arguments(leaves, words)
        classes = Classes()
        short = _hints([leaf.path for leaf in arrays])
        operands = [
            _argument(classes, leaf, name, each)
            for leaf, name, each in zip(arrays, short, words, strict=True)
        ]
        frame = Walk(classes, INFER).frame(closed, operands, user_definition(self.function))
        results = [frame.of(atom) for atom in frame.jaxpr.outvars]
        keyed, out_tree = jax.tree_util.tree_flatten_with_path(shapes)
        out_paths = [path_of(keys, "return") for keys, _ in keyed]
        out_words = annotate_results(
            self.names,
            [(p, tuple(leaf.shape)) for p, (_, leaf) in zip(out_paths, keyed, strict=True)],
        )
        for path, dims, each in zip(out_paths, results, out_words, strict=True):
            _say(classes, dims.nodes, each, path)
        if classes.conflicts:
            raise ValueError(
                f"{self.word}: names of {self.__name__} contradict each other: "
                + "; ".join(classes.conflicts)
                + ". Give them one name, or change the function so that they do not meet"
            )
        classes.settle()
        naming = Naming(classes)
        inputs = tuple(labels(naming, frame, v) for v in frame.jaxpr.invars)
        outputs = tuple(() if len(d.nodes) == 0 else naming.of(d.nodes) for d in results)
        return Inferred(frame, naming, tuple(shown), inputs, outputs, out_tree, stacking)

    def _traced(self, leaves: Sequence[Any], tree: Any) -> tuple[Any, Any]:
        """Returns the function's jaxpr, and the shapes of its results.

        Raises:
            ValueError: there are keys of another kind, or primitives without a translation.
        """
        arrays = [leaf for leaf in leaves if isinstance(leaf, Leaf)]
        typed = [leaf for leaf in arrays if is_typed(leaf)]
        if other := [f"{leaf.path} is {leaf.dtype}" for leaf in typed if leaf.dtype != key_dtype()]:
            raise ValueError(
                f"{self.word}: {self.__name__} takes keys of Threefry-2x32, and "
                f"{', '.join(other)}: make them with jax.random.key(seed, impl='threefry2x32')"
            )
        changed: dict[str, Any] = {}

        def flat(*values: Any) -> Any:
            given = iter(values)
            full = [next(given) if isinstance(leaf, Leaf) else leaf for leaf in leaves]
            bound = self._signature.bind_partial()
            bound.arguments = self._opened(jax.tree.unflatten(tree, full))
            before = jax.tree_util.tree_flatten_with_path(bound.arguments)[0]
            result = self.function(*bound.args, **bound.kwargs)
            after = jax.tree_util.tree_flatten_with_path(bound.arguments)[0]
            changed.clear()
            changed.update(replaced(before, after, result))
            return self._closed(result)

        specs = [jax.ShapeDtypeStruct(leaf.sizes, leaf.dtype) for leaf in arrays]
        source = user_definition(self.function)
        try:
            closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*specs)
        except jax.errors.ConcretizationTypeError as error:
            numbers = [leaf.path for leaf in arrays if not leaf.sizes]
            if numbers and self.word == "from_jax":
                error.add_note(
                    f"meshdsl: md.from_jax computes with numbers, as jax.jit does; here with "
                    f"{', '.join(numbers[:8])}. md.from_equinox keeps numbers of Python as they are"
                )
            raise
        if changed and (gone := lost(flat, specs, lambda: changed)):
            listed = ", ".join(gone[:4]) + f" and {len(gone) - 4} more" * (len(gone) > 4)
            warnings.warn(
                f"{self.word}: {self.__name__}{source.at} changes parts of its arguments in place "
                f"({listed}) and does not return them, so the changes are lost: "
                "return what is changed, such as the model or nnx.state(model)",
                stacklevel=3,
            )
        if unknown := check_known(closed, INFER, source):
            prints = any(each.startswith("`debug_print") for each in unknown)
            instead = "; return what is printed, and give it to md.print" if prints else ""
            raise ValueError(
                f"{self.word}: {self.__name__} uses primitives of JAX that have no translation: "
                f"{'; '.join(unknown)}. Compute that part in the language, or with md.local, which "
                f"runs a function of JAX on each device's arrays{instead}"
            )
        return closed, shapes

    def _rolled(self, closed: Any, arrays: Sequence[Leaf], words: Sequence[Words]) -> Any:
        """Returns the jaxpr with its equal layers as loops; None, with a warning: it has none."""

        def alike(numbers: Sequence[int]) -> bool:
            return are_alike([arrays[n] for n in numbers], [words[n] for n in numbers])

        rolling = rolled(closed, alike)
        if rolling is None:
            unlike = difference(closed, alike, [leaf.path for leaf in arrays])
            self._warn_of_roll(
                "has no equal layers, with parameters of their own, one after the other: they stay "
                "apart" + (f"; the first that differs: {unlike}" if unlike else "")
            )
        return rolling

    def _warn_of_roll(self, what: str) -> None:
        at = user_definition(self.function).at
        warnings.warn(f"{self.word}: roll={self.roll!r}: {self.__name__}{at} {what}", stacklevel=4)


def _parts(inferred: Inferred, arguments: Sequence[_Argument]) -> list[Part | None]:
    """Returns the stacks of each argument; None: it has them already, or has none.

    Raises:
        ValueError: an argument has other stacks.
    """
    parts: list[Part | None] = []
    first = 0
    for each in arguments:
        end = first + each.apart.num_leaves
        own = None
        if inferred.stacking is not None:
            own = inferred.stacking.within(first, end)
        if each.part is not None and (own is None or own.groups != each.part.stacking.groups):
            raise ValueError(
                f"from_jax: `{each.name}` has stacks of layers that are no stacks with arguments "
                "of these sizes: call named(...) anew"
            )
        stacks = own is not None and own.groups and each.part is None
        parts.append(Part(each.tree, own) if stacks and own is not None else None)
        first = end
    return parts


def _stacked(arguments: Sequence[_Argument], parts: Sequence[Part | None]) -> list[list[Any]]:
    """Returns the leaves of each argument with stacks, as of `_parts`."""
    pairs = zip(arguments, parts, strict=True)
    return [a.leaves if part is None else part.stacking.stacked(a.leaves) for a, part in pairs]


def _words(dims: Sequence[str] | None) -> Words:
    return tuple(map(Word, dims or ()))


def _argument(classes: Classes, leaf: Leaf, name: str, words: Words) -> Dims:
    """Returns the dims of an argument, with the names that are known."""
    nodes = tuple(classes.new(size, f"{name}_{p}") for p, size in enumerate(leaf.sizes))
    classes.array(nodes)
    _say(classes, nodes, known_of(leaf, words), leaf.path)
    return Dims(nodes, tuple(size == 1 for size in leaf.sizes))


def _hints(paths: Sequence[str]) -> list[str]:
    """Returns short, unique names of leaves, none of which begins with a number."""
    hints = []
    for path, name in zip(paths, path_names(paths), strict=True):
        before = path.split("/")[: -1 - name.count(".")]
        while name[0].isdigit() and before:
            name = f"{before.pop()}.{name}"
        hints.append(name.replace(".", "_"))
    return hints


def _say(classes: Classes, nodes: Sequence[int], words: Words, path: str) -> None:
    for place, (node, word) in enumerate(zip(nodes, words, strict=True)):
        if word is not None:
            classes.say(node, word.name, f"dim {place} of {path}", word.parts)


def _array(tensor: Tensor) -> Array:
    return Array.of(tensor, [KEY.name] if is_key(tensor) else [])


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, Tensor | Spec) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def _aval(leaf: Any) -> tuple[tuple[int, ...], Any, tuple[str, ...] | None]:
    if isinstance(leaf, Tensor | Spec):
        if is_key(leaf):
            return leaf.dims.sizes[:-1], key_dtype(), leaf.dims.names[:-1]
        return leaf.dims.sizes, np.dtype(leaf.dtype), leaf.dims.names
    if is_typed(leaf):
        return tuple(leaf.shape), leaf.dtype, None
    return tuple(leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype), None


def _bare(leaf: Any) -> Any:
    """Returns an argument as an array, if it is a number."""
    return number(leaf) if isinstance(leaf, bool | int | float) else leaf


def _name(leaf: Any, names: Sequence[str]) -> Any:
    if isinstance(leaf, TracedTensor | NamedArray | Spec):
        return leaf
    if is_typed(leaf):
        return named_keys(leaf, names)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        dims = [Dimension(n, s) for n, s in zip(names, leaf.shape, strict=True)]
        return Spec(Shape(dims), np.dtype(leaf.dtype))
    return named(leaf, list(names))
