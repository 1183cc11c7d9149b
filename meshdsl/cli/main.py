"""`meshdsl <command> --flags`: finds the command, and turns errors into one clear message.

Exit codes: 0 for success, 2 for a mistake of the user, 1 for an error on the devices or a program
that does not fit them, 65 for a step that was not finite, 70 for replicas that differ, 130 after
Ctrl-C, 143 after SIGTERM, and 75 for a run whose time is over and that should be started again. A
command returns its exit code, or None for 0.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from meshdsl.cli.help_pages import help_page
from meshdsl.tensors.dims import did_you_mean
from meshdsl.training.exit_codes import DIFFERING, FAILED, INTERRUPTED, MISTAKE, NOT_FINITE
from meshdsl.training.reporting.noise import look_for_no_absent_tpu
from meshdsl.training.reporting.output import hush, tell
from meshdsl.version import version_line

if TYPE_CHECKING:
    from absl.flags import FlagValues

COMMANDS = {
    "train": "Train a language model on text.",
    "launch": "Start the processes of a job, and all of them again when one dies.",
    "explain": "Show what a training step would do, on any mesh, without running it.",
    "compile": "Compile a training step for a pod, without the pod, and compare the plan.",
    "plan": "Find the best mesh and layout of a training step for a machine.",
    "explore": "Write a page with many plans of a training step, to edit and to compare.",
    "sweep": "Rank many meshes and layouts by what a training step costs under each.",
    "calibrate": "Measure the devices at hand, for `explain` and `sweep` to take times from.",
    "generate": "Write text with a trained model.",
    "serve": "Answer requests of OpenAI's API with a trained model.",
    "evaluate": "Score a trained model: its loss and perplexity on text, or benchmarks.",
    "export": "Write the parameters of a checkpoint as safetensors.",
    "runs": "List runs, the best first, and how their settings differ: meshdsl runs runs/*.",
    "plot": "Draw the curves of runs: meshdsl plot runs/* --out=curves.svg.",
    "names": "Show the dims of a function of JAX: meshdsl names my_model.py:example.",
    "doctor": "Show what is installed, what devices there are, and what is missing for what.",
}
TAKES_WORDS = frozenset(
    ["runs", "plot", "names", "launch"]
)  # take arguments that are no flags: folders, functions, or another command
_WITHOUT_DEVICES = frozenset(["runs", "plot", "launch"])  # never use JAX's devices
EXAMPLE = (
    'meshdsl train --model=gpt_mini --mesh_shape="data:2,model:4" --host_devices=8 \\\n'
    '      --layout="batch:data; heads:model; d_ff:model; vocab:model"'
)


def console() -> int:
    """The console script: runs the command line, and exits at once when it is interrupted.

    Before the first step nothing can be lost, so Ctrl-C ends the process immediately. During
    training the process ends between two steps. In both cases it waits for no other thread.
    """
    signal.signal(signal.SIGINT, lambda signum, frame: _quit(b"\nmeshdsl: interrupted\n"))
    code = run()
    # A framework may wait for devices that are gone, and Orbax for the other processes.
    if code in (INTERRUPTED, FAILED, NOT_FINITE) or (code and "orbax.checkpoint" in sys.modules):
        _quit(code=code)
    return code


def _quit(message: bytes = b"", code: int = INTERRUPTED) -> None:
    for stream in (sys.stdout, sys.stderr):
        hush(stream)
    with suppress(OSError):
        os.write(2, message)
    os._exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns its exit code."""
    name, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    if name in ("--help", "-h", "help"):
        tell(_usage())
        return 0
    if name in ("--version", "version"):
        tell(version_line())
        return 0
    if name == "completion":
        return _show_completion(rest)
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS)
        return _fail(
            "meshdsl", f"unknown command {name!r}; choose one of {', '.join(COMMANDS)}{hint}"
        )
    if rest in (["--help"], ["-h"]) and (page := help_page(name)):
        tell(page.rstrip())
        return 0
    command = f"meshdsl {name}"
    from meshdsl.cli import flags

    words: list[str] | None = [] if name in TAKES_WORDS else None
    from meshdsl.cli.mistakes.other_commands import of_other_commands

    values, problems = flags.read(rest, name, words)
    problems.found += of_other_commands(rest, name)
    if values.init_from is not None or values["model"].present:
        from meshdsl.cli.checkpointed import follow_init_from

        follow_init_from(values)
    if values.lora is not None:
        from meshdsl.cli.checkpointed import train_adapters

        train_adapters(values)
    if values.help:
        from meshdsl.cli.help import show_help

        tell(show_help(name, COMMANDS[name]))
        return 0
    code = None
    try:
        if values.print_config:
            problems.check()
            tell(_configuration(name, values))
            return 0
        with _plain_warnings(command):
            if name not in _WITHOUT_DEVICES:
                look_for_no_absent_tpu()
            module = importlib.import_module(f"meshdsl.cli.{name}")
            code = module.main(values, problems, *[words] * (words is not None))
        if sys.stdout is not None:
            sys.stdout.flush()
    except SystemExit as stopped:  # a signal has ended a run between two steps
        return _fail(command, getattr(stopped, "reason", "stopped"), code=int(stopped.code or 0))
    except KeyboardInterrupt as error:
        return _fail(command, str(error) or "interrupted", code=INTERRUPTED)
    except BrokenPipeError:
        if not hush(sys.stdout):  # else the reader of our output has gone, as with `| head`
            raise
    except Exception as error:
        failure = None if values.debug else _explained(error)
        if failure is None:
            raise
        return _fail(command, *failure)
    return code or 0


def _configuration(name: str, values: FlagValues) -> str:
    """Returns the flags of a command as a file of `--config`."""
    from meshdsl.cli import flags
    from meshdsl.cli.help import HELP
    from meshdsl.cli.parsing.table import FLAGS

    return flags.as_configuration(values, name, HELP[name].flags if name in HELP else FLAGS)


def _explained(error: Exception) -> tuple[str, int] | None:
    """Returns the message and the exit code of an error; None for an unexpected error."""
    from meshdsl.cli.mistakes.user_errors import user_text
    from meshdsl.lowering.backends import DeviceError
    from meshdsl.training.batch_entries import MissingEntry
    from meshdsl.training.health.replicas import ReplicasDiffer
    from meshdsl.training.nonfinite import NotFinite
    from meshdsl.training.processes.joining import Deserted

    if isinstance(error, ReplicasDiffer):
        return str(error), DIFFERING
    if isinstance(error, NotFinite):
        return str(error), NOT_FINITE
    if isinstance(error, DeviceError | Deserted):
        return str(error), FAILED
    if "RESOURCE_EXHAUSTED" in str(error) and isinstance(error, RuntimeError):
        return (
            "out of memory on a device. `meshdsl explain` with the same flags shows what fills it; "
            "try a smaller --batch_size or --length, --remat=full, or a larger mesh",
            FAILED,
        )
    if isinstance(error, MissingEntry):
        return f"{error}\n  A Model's batch_spec gives the entries (meshdsl.models.Model)", MISTAKE
    text = user_text(error)
    if text is None and isinstance(error, ValueError):
        text = str(error)
    return None if text is None else (text, MISTAKE)


@contextmanager
def _plain_warnings(command: str) -> Iterator[None]:
    """Prints each user warning in its block as one line, once, without a place in the code."""
    printed: set[str] = set()  # a command lowers several programs, which give the same warnings
    with warnings.catch_warnings():
        show = warnings.showwarning

        def plain(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            if issubclass(category, UserWarning):
                line = f"{command}: warning: {message}"
                if line not in printed:
                    printed.add(line)
                    tell(line, error=True)
            else:
                show(message, category, *rest)

        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = plain  # type: ignore[assignment]
        yield


def _fail(command: str, message: str, code: int = MISTAKE) -> int:
    tell(f"{command}: {message}", error=True)
    return code


def _show_completion(words: Sequence[str]) -> int:
    from meshdsl.cli.help_pages.completion import script

    try:
        tell(script(" ".join(words), COMMANDS).rstrip())
    except ValueError as error:
        return _fail("meshdsl completion", str(error))
    return 0


def _usage() -> str:
    width = max(map(len, COMMANDS))
    commands = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: meshdsl <command> --flags",
            "",
            *commands,
            "",
            "Flags of a command: meshdsl <command> --help. Versions: meshdsl --version.",
            "Completion of a shell: source <(meshdsl completion bash); also zsh and fish.",
            "For example",
            f"  {EXAMPLE}",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(console())
