"""Chats: messages as the text that a model has learned to answer, by a template of Jinja.

The template is that of Hugging Face's tokenizers, beside `tokenizer.json`. It runs in Jinja's
sandbox, which keeps it from files and from Python's objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from meshdsl.training.data.tokenizers import Tokenizer


class Unfit(Exception):
    """The template refuses messages."""


class Template(Protocol):
    """Makes the text of messages, up to where the answer begins."""

    def __call__(self, messages: Sequence[Mapping[str, Any]], answers: bool = True) -> str:
        """Returns the text.

        Args:
            answers: whether an answer is to begin after the messages.

        Raises:
            Unfit: the template refuses them.
        """


def template_beside(tokenizer: str | Path) -> Path | None:
    """Returns the file with the template of a tokenizer's file, if there is one."""
    folder = Path(tokenizer).expanduser().parent
    if (file := folder / "chat_template.jinja").is_file():
        return file
    file = folder / "tokenizer_config.json"
    return file if file.is_file() and "chat_template" in _configuration(file) else None


def load_template(path: str | Path, today: datetime | None = None) -> Template:
    """Returns the template of a file: Jinja, or a `tokenizer_config.json`.

    Args:
        today: the date for templates that ask for it. None: that of the clock.

    Raises:
        ValueError: the library or the file is missing, or there is no template in it.
    """
    return _compiled(*_read(path), path, today)


def identity(path: str | Path) -> str:
    """Returns a text that differs if the texts of a template file may differ.

    Raises:
        ValueError: the file is missing, or there is no template in it.
    """
    return json.dumps(_read(path), sort_keys=True)


def _read(path: str | Path) -> tuple[str, dict[str, str]]:
    """Returns the text of a template, and the special tokens that it may name."""
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    names: dict[str, str] = {}
    beside = file if file.suffix == ".json" else file.parent / "tokenizer_config.json"
    if beside.is_file():
        configuration = _configuration(beside)
        names = {n: _token(configuration.get(n)) for n in ("bos_token", "eos_token", "unk_token")}
        if file.suffix == ".json":
            text = _default(configuration.get("chat_template"), path)
    return text, names


def stop_tokens_of(tokenizer: Tokenizer, path: str | Path) -> frozenset[int]:
    """Returns the tokens that end an answer, beside the tokenizer's own, by the files beside it.

    `generation_config.json` has their numbers, `tokenizer_config.json` the text of one.
    """
    folder = Path(path).expanduser().parent
    stop_tokens: set[int] = set()
    if (file := folder / "generation_config.json").is_file():
        numbers = _configuration(file).get("eos_token_id")
        numbers = numbers if isinstance(numbers, list) else [numbers]
        stop_tokens |= {number for number in numbers if isinstance(number, int)}
    if (file := folder / "tokenizer_config.json").is_file():
        text = _token(_configuration(file).get("eos_token"))
        tokens = [int(token) for token in tokenizer.encode([text.encode()])[0]]
        if text and len(tokens) == 2:  # it, and the end of the document
            stop_tokens.add(tokens[0])
    return frozenset(stop_tokens)


def bos_token_of(tokenizer: Tokenizer, path: str | Path) -> int | None:
    """Returns the token that begins texts, by `tokenizer_config.json` beside it; None: no token."""
    file = Path(path).expanduser().parent / "tokenizer_config.json"
    text = _token(_configuration(file).get("bos_token")) if file.is_file() else ""
    tokens = [int(token) for token in tokenizer.encode([text.encode()])[0]]
    return tokens[0] if text and len(tokens) == 2 else None  # it, and the end of the document


def _configuration(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    return value if isinstance(value, dict) else {}


def _token(value: Any) -> str:
    """Returns the text of a special token, which some files have as an object."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""


def _default(value: Any, path: str | Path) -> str:
    """Returns the template of a configuration, which may have several by name."""
    if isinstance(value, list):
        named = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
        value = named.get("default")
    if not isinstance(value, str):
        raise ValueError(f"{path} has no chat_template")
    return value


def _compiled(
    text: str, names: Mapping[str, str], path: str | Path, today: datetime | None
) -> Template:
    try:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError("templates of chats need Jinja: pip install 'meshdsl[serve]'") from None

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})  # Jinja's escapes for HTML

    # The settings and the names that `transformers` gives to templates.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: (
        datetime.now() if today is None else today
    ).strftime(form)
    try:
        template = environment.from_string(text)
    except TemplateError as error:
        raise ValueError(f"{path} is no template of Jinja: {error}") from None

    def render(messages: Sequence[Mapping[str, Any]], answers: bool = True) -> str:
        given = [dict(message) for message in messages]
        try:
            return template.render(
                messages=given, tools=None, documents=None, add_generation_prompt=answers, **names
            )
        except (TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise Unfit(str(error)) from None

    return render
