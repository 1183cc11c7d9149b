"""Probabilities of tokens on the wire: OpenAI's objects `logprobs` of completions and of chats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from meshdsl.generation.probabilities import TokenProbability
from meshdsl.generation.serving.engine import WrittenToken
from meshdsl.training.data.tokenizers import Bytes, Tokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_LEAST = -9999.0  # stands for the logarithm of 0, which JSON has no word for


def of_prompt(
    tokenizer: Tokenizer, text: str, tokens: Sequence[TokenProbability], begin: int | None = None
) -> list[WrittenToken]:
    """Returns the tokens of a prompt, with where each begins in its text.

    Args:
        begin: the token that prompts begin with; it is none of the text, unless that has it too.
    """
    numbers = [each.token for each in tokens]
    if numbers[:1] == [begin] and not text.startswith(tokenizer.decode(numbers[:1])):
        first = 1
    else:
        first = 0
    known = [tokenizer.decode(numbers[first:count]).rstrip(_BROKEN) for count in range(len(tokens))]
    return [
        WrittenToken(each, min(len(before), len(text)))
        for each, before in zip(tokens, known, strict=True)
    ]


def of_completion(
    tokenizer: Tokenizer, tokens: Sequence[WrittenToken], likeliest: int
) -> dict[str, Any]:
    """Returns the object of a completion: a list for each property of its tokens.

    Args:
        likeliest: how many of the likeliest tokens it has for each position, beside its own.
    """

    def likely(probability: TokenProbability) -> dict[str, float] | None:
        if probability.log_probability is None:
            return None
        by_text: dict[str, float] = {}
        own = (probability.token, probability.log_probability)
        for token, value in (*probability.likeliest[:likeliest], own):
            by_text.setdefault(tokenizer.decode([token]), _sendable(value))
        return by_text

    return {
        "tokens": [tokenizer.decode([each.probability.token]) for each in tokens],
        "token_logprobs": [
            None if (value := each.probability.log_probability) is None else _sendable(value)
            for each in tokens
        ],
        "top_logprobs": [likely(each.probability) for each in tokens],
        "text_offset": [each.offset for each in tokens],
    }


def of_chat(tokenizer: Tokenizer, tokens: Sequence[WrittenToken], likeliest: int) -> dict[str, Any]:
    """Returns the object of a chat: one for each token; arguments as of `of_completion`."""

    def described(token: int, value: float) -> dict[str, Any]:
        text = tokenizer.decode([token])
        return {"token": text, "logprob": _sendable(value), "bytes": _bytes(tokenizer, token, text)}

    content = []
    for each in (written.probability for written in tokens):
        assert each.log_probability is not None  # only the first token of a prompt has none
        top = [described(*pair) for pair in each.likeliest[:likeliest]]
        content.append({**described(each.token, each.log_probability), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _bytes(tokenizer: Tokenizer, token: int, text: str) -> list[int] | None:
    """Returns the bytes of a token; None if it is a part of a character."""
    if isinstance(tokenizer, Bytes):
        return [token] if token < 256 else []
    return None if _BROKEN in text else list(text.encode())


def _sendable(value: float) -> float:
    return max(value, _LEAST) if math.isfinite(value) else _LEAST
