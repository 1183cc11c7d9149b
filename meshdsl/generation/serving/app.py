"""The application of ASGI: OpenAI's completions and chats over HTTP, for an `Engine`.

Guarantees:
    What is refused has the status and the body of an error of OpenAI.
    A text whose reader has gone is not written on.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from meshdsl.generation.serving.chat import Template, Unfit
from meshdsl.generation.serving.engine import (
    Engine,
    Event,
    Full,
    Request,
    Stopped,
    WrittenToken,
)
from meshdsl.generation.serving.logprobs import of_chat, of_completion, of_prompt
from meshdsl.generation.serving.wire import (
    Answer,
    Asked,
    Refusal,
    no_model,
    read_object,
    read_request,
    usage_of,
)
from meshdsl.generation.texts import Text, prompt_tokens
from meshdsl.training.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Service:
    """What is served.

    Attributes:
        engine: is started with the application, and closed with it.
        tokenizer: of the model.
        model: its name for clients.
        template: of chats. None: chats are refused.
        stop_tokens: tokens that end an answer of a chat, beside the tokenizer's own.
        begin: the token that prompts begin with, as of `prompt_tokens`. The text of a chat has its
            own, by the template.
        body_bytes: the most bytes of a request's body.
        body_seconds: the time in which a body must have come.
        created: when the model was, for clients: in seconds since 1970.
    """

    engine: Engine
    tokenizer: Tokenizer
    model: str
    template: Template | None = None
    stop_tokens: frozenset[int] = frozenset()
    begin: int | None = None
    body_bytes: int = 2**20
    body_seconds: float = 30.0
    created: int = field(default_factory=lambda: int(time.time()))


def application(service: Service) -> Starlette:
    """Returns the application: /v1/completions, /v1/chat/completions, /v1/models and /health."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.engine.start()
        yield
        await run_in_threadpool(service.engine.close)

    server = _Server(service)
    return Starlette(
        routes=[
            Route("/v1/completions", server.completions, methods=["POST"]),
            Route("/v1/chat/completions", server.chat, methods=["POST"]),
            Route("/v1/models", server.models),
            Route("/v1/models/{name:path}", server.one_model),
            Route("/health", server.health),
        ],
        exception_handlers={
            Refusal: _refused,
            HTTPException: _http_error,
            ClientDisconnect: _gone,
            Exception: _failed,
        },
        lifespan=lifespan,
    )


async def _refused(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return JSONResponse(error.content, error.status, headers=error.headers)


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refusal = Refusal(f"{request.method} {request.url.path}: {error.detail}")
    return JSONResponse(refusal.content, error.status_code, headers=error.headers)


async def _gone(request: HttpRequest, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it


async def _failed(request: HttpRequest, error: Exception) -> Response:
    return JSONResponse(_server_error().content, 500)


def _server_error() -> Refusal:
    return Refusal("the server has failed", status=500, kind="server_error")


class _Server:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, http: HttpRequest) -> Response:
        engine = self._service.engine
        if engine.error is not None:
            return JSONResponse({"status": "failed"}, 503)
        return JSONResponse({"status": "ok", **engine.counts()})

    async def models(self, http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def one_model(self, http: HttpRequest) -> Response:
        name = http.path_params["name"]
        if name != self._service.model:
            raise no_model(name, self._service.model)
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        service = self._service
        return {
            "id": service.model,
            "object": "model",
            "created": service.created,
            "owned_by": "meshdsl",
        }

    async def completions(self, http: HttpRequest) -> Response:
        return await self._answer(http, chat=False)

    async def chat(self, http: HttpRequest) -> Response:
        return await self._answer(http, chat=True)

    async def _answer(self, http: HttpRequest, chat: bool) -> Response:
        body = await self._body(http)
        fields = read_object(body)
        asked = read_request(fields, chat, self._service.model)
        self._check_number(asked)
        self._check_probabilities(asked)
        # Long texts take a while to split into tokens: other requests go on meanwhile.
        prompts = await run_in_threadpool(self._prompts, asked)
        events: asyncio.Queue[tuple[int, Event] | None] = asyncio.Queue()
        requests = self._requests(asked, prompts, events)
        self._submit(requests)
        answer = Answer(self._service.model, chat, int(time.time()), secrets.token_hex(12))
        contents = _Contents(self._service, asked, chat, requests)
        if asked.stream:
            stream = _stream(http, answer, contents, events)
            return StreamingResponse(
                stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"}
            )
        return await _together(http, answer, contents, events)

    async def _body(self, http: HttpRequest) -> bytes:
        """Returns the body of a request.

        Raises:
            Refusal: it is too long, comes too slowly, or is not said to be JSON.
        """
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a page of another site may send other kinds unasked
            raise Refusal("the body needs Content-Type: application/json", status=415)
        most, body = self._service.body_bytes, bytearray()
        too_long = Refusal(f"the body is longer than {most:,} bytes", status=413)
        with suppress(ValueError):
            if int(http.headers.get("content-length", "0")) > most:
                raise too_long
        try:
            async with asyncio.timeout(self._service.body_seconds):
                async for piece in http.stream():
                    body += piece
                    if len(body) > most:
                        raise too_long
        except TimeoutError:
            raise Refusal("the body did not come in time", status=408) from None
        return bytes(body)

    def _check_number(self, asked: Asked) -> None:
        """Raises Refusal if more texts are asked for than may ever wait, before any is prepared."""
        engine = self._service.engine
        wanted = max(len(asked.prompts), 1) * asked.count
        if wanted > (most := engine.waiting + engine.writer.rows):
            raise Refusal(f"{wanted:,} texts in one request; at most {most:,}", "n")

    def _check_probabilities(self, asked: Asked) -> None:
        """Raises Refusal if the engine has no probabilities that are asked for."""
        if asked.logprobs is None:
            return
        writer = self._service.engine.writer
        if asked.logprobs > writer.ranked or not writer.ranked:
            raise Refusal(
                f"this server has the probabilities of {writer.ranked} tokens", "logprobs"
            )
        if asked.echo and writer.programs.encodes:
            raise Refusal("an encoder reads the prompt: its tokens have no logprobs", "echo")

    def _prompts(self, asked: Asked) -> list[tuple[str, Sequence[int]]]:
        """Returns the text and the tokens of each prompt.

        Raises:
            Refusal: the template refuses the messages, or a prompt does not fit.
        """
        service = self._service
        prompts = asked.prompts
        if asked.messages:
            if service.template is None:
                raise Refusal(
                    "the tokenizer of this model has no chat template: use /v1/completions, or "
                    "start the server with --chat_template",
                    "messages",
                )
            try:
                prompts = [service.template(asked.messages)]
            except Unfit as error:
                raise Refusal(
                    f"the chat template refuses the messages: {error}", "messages"
                ) from None
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        start = service.engine.writer.start
        # The template of a chat has the token that begins it.
        begin = None if asked.messages else service.begin
        encoded = iter(prompt_tokens(service.tokenizer, texts, start, begin))
        encoded_prompts: list[tuple[str, Sequence[int]]] = []
        for prompt in prompts:
            text, tokens = (prompt, next(encoded)) if isinstance(prompt, str) else ("", prompt)
            self._check_fits(tokens, asked)
            encoded_prompts.append((text, tokens))
        return encoded_prompts

    def _check_fits(self, tokens: Sequence[int], asked: Asked) -> None:
        param = "messages" if asked.messages else "prompt"
        writer, most = self._service.engine.writer, self._service.tokenizer.vocabulary
        if max(tokens) >= most:
            raise Refusal(f"tokens are below {most:,}, but a prompt has {max(tokens):,}", param)
        room, wanted = writer.room(len(tokens)), 1 if asked.most is None else asked.most
        if room < wanted or len(tokens) > writer.context:
            raise Refusal(
                f"this model's context is {writer.context:,} tokens, too few for a prompt of "
                f"{len(tokens):,} and {wanted:,} more",
                param,
                code="context_length_exceeded",
            )

    def _requests(
        self,
        asked: Asked,
        prompts: Sequence[tuple[str, Sequence[int]]],
        events: asyncio.Queue[tuple[int, Event] | None],
    ) -> list[Request]:
        service, loop = self._service, asyncio.get_running_loop()

        def listener(number: int) -> Callable[[Event], None]:
            def listen(event: Event) -> None:
                with suppress(RuntimeError):  # the loop is closed: nobody waits
                    loop.call_soon_threadsafe(events.put_nowait, (number, event))

            return listen

        rows = [prompt for prompt in prompts for _ in range(asked.count)]
        return [
            Request(
                prompt=tokens,
                text=Text(
                    text,
                    service.tokenizer,
                    asked.stop,
                    service.stop_tokens if asked.messages else frozenset(),
                ),
                sampling=asked.sampling,
                most=service.engine.writer.room(len(tokens)) if asked.most is None else asked.most,
                listener=listener(number),
                number=number,
                reports=asked.logprobs is not None,
                scored=asked.logprobs is not None and asked.echo,
            )
            for number, (text, tokens) in enumerate(rows)
        ]

    def _submit(self, requests: Sequence[Request]) -> None:
        try:
            self._service.engine.submit(requests)
        except Full:
            raise Refusal(
                "too many requests wait; try again later",
                status=429,
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
            ) from None
        except Stopped:
            raise Refusal(
                "the server stops", status=503, kind="server_error", headers={"Retry-After": "10"}
            ) from None


@dataclass(frozen=True)
class _Contents:
    """What readers get of the texts of a request: their prompts, and probabilities of tokens.

    Attributes:
        requests: those of the texts, in order.
    """

    service: Service
    asked: Asked
    chat: bool
    requests: Sequence[Request]

    def prompt(self, number: int) -> str:
        """Returns the text that comes before what is written."""
        request = self.requests[number]
        if not self.asked.echo:
            return ""
        return request.text.prompt or self.service.tokenizer.decode(request.prompt)

    def logprobs(self, number: int, tokens: Sequence[WrittenToken], first: bool) -> Any:
        """Returns the probabilities of the next tokens of a text, and of its prompt before them.

        Args:
            first: whether they are the first ones.
        """
        if self.asked.logprobs is None:
            return None
        tokenizer = self.service.tokenizer
        if self.chat:
            return of_chat(tokenizer, tokens, self.asked.logprobs)
        prompt = self.prompt(number)
        read = self.requests[number].read if first else []
        shifted = [WrittenToken(each.probability, each.offset + len(prompt)) for each in tokens]
        of_both = [*of_prompt(tokenizer, prompt, read, self.service.begin), *shifted]
        return of_completion(tokenizer, of_both, self.asked.logprobs)


@asynccontextmanager
async def _watched(
    http: HttpRequest,
    requests: Sequence[Request],
    events: asyncio.Queue[tuple[int, Event] | None],
) -> AsyncIterator[None]:
    """Cancels requests at the end of a block, and at once when their reader goes away."""

    async def watch() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        events.put_nowait(None)

    watching = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        watching.cancel()
        for request in requests:
            request.cancelled = True


async def _together(
    http: HttpRequest,
    answer: Answer,
    contents: _Contents,
    events: asyncio.Queue[tuple[int, Event] | None],
) -> Response:
    """Returns the answer with all texts."""
    requests = contents.requests
    reasons: dict[int, str] = {}
    tokens: list[list[WrittenToken]] = [[] for _ in requests]
    async with _watched(http, requests, events):
        while len(reasons) < len(requests):
            happened = await events.get()
            if happened is None:
                raise ClientDisconnect
            number, event = happened
            if event.finish == "failed":
                raise _server_error()
            tokens[number] += event.tokens
            if event.finish is not None:
                reasons[number] = event.finish
    numbers = range(len(requests))
    texts = [contents.prompt(number) + requests[number].text.written for number in numbers]
    ordered = [reasons[number] for number in numbers]

    def logprobs() -> list[Any]:
        return [contents.logprobs(number, tokens[number], first=True) for number in numbers]

    probabilities = await run_in_threadpool(logprobs)
    usage = _usage(contents.asked, requests)
    return JSONResponse(answer.all(texts, ordered, usage, probabilities))


async def _stream(
    http: HttpRequest,
    answer: Answer,
    contents: _Contents,
    events: asyncio.Queue[tuple[int, Event] | None],
) -> AsyncIterator[bytes]:
    """Yields the events of server-sent events that answer a request."""
    left, begun = len(contents.requests), set[int]()
    async with _watched(http, contents.requests, events):
        for number in range(left):
            if (first := answer.first(number)) is not None:
                yield _sent(first)
        while left:
            happened = await events.get()
            if happened is None:
                return
            number, event = happened
            if event.finish == "failed":
                yield _sent(_server_error().content)
                return
            left -= event.finish is not None
            is_first = number not in begun
            begun.add(number)
            piece = contents.prompt(number) * is_first + event.piece
            logprobs = None
            if contents.asked.logprobs is not None:
                logprobs = await run_in_threadpool(
                    contents.logprobs, number, event.tokens, is_first
                )
            yield _sent(answer.piece(number, piece, event.finish, logprobs))
        if contents.asked.usage:
            yield _sent(answer.usage(_usage(contents.asked, contents.requests)))
        yield b"data: [DONE]\n\n"


def _usage(asked: Asked, requests: Sequence[Request]) -> dict[str, int]:
    prompts = [len(request.prompt) for request in requests[:: asked.count]]
    return usage_of(prompts, [request.written for request in requests])


def _sent(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"
