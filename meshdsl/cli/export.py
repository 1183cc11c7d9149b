"""`meshdsl export`: a checkpoint's parameters as safetensors, or as a folder of Hugging Face."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from absl import flags

from meshdsl.cli.checkpointed import (
    OF_MODEL,
    STDOUT,
    begin_token,
    is_hugging_face,
    model_of,
    stored_params,
)
from meshdsl.cli.flags import Mistake
from meshdsl.cli.mistakes.problems import Problems
from meshdsl.training.checkpointing.weight_files import SUFFIX
from meshdsl.training.data.entries import parse_entries
from meshdsl.training.data.files import matching
from meshdsl.training.data.records import TOKENS
from meshdsl.training.data.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from meshdsl.training.checkpointing.stored_params import StoredParams

# Files of which each group is a tokenizer: of `tokenizers`, of sentencepiece, of words, of bytes.
_TOKENIZERS = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("vocab.txt",),
    ("vocab.json", "merges.txt"),
)


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
    elif values.out == STDOUT:
        problems.add(f"--out=-: weights are files; give a folder, or a name as weights{SUFFIX}")
    elif values.out.endswith(SUFFIX) and values["max_shard_size"].present:
        problems.add(f"--max_shard_size: {values.out} is one file; give a folder for several")
    if not isinstance(values.max_shard_size, Mistake) and values.max_shard_size < 1:
        problems.add("--max_shard_size: needs at least 1 byte")
    foreign = values.format == "hf"
    if foreign and values.out and values.out.endswith(SUFFIX):
        problems.add(f"--format=hf writes a folder: give --out={values.out.removesuffix(SUFFIX)}")
    jax.config.update("jax_platforms", "cpu")  # devices may be at work in a run that goes on
    stored, model, origin, tokenizer = None, None, None, None
    begin, end = None, None
    if foreign and not problems.found:
        stored = stored_params(values, problems, OF_MODEL)
        model = model_of(values, problems)
        origin = values.model if is_hugging_face(values.model) else None
        tokenizer = Path(values.tokenizer).expanduser() if values.tokenizer else None
        readable = _reads_bytes(stored) if tokenizer is None else tokenizer.is_file()
        if origin is None and readable:
            with problems.caught("--tokenizer"):
                read = load_tokenizer(values.tokenizer, values.end_token)
                begin, end = begin_token(values, read, stored), read.end
    problems.check()
    from meshdsl.training.checkpointing.exporting import export

    found = tokenizer if tokenizer is not None and tokenizer.is_file() else None
    how = (values.step, values.dtype, values.max_shard_size, model, origin, values.ema, found)
    done = export(values.workdir, values.out, *how, begin, end)
    files = (
        str(done.files[0]) if len(done.files) == 1 else f"{len(done.files)} files in {values.out}"
    )
    print(f"{done.count:,} parameters after step {done.step:,} in {files}")
    if foreign and not _has_tokenizer(Path(values.out)):
        print(f"no tokenizer is in {values.out}: {_missing(tokenizer, _reads_bytes(stored))}")
    return 0


def _reads_bytes(stored: StoredParams | None) -> bool:
    """Whether a run without a tokenizer makes its tokens of bytes; those of token files are any."""
    data = None if stored is None else stored.config.get("data")
    with suppress(ValueError):  # as a later version may write it
        patterns = [pattern for entry in parse_entries(data) for pattern in entry.patterns]
        # Files may be gone, or elsewhere: then their names decide.
        files = [path for pattern in patterns for path in matching(pattern) or [Path(pattern)]]
        return not files or any(path.suffix not in TOKENS for path in files)
    return False


def _has_tokenizer(out: Path) -> bool:
    """Whether a folder that was just written has the files of one of the usual tokenizers."""
    return any(all((out / file).is_file() for file in files) for files in _TOKENIZERS)


def _missing(tokenizer: Path | None, reads_bytes: bool) -> str:
    if tokenizer is None and reads_bytes:
        return "the run reads bytes"
    if tokenizer is None:
        return "the run reads files of tokens, and was given no tokenizer"
    return f"{tokenizer}, that of the run, is not there; copy it to tokenizer.json"
