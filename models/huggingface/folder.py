"""A folder of Hugging Face: which family it is of, and the model that its `config.json` says.

Files are data: nothing in them is executed, and code that a folder brings along is not read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshdsl.models.huggingface.families import FAMILIES
from meshdsl.models.huggingface.family import Family
from meshdsl.models.huggingface.settings import Settings
from meshdsl.models.model import Model
from meshdsl.tensors.dims import did_you_mean

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
_NEEDS = re.compile(r"needs (\w+)=(\S+), not \S+")  # of `describing.misfits`
_BATCH, _LENGTH = 8, 1024  # sensible defaults for training


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder with a `config.json`."""
    return (Path(path).expanduser() / CONFIG).is_file()


@dataclass(frozen=True)
class Folder:
    """A folder of Hugging Face: `Folder.read("models/gpt2").model`.

    Attributes:
        path: the folder.
        family: that of its `model_type`.
        model: what its `config.json` configures.
        settings: the contents of `config.json`.
    """

    path: Path
    family: Family
    model: Model
    settings: dict[str, Any]

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Folder:
        """Returns what is known of a folder; reads no weights.

        Raises:
            ValueError: there is no `config.json`, it is of no known family, or it asks for what
                models here do not have; all of this is listed.
        """
        folder = Path(path).expanduser()
        values = _values(folder)
        family = _family(folder, values)
        settings = Settings(values, _tokenizer(folder))
        config, problems = None, settings.problems
        if quantised := values.get("quantization_config"):
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            problems.append(
                f"quantization_config: the weights are quantised ({method}); take those in "
                "bfloat16, or write such with transformers"
            )
        try:
            config = family.configure(settings)
        except (ValueError, TypeError, AttributeError, KeyError, ZeroDivisionError) as error:
            if not problems:
                problems.append(str(error))
        if problems:
            listed = "\n  ".join(problems)
            raise ValueError(f"{folder / CONFIG} is of no model that there is here\n  {listed}")
        assert config is not None
        name = folder.absolute().name
        model = family.make(name, config, _BATCH, min(_LENGTH, config.max_length))
        return Folder(folder, family, model, values)

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer of the `tokenizers` library in the folder, if there is one."""
        return _tokenizer(self.path)


def _tokenizer(folder: Path) -> Path | None:
    file = folder / TOKENIZER
    return file if file.is_file() else None


def _values(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has no {CONFIG}, which says what model its weights are of; download it "
            "beside them"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file} is no object of settings")
    return values


def _family(folder: Path, values: dict[str, Any]) -> Family:
    kind = values.get("model_type")
    if kind in FAMILIES:
        return FAMILIES[kind]
    known = ", ".join(FAMILIES)
    named = values.get("architectures") or []
    what = f"model_type={kind!r}" if kind else "no model_type"
    classes = f" ({', '.join(map(str, named))})" if isinstance(named, list) and named else ""
    raise ValueError(
        f"{folder / CONFIG} has {what}{classes}{did_you_mean(str(kind), FAMILIES) or '.'} "
        f"The families that can be read are {known}; for others, write a table as in "
        "models/huggingface/families"
    )


def family_for(config: Any, name: str | None = None) -> tuple[Family, dict[str, Any]]:
    """Returns a family whose models a configuration can be, and its `config.json`.

    Args:
        name: the family's; None: the first that fits.

    Raises:
        ValueError: there is none; it says why not, of each.
    """
    reasons: dict[tuple[str, ...], list[str]] = {}  # families, by what they cannot have
    for family in [FAMILIES[name]] if name is not None else FAMILIES.values():
        settings, problems = family.describe(config)
        if not problems:
            kind = {"architectures": [family.architecture], "model_type": family.name}
            return family, {**kind, **settings}
        reasons.setdefault(tuple(problems), []).append(family.name)
    nearest = sorted(reasons, key=lambda problems: (_changes(problems) is None, len(problems)))
    lines = [f"{', '.join(reasons[problems])}: {'; '.join(problems)}" for problems in nearest]
    head = "no family of Hugging Face has such models"
    if changes := _changes(nearest[0]):
        head += (
            f'; one that is trained with --model_args="{changes}" is of {reasons[nearest[0]][0]}'
        )
    raise ValueError("\n  ".join([head, *lines]))


def _changes(problems: Sequence[str]) -> str | None:
    """Returns the changes of a configuration after which a family has it; None: unknown."""
    matches = [_NEEDS.fullmatch(problem) for problem in problems]
    found = [f"{match[1]}={match[2].lower()}" for match in matches if match is not None]
    return ",".join(found) if len(found) == len(problems) else None
