"""Bytes on the wire of TensorFlow's TPU programs, as planned and as the TPU compiler made them.

Each pair of `tests.benchmarks.pairs` is emitted as the program of one TPU replica, compiled by
libtpu for chips that are not there, and what a device sends is counted in the optimised HLO. No TPU
is needed, only libtpu (`pip install -e '.[tpu]'`).

TensorFlow sums over devices with CrossReplicaSum; it gathers, scatters and takes maxima with
exchanges. So sums are told apart from the rest. XLA:TPU sends some float32 numbers as bfloat16,
where that is all that is needed of them, such as for a product of the default precision; so the
numbers are counted too, whatever their dtype, and those are as many as planned.

Run: python -m tests.benchmarks.tf_tpu_bytes [--pair=NAME ...] [--topology=v5e:2x4 ...]
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

import jax

from meshdsl.lowering import attention_sizes
from meshdsl.lowering.backends.hlo.wire import sent
from meshdsl.lowering.program import Instruction, SpmdProgram, payload_bytes, wire_bytes
from tests.benchmarks.pairs import PAIRS, Pair, Size, jitted
from tests.reference.tf_tpu import compile_for_tpu, program_text

TOPOLOGIES: dict[str, Size] = {"v5e:2x4": "small", "v4:2x2x2": "small", "v5p:4x4x4": "tpu"}
USUAL = ("wide_tensor", "mlp_fsdp", "decoder_tensor", "decoder_fsdp")
MIB = 2**20


@dataclass(frozen=True)
class Wire:
    """What one device sends per run: bytes of sums and of all else, and how many numbers."""

    sums: float
    rest: float
    numbers: float

    @staticmethod
    def of(parts: Iterable[tuple[bool, float, int]]) -> Wire:
        """Adds up collectives: whether it is a sum, its bytes, the bytes of one number."""
        found = list(parts)
        return Wire(
            sum(size for is_sum, size, _ in found if is_sum),
            sum(size for is_sum, size, _ in found if not is_sum),
            sum(size / each for _, size, each in found),
        )


def planned(program: SpmdProgram) -> Wire:
    """Returns what the collectives of a program send, of a `cond` those of the worse branch."""

    def size(instruction: Instruction) -> float:
        if not instruction.is_collective:
            return 0.0
        devices = program.mesh.extent(instruction.params["axes"])
        return wire_bytes(instruction.op, payload_bytes(instruction, program.mesh), devices)

    return Wire.of(
        (one.params.get("kind") == "sum", size(one) * times, one.outputs[0].dtype.itemsize)
        for one, times in program.block.counted(size)
        if one.is_collective
    )


def compiled(text: str, devices: int) -> Wire:
    """Returns what a device sends by optimised HLO."""
    dtypes = dict(re.findall(r"%([\w.\-]+) = \(*([a-z]+\d*)\[", text))
    bits = {name: int(re.sub(r"\D", "", dtype) or 8) for name, dtype in dtypes.items()}
    return Wire.of(
        (one.kind == "all_reduce", one.wire_bytes * one.count, max(bits[one.line] // 8, 1))
        for one in sent(text, devices)
    )


@dataclass(frozen=True)
class Row:
    """A pair on a topology."""

    pair: Pair
    topology: str
    planned: Wire
    compiled: Wire
    seconds: float

    def __str__(self) -> str:
        ours, theirs = self.planned, self.compiled
        sizes = (ours.sums, theirs.sums, ours.rest, theirs.rest)
        cells = "".join(f"{size / MIB:11,.2f}" for size in sizes)
        ratio = theirs.numbers / ours.numbers if ours.numbers else 1.0
        return f"{self.pair.name:24}{self.topology:10}{cells}{ratio:9.4f}{self.seconds:9.1f}"


HEAD = (
    f"{'':34}{'MiB of sums':>22}{'MiB of the rest':>22}{'numbers':>9}{'compile':>9}\n"
    f"{'pair':24}{'chips':10}" + f"{'planned':>11}{'sent':>11}" * 2 + f"{'ratio':>9}{'s':>9}"
)


def measured(pair: Pair, topology: str) -> Row:
    """Compiles a pair for a topology, and counts."""
    function, arguments = jitted(pair, TOPOLOGIES[topology], "tf")
    program = function.lower(*arguments)
    text = program_text(program)
    start = time.perf_counter()
    made = compile_for_tpu(text, topology, program.mesh.size)
    seconds = time.perf_counter() - start
    return Row(pair, topology, planned(program), compiled(made, program.mesh.size), seconds)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pair", action="append", choices=[*PAIRS], help="by default, a few")
    parser.add_argument("--topology", action="append", choices=[*TOPOLOGIES])
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    attention_sizes.DIRECT = 2**62  # scores that are computed at once, as in `gspmd_bytes`
    print(HEAD, flush=True)
    for topology in arguments.topology or TOPOLOGIES:
        for name in arguments.pair or USUAL:
            print(measured(PAIRS[name], topology), flush=True)


if __name__ == "__main__":
    main()
