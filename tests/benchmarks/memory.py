"""Peak memory of whole training steps: `program.peak_bytes` against the TPU compiler's own account.

Each pair of `tests.benchmarks.pairs` is lowered and compiled for 64 TPU v5p chips, with all scores
of an attention computed at once, as in `tests.benchmarks.gspmd_bytes`. No TPU is needed, only
libtpu (`pip install -e '.[tpu]'`). Printed are MiB of one device: the peak, and of that what is
not an argument. With `--blocks`, long attentions are computed in blocks of scores instead.

The plan is what a program needs. With collectives on the SparseCores the compiler holds more at
once where there is room, to hide them, so programs are compiled without these; `--offloaded` is
with them.

Run: python -m tests.benchmarks.memory [--pair=NAME ...] [--blocks] [--offloaded]
"""

import argparse
import math
import os
import time
from dataclasses import dataclass

import jax

from meshdsl.lowering import attention_sizes
from meshdsl.lowering.backends.compiler_flags import RECOMMENDED, without_offloading
from meshdsl.lowering.backends.jax.executable import Executable
from tests.benchmarks.gspmd_bytes import topology_mesh
from tests.benchmarks.pairs import PAIRS, Pair, jitted

MIB = 2**20


@dataclass(frozen=True)
class Account:
    """Bytes of one device, by our model and by the compiler.

    Attributes:
        seconds: what the model takes.
    """

    peak: int
    arguments: int
    compiler_peak: int
    compiler_arguments: int
    seconds: float

    @property
    def ratio(self) -> float:
        """The peak of the model over that of the compiler."""
        return self.peak / self.compiler_peak

    @property
    def of_the_rest(self) -> float:
        """The same without arguments, which are no matter of opinion."""
        return (self.peak - self.arguments) / (self.compiler_peak - self.compiler_arguments)


def account(pair: Pair, offloaded: bool = False) -> Account:
    """Lowers and compiles a pair: `account(PAIRS["mlp_data"])`.

    Args:
        offloaded: whether with collectives on the SparseCores.
    """
    function, arguments = jitted(pair)
    program = function.lower(*arguments)
    start = time.perf_counter()
    memory = program.memory
    seconds = time.perf_counter() - start
    devices, donated = topology_mesh(program.mesh), program.donated
    flags = RECOMMENDED["v5p"] if offloaded else without_offloading(RECOMMENDED["v5p"])
    xla = Executable(program, donated, devices, "cpu", flags).memory_analysis()
    return Account(
        memory.peak_bytes,
        sum(buffer.bytes for buffer in memory.buffers if buffer.kind == "input"),
        xla.peak_memory_in_bytes,
        xla.argument_size_in_bytes,
        seconds,
    )


def show(pair: Pair, found: Account) -> str:
    """Returns a row of the table."""
    peaks = f"{found.peak / MIB:10,.1f} {found.compiler_peak / MIB:10,.1f} {found.ratio:6.3f}"
    ours, theirs = found.peak - found.arguments, found.compiler_peak - found.compiler_arguments
    rest = f"{ours / MIB:10,.1f} {theirs / MIB:10,.1f} {found.of_the_rest:6.3f}"
    return f"{pair.name:23s} {peaks}   {rest}   {1000 * found.seconds:5.1f} ms"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pair", action="append", choices=[*PAIRS], help="leave out for all")
    parser.add_argument("--blocks", action="store_true", help="blocks of scores, as on devices")
    parser.add_argument("--offloaded", action="store_true", help="collectives on SparseCores")
    arguments = parser.parse_args()
    # As in `gspmd_bytes`: no TPU is looked for, and several processes may compile at a time.
    jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5e-256")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    if not arguments.blocks:
        attention_sizes.DIRECT = 2**62
    columns = f"{'ours':>10s} {'compiler':>10s} {'ratio':>6s}"
    print(f"{'MiB':23s} {'peak':>28s}   {'without arguments':>28s}\n{'':23s} {columns}   {columns}")
    found = {}
    for name in arguments.pair or PAIRS:
        found[name] = account(PAIRS[name], arguments.offloaded)
        print(show(PAIRS[name], found[name]), flush=True)
    ratios = [one.ratio for one in found.values()]
    away = max(abs(math.log(ratio)) for ratio in ratios)
    print(f"{len(ratios)} ratios from {min(ratios):.3f} to {max(ratios):.3f}, {away:.3f} at most")


if __name__ == "__main__":
    main()
