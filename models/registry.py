"""Models by name: registered ones, and the user's own by module or file."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from meshdsl.models.model import Model
from meshdsl.models.named import MODELS
from meshdsl.tensors.dims import did_you_mean

NAMES = tuple(MODELS)


def load(name: str, overrides: str = "") -> Model:
    """Returns a model.

    `load("gpt_mini")`, `load("gpt2_small", "layers=8,embed=512")`.

    Args:
        name: a registered name, `my_package.my_models:tiny`, or `my_models.py:tiny`; the attribute
            is a Model or a function without arguments that returns one.
        overrides: changes of configuration fields.

    Raises:
        ValueError: unknown name, module, file or attribute (choices shown), an attribute that is no
            model, or overrides that do not fit; all of these are told.
    """
    if name in MODELS:
        model = MODELS[name].model(name)
    elif ":" in name:
        model = _own(name)
    else:
        raise ValueError(
            f"unknown model {name!r}{did_you_mean(name, NAMES) or '.'} Choose from "
            f"{', '.join(NAMES)}, or give your own as my_package.my_models:name or "
            "my_models.py:name"
        )
    return model.with_overrides(overrides)


def _own(name: str) -> Model:
    place, _, attribute = name.rpartition(":")
    module = _from_file(place) if place.endswith(".py") else _from_package(place)
    if not hasattr(module, attribute):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise ValueError(
            f"{place} has no {attribute!r}{did_you_mean(attribute, public) or '.'} "
            f"It has {', '.join(public) or 'nothing public'}"
        )
    found = getattr(module, attribute)
    if inspect.isfunction(found):
        signature = inspect.signature(found)
        try:
            signature.bind()
        except TypeError:
            raise ValueError(
                f"{attribute}{signature} needs arguments; {name} should be a meshdsl.models.Model, "
                "or a function without arguments that returns one"
            ) from None
        found = found()
    if not isinstance(found, Model):
        raise ValueError(
            f"{name} is a {type(found).__name__}; it should be a meshdsl.models.Model, or a "
            "function without arguments that returns one"
        )
    return found


def _from_file(place: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {place} (looked for {path})")
    # Not `path.stem`: a file called random.py must not take the place of the library's.
    spec = importlib.util.spec_from_file_location(f"model_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _importable_from(path.parent):
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return module


def _from_package(place: str) -> ModuleType:
    with _importable_from(Path.cwd()):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if not f"{place}.".startswith(f"{error.name}."):
                raise
            hint = f"; for a file, write {place}.py" if Path(f"{place}.py").is_file() else ""
            raise ValueError(f"there is no module {error.name!r} for {place}{hint}") from None


@contextmanager
def _importable_from(folder: Path) -> Iterator[None]:
    """Lets modules in `folder` be imported, as Python does for the script it runs."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
