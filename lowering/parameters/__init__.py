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

from meshdsl.lowering.parameters.collectives import *
from meshdsl.lowering.parameters.control import *
from meshdsl.lowering.parameters.data import *
from meshdsl.lowering.parameters.products import *
from meshdsl.lowering.parameters.reading import *
from meshdsl.lowering.parameters.reductions import *
