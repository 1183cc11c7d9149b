"""`meshdsl generate`: text from a trained model."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from meshdsl.cli.checkpointed import (
    STDOUT,
    Trained,
    begin_token,
    check_mesh_and_out,
    place_of,
    tell_of_context,
)
from meshdsl.cli.flags import Mistake
from meshdsl.cli.mistakes.problems import Problems
from meshdsl.training.reporting.output import give, tell

if TYPE_CHECKING:
    from meshdsl.generation import Place, Sampling, Searcher, Text, Writer
    from meshdsl.models import Model
    from meshdsl.training.data.tokenizers import Tokenizer

_AT_ONCE = 8  # texts, by default
_PROMPT = "prompt"  # the key in lines of JSON
_RESULTS = ("text", "finish", "tokens")  # keys that are written there
# Control characters as a terminal shows them: a model of bytes may write any, and some of them
# change the terminal itself.
_PICTURES = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    **dict.fromkeys(range(0x7F, 0xA0), 0xFFFD),
}


@dataclass(frozen=True)
class Asked:
    """The prompts, and the other fields of each one's line in the file."""

    prompts: list[str]
    lines: list[dict[str, Any]]


def main(values: flags.FlagValues, problems: Problems) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ValueError: the user's mistakes, as many as possible in one error.
    """
    trained = Trained.of(values, problems)
    model, tokenizer = trained.model, trained.tokenizer
    asked = _asked(values, problems)
    sampling = _sampling(values, problems)
    begin = begin_token(values, tokenizer, trained.stored)
    check_mesh_and_out(values, problems)
    problems.check()
    assert model is not None and tokenizer is not None and sampling is not None
    longest = _longest(values, model, tokenizer, asked.prompts, begin, problems)
    problems.check()
    tell_of_context(values, model, longest + values.max_tokens)
    at_once = min(values.batch_size or _AT_ONCE, len(asked.prompts))
    writer = _writer(values, model, longest, at_once, sampling, place_of(values))
    writer.load(trained.load(writer.programs.like, writer.programs.places()))
    stop = [text.replace("\\n", "\n").replace("\\t", "\t") for text in values.stop or ()]
    if values.out:
        _to_file(values, writer, tokenizer, asked, stop, begin)
    else:
        _to_terminal(writer, tokenizer, asked.prompts, stop, begin)
    return 0


def _writer(
    values: flags.FlagValues,
    model: Model,
    longest: int,
    at_once: int,
    sampling: Sampling,
    place: Place,
) -> Writer | Searcher:
    """Returns what writes the texts: by drawing tokens, or by a search with beams."""
    from meshdsl.generation import Searcher, Writer

    sizes = {"prompt_tokens": longest, "new_tokens": values.max_tokens, "batch_size": at_once}
    if values.beams == 1:
        return Writer(model, **sizes, sampling=sampling, place=place)
    beams: dict[str, Any] = {"beams": values.beams, "length_penalty": values.length_penalty}
    return Searcher(model, **sizes, **beams, place=place)


def _texts(
    writer: Writer | Searcher,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    stop: Sequence[str],
    begin: int | None,
    show: Callable[[int, str], None] | None = None,
) -> Iterator[Text]:
    """Yields the text after each prompt; `show` gets the pieces of those that grow by pieces."""
    from meshdsl.generation import Searcher, search_texts, write_texts

    if not isinstance(writer, Searcher):
        yield from write_texts(writer, tokenizer, prompts, stop, show, begin)
        return
    for number, text in enumerate(search_texts(writer, tokenizer, prompts, stop, begin)):
        if show is not None:
            show(number, text.written)
        yield text


def _to_terminal(
    writer: Writer | Searcher,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    stop: Sequence[str],
    begin: int | None,
) -> None:
    """Prints a single text as it is written, and several one after another."""
    single, pictures = len(prompts) == 1, _PICTURES if sys.stdout.isatty() else {}

    def show(number: int, piece: str) -> None:
        sys.stdout.write(piece.translate(pictures))
        sys.stdout.flush()

    if single:
        show(0, prompts[0])
    texts = _texts(writer, tokenizer, prompts, stop, begin, show if single else None)
    for number, text in enumerate(texts, start=1):
        show(number, "\n" if single else f"[{number}] {text.prompt}{text.written}\n")


def _to_file(
    values: flags.FlagValues,
    writer: Writer | Searcher,
    tokenizer: Tokenizer,
    asked: Asked,
    stop: Sequence[str],
    begin: int | None,
) -> None:
    """Writes a line of JSON for each text, to a file or standard output.

    Raises:
        BrokenPipeError: nobody reads standard output.
        ValueError: the lines cannot be written.
    """
    finished: Counter[str] = Counter()
    count = 0
    try:
        with _opened(values.out) as write:
            texts = _texts(writer, tokenizer, asked.prompts, stop, begin)
            for line, text in zip(asked.lines, _tracked(texts, len(asked.prompts)), strict=True):
                write(_line(line, text) + "\n")
                finished[str(text.finish)] += 1
                count += len(text.tokens)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ValueError(f"cannot write {values.out}: {error.strerror}") from error
    reasons = ", ".join(f"{number:,} by {why}" for why, number in sorted(finished.items()))
    total = f"{len(asked.prompts):,} texts, {count:,} {tokenizer.unit}s"
    place = "" if values.out == STDOUT else f" in {values.out}"
    tell(f"{total}{place}; ended {reasons}", error=values.out == STDOUT)


@contextmanager
def _opened(out: str) -> Iterator[Callable[[str], object]]:
    """Yields what writes to standard output, or to a file that is not there yet, at once."""
    if out == STDOUT:
        yield give
        return
    with open(out, "x", encoding="utf-8", buffering=1) as file:  # each line is written at its end
        yield file.write


def _line(given: Mapping[str, Any], text: Text) -> str:
    results = (text.written, text.finish, len(text.tokens))
    written = dict(zip(_RESULTS, results, strict=True))
    return json.dumps({**given, _PROMPT: text.prompt, **written}, ensure_ascii=False)


def _tracked(texts: Iterable[Text], total: int) -> Iterator[Text]:
    """Yields texts, with a bar on a terminal that shows how many are done."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    hidden = not console.is_interactive
    yield from track(texts, "texts", total, console=console, disable=hidden, transient=True)


def _asked(values: flags.FlagValues, problems: Problems) -> Asked:
    """Returns the prompts of `--prompt` or of the file `--prompts`."""
    given = list(values.prompt or ())
    if bool(given) == bool(values.prompts):
        problems.add(
            "--prompt is the text to go on from; give it once or several times, or a file of them "
            "with --prompts"
        )
        return Asked([], [])
    if given:
        return Asked(given, [{} for _ in given])
    lines: list[dict[str, Any]] = []
    with problems.caught("--prompts"):
        lines = _read(Path(values.prompts))
    if values.out and (taken := [key for key in _RESULTS if any(key in line for line in lines)]):
        problems.add(
            f"--prompts: lines of {values.prompts} have {', '.join(taken)}, which --out writes "
            "itself; give these keys other names"
        )
    return Asked([line[_PROMPT] for line in lines], lines)


def _read(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a file of JSON lines, or one for each line of a text.

    Raises:
        ValueError: the file cannot be read, or lines are wrong; all of these are listed.
    """
    try:
        texts = path.expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    if path.suffix not in (".jsonl", ".json"):
        texts = [text for text in texts if text.strip()]
        lines, wrong = [{_PROMPT: text} for text in texts], list[str]()
    else:
        lines, wrong = [], []
        for number, text in enumerate(texts, start=1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
            except ValueError as error:
                wrong.append(f"line {number}: {error}")
                continue
            if isinstance(line, dict) and isinstance(line.get(_PROMPT), str):
                lines.append(line)
            else:
                wrong.append(f'line {number}: needs {{"{_PROMPT}": "..."}}')
    if wrong:
        raise ValueError("\n  ".join([f"{path} is no file of prompts", *wrong[:10]]))
    if not lines:
        raise ValueError(f"{path} has no prompt")
    return lines


def _sampling(values: flags.FlagValues, problems: Problems) -> Sampling | None:
    from meshdsl.generation import Sampling

    chosen = {field.name: getattr(values, field.name) for field in fields(Sampling)}
    if any(isinstance(value, Mistake) for value in chosen.values()):
        return None
    _check_beams(values, problems)
    with problems.caught("sampling"):
        return Sampling(**chosen)
    return None


def _check_beams(values: flags.FlagValues, problems: Problems) -> None:
    """Adds the problems of flags that a search with beams does not follow, or that need one."""
    if isinstance(values.beams, Mistake):
        return
    if values.beams == 1:
        if values["length_penalty"].present:
            problems.add("--length_penalty is for a search: give --beams too, as in --beams=4")
        return
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        flag = values[name]
        if flag.present and not (name == "temperature" and flag.value == 0):
            problems.add(
                f"--{name}: a search with --beams={values.beams} draws nothing; leave it out"
            )


def _longest(
    values: flags.FlagValues,
    model: Model,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    begin: int | None,
    problems: Problems,
) -> int:
    """Returns the number of tokens of the longest prompt; checks that the model has room for it."""
    from meshdsl.generation.reading import check_writes, limits
    from meshdsl.generation.texts import prompt_tokens

    with problems.caught("--model"):
        check_writes(model)
    problems.check()
    assert model.decoding is not None
    tokens = prompt_tokens(tokenizer, prompts, model.decoding.start, begin)
    sizes = [len(each) for each in tokens]
    most, new = limits(model)
    source = "--prompts" if values.prompts else "--prompt"
    unit = tokenizer.unit
    for number, size in enumerate(sizes, start=1):
        if most is not None and size > most:
            which = f"number {number} has" if len(sizes) > 1 else "it has"
            problems.add(
                f"{source}: {which} {size:,} {unit}s, but {values.model} reads at most {most:,}: "
                "shorten it"
            )
    longest = max(sizes)
    problems.check()
    room = new(longest)
    if room is not None and values.max_tokens > room:
        problems.add(
            f"--max_tokens={values.max_tokens}: {values.model} has positions for {room:,} more "
            f"{unit}s after a prompt of {longest:,}; take --max_tokens={room}"
        )
    return longest
