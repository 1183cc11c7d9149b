"""The OpenAI API on the wire: what a request asks for, and the objects that answer it.

Guarantees:
    A field that is not known, or that asks for what is not there, is refused by name: no request is
    answered as if it had asked for something else.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshdsl.generation.sampling import Sampling
from meshdsl.tensors.dims import did_you_mean

# Fields that change nothing of a text.
_IGNORED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key "
    "parallel_tool_calls".split()
)
# Fields for what is not there, with the values that do not ask for it.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "web_search_options": (),
}
_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_SHARED = {"model", "n", "stream", "stream_options", "stop", "max_tokens", "logprobs", *_SAMPLED}
_PROMPT, _MESSAGES = "prompt", "messages"
_OF_CHATS = {_MESSAGES, "max_completion_tokens", "top_logprobs"}
_OF_COMPLETIONS = {_PROMPT, "echo"}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_STOPS, _STOP_LENGTH = 16, 256
_MOST = {"temperature": 2.0, "repetition_penalty": 100.0}
_LARGEST = 2**31 - 1
RANKED = 20  # the most of the likeliest tokens whose probabilities a request may have
_DEFAULT_TOKENS = 16  # of a completion; a chat goes on to the end of the context


class Refusal(Exception):
    """A request is not answered.

    Attributes:
        status: of HTTP.
        content: the body of the answer, in OpenAI's shape of an error.
        headers: of the answer.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        # A name that is quoted may have half of a surrogate pair, which no answer can carry.
        message, param = _sendable(message), None if param is None else _sendable(param)
        self.content = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _sendable(text: str) -> str:
    return text.encode(errors="replace").decode()


@dataclass(frozen=True)
class Asked:
    """What a request asks for.

    Attributes:
        prompts: texts, or tokens; of a chat, none.
        messages: of a chat.
        most: the most tokens of a text. None: as many as there is room for. 0: only the prompt is
            echoed.
        count: how many texts for each prompt.
        usage: whether a stream ends with the numbers of tokens.
        logprobs: of how many of the likeliest tokens the answer has the probabilities, beside its
            own. None: it has none.
        echo: whether a text begins with its prompt.
    """

    prompts: Sequence[str | Sequence[int]]
    messages: Sequence[Mapping[str, Any]]
    sampling: Sampling
    most: int | None
    count: int
    stop: Sequence[str]
    stream: bool
    usage: bool
    logprobs: int | None = None
    echo: bool = False


def read_object(body: bytes) -> dict[str, Any]:
    """Returns the object of a body.

    Raises:
        Refusal: it is no JSON, or another value of JSON.
    """

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is no number of JSON")

    try:
        value = json.loads(body, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Refusal(f"the body is not JSON: {reason[:200]}") from None
    if not isinstance(value, dict):
        raise Refusal("the body needs to be an object of JSON")
    return value


def read_request(fields: Mapping[str, Any], chat: bool, model: str) -> Asked:
    """Returns what a request asks for.

    Args:
        fields: of its body.
        chat: whether it is of /v1/chat/completions.
        model: the name of the model that answers.

    Raises:
        Refusal: a field is wrong, or asks for what is not there.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    _check_names(fields, chat)
    asked_model = _text(fields, "model", model)
    if asked_model != model:
        raise no_model(asked_model, model)
    options = _object(fields, "stream_options")
    stream = _truth(fields, "stream")
    if options and not stream:
        raise Refusal("stream_options is for stream=true", "stream_options")
    for name in options:
        if name not in ("include_usage", "include_obfuscation"):
            raise Refusal(f"stream_options has no {name[:50]!r}", "stream_options")
    echo = False if chat else _truth(fields, "echo")
    most = _whole(fields, "max_tokens", 0 if echo else 1, None if chat else _DEFAULT_TOKENS)
    if chat:
        most = _whole(fields, "max_completion_tokens", 1, most)
    return Asked(
        prompts=[] if chat else _prompts(fields),
        messages=_messages(fields) if chat else [],
        sampling=_sampling(fields),
        most=most,
        count=_whole(fields, "n", 1, 1, 128),
        stop=_stop(fields),
        stream=stream,
        usage=_truth(options, "include_usage"),
        logprobs=_logprobs(fields, chat),
        echo=echo,
    )


def _logprobs(fields: Mapping[str, Any], chat: bool) -> int | None:
    """Returns of how many of the likeliest tokens the probabilities are asked for, if they are."""
    if not chat:
        value = fields.get("logprobs", False)
        return None if value is False else _whole(fields, "logprobs", 0, None, RANKED)
    asked, count = _truth(fields, "logprobs"), _whole(fields, "top_logprobs", 0, 0, RANKED)
    if count and not asked:
        raise Refusal("top_logprobs is for logprobs=true", "top_logprobs")
    return count if asked else None


def no_model(asked: str, model: str) -> Refusal:
    """Returns the refusal of a request for another model than the one that is served."""
    message = f"the model {asked[:200]!r} is not here: this server has {model!r}"
    return Refusal(message, "model", status=404, code="model_not_found")


def _check_names(fields: Mapping[str, Any], chat: bool) -> None:
    known = _SHARED | (_OF_CHATS if chat else _OF_COMPLETIONS)
    for name, value in fields.items():
        if name in known or name in _IGNORED:
            continue
        if name not in _NEUTRAL:
            hint = did_you_mean(name[:50], sorted(known))
            raise Refusal(f"there is no field {name[:50]!r}{hint}", name[:50])
        if not any(_same(value, neutral) for neutral in _NEUTRAL[name]):
            raise Refusal(f"{name} is not supported; leave it out", name)


def _same(value: Any, other: Any) -> bool:
    """Whether two values of JSON are equal; to Python, false and 0 are."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _sampling(fields: Mapping[str, Any]) -> Sampling:
    chosen: dict[str, Any] = {}
    for name in _SAMPLED:
        if name == "seed":
            # Without a seed, each request has another text.
            chosen[name] = _whole(fields, name, -(2**63), secrets.randbits(63), 2**64 - 1)
            chosen[name] %= 2**64
        elif name == "top_k":
            chosen[name] = max(_whole(fields, name, -1, 0) or 0, 0)  # some say -1 for all
        elif name in fields:
            chosen[name] = _number(fields, name, _MOST.get(name, 1.0))
    try:
        return Sampling(**chosen)
    except ValueError as error:
        name = str(error).partition("=")[0]
        raise Refusal(str(error), name) from None


def _prompts(fields: Mapping[str, Any]) -> list[str | Sequence[int]]:
    value = fields.get(_PROMPT)
    if isinstance(value, str) or (value and isinstance(value, list) and _is_whole(value[0])):
        value = [value]
    if not isinstance(value, list) or not value:
        raise Refusal("prompt is the text to go on from, or a list of texts or of tokens", _PROMPT)
    for each in value:
        if isinstance(each, list):
            if not each or not all(_is_whole(token) and 0 <= token <= _LARGEST for token in each):
                raise Refusal("tokens of a prompt are whole numbers from 0, at least one", _PROMPT)
        else:
            _check_text(each, _PROMPT)
    return value


def _messages(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    value = fields.get(_MESSAGES)
    if not isinstance(value, list) or not value:
        raise Refusal('messages is a list of {"role": "user", "content": "..."}', _MESSAGES)
    return [_message(each, f"{_MESSAGES}[{number}]") for number, each in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or value.get("role") not in _ROLES:
        raise Refusal(f"{where} needs a role, one of {', '.join(_ROLES)}", where)
    content = value.get("content")
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text":
                raise Refusal(f"{where}: a part of its content is no text", where)
            texts.append(_check_text(part.get("text"), where))
        content = "".join(texts)
    _check_text(content, where)
    name = value.get("name")
    named = {} if name is None else {"name": _check_text(name, where)}
    for other in value:
        known = ("role", "content", "name", "refusal", "annotations")
        if other not in known and value[other] is not None:
            raise Refusal(f"{where}: {other[:50]} is not supported", where)
    return {"role": value["role"], "content": content, **named}


def _stop(fields: Mapping[str, Any]) -> list[str]:
    value = fields.get("stop", [])
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or len(value) > _STOPS:
        raise Refusal(f"stop is a text, or a list of up to {_STOPS}", "stop")
    for each in value:
        if not 1 <= len(_check_text(each, "stop")) <= _STOP_LENGTH:
            raise Refusal(f"a stop text has 1 to {_STOP_LENGTH} characters", "stop")
    return value


def _check_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise Refusal(f"{where} needs to be a text", where)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Refusal(f"{where} has half of a surrogate pair, which is no text", where) from None
    return value


def _text(fields: Mapping[str, Any], name: str, default: str) -> str:
    return _check_text(fields.get(name, default), name)


def _object(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = fields.get(name, {})
    if not isinstance(value, dict):
        raise Refusal(f"{name} needs to be an object", name)
    return value


def _truth(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise Refusal(f"{name} needs to be true or false", name)
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(
    fields: Mapping[str, Any], name: str, least: int, default: Any, most: int = _LARGEST
) -> Any:
    value = fields.get(name, default)
    if value is default:
        return default
    if not _is_whole(value) or not least <= value <= most:
        raise Refusal(f"{name} needs to be a whole number from {least} to {most}", name)
    return value


def _number(fields: Mapping[str, Any], name: str, most: float) -> float:
    value = fields[name]
    if not (_is_whole(value) or isinstance(value, float)) or not 0 <= value <= most:
        raise Refusal(f"{name} needs to be a number from 0 to {most:g}", name)
    return float(value)


@dataclass(frozen=True)
class Answer:
    """The objects that answer one request.

    Attributes:
        model: its name.
        chat: whether the request is of /v1/chat/completions.
        created: when, in seconds since 1970.
        identity: of the request.
    """

    model: str
    chat: bool
    created: int
    identity: str

    def all(
        self,
        texts: Sequence[str],
        reasons: Sequence[str],
        usage: Mapping[str, int],
        logprobs: Sequence[Any],
    ) -> dict[str, Any]:
        """Returns the answer with all texts, why each has ended, and how likely its tokens are."""
        choices = [
            {
                "index": index,
                **self._whole(text),
                "logprobs": probabilities,
                "finish_reason": _reason(reason),
            }
            for index, (text, reason, probabilities) in enumerate(
                zip(texts, reasons, logprobs, strict=True)
            )
        ]
        name = "chat.completion" if self.chat else "text_completion"
        return {**self._head(name), "choices": choices, "usage": usage}

    def first(self, index: int) -> dict[str, Any] | None:
        """Returns the chunk that a text of a chat begins with; a completion has none."""
        if not self.chat:
            return None
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def piece(
        self, index: int, text: str, finish: str | None, logprobs: Any = None
    ) -> dict[str, Any]:
        """Returns the chunk for a piece of a text, and why the text has ended, if it has."""
        if not self.chat:
            return self._chunk(index, {"text": text}, finish, logprobs)
        return self._chunk(index, {"delta": {"content": text} if text else {}}, finish, logprobs)

    def usage(self, usage: Mapping[str, int]) -> dict[str, Any]:
        """Returns the chunk with the numbers of tokens."""
        return {**self._head(self._chunks), "choices": [], "usage": usage}

    @property
    def _chunks(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(
        self, index: int, content: dict[str, Any], finish: str | None, logprobs: Any = None
    ) -> dict[str, Any]:
        reason = None if finish is None else _reason(finish)
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head(self._chunks), "choices": [choice]}

    def _head(self, name: str) -> dict[str, Any]:
        identity = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.identity}"
        return {"id": identity, "object": name, "created": self.created, "model": self.model}

    def _whole(self, text: str) -> dict[str, Any]:
        if not self.chat:
            return {"text": text}
        return {"message": {"role": "assistant", "content": text, "refusal": None}}


def _reason(finish: str) -> str:
    """Returns OpenAI's word for why a text has ended."""
    return "length" if finish == "length" else "stop"


def usage_of(prompts: Collection[int], written: Collection[int]) -> dict[str, int]:
    """Returns the numbers of tokens of prompts, and of texts."""
    read, made = sum(prompts), sum(written)
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
