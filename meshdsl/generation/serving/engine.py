"""Engine: a thread that writes the texts of many requests, with a fixed number of rows.

A request waits in a queue, its prompt is read chunk by chunk between the steps of other texts, and
its text is written in a free row. Where the writer's texts share pages and these run out, the text
that was submitted last is put back at the head of the queue; it is read again, and goes on, later.

Guarantees:
    A text is the one that `write_texts` writes of its prompt alone, with the same sampling.
    Requests are begun in the order in which they are submitted. A text is put back only if others
    are written that were submitted before it.
    Every request that is taken gets a last event, unless it is cancelled.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from meshdsl.generation.continuous import ReadPrompt, RowWriter
from meshdsl.generation.probabilities import StepProbabilities, TokenProbability
from meshdsl.generation.reading import check_prompts
from meshdsl.generation.sampling import Sampling
from meshdsl.generation.texts import Text

_CLOSING = 10.0  # seconds that a step may take to end

Finish = Literal["end", "stop", "length", "failed"]


@dataclass(frozen=True)
class WrittenToken:
    """A token of a text.

    Attributes:
        offset: the characters of the text that are known before it.
    """

    probability: TokenProbability
    offset: int


@dataclass(frozen=True)
class Event:
    """What has happened to a text.

    Attributes:
        piece: what is written of it since the last event; may be empty.
        finish: why it has ended: as `Text.finish`, or "failed" (the engine has stopped). None: it
            goes on.
        tokens: those that are written since the last event, if the request reports them.
    """

    piece: str
    finish: Finish | None = None
    tokens: tuple[WrittenToken, ...] = ()


@dataclass(eq=False)
class Request:
    """A text that is asked for.

    Attributes:
        prompt: its tokens.
        text: what is written.
        sampling: how tokens are chosen.
        most: the most tokens that are written. 0: the prompt is read alone, for its probabilities.
        listener: gets every event, on the thread of the engine.
        number: of the text, as of `Writer.write`.
        cancelled: nobody waits for the text any more; the engine then drops it. Any thread may say
            so.
        written: how many tokens have been written, the one that ends the text included.
        reports: whether events have the tokens of the text, with their probabilities.
        scored: whether the tokens of the prompt are to get theirs.
        read: these, once the prompt is read.
    """

    prompt: Sequence[int]
    text: Text
    sampling: Sampling
    most: int
    listener: Callable[[Event], None]
    number: int = 0
    cancelled: bool = False
    written: int = 0
    reports: bool = False
    scored: bool = False
    read: list[TokenProbability] = field(default_factory=list, repr=False)
    _fresh: list[WrittenToken] = field(default_factory=list, repr=False)
    _begun: int = field(default=0, repr=False)  # tokens whose step has begun
    _order: int = field(default=0, repr=False)  # in which requests were submitted

    def _add(self, token: int, probability: TokenProbability | None = None) -> None:
        """Adds the next token to the text, and tells the listener what is new."""
        self.written += 1
        offset = self.text.known
        piece = self.text.add(token)
        if self.text.finish is None and self.written == self.most:
            piece += self.text.close("length")
        if probability is not None and self.text.finish != "end":  # no text has its end token
            self._fresh.append(WrittenToken(probability, offset))
        if piece or self.text.finish:
            # What may still become a stop string, or is one, is none of the text.
            certain = self.text.finish in ("end", "length")
            most = len(self.text.written)
            fresh = tuple(each for each in self._fresh if certain or each.offset < most)
            self._fresh = self._fresh[len(fresh) :]
            self.listener(Event(piece, self.text.finish, fresh))

    @property
    def _over(self) -> bool:
        return self.cancelled or self.text.finish is not None


# The tokens of a step, their probabilities, and whose rows it has.
_Step: TypeAlias = tuple[Any, Any, list[Request | None]]


class Full(Exception):
    """As many requests wait as may wait."""


class Stopped(Exception):
    """The engine takes no requests any more."""


class Engine:
    """Writes the texts of requests on a thread of its own.

        engine = Engine(writer, waiting=64)
        engine.start()
        engine.submit([Request(prompt, Text("", tokenizer), Sampling(), 50, print)])

    Args:
        writer: has parameters.
        waiting: how many requests may wait for a row, or for pages.

    Attributes:
        error: what has stopped the engine, if an error has.
        on_error: is then called, on the engine's thread, after the last events.
    """

    def __init__(self, writer: RowWriter, waiting: int = 64) -> None:
        self.writer, self.waiting = writer, waiting
        self.error: BaseException | None = None
        self.on_error: Callable[[], None] | None = None
        self._queue: deque[Request] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._rows: list[Request | None] = [None] * writer.rows
        self._submitted = itertools.count()
        self._open: dict[Request, None] = {}  # those taken from the queue that are not over
        self._reading: tuple[Request, Iterator[ReadPrompt], ReadPrompt | None] | None = None
        self._ahead: _Step | None = None
        self._thread = threading.Thread(target=self._run, name="meshdsl engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stops the thread; texts that are not finished fail. A device that hangs is left."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(_CLOSING)

    def submit(self, requests: Sequence[Request]) -> None:
        """Takes requests: all of them or none.

        Raises:
            Full: too many requests wait.
            Stopped: the engine is closed, or an error has stopped it.
            ValueError: a prompt is empty, or the writer has no room for it or for its text.
        """
        for request in requests:
            check_prompts([request.prompt], 1, self.writer.context)
            room = self.writer.room(len(request.prompt))
            if not 0 <= request.most <= room:
                raise ValueError(
                    f"{request.most} tokens after a prompt of {len(request.prompt)}: the writer "
                    f"has room for 0 to {room}"
                )
        with self._changed:
            if self._closed:
                raise Stopped
            waiting = [request for request in self._queue if not request.cancelled]
            at_work = self._reading  # the thread may end with it at any time
            reading = [] if at_work is None else [at_work[0]]
            asked = [*reading, *waiting, *requests]
            begun = [(each.prompt, each.text.tokens) for each in asked[: self._rows.count(None)]]
            # A free row is of use to a text only if there are pages for it.
            # No text ends that makes room: what is refused now would be refused for ever.
            idle = len(asked) == len(requests) and not any(self._rows)
            if len(asked) - self.writer.joining(begun) > self.waiting and not idle:
                raise Full
            for request in requests:
                request._order = next(self._submitted)
            self._queue = deque([*waiting, *requests])
            self._changed.notify()

    @property
    def free(self) -> int:
        """How many rows no text has."""
        return self._rows.count(None) - (self._reading is not None)

    def counts(self) -> dict[str, int]:
        """Returns how many texts are written and wait; how many pages there are, and are free."""
        with self._changed:
            waiting = sum(not request.cancelled for request in self._queue)
        counts = {"running": len(self._rows) - self.free, "waiting": waiting}
        table = self.writer.table
        return (
            counts if table is None else {**counts, "pages": table.pages, "free_pages": table.free}
        )

    def _run(self) -> None:
        try:
            while self._has_work():
                self._turn()
        except BaseException as error:  # the device is gone, or a program has failed on it
            self.error = error
        with self._changed:
            self._closed = True
            left = [*self._queue]
            self._queue.clear()
        for request in dict.fromkeys([*self._open, *left]):
            if not request._over:
                request.listener(Event("", "failed"))
        if self.error is not None and self.on_error is not None:
            self.on_error()

    def _has_work(self) -> bool:
        """Waits for work; returns whether there is any, and not the end."""
        with self._changed:
            while not self._closed:
                if self._queue or self._reading or self._ahead or any(self._rows):
                    return True
                self._changed.wait()
            return False

    def _turn(self) -> None:
        """Reads a chunk of a prompt, begins a step, and takes the tokens of the step before it."""
        self._open = {request: None for request in self._open if not request._over}
        self._drop_ended()
        self._read()
        if self.writer.lacking:
            # Of a text that is put back, all tokens have to be known.
            self._take_tokens(self._ahead)
            self._ahead = None
            self._drop_ended()
            while self.writer.lacking:
                self._put_back()
        before, self._ahead = self._ahead, None
        if any(self._rows):
            self._ahead = self.writer.step(), self.writer.probabilities, list(self._rows)
            for row, request in enumerate(self._rows):
                if request is not None:
                    request._begun += 1
                    if request._begun == request.most:
                        self._leave(row)
        self._take_tokens(before)

    def _drop_ended(self) -> None:
        for row, request in enumerate(self._rows):
            if request is not None and request._over:
                self._leave(row)

    def _leave(self, row: int) -> Request:
        """Frees a row, and returns the request that had it."""
        request, self._rows[row] = self._rows[row], None
        assert request is not None
        self.writer.leave(row)
        return request

    def _put_back(self) -> None:
        """Puts the text that was submitted last back; also one that is read and came later."""
        last = max(filter(None, self._rows), key=lambda request: request._order)
        back = [self._leave(self._rows.index(last))]
        if self._reading is not None and self._reading[0]._order > last._order:
            back.append(self._reading[0])
            self._reading = None
        with self._changed:
            self._queue.extendleft(reversed(back))

    def _take_tokens(self, step: _Step | None) -> None:
        """Waits for the tokens of a step, and tells the listeners."""
        if step is None:
            return
        tokens, probabilities, rows = np.asarray(step[0])[:, 0], None, step[2]
        if any(request is not None and request.reports for request in rows):
            probabilities = StepProbabilities.of(tokens, step[1])
        for row, (request, token) in enumerate(zip(rows, tokens, strict=True)):
            if request is not None and not request._over:
                reported = probabilities if request.reports else None
                request._add(int(token), reported.at(row) if reported else None)

    def _read(self) -> None:
        """Reads a chunk of a prompt, if a row is free for its text."""
        if self._reading is None:
            with self._changed:
                while self._queue and self._queue[0].cancelled:
                    self._queue.popleft()
                if not self._queue or None not in self._rows:
                    return
                request = self._queue.popleft()
                self._open[request] = None
                pieces = self.writer.read(
                    request.prompt,
                    request.sampling,
                    request.number,
                    reports=request.reports,
                    scored=request.scored and not request.written,
                    written=request.text.tokens,
                )
                self._reading = request, pieces, None
        request, pieces, latest = self._reading
        if request.cancelled:
            self._reading = None
            return
        read = next(pieces, None)
        if read is not None:
            self._reading = request, pieces, read
            return
        assert latest is not None  # a prompt has a token
        goes_on = request.most > request.written + 1
        if goes_on and not self.writer.fits(latest):
            return  # until other texts have ended
        self._reading, request._begun = None, request.written + 1
        if goes_on:
            row = self._rows.index(None)
            self.writer.join(latest, row)
            self._rows[row] = request
        if request.scored and not request.written:
            request.read = latest.prompt_probabilities(request.prompt)
        if request.most == 0:
            request.listener(Event(request.text.close("length"), "length"))
            return
        request._add(latest.first, latest.first_probability() if request.reports else None)
