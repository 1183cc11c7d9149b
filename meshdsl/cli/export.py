"""`meshdsl export`: a checkpoint's parameters as safetensors."""

from __future__ import annotations

import jax
from absl import flags

from meshdsl.cli.flags import Mistake
from meshdsl.cli.mistakes.problems import Problems
from meshdsl.training.checkpointing.weight_files import SUFFIX


def main(values: flags.FlagValues, problems: Problems) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ValueError: there is no such checkpoint, or the files cannot be written.
    """
    if not values.workdir:
        problems.add("--workdir says whose checkpoint to export, as in --workdir=runs/first")
    if not values.out:
        problems.add(
            f"--out says where to, as in --out=weights (a folder) or --out=weights{SUFFIX}"
        )
    elif values.out.endswith(SUFFIX) and values["max_shard_size"].present:
        problems.add(f"--max_shard_size: {values.out} is one file; give a folder for several")
    if not isinstance(values.max_shard_size, Mistake) and values.max_shard_size < 1:
        problems.add("--max_shard_size: needs at least 1 byte")
    problems.check()
    jax.config.update("jax_platforms", "cpu")  # devices may be at work in a run that goes on
    from meshdsl.training.checkpointing.exporting import export

    done = export(values.workdir, values.out, values.step, values.dtype, values.max_shard_size)
    files = (
        str(done.files[0]) if len(done.files) == 1 else f"{len(done.files)} files in {values.out}"
    )
    print(f"{done.count:,} parameters after step {done.step:,} in {files}")
    return 0
