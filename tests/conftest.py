"""Eight virtual CPU devices, 64-bit numbers where a test asks for them, and the samples of a run.

A run checks a sample of the random programs and one of the tests marked slow; one of the whole
suite, each quarter of those marked long. All are chosen by the commit, so that a run can be
repeated; the last line names the seed, and `--seed` sets it. `--cases=10000 --first_case=0` and
`--slow` run them all.

Compilation takes most of the time, so XLA leaves out LLVM's optimizations. Its own passes, which
reorder arithmetic, run as for users. Tests marked `optimized`, and all with `--optimize`, compile
as users do: LLVM may fuse a multiplication with an addition, which rounds otherwise.
"""

import ctypes
import functools
import gc
import os
import subprocess
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

# The first example of a test may import what it needs, on a machine that others share.
hypothesis.settings.register_profile("meshdsl", deadline=None)
hypothesis.settings.load_profile("meshdsl")

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)

KNOWN_CASES = 10_000
TURNS = 4  # a test marked long runs in one of so many runs of the whole suite
MUCH = 3 << 29  # bytes; a worker that holds more lets go of what a module's tests have compiled
MOST = 2 << 30  # bytes; one that holds more does so within a module too, where tests share programs
GROWTH = 1 << 28  # bytes; what a worker must hold beyond what it could not let go of
RESIDENT = Path("/proc/self/statm")  # on Linux


def pytest_addoption(parser):
    parser.addoption("--cases", type=int, default=40, help="how many random programs to check")
    parser.addoption("--half_precision", type=int, default=8, help="how many in half precision")
    parser.addoption("--jax_every", type=int, default=4, help="which of them to run on JAX too")
    parser.addoption("--tf_every", type=int, default=6, help="which to run on TensorFlow too")
    parser.addoption("--tpu_every", type=int, default=12, help="which as TensorFlow runs on TPUs")
    parser.addoption("--first_case", type=int, help="the first of them; by default, from the seed")
    parser.addoption("--slow", action="store_true", help="run every slow and every long test")
    parser.addoption("--optimize", action="store_true", help="compile every test as users do")
    parser.addoption("--seed", type=int, help="chooses the samples; by default, from the commit")


@functools.cache
def commit() -> int:
    """Returns a number that follows from the commit; 0 outside of a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(done.stdout[:8], 16)


def seed(config) -> int:
    """Returns what chooses the samples of this run."""
    given = config.getoption("seed")
    return commit() if given is None else given


def is_optimized(item) -> bool:
    """Returns whether a test is about what users' compilers make: its rounding, or TPU programs."""
    # Tests of TPU programs are those that are skipped without libtpu, for this very reason.
    reasons = [mark.kwargs.get("reason") for mark in item.iter_markers("skipif")]
    return item.get_closest_marker("optimized") is not None or "needs libtpu" in reasons


def pytest_runtest_setup(item):
    optimized = item.config.getoption("optimize") or is_optimized(item)
    if jax.config.read("jax_disable_most_optimizations") == optimized:
        # Lets go of what was compiled the other way. `md.jit` objects that helpers keep in a
        # `functools.cache` survive, with the programs that they have compiled.
        let_go()
        jax.config.update("jax_disable_most_optimizations", not optimized)
        # Processes that a test starts round as this one does.
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0" if optimized else "1"


def pytest_terminal_summary(terminalreporter, config):
    terminalreporter.write_line(f"samples: --seed={seed(config)}")


def resident_bytes() -> int:
    """Returns what memory this process holds; where it is not known, as if it were much."""
    if not RESIDENT.exists():
        return MUCH + 1
    return int(RESIDENT.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_are_let_go():
    """Keeps a worker small: no other module runs what one module's tests have compiled."""
    yield
    let_go_above(MUCH)


@pytest.fixture(autouse=True)
def most_memory_is_kept_to():
    yield
    let_go_above(MOST)


least = 0  # the resident bytes of this process after it last let go


def let_go_above(limit):
    """Lets go where this process holds more than `limit`, and has grown since it last did so.

    Letting go takes seconds. Imported frameworks alone may be above the limit, and stay.
    """
    global least
    if resident_bytes() > max(limit, least + GROWTH):
        let_go()
        least = resident_bytes() if RESIDENT.exists() else 0


def let_go():
    """Drops compiled programs, and gives what they held back to the system."""
    from meshdsl.running import eager

    eager.clear_cache()
    jax.clear_caches()
    gc.collect()
    # What is free between blocks in use goes back to the system only when asked for.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def pytest_generate_tests(metafunc):
    count, first = metafunc.config.getoption("cases"), metafunc.config.getoption("first_case")
    if first is None:
        first = seed(metafunc.config) * count % KNOWN_CASES
    if "case_number" in metafunc.fixturenames:
        metafunc.parametrize("case_number", range(first, first + count))
    if "pipeline_number" in metafunc.fixturenames:  # a pipeline for each four other programs
        metafunc.parametrize("pipeline_number", range(first // 4, (first + count) // 4))
    if "half_precision_number" in metafunc.fixturenames:  # the same in each run
        metafunc.parametrize(
            "half_precision_number", range(metafunc.config.getoption("half_precision"))
        )


def pytest_collection_modifyitems(config, items):
    if config.getoption("slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    left = set()
    if 1 < len(slow) < len(items):
        left.update(slow)
        left.remove(slow[seed(config) % len(slow)])
    if is_whole(config):
        long = [item for item in items if item.get_closest_marker("long") and item not in left]
        left.update(item for at, item in enumerate(long) if (at + seed(config)) % TURNS)
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


def is_whole(config) -> bool:
    """Returns whether the whole suite is asked for; who names a part of it wants all of that."""
    suite = [config.rootpath / path for path in config.getini("testpaths")]
    return [Path(config.invocation_params.dir, path).resolve() for path in config.args] == suite
