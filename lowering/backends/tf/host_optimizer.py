"""TensorFlow's graph optimizer, which must be off where it would rename loops.

TensorFlow identifies a collective in a loop by the loop's name and the collective's own number. So
the loop must have the same name on all devices. The optimizer copies a program for each device, and
changes the copies in several threads. If it moves an operation into a branch, it renames the loops
of that branch, and the name depends on the order of the threads (2.21: the passes
`tfg-functional-to-region` and `tfg-cf-sink`). Then devices wait for each other for ever.

Guarantees:
    In a block of `unoptimized` the optimizer is off for the functions that are built or called
    there, in any thread. After the last open block the option is as it was before the first.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import tensorflow as tf

from meshdsl.lowering.program import Block

_OPTION = "disable_meta_optimizer"
_LOCK = threading.Lock()
_before: list[bool] = []  # the option before the first block, once for each open block


@contextlib.contextmanager
def unoptimized() -> Iterator[None]:
    """Turns the optimizer off for functions that are built or called in its block."""
    with _LOCK:
        options = tf.config.optimizer.get_experimental_options()
        _before.append(_before[0] if _before else bool(options.get(_OPTION, False)))
        _set(True)  # in each thread: a thread keeps its own options until it sets one
    try:
        yield
    finally:
        with _LOCK:
            before = _before.pop()
            _set(bool(_before) or before)


def _set(disabled: bool) -> None:
    tf.config.optimizer.set_experimental_options({_OPTION: disabled})


def collects_in_bodies(block: Block) -> bool:
    """Whether a collective is in the body of an instruction, at any depth."""
    bodies = [body for instruction in block.instructions for body in instruction.bodies]
    return any(inner.is_collective for body in bodies for inner, _ in body.walk())
