"""The engine: texts of requests are those written alone; requests wait, leave and fail in order."""

import queue
import threading

import numpy as np
import pytest

from meshdsl.generation import Place, RowWriter, Sampling, Writer, write_texts
from meshdsl.generation.serving import Engine, Event, Full, Request, Stopped
from meshdsl.generation.texts import Text
from meshdsl.training.data.tokenizers import Bytes
from tests.generation.test_writer import PLACES, SIZES, trained

SAMPLINGS = [
    Sampling(temperature=0),
    Sampling(seed=3),
    Sampling(0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.3, seed=3),
]
CONTEXT = 24
MODEL = ("gpt_mini", SIZES.replace("vocab=61", "vocab=128"))


class Short(Bytes):
    """Bytes, one of which the model writes often enough, ends a text."""

    end = 70


class Slow:
    """A writer whose steps wait until the test lets them."""

    def __init__(self, writer):
        self.writer, self.go = writer, threading.Semaphore(0)

    def __getattr__(self, name):
        return getattr(self.writer, name)

    def step(self):
        assert self.go.acquire(timeout=60)
        return self.writer.step()


def writer_of(rows=3, backend="numpy", **options):
    model, params = trained(*MODEL)
    place = Place(backend=backend)
    writer = RowWriter(model, context=CONTEXT, rows=rows, place=place, chunk=4, **options)
    writer.load(params)
    return writer


@pytest.fixture
def engine():
    made = []

    def make(rows=3, waiting=64, slow=False, backend="numpy", **options):
        writer = writer_of(rows, backend, **options)
        writer = Slow(writer) if slow else writer
        made.append(Engine(writer, waiting))
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        if isinstance(each.writer, Slow):
            each.writer.go.release(10_000)
        each.close()


def asked(prompt, most, sampling=SAMPLINGS[0], number=0, stop=()):
    """Returns a request, and the queue of its events."""
    events = queue.Queue()
    text = Text(prompt, Bytes(), stop)
    return Request([*prompt.encode()], text, sampling, most, events.put, number), events


def until_end(events):
    """Returns the pieces of a text, and why it ended."""
    pieces = []
    while True:
        event = events.get(timeout=60)
        pieces.append(event.piece)
        if event.finish:
            return "".join(pieces), event.finish


@pytest.mark.long
@pytest.mark.parametrize("cache_tokens", [None, 32], ids=["own caches", "few pages"])
@pytest.mark.parametrize("tokenizer", [Bytes(), Short()], ids=["bytes", "short"])
def test_each_text_is_the_one_written_alone(engine, tokenizer, cache_tokens, monkeypatch):
    put_back = []
    monkeypatch.setattr("meshdsl.generation.continuous.PAGE", 4)
    usual = Engine._put_back

    def watched(engine):
        begun = [*filter(None, engine._rows), *(engine._reading or ())[:1]]
        usual(engine)
        back = [*engine._queue][: len(begun) - len([*filter(None, engine._rows)])]
        back = [request for request in back if request in begun]
        put_back.extend(back)
        stay = {*begun} - {*back}
        assert stay and all(a._order < b._order for a in stay for b in back)
        assert [r._order for r in engine._queue] == sorted(r._order for r in engine._queue)

    monkeypatch.setattr(Engine, "_put_back", watched)
    rng = np.random.default_rng(0)
    running, requests = engine(cache_tokens=cache_tokens), []
    for number in range(18):
        prompt = "".join(map(chr, rng.integers(97, 123, rng.integers(1, 12))))
        request, events = asked(
            prompt, int(rng.integers(1, 13)), SAMPLINGS[number % 3], number, stop=["a", "zz"]
        )
        request.text.tokenizer = tokenizer
        requests.append((request, events))
        running.submit([request])
    finishes = set()
    for at, sampling in enumerate(SAMPLINGS):
        model, params = trained(*MODEL)
        sizes = {"prompt_tokens": 12, "new_tokens": 12, "chunk": 4}
        writer = Writer(model, sampling=sampling, place=PLACES["one device"], **sizes)
        writer.load(params)
        for request, events in requests[at::3]:
            writer.new_tokens = request.most
            (text,) = write_texts(
                _Numbered(writer, request.number), tokenizer, [request.text.prompt], ["a", "zz"]
            )
            assert until_end(events) == (text.written, text.finish)
            assert request.text.tokens == text.tokens
            finishes.add(text.finish)
    assert finishes >= {"length", "stop" if tokenizer.end == 0 else "end"}
    pages = {} if cache_tokens is None else {"pages": 8, "free_pages": 8}
    assert running.counts() == {"running": 0, "waiting": 0, **pages}
    assert bool(put_back) == bool(pages)


@pytest.mark.long
def test_texts_that_join_at_once_are_the_same_on_jax(engine):
    """There, the buffers of programs are given up while the host still waits for their tokens."""
    written = []
    for backend in ("numpy", "jax"):
        running, requests = engine(backend=backend), []
        for number in range(8):
            requests.append(asked("ab" * (1 + number % 3), 4 + number, SAMPLINGS[1], number))
        running.submit([request for request, _ in requests])
        written.append([until_end(events) for _, events in requests])
    assert written[0] == written[1]


class _Numbered:
    """A writer whose only text has another number than 0."""

    def __init__(self, writer, number):
        self.inner, self.number = writer, number
        self.sizes, self.start = writer.sizes, writer.start

    def write(self, prompts, numbers):
        return self.inner.write(prompts, [self.number])


def test_requests_beyond_the_queue_are_refused_all_or_none(engine):
    running = engine(rows=1, waiting=2, slow=True)
    first, events = asked("ab", 5)
    running.submit([first])
    assert events.get(timeout=60).piece  # it has the row
    more = [asked("cd", 2)[0] for _ in range(3)]
    with pytest.raises(Full):
        running.submit(more)
    running.submit(more[:2])
    with pytest.raises(Full):
        running.submit(more[2:])
    more[0].cancelled = True  # makes room
    running.submit(more[2:])
    assert running.counts() == {"running": 1, "waiting": 2}


def test_free_rows_without_pages_take_no_requests(engine, monkeypatch):
    monkeypatch.setattr("meshdsl.generation.continuous.PAGE", 4)
    running = engine(rows=3, waiting=1, slow=True, cache_tokens=CONTEXT)
    first, events = asked("a" * 17, 5)
    running.submit([first])
    assert events.get(timeout=60).piece  # it has 5 of the 6 pages, and two rows are free
    more = [asked("b" * 5, 2) for _ in range(2)]
    with pytest.raises(Full):
        running.submit([request for request, _ in more])
    running.submit([more[0][0]])
    with pytest.raises(Full):  # also once its prompt is read
        running.submit([more[1][0]])
    running.writer.go.release(10)
    assert until_end(more[0][1])[1] == "length"
    running.submit([more[1][0]])
    assert until_end(more[1][1])[1] == "length"


def test_an_idle_engine_takes_more_texts_than_have_pages(engine, monkeypatch):
    """They would be refused for ever: no other text ends."""
    monkeypatch.setattr("meshdsl.generation.continuous.PAGE", 4)
    running = engine(rows=3, waiting=1, cache_tokens=CONTEXT)
    requests = [asked("a" * 17, 2) for _ in range(3)]
    running.submit([request for request, _ in requests])
    assert [until_end(events)[1] for _, events in requests] == ["length"] * 3


def test_a_text_that_nobody_waits_for_gives_up_its_row(engine):
    running = engine(rows=1, slow=True)
    first, events = asked("ab", 20)
    second, others = asked("cd", 1)
    running.submit([first])
    assert events.get(timeout=60).piece
    running.submit([second])
    first.cancelled = True
    running.writer.go.release(2)
    assert until_end(others)[1] == "length"
    assert first.written < 5


def test_a_request_is_cancelled_while_it_waits(engine):
    running = engine(rows=1)
    first, events = asked("ab", 3)
    first.cancelled = True
    second, others = asked("cd", 3)
    running.submit([first, second])
    assert until_end(others)[1] == "length"
    assert events.empty()


def test_an_error_fails_every_request_and_stops_the_engine(engine):
    running = engine(rows=1, slow=True)
    requests, reported = [asked("ab", 5), asked("cd", 5)], []
    running.on_error = lambda: reported.append(True)
    running.submit([request for request, _ in requests])
    problem = RuntimeError("the device is gone")

    def broken():
        raise problem

    running.writer.writer.step = broken
    running.writer.go.release(1)
    for _, events in requests:
        assert until_end(events)[1] == "failed"
    running.close()
    assert running.error is problem and reported == [True]
    with pytest.raises(Stopped):
        running.submit([asked("ab", 1)[0]])


class _Gone:
    """The tokens of a step that the device never made."""

    def __array__(self, *args, **options):
        raise RuntimeError("the device is gone")


@pytest.mark.parametrize("where", ["join", "step"])
def test_a_text_whose_last_step_fails_or_that_cannot_join_fails(engine, where):
    running = engine(rows=1, slow=True)

    def broken(*args):
        raise RuntimeError("the device is gone")

    setattr(running.writer, where, broken if where == "join" else _Gone)
    request, events = asked("ab", 2)  # its last token is of the first step
    running.submit([request])
    assert until_end(events)[1] == "failed"
    running.close()
    assert isinstance(running.error, RuntimeError)


def test_closing_fails_what_is_not_finished(engine):
    running = engine(rows=1, slow=True)
    (first, events), (second, others) = asked("ab", 20), asked("cd", 1)
    running.submit([first, second])
    assert events.get(timeout=60) == Event(first.text.written)
    closing = threading.Thread(target=running.close)
    closing.start()
    running.writer.go.release(10)
    closing.join(timeout=60)
    assert until_end(events)[1] == until_end(others)[1] == "failed"
    assert running.error is None


def test_what_does_not_fit_is_refused_at_once(engine):
    running = engine()
    for prompt, most, problem in [
        ("", 1, "prompt 0 has 0 tokens; the writer takes 1 to 24"),
        ("a" * 20, 5, "5 tokens after a prompt of 20: the writer has room for 0 to 4"),
        ("a", -1, "-1 tokens after a prompt of 1: the writer has room for 0 to 23"),
    ]:
        with pytest.raises(ValueError) as error:
            running.submit([asked(prompt, most)[0]])
        assert str(error.value) == problem
