"""TensorFlow's optimizer of graphs, which is off where it would rename loops.

A collective in a loop is known to TensorFlow by the name of that loop, beside its own number. So
all devices must know the loop by one name. The optimizer makes a copy of a program for each device
and changes them in several threads. Where it moves an operation into a branch, it renames the
loops of that branch, and the name depends on which thread came first (2.21: the passes
`tfg-functional-to-region` and `tfg-cf-sink`). Then devices wait for each other for ever.

Guarantees:
    In a block of `unoptimized` the optimizer is off for the functions that are built or called
    there, in whichever thread; after the last block the option is what it was before the first.
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
    """Lets the functions that are built or called in its block be run as they are written."""
    with _LOCK:
        options = tf.config.optimizer.get_experimental_options()
        _before.append(_before[0] if _before else bool(options.get(_OPTION, False)))
        _set(True)  # in each thread: TensorFlow keeps the options of a thread until it sets one
    try:
        yield
    finally:
        with _LOCK:
            before = _before.pop()
            _set(bool(_before) or before)


def _set(disabled: bool) -> None:
    tf.config.optimizer.set_experimental_options({_OPTION: disabled})


def collects_in_bodies(block: Block) -> bool:
    """Returns whether a collective is in the body of an instruction, at any depth."""
    bodies = [body for instruction in block.instructions for body in instruction.bodies]
    return any(one.is_collective for body in bodies for one, _ in body.walk())
