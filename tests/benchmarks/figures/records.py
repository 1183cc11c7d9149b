"""Records of runs: what a benchmark printed, and the command, date, commit and machine.

A record is a file of JSON in `measured/`, which only `measure` writes. It refuses a checkout with
changes that are not committed, but for records and the page, and one that changes meanwhile: the
commit would not say what ran. Files that commands leave for each other are of one commit.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.figures.table import FOLDER, ROOT, Benchmark

MEASURED = Path(__file__).parent / "measured"
# Records and the page are what a run writes.
_CHANGES = (
    *("status", "--porcelain", "--untracked-files=no", "--", "."),
    *(":!BENCHMARKS.md", ":!tests/benchmarks/figures/measured"),
)
LIBRARIES = ("jax", "jaxlib", "libtpu", "numpy", "tensorflow")


@dataclass(frozen=True)
class Record:
    """One run of a benchmark.

    Attributes:
        commands: as they ran.
        date: of the run, as YYYY-MM-DD.
        commit: of the checkout, without changes.
        machine: processor, cores, accelerator, and how busy it was.
        versions: of Python and of the libraries that are installed.
        source: see `digest`.
        seconds, processor_seconds: of the commands together; the second is the sum of all threads.
        output: what the last command printed on standard output.
    """

    commands: tuple[str, ...]
    date: str
    commit: str
    machine: str
    versions: dict[str, str]
    source: str
    seconds: float
    processor_seconds: float
    output: str


def measure(benchmark: Benchmark) -> Record:
    """Runs a benchmark and writes its record.

    Raises:
        ValueError: something is missing, the checkout has changes, or a command failed.
    """
    if missing := [each for each in benchmark.needs if not is_there(each)]:
        raise ValueError(f"{benchmark.name} needs {' and '.join(missing)}, which is not here")
    if changes := _git(*_CHANGES):
        raise ValueError(f"commit first, so that the record's commit is what ran:\n{changes}")
    commit = _git("rev-parse", "--short=9", "HEAD")
    _make_folder(commit)
    machine, start, used = _machine(), time.monotonic(), _processor_seconds()
    for command in benchmark.commands:
        output = _run(command)
    if _git(*_CHANGES) or _git("rev-parse", "--short=9", "HEAD") != commit:
        raise ValueError(f"the checkout has changed while {benchmark.name} ran: run it again")
    record = Record(
        commands=benchmark.commands,
        date=f"{datetime.date.today():%Y-%m-%d}",
        commit=commit,
        machine=machine,
        versions=_versions(),
        source=digest(benchmark),
        seconds=round(time.monotonic() - start, 1),
        processor_seconds=round(_processor_seconds() - used, 1),
        output=output,
    )
    MEASURED.mkdir(exist_ok=True)
    text = json.dumps(dataclasses.asdict(record), indent=1, ensure_ascii=False)
    file_of(benchmark.name).write_text(f"{text}\n")
    return record


def _make_folder(commit: str) -> None:
    """Makes the folder of what commands leave, without what another commit has left."""
    folder, stamp = ROOT / FOLDER, ROOT / FOLDER / "commit"
    if folder.exists() and not (stamp.exists() and stamp.read_text() == commit):
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stamp.write_text(commit)


def read(name: str) -> Record | None:
    """Returns the record of a benchmark; None if it has none."""
    file = file_of(name)
    if not file.exists():
        return None
    fields = json.loads(file.read_text())
    return Record(**{**fields, "commands": tuple(fields["commands"])})


def file_of(name: str) -> Path:
    """Returns the file of a benchmark's record."""
    return MEASURED / f"{name}.json"


def digest(benchmark: Benchmark) -> str:
    """Returns a digest of the benchmark's own files, and of those of `tests` that they import.

    It changes when the way changes in which something is measured. It does not know of changes of
    meshdsl, which the record's commit tells.
    """
    files, front = set[Path](), benchmark.sources
    while front:
        if (file := front.pop()) not in files and file.exists():
            files.add(file)
            names = re.findall(
                r"^ *(?:from|import) (tests[.\w]*)(?: import ([\w, ]+))?",
                file.read_text(),
                re.MULTILINE,
            )
            for module, parts in names:
                modules = [
                    module,
                    *(f"{module}.{part.strip()}" for part in parts.split(",") if part),
                ]
                front += [ROOT / f"{each.replace('.', '/')}.py" for each in modules]
    total = hashlib.sha256()
    for file in sorted(files):
        total.update(file.read_bytes())
    return total.hexdigest()[:16]


def is_there(need: str) -> bool:
    """Whether a module is installed, or the machine has a GPU."""
    if need == "gpu":
        return shutil.which("nvidia-smi") is not None
    return importlib.util.find_spec(need) is not None


def _run(command: str) -> str:
    """Runs a command of the environment of this Python; returns what it printed."""
    bin_folder = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    environment["COLUMNS"] = "100"
    done = subprocess.run(
        command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise ValueError(f"{command} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _machine() -> str:
    """Returns the processor, the accelerator if there is one, and the load."""
    name = platform.processor() or platform.machine()
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    parts = [f"{len(os.sched_getaffinity(0))} cores of {name}"]
    if is_there("gpu"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        parts.append(subprocess.run(query, capture_output=True, text=True).stdout.strip())
    return ", ".join([*parts, f"load {os.getloadavg()[0]:.1f} at the start"])


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
