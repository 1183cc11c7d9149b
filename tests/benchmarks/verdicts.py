"""The TPU compiler's verdict on whole training steps: ours, XLA's partition, and plain JAX by hand.

Each program is compiled for 64 TPU v5p chips in a process of its own; no TPU is needed, only libtpu
(`pip install -e '.[tpu]'`). A compile takes up to two minutes of processor time. Each appends one
JSON line to `--out`, and what is there already is not compiled again, unless it failed. The table
has our program with the recommended flags of the compiler, and the others each with those flags
with which its step is shortest.

All programs compute all scores of a layer's attention at once: the compiler knows no cycles of
fused kernels, so work in them would be free. `--kernels` has ours and those by hand use them.

Run: python -m tests.benchmarks.verdicts --out=FILE [--pair=NAME ...] [--kind=by_hand ...]
         [--flags=recommended ...] [--jobs=1] [--kernels]
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topologies import Topology
from meshdsl.lowering import attention_sizes
from meshdsl.lowering.backends.compiler_flags import RECOMMENDED, Flag, of_any_program
from meshdsl.lowering.compiled import Compiled
from meshdsl.lowering.program import SpmdProgram
from tests.benchmarks.pairs import MORE_PAIRS, PAIRS, TOPOLOGY, Pair, jitted

OURS, KINDS = "jax", ("jax", "jax_auto", "by_hand")
WORDS: Mapping[str, str] = {"jax": "ours", "jax_auto": "GSPMD", "by_hand": "by hand"}
_MATMUL = "collective_matmul_mode"
FLAGS: Mapping[str, Mapping[str, Flag]] = {
    "recommended": RECOMMENDED["v5p"],
    "without_offload": RECOMMENDED["v4"],
    # XLA's partitioner then makes no rings of small products.
    "whole_products": {
        **RECOMMENDED["v5p"],
        "xla_jf_spmd_threshold_for_windowed_einsum_mib": 2**20,
    },
    "collective_matmul": {
        **RECOMMENDED["v5p"],
        f"xla_tpu_all_gather_{_MATMUL}": "post_spmd_conservative",
        f"xla_tpu_reduce_scatter_{_MATMUL}": "post_spmd_conservative",
    },
}
USUAL = ("recommended", "without_offload", "whole_products")
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Job:
    """One program to compile.

    Attributes:
        kind: one of `KINDS`.
        flags: a name in `FLAGS`.
    """

    pair: str
    kind: str
    flags: str
    kernels: bool = False


@dataclass(frozen=True)
class Verdict:
    """What the compiler says of one program: bytes and seconds of one device and step.

    Attributes:
        unknown: how many operations without cycles run, such as fused kernels.
        processor_seconds: of tracing, lowering and compiling.
    """

    wire_bytes: float
    work: float
    exposed: float
    hidden: float
    step: float
    unknown: int
    peak_bytes: int
    processor_seconds: float


Known = Mapping[Job, Verdict]


def pairs() -> Mapping[str, Pair]:
    """Returns all pairs by name."""
    return {**PAIRS, **MORE_PAIRS}


# One compile, in a process of its own.


def judged(job: Job) -> Verdict:
    """Compiles a program.

    Raises:
        ValueError: the compiler refuses it, it does not fit into memory, or its time is not known.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")  # libtpu must not look for a TPU
    if not job.kernels:
        without_kernels()
    start = time.process_time()
    compiled, before = _compiled(job, start)
    if not compiled.fits:
        raise ValueError(f"needs {compiled.peak_bytes / GIB:.1f} GiB")
    schedule = compiled.schedule
    if schedule is None or compiled.sent is None:
        raise ValueError(compiled.untimed or compiled.unread)
    times = schedule.times
    return Verdict(
        math.fsum(compiled.sent.values()),
        times.work,
        times.exposed,
        times.hidden,
        schedule.seconds,
        sum(schedule.unknown.values()),
        compiled.peak_bytes,
        before + compiled.processor_seconds,
    )


def _compiled(job: Job, start: float) -> tuple[Compiled, float]:
    """Returns the compiler's account, and the seconds before the compiler."""
    from meshdsl.lowering.backends.jax.ahead import compile_ahead, compile_plain, plain_program
    from tests.benchmarks.baselines.table import BASELINES

    pair, topology, flags = pairs()[job.pair], Topology.parse(TOPOLOGY), FLAGS[job.flags]
    flags = flags if job.kind == OURS else of_any_program(flags)
    if job.kind == "by_hand":
        mesh = Mesh.parse(pair.mesh("tpu"))
        make = partial(BASELINES[job.pair].program, size="tpu", kernels=job.kernels)
        made = plain_program(make, mesh, topology)
        return compile_plain(made, mesh, topology, flags), time.process_time() - start
    if job.kind == OURS:
        program = of_ours(pair)
    else:
        function, arguments = jitted(pair, "tpu", job.kind)
        program = function.lower(*arguments)
    before = time.process_time() - start
    return compile_ahead(program, topology, flags, job.kind), before


def without_kernels() -> None:
    """Has attention compute all of its scores at once, in programs and in simulations."""
    from meshdsl.layouts.costs import Costs
    from meshdsl.lowering.backends.jax.operations import attention

    attention_sizes.DIRECT = 2**62
    attention.kernel = lambda *_: None  # type: ignore[assignment]
    Costs.attention = lambda *_, **__: None  # type: ignore[method-assign,assignment]


def of_ours(pair: Pair) -> SpmdProgram:
    """Returns our program of a pair: the fastest by the simulated time on `TOPOLOGY`."""
    function, arguments = jitted(pair, "tpu", hardware=Topology.parse(TOPOLOGY).name)
    return function.lower(*arguments)


# All of them.


def jobs(
    names: Iterable[str], kinds: Sequence[str], flags: Sequence[str], kernels: bool
) -> Iterator[Job]:
    """Yields what to compile: ours with the recommended flags, the others with all of them."""
    from tests.benchmarks.baselines.table import BASELINES

    for name in names:
        for kind in kinds:
            if kind == "by_hand" and name not in BASELINES:
                continue
            chosen = ["recommended"] if kind == OURS else flags
            yield from (Job(name, kind, one, kernels) for one in chosen)


def read(file: Path) -> dict[Job, Verdict]:
    """Returns the verdicts of a file; programs that failed have none."""
    found = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        record = json.loads(line)
        if "verdict" in record:
            found[Job(**record["job"])] = Verdict(**record["verdict"])
    return found


def judge_all(todo: Sequence[Job], file: Path, at_once: int) -> None:
    """Compiles programs, several at once, and appends a line for each to a file."""
    with ThreadPoolExecutor(at_once) as pool:
        waiting = {pool.submit(_in_a_process, job): job for job in todo}
        for number, done in enumerate(as_completed(waiting), 1):
            job, result = waiting[done], done.result()
            with file.open("a") as lines:
                lines.write(json.dumps({"job": asdict(job), **result}) + "\n")
            word = result.get("error", "compiled")
            print(
                f"{number} of {len(todo)}: {job.pair}, {job.kind}, {job.flags}: {word}", flush=True
            )


def _in_a_process(job: Job) -> dict[str, object]:
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.verdicts",
        f"--job={json.dumps(asdict(job))}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"error": lines[-1]}
    return {"verdict": json.loads(done.stdout.splitlines()[-1])}


# The table.


def best(known: Known, pair: str, kind: str, kernels: bool) -> tuple[str, Verdict] | None:
    """Returns the shortest step of a kind, and the flags of it."""
    found = [
        (verdict.step, job.flags, verdict)
        for job, verdict in known.items()
        if (job.pair, job.kind, job.kernels) == (pair, kind, kernels)
        and (kind != OURS or job.flags == "recommended")
    ]
    if not found:
        return None
    _, flags, verdict = min(found, key=lambda one: one[:2])
    return flags, verdict


def table(known: Known, names: Iterable[str], kernels: bool = False) -> str:
    """Returns the table, and the means of our figures over those of the best other program."""
    lines = [
        f"{'':24s}{'':9s}{'MiB':>9s}{'work':>9s}{'exposed':>9s}{'hidden':>9s}{'step ms':>9s}"
        f"{'GiB':>7s}{'seconds':>9s}  flags"
    ]
    ratios: dict[str, list[float]] = {"step": [], "exposed": [], "wire_bytes": []}
    for name in names:
        rows = {kind: best(known, name, kind, kernels) for kind in KINDS}
        found = {kind: row for kind, row in rows.items() if row is not None}
        lines += [_row(name, kind, flags, verdict) for kind, (flags, verdict) in found.items()]
        if OURS not in found or len(found) == 1:
            continue
        said = []
        for field, values in ratios.items():
            others = [getattr(one, field) for kind, (_, one) in found.items() if kind != OURS]
            values.append(_ratio(getattr(found[OURS][1], field), min(others)))
            said.append(f"{field} {values[-1]:.2f}")
        lines.append(f"{'':24s}ours over the best: {', '.join(said)}")
    for field, values in ratios.items():
        if values:
            known_values = [value for value in values if 0 < value < math.inf]
            mean = math.exp(math.fsum(map(math.log, known_values)) / max(len(known_values), 1))
            lines.append(
                f"{field}: geometric mean {mean:.3f} of {len(known_values)} pairs, "
                f"largest {max(values):.3f}"
            )
    return "\n".join(lines)


def _row(name: str, kind: str, flags: str, one: Verdict) -> str:
    times = "".join(f"{1e3 * t:9.2f}" for t in (one.work, one.exposed, one.hidden, one.step))
    note = f", {one.unknown} operations without cycles" if one.unknown else ""
    return (
        f"{name:24s}{WORDS[kind]:9s}{one.wire_bytes / MIB:9,.0f}{times}"
        f"{one.peak_bytes / GIB:7.2f}{one.processor_seconds:9.0f}  {flags}{note}"
    )


def _ratio(ours: float, theirs: float) -> float:
    return 1.0 if ours == theirs else ours / theirs if theirs else math.inf


def main() -> None:
    """Compiles what is missing, and prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="a file of JSON lines")
    parser.add_argument("--pair", action="append", choices=[*pairs()], help="leave out for all")
    parser.add_argument("--kind", action="append", choices=KINDS, help="leave out for all")
    parser.add_argument("--flags", action="append", choices=[*FLAGS], help="leave out for three")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--kernels", action="store_true", help="use fused attention")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        print(json.dumps(asdict(judged(Job(**json.loads(arguments.job))))))
        return
    if arguments.out is None:
        parser.error("--out=FILE says where the verdicts are kept")
    names = arguments.pair or [*pairs()]
    flags = arguments.flags or USUAL
    known = read(arguments.out)
    wanted = jobs(names, arguments.kind or KINDS, flags, arguments.kernels)
    judge_all([job for job in wanted if job not in known], arguments.out, arguments.jobs)
    print(table(read(arguments.out), names, arguments.kernels))


if __name__ == "__main__":
    main()
