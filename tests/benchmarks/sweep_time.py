"""Time of a sweep: 100 layouts of gpt3_175b on 512 devices by plan, with all pages.

It runs as users run it, as a process that starts its workers. Printed are what the clock says and
what all its processes took of the cores; beside other jobs the second is what means something. With
`--profile` ten of the candidates are measured in this process, under cProfile.

Run: python -m tests.benchmarks.sweep_time [--parallel=2] [--profile]
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


def sweep(parallel: int, folder: str) -> tuple[float, float, list[dict]]:
    """Returns the seconds of a sweep by the clock and of the cores, and its candidates."""
    flags = [f"--mesh_shape={mesh}" for mesh in MESHES]
    flags += [f"--layout={layout}" for layout in LAYOUTS]
    flags += [*ARGUMENTS, f"--parallel={parallel}", f"--workdir={folder}"]
    code = "import sys; from meshdsl.cli.main import run; sys.exit(run(sys.argv[1:]))"
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", code, "sweep", *flags], check=True, stdout=sys.stderr)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cores = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, cores, json.loads(Path(folder, "sweep.json").read_text())["candidates"]


def profile(folder: str) -> None:
    """Prints where the time of ten candidates goes."""
    from meshdsl.cli.sweeping.measures import Asked, Setup, Subject, by_plan
    from meshdsl.reports.sweeps.candidates import read

    Path(folder, "pages").mkdir()
    subject = Subject.of(Setup(ARGUMENTS, folder))
    profiler = cProfile.Profile()
    for candidate in read(MESHES, LAYOUTS).candidates[::10]:
        start = time.process_time()
        result = profiler.runcall(by_plan, subject, Asked(candidate, "page"))
        print(f"{time.process_time() - start:.2f} s  {candidate}  {result.reason}")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def main() -> None:
    """Prints the times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.profile:
            return profile(folder)
        seconds, cores, found = sweep(arguments.parallel, folder)
        pages = len([*Path(folder, "pages").iterdir()])
    fit, failed = (sum(bool(row[name]) for row in found) for name in ("fits", "reason"))
    print(
        f"{len(found)} layouts, {arguments.parallel} processes: {seconds:.1f} s, {cores:.1f} s of "
        f"all cores; {fit} fit, {failed} not measured, {pages} pages"
    )
    best = found[0]
    print(f"the first is {best['mesh']} | {best['layout']}: {best['seconds']:.2f} s per step")
    return None


if __name__ == "__main__":
    main()
