"""`meshdsl doctor`: what is installed, what devices there are, and what is missing for what."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshdsl.cli.mistakes.problems import Problems
from meshdsl.version import version_line

# Files by which a machine's accelerators are known without their libraries.
_DEVICE_FILES = {"gpu": ("/dev/nvidia0", "/dev/kfd"), "tpu": ("/dev/accel0", "/dev/vfio/0")}


@dataclass(frozen=True)
class Use:
    """Something that users do, and the packages that it needs.

    Attributes:
        packages: their names; of alternatives, joined by `|`, one will do.
        install: what to give to `pip install`.
        always: whether every user needs it.
    """

    what: str
    packages: tuple[str, ...]
    install: str
    always: bool = False

    def missing(self, installed: Mapping[str, str]) -> list[str]:
        """Returns the packages that are not there."""
        return [each for each in self.packages if not any(p in installed for p in each.split("|"))]


USES = (
    Use("programs", ("jax", "jaxlib", "numpy", "absl-py", "rich"), "-e .", always=True),
    Use(
        "training",
        ("grain", "orbax-checkpoint", "tensorboardX", "safetensors"),
        "-e .",
        always=True,
    ),
    Use("NVIDIA GPUs", ("jax-cuda12-plugin|jax-cuda13-plugin",), "-e '.[gpu]'"),
    Use("TPUs, and `meshdsl compile` for them", ("libtpu",), "-e '.[tpu]'"),
    Use("--backend=tf", ("tensorflow|tensorflow-cpu",), "-e '.[tf]'"),
    Use("--tokenizer, and .parquet of --data", ("pyarrow", "tokenizers"), "-e '.[data]'"),
    Use("`meshdsl plot`", ("matplotlib",), "-e '.[plot]'"),
    Use("`meshdsl serve`", ("jinja2", "starlette", "uvicorn"), "-e '.[serve]'"),
    Use("`meshdsl evaluate --tasks`", ("lm_eval",), "-e '.[lm_eval]'"),
    Use("optax's optimizers", ("optax",), "optax"),
    Use("profiles in TensorBoard", ("tensorboard", "xprof"), "tensorboard xprof"),
    Use("the documentation", ("mkdocs-material", "mkdocstrings-python"), "-e '.[docs]'"),
    Use("the tests", ("pytest", "hypothesis", "mypy", "ruff"), "-e '.[test]'"),
)


def main(values: flags.FlagValues, problems: Problems) -> int:
    """Runs the command; returns 1 if something is missing that every user needs."""
    problems.check()
    installed = versions()
    for line in (*_machine(), "", *_devices(), ""):
        print(line)
    print(table(installed))
    return 1 if any(use.always and use.missing(installed) for use in USES) else 0


def versions() -> dict[str, str]:
    """Returns the versions of the installed packages that `USES` names."""
    names = [name for use in USES for each in use.packages for name in each.split("|")]
    installed = {}
    for name in names:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def table(installed: Mapping[str, str]) -> str:
    """Returns what is installed for what, and how to install what is missing."""
    console = Console(width=110, color_system=None)
    grid = Table(box=None, pad_edge=False)
    for head in ("for", "", "packages"):
        grid.add_column(head)
    for use in USES:
        missing = use.missing(installed)
        if missing:
            names = ", ".join(each.replace("|", " or ") for each in missing)
            detail = f"{names} missing: pip install {use.install}"
        else:
            every = [name for each in use.packages for name in each.split("|")]
            detail = ", ".join(f"{name} {installed[name]}" for name in every if name in installed)
        grid.add_row(Text(use.what), "no" if missing else "yes", Text(detail))
    with console.capture() as captured:
        console.print(grid)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def _machine() -> Iterator[str]:
    yield version_line()
    yield f"  {Path(__file__).resolve().parents[1]}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = ""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        memory = f", {size / 2**30:.0f} GiB of memory"
    yield f"  {platform.system()} on {platform.machine()}, {cores} cores{memory}"


def _devices() -> Iterator[str]:
    """Yields what JAX finds, and accelerators that it does not."""
    yield "devices"
    try:
        import jax

        devices: list[Any] = jax.devices()
    except (ImportError, RuntimeError) as error:  # no JAX, or devices that do not start
        yield f"  JAX finds none: {str(error).splitlines()[0]}"
        devices = []
    kinds = Counter((device.platform, device.device_kind) for device in devices)
    for (where, kind), count in kinds.items():
        yield f"  {count} × {kind} ({where}){_known(kind, where)}"
    if {where for where, _ in kinds} == {"cpu"}:
        yield "  more virtual ones, to try a mesh: --host_devices=8"
    yield from _unused({where for where, _ in kinds}, _DEVICE_FILES)


def _known(kind: str, where: str) -> str:
    """Returns under which name reports know a kind of device."""
    from meshdsl.layouts.hardware import hardware_of

    known = hardware_of(kind)
    if known is not None:
        return f": --hardware={known.name}"
    return "" if where == "cpu" else ": unknown to --hardware; `meshdsl calibrate` measures it"


def _unused(used: set[str], files: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Yields accelerators whose device files are there, but which JAX does not use."""
    for kind, paths in files.items():
        present = [path for path in paths if Path(path).exists()]
        if present and kind not in used:
            platforms = os.environ.get("JAX_PLATFORMS")
            reason = (
                f"JAX_PLATFORMS={platforms} leaves it out"
                if platforms and kind not in platforms
                else f"pip install -e '.[{kind}]'"
            )
            yield f"  a {kind.upper()} is here ({present[0]}), but JAX does not use it: {reason}"
