"""Configuration files: flags as TOML, `meshdsl train --config=run.toml`.

A setting is a flag without its dashes. Numbers, texts, `true` and `false` are TOML's; a list is
what the flag separates by commas, or takes several times; a table is what it writes as pairs:

    model = "gpt_mini"
    steps = 1000
    mesh_shape = {data = 2, model = 4}

    [layout]
    batch = "data"
    "params/embed" = ["data", "model"]

Invariants:
    A flag on the command line replaces the setting of the file.
    What `shown` prints reads back as the same flags.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from meshdsl.tensors.dims import did_you_mean

# What stands between name and value of a pair, between values, and between pairs.
_PAIRS = {
    "layout": (":", "+", "; "),
    "mesh_shape": (":", "x", ","),
    "precision": (":", "+", ","),
    "policy": ("=", "+", ","),
    "model_args": ("=", "+", ","),
    "compiler_flags": ("=", "+", ","),
}
_LISTS = (  # flags that commas separate
    "data batch_ramp split trainable weight_decay_except extra_metrics compiler_flags".split()
)
_NUMBER = re.compile(r"[+-]?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Settings:
    """The settings of a file.

    Attributes:
        arguments: the settings as arguments of the command line.
        places: for each of them its place, `run.toml, line 3`.
        problems: the mistakes in settings.
    """

    arguments: tuple[str, ...]
    places: Mapping[str, str]
    problems: tuple[str, ...]


def read(
    path: str, known: Collection[str], several: Collection[str], given: Collection[str]
) -> Settings:
    """Returns the settings of a file.

    Args:
        path: the file.
        known: the names of all flags.
        several: the flags that the command takes several times.
        given: the flags of the command line, which replace settings.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        settings = tomllib.loads(text)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    arguments, problems = [], []
    places = {name: f"{path}{_line(name, text)}" for name in settings if name not in given}
    for name, place in places.items():
        if name not in known:
            problems.append(f"{place}: unknown setting {name}{did_you_mean(name, known)}")
            continue
        try:
            texts = _texts(name, settings[name], name in several)
        except ValueError as error:
            problems.append(f"{place}: {name} {error}")
        else:
            arguments += [f"--{name}={text}" for text in texts]
    return Settings(tuple(arguments), places, tuple(problems))


def shown(command: str, texts: Mapping[str, list[str]], defaults: Mapping[str, str | None]) -> str:
    """Returns a configuration file.

    Args:
        command: the command that it is for.
        texts: the flags that are set, each with its values.
        defaults: the other flags of the command, as comments; None: they have no default.
    """
    lines = [f"# The flags of a `meshdsl {command}`; use the file with --config=FILE."]
    for name, values in texts.items():
        several = f"[{', '.join(map(_written, values))}]"
        lines.append(f"{name} = {_written(values[0]) if len(values) == 1 else several}")
    lines += ["", "# Defaults."]
    for name, default in defaults.items():
        lines.append(f"# {name}: none" if default is None else f"# {name} = {_written(default)}")
    return "\n".join(lines)


def _line(name: str, text: str) -> str:
    """Returns the place of a setting in its file, as far as a plain search finds it."""
    setting = re.compile(rf"^\s*(\[\s*)?[\"']?{re.escape(name)}[\"']?\s*[].=]")
    for number, line in enumerate(text.splitlines(), 1):
        if setting.match(line):
            return f", line {number}"
    return ""


def _texts(name: str, value: Any, several: bool) -> list[str]:
    """Returns a setting as the texts that its flag is given."""
    if isinstance(value, list) and several:
        return [_text(name, one) for one in value]
    return [_text(name, value)]


def _text(name: str, value: Any) -> str:
    """Returns a setting as the text of its flag."""
    if isinstance(value, list):
        if name not in _LISTS:
            raise ValueError("is a list, which its flag does not take")
        texts = [_plain(one) for one in value]
        if whole := [text for text in texts if "," in text]:
            raise ValueError(f"has a comma in {whole[0]!r}; write it as two values of the list")
        return ",".join(texts)
    if not isinstance(value, dict):
        return _plain(value)
    if name not in _PAIRS:
        tables = ", ".join(_PAIRS)
        raise ValueError(f"is a table, which {tables} alone may be; settings stand at the top")
    between, joint, end = _PAIRS[name]
    pairs = []
    for key, one in value.items():
        if isinstance(one, dict):
            raise ValueError(
                f"has a table {key} in it. If {key} is a setting of its own, write it above "
                f'[{name}]; if it is a scope, quote the whole: "{key}/{next(iter(one), "dim")}"'
            )
        if name == "layout" and not isinstance(one, str | list):
            raise ValueError(
                f"has {key} = {_plain(one)}, which is no rule; other settings stand above [layout]"
            )
        pairs.append(f"{key}{between}{joint.join(map(_plain, _listed(one)))}")
    return end.join(pairs)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _plain(value: Any) -> str:
    """Returns a text, a number, or a truth value as flags write it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise ValueError(f"has a value that no flag takes: {value!r}")


def _written(text: str) -> str:
    """Returns the text of a flag as a value of TOML."""
    if text in ("true", "false") or (_NUMBER.fullmatch(text) and _plain_number(text) == text):
        return text
    # A JSON string is a TOML string but for one character, which JSON leaves as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _plain_number(text: str) -> str:
    """Returns a number as it reads back from TOML: `1e-3` would as 0.001."""
    return str(tomllib.loads(f"x = {text}")["x"])
