"""Peak memory of spatial convolutions with few features: the plan against the TPU compiler's.

Printed are MiB of one chip of v5e:2x4. The compiler's figures stand in `COMPILED`; `--compile`
compiles the steps again (two and four minutes of processor time), which needs libtpu.

Run: python -m tests.benchmarks.image_memory [--compile]
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import meshdsl as md
from meshdsl.layouts.hardware import hardware
from meshdsl.layouts.topologies import Topology
from meshdsl.lowering.backends.compiler_flags import RECOMMENDED
from meshdsl.lowering.program import SpmdProgram
from meshdsl.models.unet3d import UNet3DConfig, unet3d
from meshdsl.optim import AdamW
from meshdsl.training.state import create, spec_of
from meshdsl.training.step import make_train_step

MIB = 2**20
MACHINE = "v5e:2x4"
COMPILED = {"8 features": 596.7, "16 features": 783.0}  # MiB, by libtpu 0.0.52
_SIZES = {
    "8 features": (UNet3DConfig(filters=8, levels=2, groups=4), "data:2,rows:4"),
    "16 features": (UNet3DConfig(filters=16, levels=3, groups=4), "data:4,rows:2"),
}


def lowered(name: str) -> SpmdProgram:
    """Returns the step of a U-Net on four volumes of 64 x 64 x 64, stored as on the machine."""
    config, mesh = _SIZES[name]
    model, optimizer = unet3d(name, config, 4, 64), AdamW(1e-3)
    step = make_train_step(model.loss, optimizer)
    function = md.jit(step, mesh, "batch:data; depth:rows", donate="state")
    program = function.lower(spec_of(create(model.init, optimizer)), model.batch_spec(4, 64))
    return replace(program, tile=hardware(Topology.parse(MACHINE).name).tile)


def main() -> None:
    """Prints a line for each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    for name, known in COMPILED.items():
        program, compiler = lowered(name), known
        if arguments.compile:
            from meshdsl.lowering.backends.jax.ahead import compile_ahead

            topology = Topology.parse(MACHINE)
            compiler = compile_ahead(program, topology, RECOMMENDED[topology.name]).peak_bytes / MIB
        plan, gapless = program.peak_bytes / MIB, replace(program, tile=None).peak_bytes / MIB
        print(
            f"{name}: planned {plan:.0f}, compiler {compiler:.0f}: {plan / compiler:.2f} "
            f"(without gaps {gapless:.0f}: {gapless / compiler:.2f})"
        )


if __name__ == "__main__":
    main()
