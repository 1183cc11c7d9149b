"""Parameters: a typed record for the parameters of each kind of instruction.

`Instruction.params` is a plain mapping, which printing, equality and the backends read. The record
that a kind is declared with (`lowering.instructions`, `lowering.collectives`) says which keys that
mapping has, and of which type; `verify` compares them. `parameters_of` reads a mapping as a record,
so that mypy knows its keys.

Unless a docstring says otherwise:

- A dim or an axis is given by its name.
- Sizes and positions count elements, and positions begin at 0.
- Axes are listed major first.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from meshdsl.lowering.parameters.collectives import *
from meshdsl.lowering.parameters.control import *
from meshdsl.lowering.parameters.data import *
from meshdsl.lowering.parameters.products import *
from meshdsl.lowering.parameters.reading import *
from meshdsl.lowering.parameters.reductions import *

if not TYPE_CHECKING:  # with it, mypy would accept any name

    def __getattr__(name: str) -> object:
        """Raises ImportError: no file that is imported here has this record."""
        text = f"module {__name__!r} has no attribute {name!r}"
        if name.startswith("_"):
            raise AttributeError(text)
        # `from ... import` hides the message of an AttributeError.
        for file in sorted(Path(__file__).parent.glob("*.py")):
            if f"class {name}(" in file.read_text():
                raise ImportError(
                    f"{text}, though lowering/parameters/{file.name} has it: import that file in "
                    "lowering/parameters/__init__.py"
                )
        raise ImportError(
            f"{text}: write this record, a TypedDict, in a file of lowering/parameters, which its "
            "__init__.py imports"
        )
