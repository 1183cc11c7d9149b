"""The contract of a backend: the parts that its folder must have, as protocols.

A backend is a module with `EMITTERS`, `Executable` and `runtime`. mypy compares each of our
backends with these protocols (see the end of this file). `missing` compares any other backend with
them at run time: `tests/lowering/backends/test_contract.py` does so for one that only prints.

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
    """Emits the instructions of a block, for one device or for all simulated devices."""

    def run(self, block: Block, inputs: Sequence[Any]) -> list[Any]:
        """Returns the block's outputs for its inputs; both are local arrays."""


# (machine, instruction, local arrays) -> the local array of its only result, or a list of all
Emitter = Callable[[Any, Instruction, Sequence[Any]], Any]


class Executable(Protocol):
    """A program ready to run.

    Attributes:
        program: the program.
        cuts: how the dims of each result are padded; `()`: it has no pads.
    """

    @property
    def program(self) -> SpmdProgram: ...

    @property
    def cuts(self) -> Sequence[Cuts]: ...

    def call_flat(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs the program on global arrays, one for each input; returns one for each result."""

    def as_text(self) -> str:
        """Returns the compiled program as the framework prints it, or the program itself."""

    def memory_analysis(self) -> Any:
        """Returns the compiler's analysis of one device's memory.

        Raises:
            ValueError: the framework has none; `program.memory` is the plan's own estimate.
        """


class Runtime(Protocol):
    """Facts about the processes and devices of a job, as a framework reports them."""

    def process_count(self) -> int:
        """Returns the number of processes of the job."""

    def process_index(self) -> int:
        """Returns the index of this process."""

    def device_kind(self) -> str:
        """Returns the driver's name for the kind of device."""

    def memory_peak(self) -> int | None:
        """Returns the peak of the memory in use on a device, in bytes; None: not known."""

    @property
    def profile(self) -> Callable[[str], AbstractContextManager[None]] | None:
        """Records a profile of the devices into a folder; None: the backend has no profiler."""


class Backend(Protocol):
    """The module of a backend."""

    @property
    def EMITTERS(self) -> Mapping[str, Emitter]:
        """The emitter of each kind of instruction."""

    @property
    def Executable(self) -> Callable[..., Executable]:
        """(program, donated, devices) -> an executable for these devices."""

    @property
    def runtime(self) -> Runtime:
        """The facts about processes and devices."""


class BackendOnJax(Backend, Protocol):
    """A backend whose programs can be part of a function that JAX traces."""

    @property
    def Storage(self) -> Any:
        """The class of the forms in which arrays are stored on a mesh."""

    def device_mesh(self, mesh: Any) -> Any:
        """Returns JAX's mesh of the first devices."""

    def function(self, program: SpmdProgram, devices: Any = None) -> Callable[..., Any]:
        """Returns the program as a function of global JAX arrays."""


_RUNTIME = ("process_count", "process_index", "device_kind", "memory_peak", "profile")
_EXECUTABLE = ("call_flat", "as_text", "memory_analysis")


def missing(backend: Any) -> list[str]:
    """Returns the parts of the contract that a module lacks, with each emitter, by name."""
    emitters = getattr(backend, "EMITTERS", KINDS)
    wanted = set(KINDS) - {"stop_gradient"}  # lowering drops this one
    lacking = [f"EMITTERS[{name!r}]" for name in sorted(wanted - set(emitters))]
    lacking += [
        f"EMITTERS[{name!r}], which is no instruction" for name in set(emitters) - set(KINDS)
    ]
    return lacking + missing_parts(backend)


def missing_parts(backend: Any) -> list[str]:
    """Returns the parts that a module lacks, apart from single emitters, by name.

    The methods of executables are checked only if `Executable` is a class.
    """
    lacking = [name for name in ("EMITTERS", "Executable", "runtime") if not hasattr(backend, name)]
    runtime = getattr(backend, "runtime", None)
    lacking += [f"runtime.{name}" for name in _RUNTIME if runtime and not hasattr(runtime, name)]
    executable = getattr(backend, "Executable", None)
    if isinstance(executable, type):
        lacking += [f"Executable.{name}" for name in _EXECUTABLE if not hasattr(executable, name)]
    return lacking


def no_memory_analysis(backend: str) -> NoReturn:
    """Raises ValueError: the compiler of a backend does not analyse memory."""
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
