"""Time of a sweep: 100 layouts of gpt3_175b on 512 devices by plan, with all pages.

It runs as users run it, as a process that starts its workers. Printed are what the clock says and
what all its processes took of the cores; beside other jobs the second is what means something. With
`--profile` ten of the candidates are measured in this process, under cProfile. With `--hardware`
time decides about each candidate, so that many programs are written and simulated for it.

Run: python -m tests.benchmarks.sweep_time [--parallel=2] [--hardware=v5p] [--profile]
"""

import argparse
import cProfile
import json
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import CodeType

MESHES = ("data:256,model:2", "data:128,model:4", "data:64,model:8", "data:32,model:16")
MESHES += ("data:16,model:32",)
TENSOR = "batch:data; heads:model; d_ff:model; vocab:model"
LAYOUTS = (  # 20 of them, on 5 meshes
    f"{TENSOR}{{,; length:model?}}{{,; params/embed:data}}{{,; optimizer/embed:data}}",
    "batch:data; heads:model; d_ff:model{,; length:model?,; params/embed:data}",
    "batch:data{,+model}{,; params/embed:data,; params/embed:data+model}",
    "batch:data; length:model{,; params/embed:data,; params/embed:data+model}",
)
ARGUMENTS = ("--model=gpt3_175b", "--policy=params=float32,compute=bfloat16", "--remat=full")
# Functions whose time, with all that they call, says where an evaluation spends it.
STAGES = ("decisions.decide", "decisions.decide.evaluate", "simplify.simplify", "placing.place")
STAGES += ("joint.choose_jointly", "planning.plan", "planning.reduce", "lower._write")
STAGES += ("lower._by.improved", "reduce_inside.reduce_inside", "halves.in_halves")
STAGES += (
    "keeping.keep_gathered",
    "simulation.Simulator.seconds",
    "program.SpmdProgram.peak_bytes",
)
STAGES += ("explanation.explain", "page.page")


def sweep(
    parallel: int, folder: str, arguments: tuple[str, ...] = ARGUMENTS
) -> tuple[float, float, list[dict]]:
    """Returns the seconds of a sweep by the clock and of the cores, and its candidates."""
    flags = [f"--mesh_shape={mesh}" for mesh in MESHES]
    flags += [f"--layout={layout}" for layout in LAYOUTS]
    flags += [*arguments, f"--parallel={parallel}", f"--workdir={folder}"]
    code = "import sys; from meshdsl.cli.main import run; sys.exit(run(sys.argv[1:]))"
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", code, "sweep", *flags], check=True, stdout=sys.stderr)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cores = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, cores, json.loads(Path(folder, "sweep.json").read_text())["candidates"]


def profile(folder: str, arguments: tuple[str, ...] = ARGUMENTS) -> None:
    """Prints where the time of ten candidates goes, by stage and by function."""
    from meshdsl.cli.sweeping.measures import Asked, Setup, Subject, by_plan
    from meshdsl.reports.sweeps.candidates import read

    Path(folder, "pages").mkdir()
    subject = Subject.of(Setup(arguments, folder))
    profiler = cProfile.Profile()
    for candidate in read(MESHES, LAYOUTS).candidates[::10]:
        start = time.process_time()
        result = profiler.runcall(by_plan, subject, Asked(candidate, "page"))
        print(f"{time.process_time() - start:.2f} s  {candidate}  {result.reason}")
    print_stages(profiler)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def print_stages(profiler: cProfile.Profile) -> None:
    """Prints the seconds and the calls of each stage, with all that it calls."""
    rows = []
    for entry in profiler.getstats():
        if isinstance(entry.code, CodeType):
            stage = f"{Path(entry.code.co_filename).stem}.{entry.code.co_qualname}"
            rows.append((entry.totaltime, entry.callcount, stage.replace("<locals>.", "")))
    for seconds, calls, stage in sorted(rows, reverse=True):
        if stage in STAGES:
            print(f"{seconds:8.2f} s {calls:7} x  {stage}")


def main() -> None:
    """Prints the times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--hardware", help="the hardware by whose time lowering decides")
    parser.add_argument("--profile", action="store_true")
    parsed = parser.parse_args()
    arguments = ARGUMENTS
    if parsed.hardware is not None:
        arguments += (f"--hardware={parsed.hardware}",)
    with tempfile.TemporaryDirectory() as folder:
        if parsed.profile:
            return profile(folder, arguments)
        seconds, cores, found = sweep(parsed.parallel, folder, arguments)
        pages = len([*Path(folder, "pages").iterdir()])
    fit, failed = (sum(bool(row[name]) for row in found) for name in ("fits", "reason"))
    print(
        f"{len(found)} layouts, {parsed.parallel} processes: {seconds:.1f} s, {cores:.1f} s of "
        f"all cores; {fit} fit, {failed} not measured, {pages} pages"
    )
    best = found[0]
    print(f"the first is {best['mesh']} | {best['layout']}: {best['seconds']:.2f} s per step")
    return None


if __name__ == "__main__":
    main()
