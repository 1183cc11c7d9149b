"""The user's own code, by module or file: `my_package.my_models:tiny`, `my_models.py:tiny`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from meshdsl.tensors.dims import did_you_mean


def attribute_of(name: str) -> Any:
    """Returns what `module:attribute` or `file.py:attribute` names.

    Raises:
        ValueError: there is no such file, module or attribute; the public attributes are listed.
    """
    place, _, attribute = name.rpartition(":")
    module = _from_file(place) if place.endswith(".py") else _from_package(place)
    if not hasattr(module, attribute):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise ValueError(
            f"{place} has no {attribute!r}{did_you_mean(attribute, public) or '.'} "
            f"It has {', '.join(public) or 'nothing public'}"
        )
    return getattr(module, attribute)


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
