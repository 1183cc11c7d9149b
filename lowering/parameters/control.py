"""Records of loops and branches, of random bits, of a user's functions, and of printing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from meshdsl.ops.control.debug import Message
from meshdsl.ops.control.local import Definition

if TYPE_CHECKING:
    from meshdsl.lowering.program import Block


class Loop(TypedDict):
    """A loop; its operands are consts, then initial carries, and for a scan, stacks.

    Attributes:
        body: one iteration: (consts, carries, slices) -> (carries, slices).
        consts: the number of operands that are the same in every iteration.
        carries: the number of operands that are initial carries.
    """

    body: Block
    consts: int
    carries: int


class Scan(Loop):
    """A loop over the positions of a dim.

    Attributes:
        dim: the dim of the stacks that the body reads and writes slice by slice.
        length: the number of iterations.
        reverse: whether the last slice comes first.
        ahead: the numbers of the stacks whose slices are read one iteration ahead; they are the
            last ones. The last iteration reads the first slice again.
    """

    dim: str
    length: int
    reverse: bool
    ahead: NotRequired[tuple[int, ...]]


class While(Loop):
    """A loop that runs while a condition holds.

    Attributes:
        condition: (consts, carries) -> whether to run another iteration.
    """

    condition: Block


class Cond(TypedDict):
    """Two branches, of the operands after the predicate.

    Attributes:
        if_true, if_false: the branches that run if the predicate is true, and if it is false.
    """

    if_true: Block
    if_false: Block


class RandomBits(TypedDict):
    """Threefry-2x32 of a key and counters.

    Attributes:
        pairs: whether both words of a counter are results, along `random_key`; else one word is
            computed from both.
    """

    pairs: bool


class Local(TypedDict):
    """A function that the user has defined.

    Attributes:
        definition: the function for each backend.
        params: its keyword arguments, (name, value).
    """

    definition: Definition
    params: tuple[tuple[str, Any], ...]


class Print(TypedDict):
    """Printing of operands.

    Attributes:
        message: the text, and how each operand is printed.
    """

    message: Message
