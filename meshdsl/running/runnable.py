"""Runnable: a graph, lowered and compiled, which runs on arrays without the structure of trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from meshdsl.layouts.hardware import Hardware, hardware_of
from meshdsl.layouts.mesh import Mesh, MeshLike
from meshdsl.running.finite import watched
from meshdsl.tensors import mirrors
from meshdsl.tensors.cuts import Cuts
from meshdsl.tensors.module import path_of
from meshdsl.tensors.named_array import NamedArray, Spec, number
from meshdsl.tensors.signature import Signature, paths_of
from meshdsl.tensors.static import Static
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Graph

if TYPE_CHECKING:
    from meshdsl.layouts.layout import Layout
    from meshdsl.layouts.placement import Placement
    from meshdsl.lowering.options import Options
    from meshdsl.lowering.program import SpmdProgram


@dataclass(frozen=True)
class Runnable:
    """A compiled program of arrays without structure."""

    program: SpmdProgram
    executable: Any

    @staticmethod
    def of(
        graph: Graph,
        mesh: Mesh,
        layout: Layout,
        backend: str = "jax",
        devices: jax.sharding.Mesh | None = None,
    ) -> Runnable:
        """Lowers and compiles a graph for `devices`; by default for the first ones."""
        from meshdsl.lowering import backends

        program = lowered(graph, mesh, layout, backend, devices)
        run = backends.load(backend)
        return Runnable(program, backends.executable(run, program, (), devices))

    @staticmethod
    def inline(graph: Graph) -> Runnable:
        """Lowers a graph for one device, to run inside a trace of JAX."""
        from meshdsl.layouts.layout import Layout
        from meshdsl.lowering import backends
        from meshdsl.lowering.lower import lower

        program = lower(graph, Mesh(), Layout())
        function = backends.load_on_jax().function(program)
        return Runnable(program, _Inline(function, [()] * len(program.block.outputs)))

    @property
    def direct(self) -> Callable | None:
        """The executable as a function of data; None if it has none or its results are checked."""
        checked = self.program.origin.blame is not None
        return None if checked else getattr(self.executable, "direct", None)

    def put(self, data: Any, number: int) -> Any:
        """Returns data with the sharding of the program's input of that number."""
        if isinstance(self.executable, _Inline):
            return data
        return jax.device_put(data, self.executable.shardings[number])

    def __call__(self, leaves: Sequence[Any]) -> list[NamedArray]:
        results, blame = self.executable.call_flat(leaves), self.program.origin.blame
        if blame is not None:
            *results, counts = results
            if np.asarray(counts).any():
                raise FloatingPointError(blame(leaves))
        rows = zip(results, self.program.block.outputs, self.executable.cuts, strict=False)
        return [NamedArray(data, value.shape, cuts) for data, value, cuts in rows]


def lowered(
    graph: Graph,
    mesh: Mesh,
    layout: Layout,
    backend: str,
    devices: jax.sharding.Mesh | None = None,
    check_finite: bool = False,
    options: Options | None = None,
    donated: Sequence[bool] = (),
    placement: Placement | None = None,
) -> SpmdProgram:
    """Returns a graph's program with its checks; `origin.blame` explains one that fails."""
    from meshdsl.lowering import backends
    from meshdsl.lowering.options import Options

    lower = lowering_of(backend, devices, placement)
    watching = watched(graph, outputs=check_finite)
    if watching is None:
        return lower(graph, mesh, layout, options, donated)

    def blame(leaves: Sequence[Any]) -> str:
        values = [leaf.data if isinstance(leaf, NamedArray) else leaf for leaf in leaves]
        if any(getattr(data, "is_deleted", bool)() for data in values):
            return (
                "check_finite: a value is not finite; its inputs were donated, so what made it "
                "cannot be found: leave out `donate` to learn it"
            )
        everything = watched(graph, outputs=False, everything=True)
        assert everything is not None
        # A pipeline computes on anything where a stage waits, and adds up no marks.
        plain = Options(pipeline="none")
        program = lowering_of(backend, devices)(everything.graph, mesh, layout, plain)
        executable = backends.load(backend).Executable(program, (), devices)
        return everything.search(np.asarray(executable.call_flat(leaves)[-1]))

    program = lower(watching.graph, mesh, layout, options, donated)
    return replace(program, origin=replace(program.origin, blame=blame))


def lowering_of(
    backend: str,
    devices: jax.sharding.Mesh | None = None,
    placement: Placement | None = None,
) -> Callable[..., SpmdProgram]:
    """Returns the function that lowers graphs for a backend: `lower`, or `lower_global`.

    Args:
        devices: the program's devices, if they are known.
        placement: layouts of some of a graph's tensors; not for `jax_auto`.
    """
    from meshdsl.lowering.global_program import lower_global
    from meshdsl.lowering.lower import lower

    if backend == "jax_auto":
        return lower_global
    return partial(lower, hardware=hardware_on(devices), placement=placement)


def hardware_on(devices: jax.sharding.Mesh | None) -> Hardware | None:
    """Returns the hardware of a mesh's devices; None if there are none or it is unknown."""
    return None if devices is None else hardware_of(devices.devices.flat[0].device_kind)


def with_hardware_at_hand(options: Options | None, backend: str) -> Options | None:
    """Returns options with the hardware of the TPUs at hand.

    They are the given ones if these name hardware, if no TPU is at hand, or if XLA decides.
    """
    from meshdsl.lowering import backends
    from meshdsl.lowering.options import Options

    given = Options.of(options)
    if backend == "jax_auto" or given.hardware is not None:
        return options
    known = hardware_of(backends.load(backend).runtime.device_kind())
    return options if known is None or not known.torus else replace(given, hardware=known.name)


@dataclass(frozen=True)
class _Inline:
    """A program as a JAX function, in an executable's place."""

    function: Callable
    cuts: Sequence[Cuts]

    def call_flat(self, leaves: Sequence[Any]) -> Sequence[Any]:
        arrays = [leaf.unpadded() if isinstance(leaf, NamedArray) else leaf for leaf in leaves]
        return self.function(*arrays)


def devices_of(mesh: MeshLike | None) -> jax.sharding.Mesh | None:
    """Returns the devices of one of JAX's meshes, which need not be the first ones; else None."""
    if not isinstance(mesh, jax.sharding.Mesh):
        return None
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names)  # whatever the types of its axes


def bare(arrays: Sequence[Any]) -> list[Any]:
    """Returns what executables take: the data of arrays without pads, and arrays with pads."""
    return [array if getattr(array, "cuts", True) else array.data for array in arrays]


def is_leaf(value: Any) -> bool:
    """Whether a value is a tensor, or stands for one."""
    return isinstance(value, Tensor | Spec)


def with_numbers(name: str, leaves: list[Any], tree: Any) -> list[Any]:
    """Returns leaves with arrays for plain numbers, which stand for tensors without dims.

    Args:
        name: of the function, for errors.
        tree: the structure of its arguments, which the leaves are of.

    Raises:
        ValueError: other leaves have no dim names; the message lists all of them.
    """
    result, problems = [], []
    for leaf, path in zip(leaves, paths_of(tree), strict=True):
        if is_leaf(leaf):
            result.append(leaf)
        elif isinstance(leaf, bool | int | float | np.generic):
            result.append(number(leaf))
        elif hasattr(leaf, "shape"):
            what = f"{type(leaf).__name__}{list(leaf.shape)}"
            problems.append(f"  {path}: {what} has no dim names; use md.named(array, dims)")
        elif callable(leaf):
            problems.append(
                f"  {path}: {type(leaf).__name__} is a function, and arguments are trees of "
                "arrays; keep it out of them. md.from_equinox makes a program of a function of "
                "JAX that takes models with functions in them"
            )
        else:
            what = f"{type(leaf).__name__} is no array and no tree of arrays"
            problems.append(
                f"  {path}: {what}; use md.named(array, dims) for arrays, and a md.Module, "
                "dict, list or tuple for what holds them"
            )
    if problems:
        raise ValueError("\n".join([f"{name}: arguments without names:", *problems]))
    return result


def need_numbers(name: str, leaves: Sequence[Any], signature: Signature) -> None:
    """Raises ValueError if arguments of a call only describe arrays, as `md.spec` does.

    The message lists all of them.
    """
    if Spec not in set(map(type, leaves)):
        return
    told = [
        f"  {path}: md.spec {leaf} has no numbers"
        for leaf, path in zip(leaves, paths_of(signature.tree), strict=True)
        if isinstance(leaf, Spec)
    ]
    advice = "give md.named(array, dims), or write .lower(...), which takes arrays without numbers"
    raise ValueError("\n".join([f"{name}: a call needs arrays: {advice}:", *told]))


def leaves_with_paths(tree: Any, avals: Sequence[Aval]) -> list[mirrors.End]:
    """Returns the leaves of a tree with their paths; None and what is static count as leaves.

    So the state of an optimizer of optax, with None for what is static, mirrors its parameters.
    """

    def is_end(value: Any) -> bool:
        return value is None or isinstance(value, Static) or is_leaf(value)

    following = iter(avals)
    keyed = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_end)[0]
    return [
        (path_of(keys), None if leaf is None or isinstance(leaf, Static) else next(following))
        for keys, leaf in keyed
    ]


def arguments_of(
    function: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Returns a call's arguments, plain arrays with names if the function names them itself.

    Programs of `md.from_jax` do so. Those of `md.from_equinox` do so with all that is no tensor.
    """
    name = getattr(function, "name_arguments", None)
    if name is None:
        return args, kwargs
    given = jax.tree.leaves((args, kwargs), is_leaf=is_leaf)
    every = getattr(function, "names_static", False)
    plain = any(not is_leaf(leaf) and (every or hasattr(leaf, "shape")) for leaf in given)
    return name(*args, **kwargs) if plain else (args, kwargs)
