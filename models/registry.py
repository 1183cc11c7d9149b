"""Models by name: registered ones, folders of Hugging Face, and the user's own."""

from __future__ import annotations

import inspect
from pathlib import Path

from meshdsl.models.huggingface import Folder, is_folder
from meshdsl.models.model import Model
from meshdsl.models.named import MODELS
from meshdsl.models.own import attribute_of
from meshdsl.tensors.dims import did_you_mean

NAMES = tuple(MODELS)
"""The names that `load` and `--model` know, beside models of your own."""


def load(name: str, overrides: str = "") -> Model:
    """Returns a model.

    `load("gpt_mini")`, `load("gpt2_small", "layers=8,embed=512")`.

    Args:
        name: a registered name, a folder of Hugging Face with its `config.json`,
            `my_package.my_models:tiny`, or `my_models.py:tiny`; the attribute is a Model or a
            function without arguments that returns one.
        overrides: changes of configuration fields.

    Raises:
        ValueError: unknown name, folder, module, file or attribute (choices shown), an attribute
            that is no model, or overrides that do not fit; all of these are told.

    Examples:
        >>> from meshdsl.models import load
        >>> model = load("gpt2_small", "layers=8,embed=512,heads=8")
        >>> model.config.layers, model.config.embed
        (8, 512)
    """
    if name in MODELS:
        model = MODELS[name].model(name)
    elif is_folder(name) or Path(name).expanduser().is_dir():
        model = Folder.read(name).model
    elif ":" in name:
        model = _own(name)
    else:
        raise ValueError(
            f"unknown model {name!r}{did_you_mean(name, NAMES) or '.'} Choose from "
            f"{', '.join(NAMES)}, or give your own as my_package.my_models:name or "
            "my_models.py:name, or the path of a folder of Hugging Face"
        )
    return model.with_overrides(overrides)


def _own(name: str) -> Model:
    model = attribute_of(name)
    if inspect.isfunction(model):
        signature = inspect.signature(model)
        try:
            signature.bind()
        except TypeError:
            raise ValueError(
                f"{name}{signature} needs arguments; it should be a meshdsl.models.Model, "
                "or a function without arguments that returns one"
            ) from None
        model = model()
    if not isinstance(model, Model):
        raise ValueError(
            f"{name} is a {type(model).__name__}; it should be a meshdsl.models.Model, or a "
            "function without arguments that returns one"
        )
    return model
