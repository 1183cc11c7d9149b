"""`meshdsl evaluate`: loss and perplexity of a trained model on text, or its scores in tasks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import flags
from numpy.typing import NDArray

from meshdsl.cli import job as jobs
from meshdsl.cli.checkpointed import (
    OF_MODEL,
    STDOUT,
    Trained,
    chat_format,
    check_begin_documents,
    check_mesh_and_out,
    place_of,
)
from meshdsl.cli.evaluating import tasks
from meshdsl.cli.mistakes.problems import Problems
from meshdsl.training.data.chats import ChatFormat
from meshdsl.training.data.corpus import has_chats
from meshdsl.training.data.entries import parse_entries
from meshdsl.training.data.files import find
from meshdsl.training.reporting.output import give, tell
from meshdsl.training.reporting.progress import Progress

if TYPE_CHECKING:
    from meshdsl.generation.scoring import Score
    from meshdsl.models import Model
    from meshdsl.training.data import Source
    from meshdsl.training.data.tokenizers import Tokenizer

_PATIENCE = 10.0  # seconds until a line says how much is done, where there is no terminal
_TEXT = {"tokens", "targets"}  # what a batch of text has
_OF_DATA = (
    "data",
    "data_column",
    "split",
    "packing",
    "length",
    "batch_size",
    "precision",
    "chat_template",
)


def main(values: flags.FlagValues, problems: Problems) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ValueError: the user's mistakes, as many as possible in one error.
    """
    if values.tasks is not None:
        scored = tasks.score(values, problems)
        for line in scored.lines(values.model):
            tell(line, error=values.out == STDOUT)
        if values.out:
            _write(values.out, scored.content)
        return 0
    for name in tasks.FLAGS:
        if values[name].present:
            problems.add(f"--{name} is for tasks: name some, as in --tasks=hellaswag")
    from meshdsl.generation.scoring import Scorer

    own = not values["data"].present  # the text that the run has kept from training
    trained = Trained.of(values, problems, (*OF_MODEL, *_OF_DATA))
    stored, model, tokenizer = trained.stored, trained.model, trained.tokenizer
    with problems.caught("--data"):
        find([name for entry in parse_entries(values.data) for name in entry.patterns])
    check_begin_documents(values, problems)
    check_mesh_and_out(values, problems)
    problems.check()
    assert model is not None and tokenizer is not None
    batch_size, length = values.batch_size or model.batch_size, values.length or model.length
    _check_text(values, model, problems)
    chats = chat_format(values, problems) if has_chats(values.data, values.data_column) else None
    if chats is not None and not model.masked:
        problems.add(f"--data: the loss of {values.model} takes no chats")
    problems.check()
    texts = _texts(values, model, tokenizer, length, own, chats)
    scorer = Scorer(
        model,
        batch_size=min(batch_size, *map(len, texts.values())),
        length=length,
        packed=values.packing,
        masked=has_chats(values.data, values.data_column),
        precision=values.precision,
        place=place_of(values),
    )
    scorer.load(trained.load(scorer.like, scorer.places()))
    most = values.eval_batches if values["eval_batches"].present else None
    chosen = {name: _spread(len(source), most, batch_size) for name, source in texts.items()}
    scores = {}
    with Progress(sum(map(len, chosen.values())), "examples", patience=_PATIENCE) as progress:
        for name, source in texts.items():
            scores[name] = scorer.score(source, chosen[name], on_progress=progress.step)
    apart = values.out == STDOUT  # from what is written there
    if stored is not None:
        tell(f"{values.model} after step {stored.step:,}, {stored.folder}", error=apart)
    for name, score in scores.items():
        described = _described(score, tokenizer.unit, len(texts[name]))
        tell(f"{name}: {described}", error=apart)
    if values.out:
        _write(values.out, _content(scores, None if stored is None else stored.step))
    return 0


def _check_text(values: flags.FlagValues, model: Model, problems: Problems) -> None:
    """Checks that the model's batches are text, packed if they are to be."""
    if set(model.batch_spec(1, 2)) != _TEXT:
        problems.add(f"--model: {values.model} is not evaluated on text: its batches are others")
    elif values.packing and not model.packed:
        problems.add(f"--packing: the loss of {values.model} takes no packed documents")
    problems.check()


def _texts(
    values: flags.FlagValues,
    model: Model,
    tokenizer: Tokenizer,
    length: int,
    own: bool,
    chats: ChatFormat | None,
) -> dict[str, Source]:
    """Returns the examples to score, by name: held-out ones of a run's text, or all of other text.

    Raises:
        ValueError: files cannot be read, or there is too little text.
    """
    from meshdsl.training.data import Corpus, DocumentWindows, PackedRows
    from meshdsl.training.data.tokenizers import WithBegin

    corpus = Corpus.read(
        values.data,
        jobs.vocabulary(model),
        WithBegin(tokenizer) if values.begin_documents else tokenizer,
        values.data_column,
        Path(values.data_cache) if values.data_cache else None,
        chats=chats,
    )
    if own:
        splits = corpus.split(length, batch_size=1, ratios=values.split, packing=values.packing)
        parts = {"held-out text": splits.valid, "test text": splits.test}
        return {name: source for name, source in parts.items() if source is not None}
    make = PackedRows.of if values.packing else DocumentWindows.of
    several = len(corpus.components) > 1
    texts: dict[str, Source] = {
        part.name if several else values.data: make(part.documents, length)
        for part in corpus.components
    }
    if short := [name for name, source in texts.items() if not len(source)]:
        raise ValueError(
            f"the text is too short for one example of {length} {tokenizer.unit}s: "
            f"{', '.join(short)}; give more, or a smaller --length"
        )
    return texts


def _spread(examples: int, batches: int | None, batch_size: int) -> NDArray[np.int64]:
    """Returns the examples to score: all, or as many batches of them, spread evenly."""
    if batches is None or batches * batch_size >= examples:
        return np.arange(examples)
    return np.arange(batches * batch_size) * examples // (batches * batch_size)


def _described(score: Score, unit: str, examples: int) -> str:
    part = f" in {score.examples:,} of {examples:,} examples" if score.examples < examples else ""
    return (
        f"loss {score.loss:.4f} nats per {unit}, perplexity {score.perplexity:,.3f}, "
        f"{score.bits:.4f} bits per {unit}; {score.tokens:,} {unit}s{part}"
    )


def _content(scores: Mapping[str, Score], step: int | None) -> dict[str, Any]:
    """Returns what `--out` gets."""
    texts = {
        name: {
            "loss": score.loss,
            "perplexity": score.perplexity,
            "bits_per_token": score.bits,
            "tokens": score.tokens,
        }
        for name, score in scores.items()
    }
    return {"step": step, "texts": texts}


def _write(out: str, content: Mapping[str, Any]) -> None:
    """Writes scores as JSON, to a file or standard output.

    Raises:
        BrokenPipeError: nobody reads standard output.
        ValueError: the scores cannot be written.
    """
    text = json.dumps(content, indent=2) + "\n"
    if out == STDOUT:
        give(text)
        return
    try:
        Path(out).write_text(text)
    except OSError as error:
        raise ValueError(f"cannot write {out}: {error.strerror}") from error
