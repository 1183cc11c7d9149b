"""Texts from tokens: pieces that can be shown at once, and where a text ends.

Guarantees:
    The pieces of a text add up to it. No piece has a part of a character, or a part of a stop
    string.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshdsl.generation.writer import Writer
from meshdsl.training.data.tokenizers import Tokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are not UTF-8, or not complete yet


@dataclass
class Text:
    """A text that a model writes, token by token.

    Attributes:
        prompt: what it follows.
        stop_tokens: tokens that end it, beside the tokenizer's end token.
        tokens: those written, without the one that ended the text.
        written: the text so far, up to what may still change.
        finish: "end" (the tokenizer's end token), "stop" (a stop string), "length" (the
            limit of tokens is reached). None: the text goes on.
    """

    prompt: str
    tokenizer: Tokenizer
    stop: Sequence[str] = ()
    stop_tokens: Collection[int] = ()
    tokens: list[int] = field(default_factory=list)
    written: str = ""
    finish: Literal["end", "stop", "length"] | None = None
    _read: int = 0  # tokens whose characters are all known
    _context: int = 0  # where the tokens begin that are decoded together with later ones
    _pending: str = ""  # the beginning of what may become a stop string

    def add(self, token: int) -> str:
        """Adds the next token; returns the text that is certain with it."""
        if token == self.tokenizer.end or token in self.stop_tokens:
            return self.close("end")
        self.tokens.append(token)
        return self._up_to_stop(self._fresh())

    def close(self, finish: Literal["end", "length"]) -> str:
        """Ends the text; returns the rest of it."""
        piece = self._up_to_stop(self._fresh(last=True), last=True)
        self.finish = self.finish or finish
        return piece

    @property
    def known(self) -> int:
        """How many characters the tokens so far are known to have, stop strings included."""
        return len(self.written) + len(self._pending)

    def _fresh(self, last: bool = False) -> str:
        """Returns the characters that are known since the last call.

        A tokenizer may join neighbours, so tokens are decoded together with those before them.
        """
        known = self.tokenizer.decode(self.tokens[self._context : self._read])
        text = self.tokenizer.decode(self.tokens[self._context :])
        if len(text) <= len(known) or (text.endswith(_BROKEN) and not last):
            return ""
        self._context, self._read = self._read, len(self.tokens)
        return text[len(known) :]

    def _up_to_stop(self, fresh: str, last: bool = False) -> str:
        """Returns new text up to a stop string, or to what may become one."""
        text = self._pending + fresh
        starts = [at for stop in self.stop if (at := text.find(stop)) >= 0]
        if starts:
            text, self._pending, self.finish = text[: min(starts)], "", "stop"
        elif last:
            self._pending = ""
        else:
            pending = max((_overlap(text, stop) for stop in self.stop), default=0)
            text, self._pending = text[: len(text) - pending], text[len(text) - pending :]
        self.written += text
        return text


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of a text that begins a stop string."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)


def prompt_tokens(
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    start: int | None = None,
    begin: int | None = None,
) -> list[list[int]]:
    """Returns the tokens of prompts; an empty one begins after the end of a document.

    Args:
        start: as of `Decoding`. If given, prompts have their end token, as an encoder has learned.
        begin: the token that prompts begin with; one that has it already gets no other.
    """
    tokens = [
        [int(token) for token in (each if start is not None else each[:-1])]
        for each in tokenizer.encode([prompt.encode() for prompt in prompts])
    ]
    if begin is not None:
        return [each if each[:1] == [begin] else [begin, *each] for each in tokens]
    return [each or [tokenizer.end] for each in tokens]


def write_texts(
    writer: Writer,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    stop: Sequence[str] = (),
    show: Callable[[int, str], None] | None = None,
    begin: int | None = None,
) -> Iterator[Text]:
    """Yields the text that follows each prompt, in order.

    Args:
        writer: has parameters, and room for the prompts.
        stop: texts end before the first of these strings.
        show: gets each piece of text as it is written, with the number of its prompt.
        begin: the token that prompts begin with; one that has it already gets no other.
    """
    tokens = prompt_tokens(tokenizer, prompts, writer.start, begin)
    size = writer.sizes.batch
    for first in range(0, len(prompts), size):
        numbers = range(first, min(first + size, len(prompts)))
        texts = [Text(prompts[number], tokenizer, stop) for number in numbers]
        steps = writer.write([tokens[number] for number in numbers], numbers)
        for chosen in steps:
            for number, text, token in zip(numbers, texts, chosen, strict=True):
                if text.finish is None:
                    piece = text.add(int(token))
                    if show is not None and piece:
                        show(number, piece)
            if all(text.finish for text in texts):
                break
        for number, text in zip(numbers, texts, strict=True):
            if text.finish is None and (piece := text.close("length")) and show is not None:
                show(number, piece)
        yield from texts
