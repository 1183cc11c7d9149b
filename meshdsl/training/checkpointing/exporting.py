"""The parameters of a checkpoint as safetensors, on any machine: no mesh, no model, no optimizer.

The checkpoint is only read, also while a run goes on that writes others beside it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshdsl.training.checkpointing.adapters import merging
from meshdsl.training.checkpointing.stored_params import Best, StoredParams
from meshdsl.training.checkpointing.weight_files import check_free
from meshdsl.training.checkpointing.weights import SHARD, write_hugging_face, write_weights
from meshdsl.training.state import spec_of


@dataclass(frozen=True)
class Exported:
    """The result of an export.

    Attributes:
        step: the checkpoint's step.
        count: the number of elements of all parameters.
        files: the written files.
    """

    step: int
    count: int
    files: tuple[Path, ...]


def export(
    workdir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    step: int | Best | None = None,
    dtype: Any = None,
    max_shard_size: int = SHARD,
    model: Any = None,
    origin: str | os.PathLike[str] | None = None,
    ema: bool = False,
    tokenizer: str | os.PathLike[str] | None = None,
    begin: int | None = None,
    end: int | None = None,
) -> Exported:
    """Writes the parameters of a run's checkpoint: `export("runs/first", "weights")`.

    Adapters of `models.with_lora` are merged into their weights.

    Args:
        workdir: the run's folder.
        out, dtype, max_shard_size: as in `save_weights`.
        step: the checkpoint's step. None: the latest undamaged one. `best`: the one with the least
            `eval_loss`.
        model: the `meshdsl.models.Model` of the run; then a folder of Hugging Face is written, for
            `transformers` and what reads its folders.
        origin: with a model, the folder of Hugging Face that it came from, whose tokenizer is to go
            out with it.
        ema: whether to write the averages that `optim.Ema` has kept, in place of parameters.
        tokenizer: with a model, a `tokenizer.json` that goes out where the origin has none.
        begin, end: with a model, the tokens that begin and end a document; `config.json` names them
            where there is no origin.

    Raises:
        ValueError: there is no such checkpoint, or it is damaged; no family of Hugging Face has
            such models; or the files cannot be written.
    """
    target = Path(out).absolute()
    check_free(target)
    stored = StoredParams.of(workdir, step, ema)
    specs, fetch = merging(stored.specs, stored.read)
    if model is not None:
        stored.check(spec_of(model.init))
        how = (dtype, max_shard_size, origin, tokenizer, begin, end)
        files = write_hugging_face(target, model, specs, fetch, *how)
    else:
        files = write_weights(target, specs, fetch, dtype, max_shard_size, stored.step)
    count = sum(each.dims.volume for each in specs.values())
    return Exported(stored.step, count, tuple(files))
