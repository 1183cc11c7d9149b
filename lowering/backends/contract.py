"""The contract of a backend: what its folder gives, and what the rest of the house asks of it.

A backend is a module with `EMITTERS`, `Executable` and `runtime`. mypy holds every backend of ours
against these protocols (see the end of this file), and `missing` holds any other one against them
when it runs; `tests/lowering/backends/test_contract.py` does so with one that only prints.

To add a backend: a folder beside this file, and its name in `BACKENDS` in `__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from meshdsl.lowering.instructions import KINDS
from meshdsl.lowering.program import Block, Instruction, SpmdProgram
from meshdsl.tensors.cuts import Cuts


class Machine(Protocol):
    """What emits the instructions of a block, for one device or for all that are simulated."""

    def run(self, block: Block, inputs: Sequence[Any]) -> list[Any]:
        """Returns the block's outputs, given its inputs: both are local arrays."""


# (machine, instruction, local arrays) -> the local array of its result, or one for each result
Emitter = Callable[[Any, Instruction, Sequence[Any]], Any]


class Executable(Protocol):
    """A program ready to run.

    Attributes:
        program: the program.
        cuts: how each result is stored: `()` for one without pads.
    """

    @property
    def program(self) -> SpmdProgram: ...

    @property
    def cuts(self) -> Sequence[Cuts]: ...

    def call_flat(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs the program on global arrays, one for each input; returns one for each result."""

    def as_text(self) -> str:
        """Returns what the framework's compiler made of the program, or the program itself."""

    def memory_analysis(self) -> Any:
        """Returns the compiler's account of one device's memory.

        Raises:
            ValueError: the framework keeps none; `program.memory` is the plan's own.
        """


class Runtime(Protocol):
    """What a framework knows of the processes and devices of a job."""

    def process_count(self) -> int:
        """Returns how many processes the job has."""

    def process_index(self) -> int:
        """Returns the number of this one."""

    def device_kind(self) -> str:
        """Returns what the driver calls the devices."""

    def memory_peak(self) -> int | None:
        """Returns the most bytes that a device has held, if that is known."""

    @property
    def profile(self) -> Callable[[str], AbstractContextManager[None]] | None:
        """Records what the devices do into a folder; None where there are none to record."""


class Backend(Protocol):
    """The module of a backend."""

    @property
    def EMITTERS(self) -> Mapping[str, Emitter]:
        """What one device does for each kind of instruction."""

    @property
    def Executable(self) -> Callable[..., Executable]:
        """(program, donated, devices) -> the program ready to run on these devices."""

    @property
    def runtime(self) -> Runtime:
        """What is known of processes and devices."""


class BackendOnJax(Backend, Protocol):
    """A backend whose programs can become part of what JAX traces."""

    @property
    def Storage(self) -> Any:
        """How arrays are stored on a mesh."""

    def device_mesh(self, mesh: Any) -> Any:
        """Returns JAX's mesh of the first devices."""

    def function(self, program: SpmdProgram, devices: Any = None) -> Callable[..., Any]:
        """Returns the program as a function of global JAX arrays."""


_RUNTIME = ("process_count", "process_index", "device_kind", "memory_peak", "profile")
_EXECUTABLE = ("call_flat", "as_text", "memory_analysis")


def missing(backend: Any) -> list[str]:
    """Returns what a module lacks to be a backend, each as a name with what is wrong.

    The methods of executables are looked for where `Executable` is a class.
    """
    found = [name for name in ("EMITTERS", "Executable", "runtime") if not hasattr(backend, name)]
    emitters = getattr(backend, "EMITTERS", KINDS)
    wanted = set(KINDS) - {"stop_gradient"}  # which lowering drops
    found += [f"EMITTERS[{name!r}]" for name in sorted(wanted - set(emitters))]
    found += [f"EMITTERS[{name!r}], which is no instruction" for name in set(emitters) - set(KINDS)]
    runtime = getattr(backend, "runtime", None)
    found += [f"runtime.{name}" for name in _RUNTIME if runtime and not hasattr(runtime, name)]
    made = getattr(backend, "Executable", None)
    if isinstance(made, type):
        found += [f"Executable.{name}" for name in _EXECUTABLE if not hasattr(made, name)]
    return found


def no_memory_analysis(backend: str) -> NoReturn:
    """Says that a framework keeps no account of memory."""
    raise ValueError(
        f"backend {backend!r} has no compiler that accounts for memory: read program.memory, the "
        "plan's own account, or compile for backend='jax'"
    )


if TYPE_CHECKING:  # mypy compares each backend with the contract
    from meshdsl.lowering.backends import jax, jax_auto, numpy, tf
    from meshdsl.lowering.backends.jax import runtime as jax_runtime
    from meshdsl.lowering.backends.numpy import runtime as numpy_runtime
    from meshdsl.lowering.backends.tf import runtime as tf_runtime

    _NUMPY: Backend = numpy
    _JAX: BackendOnJax = jax
    _JAX_AUTO: BackendOnJax = jax_auto
    _TF: Backend = tf
    _NUMPY_RUNTIME: Runtime = numpy_runtime
    _JAX_RUNTIME: Runtime = jax_runtime
    _TF_RUNTIME: Runtime = tf_runtime
