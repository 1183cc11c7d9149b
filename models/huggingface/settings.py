"""The settings of a `config.json`, read so that one error lists all that does not fit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_REQUIRED = object()


class Settings:
    """Reads settings by name and collects problems: `problems` of what is missing or unusual."""

    def __init__(self, values: Mapping[str, Any], tokenizer: Path | None = None) -> None:
        self.values = values
        self.tokenizer = tokenizer
        self.problems: list[str] = []

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns a setting; null counts as missing. Without a default, it must be there."""
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            self.problems.append(f"{name}: missing")
            return 1  # of a kind that goes on without errors until all problems are known
        return default

    def whole(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns a whole number of at least 1, or the default."""
        value = self.get(name, default)
        if self.values.get(name) is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            self.problems.append(f"{name}={value!r}: needs a whole number of at least 1")
            return 1
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns a number, or the default."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float | type(None)):
            self.problems.append(f"{name}={value!r}: needs a number")
            return 1.0
        return value

    def choice(self, name: str, choices: Mapping[str, Any], default: str) -> Any:
        """Returns what stands for one of some texts."""
        value = self.get(name, default)
        if value not in choices:
            listed = ", ".join(choices)
            self.problems.append(f"{name}={value!r}: meshdsl has {listed} for this family")
            return next(iter(choices.values()))
        return choices[value]

    def only(self, name: str, usual: Any, also: Sequence[Any] = ()) -> None:
        """Checks that a setting is missing or as usual."""
        value = self.values.get(name)
        if value is not None and value != usual and value not in also:
            self.problems.append(f"{name}={value!r}: meshdsl has only {usual!r} for this family")

    def token(self, *texts: str) -> int | None:
        """Returns the number of the first added token of the tokenizer that is one of the texts."""
        if self.tokenizer is None:
            return None
        try:
            added = json.loads(self.tokenizer.read_text(encoding="utf-8"))["added_tokens"]
            return next((int(one["id"]) for one in added if one["content"] in texts), None)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.problems.append(f"{self.tokenizer} cannot be read: {error!r}")
            return None
