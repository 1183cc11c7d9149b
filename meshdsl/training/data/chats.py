"""Chats: documents of whose tokens only the answers are learned, as JSON lines or in Parquet files.

A line is an object with `messages`, which a template makes one text of, or with a text alone, all
of which is learned. A Parquet file has a column `messages`, and none with a text. The answers in
the text of a chat are what the template adds for each message of the assistant after the prompt
that asks for it, so the end of an answer belongs to it.

A token that is not learned has the id `-1 - id`, so that ids alone carry the difference.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshdsl.training.data.records import PARQUET, parquet_rows, parquet_type
from meshdsl.training.data.tokenizers import Tokenizer, WithBegin

JSON_LINES = (".jsonl",)
_MESSAGES, _ASSISTANT = "messages", "assistant"
_MOST = 10  # the most lines in an error


@dataclass(frozen=True)
class ChatFormat:
    """How chats become text.

    Attributes:
        render: messages, and whether an answer is to begin after them -> the text. It raises an
            error if it refuses them.
        identity: a text that differs if the texts may differ.
    """

    render: Callable[[Sequence[Mapping[str, Any]], bool], str]
    identity: str

    @staticmethod
    def of(render: Callable[[Sequence[Mapping[str, Any]], bool], str], source: str) -> ChatFormat:
        """Returns the format of a template, by its own text."""
        return ChatFormat(render, hashlib.sha256(source.encode()).hexdigest())


@dataclass(frozen=True)
class Chat:
    """The text of a line.

    Attributes:
        answers: where the text is learned: (start, end) in characters, in order.
        ends: whether the end of the document is learned, too.
        plain: whether the line has a text, so that no template says what begins it.
    """

    text: str
    answers: tuple[tuple[int, int], ...]
    ends: bool
    plain: bool = False

    def ids(self, tokenizer: Tokenizer) -> NDArray[np.int32]:
        """Returns its tokens; a token is learned if it begins in an answer."""
        ids, starts = tokenizer.located(self.text)
        numbers = np.searchsorted([start for start, _ in self.answers], starts, side="right") - 1
        ends = np.array([end for _, end in self.answers] or [0])
        learned = (numbers >= 0) & (starts < ends[numbers])
        marked = np.where(learned, ids, -1 - ids)
        if self.plain and isinstance(tokenizer, WithBegin):
            marked = np.concatenate([[tokenizer.begin], marked])
        if ids.size and ids[-1] == tokenizer.end:
            return marked.astype(np.int32)
        end = tokenizer.end if self.ends else -1 - tokenizer.end
        return np.append(marked, end).astype(np.int32)


def are_chats(path: Path, column: str = "text") -> bool:
    """Whether a file is of chats: of JSON lines, or of Parquet with `messages` and without a text.

    A file that cannot be read is of none.

    Args:
        column: the name of the column of a Parquet file that would have the text.
    """
    if path.suffix in JSON_LINES:
        return True
    try:
        return path.suffix in PARQUET and _has_messages(path, column, path.stat().st_mtime_ns)
    except (OSError, ValueError):
        return False


def has_plain_text(path: Path, column: str = "text") -> bool:
    """Whether a file of chats has a line with a text; one that cannot be read may have."""
    try:
        return path.suffix in JSON_LINES and any(
            _is_plain(value(), column) for _, value in _lines(path)
        )
    except (OSError, ValueError):  # reading the data says what is wrong
        return True


@lru_cache(maxsize=4096)
def _has_messages(path: Path, column: str, changed: int) -> bool:
    from pyarrow import types

    if column != _MESSAGES and parquet_type(path, column) is not None:
        return False
    kind = parquet_type(path, _MESSAGES)
    if kind is None or not (types.is_list(kind) or types.is_large_list(kind)):
        return False
    message = kind.value_type
    return types.is_struct(message) and {"role", "content"} <= {each.name for each in message}


def read_chats(path: Path, format_: ChatFormat | None, column: str = "text") -> Iterator[Chat]:
    """Yields the chats of a file of JSON lines or of Parquet; see `are_chats`.

    Args:
        format_: of chats. None: there is no template, so lines have texts.
        column: the name of the text of a line without `messages`.

    Raises:
        ValueError: lines are wrong; the first of them are listed.
        OSError: the file cannot be read.
    """
    problems: list[str] = []
    unit, values = ("row", _rows) if path.suffix in PARQUET else ("line", _lines)
    for number, value in values(path):
        try:
            chat = _chat(value(), format_, column)
            chat.text.encode()
        except UnicodeDecodeError:
            problems.append(f"{unit} {number}: it is not UTF-8")
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])
            problems.append(f"{unit} {number}: its text has {half}, which is half of a character")
        except ValueError as error:
            problems.append(f"{unit} {number}: {error}")
        else:
            yield chat
        if len(problems) == _MOST:
            break
    if problems:
        raise ValueError("\n  ".join([f"{path} has {unit}s that are no chats:", *problems]))


_Numbered: TypeAlias = Iterator[tuple[int, Callable[[], Any]]]  # and what reads the value


def _lines(path: Path) -> _Numbered:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, partial(json.loads, line)


def _rows(path: Path) -> _Numbered:
    for number, messages in parquet_rows(path, _MESSAGES):
        if messages is not None:
            yield number, partial(_line_of, messages)


def _line_of(messages: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Returns a row as a line has it: a message there lacks what has no value."""
    there = (message or {} for message in messages)
    return {_MESSAGES: [{k: v for k, v in each.items() if v is not None} for each in there]}


def _chat(line: Any, format_: ChatFormat | None, column: str) -> Chat:
    if _is_plain(line, column):
        text = line[column]
        return Chat(text, ((0, len(text)),), True, plain=True)
    messages = line.get(_MESSAGES) if isinstance(line, dict) else None
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ValueError(
            f'needs {{"{_MESSAGES}": [{{"role": "user", "content": "..."}}, ...]}}, or '
            f'{{"{column}": "..."}}'
        )
    if format_ is None:
        raise ValueError("chats need the tokenizer's template: give one with --chat_template")
    if not any(message["role"] == _ASSISTANT for message in messages):
        raise ValueError("no message is of the assistant, so nothing is learned")
    return _rendered(messages, format_)


def _is_plain(line: Any, column: str) -> bool:
    return isinstance(line, dict) and isinstance(line.get(column), str) and _MESSAGES not in line


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(name), str) for name in ("role", "content")
    )


def _rendered(messages: Sequence[Mapping[str, Any]], format_: ChatFormat) -> Chat:
    def text_of(count: int, answers: bool) -> str:
        try:
            return format_.render(messages[:count], answers)
        except Exception as error:  # the template's own, of any kind
            raise ValueError(f"the chat template refuses the messages: {error}") from None

    text, answers = text_of(len(messages), False), []
    for number, message in enumerate(messages):
        if message["role"] != _ASSISTANT:
            continue
        before = text_of(number, True)
        through = text if number == len(messages) - 1 else text_of(number + 1, False)
        if not (through.startswith(before) and text.startswith(through)):
            raise ValueError(
                f"message {number}: the template changes earlier text when later messages follow, "
                "so where the answer is cannot be told"
            )
        answers.append((len(before), len(through)))
    return Chat(text, tuple(answers), messages[-1]["role"] == _ASSISTANT)
