"""Tokens: what each host device tells of its collectives while it runs a program.

A token is a whole number on the device. Its lower half is the number of the instruction, counted
from 1, whose collective the device is in, or 0 while it is in none; its upper half counts those
that it has ended, so that a token that stays as it is means a device that does.

Guarantees:
    After a call that has not failed every device is in no collective; `reset` makes it so after
    one that has.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

_ENDED = 2**32


def tokens(names: Sequence[str]) -> list[tf.Variable]:
    """Returns the token of each device, which all programs on it share."""
    return [_token(name) for name in names]


@functools.cache
def _token(name: str) -> tf.Variable:
    with tf.device(name):
        return tf.Variable(0, dtype=tf.int64)


def begin(token: tf.Tensor, number: int) -> tf.Operation:
    """Notes, on its device, that the collective of an instruction begins."""
    return _add(token, number + 1)


def end(token: tf.Tensor, number: int) -> tf.Operation:
    """Notes that it has ended."""
    return _add(token, _ENDED - (number + 1))


def touch(token: tf.Tensor) -> tf.Operation:
    """Notes nothing, in the order of what is noted."""
    return _add(token, 0)


def _add(token: tf.Tensor, change: int) -> tf.Operation:
    value = tf.constant(change, tf.int64)
    return tf.raw_ops.AssignAddVariableOp(resource=token, value=value)


def read(tokens: Sequence[tf.Variable]) -> list[int]:
    """Returns what tokens hold."""
    return [int(token.numpy()) for token in tokens]


def instruction(held: int) -> int | None:
    """Returns the number of the instruction whose collective a device is in, by its token."""
    return held % _ENDED - 1 if held % _ENDED else None


def reset(tokens: Sequence[tf.Variable]) -> None:
    """Lets devices be in no collective."""
    for token in tokens:
        token.assign(0)
