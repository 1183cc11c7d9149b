"""meshdsl: tensor programs over named dims, laid out on device meshes by one line.

`import meshdsl as md` has all that a program needs: the words of `meshdsl.language`. Further rooms
are imported by name: `meshdsl.models`, `meshdsl.training`, `meshdsl.lowering`.

The import itself loads nothing, so that `meshdsl --help` does not wait for JAX. The first use of a
word loads the whole language.
"""

import importlib
from typing import TYPE_CHECKING

from meshdsl.version import VERSION as __version__

if TYPE_CHECKING:
    from meshdsl.imports.jax.equinox import from_equinox as from_equinox
    from meshdsl.imports.jax.function import from_jax as from_jax
    from meshdsl.language import *
    from meshdsl.language import __all__ as __all__
    from meshdsl.reports.notebook.showing import show as show


def __getattr__(name: str) -> object:
    if name.startswith("__") and name != "__all__":  # what Python and its tools ask any module for
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    language = importlib.import_module("meshdsl.language")
    try:
        found: object = getattr(language, name)
    except AttributeError:
        if name in globals():  # a room, which the language has imported
            return globals()[name]
        if not hasattr(language, "__all__"):  # a layer asks while the language is being loaded
            raise
        from meshdsl.tensors.idioms import missing

        raise missing(name, language.__all__) from None
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(importlib.import_module("meshdsl.language").__all__)
