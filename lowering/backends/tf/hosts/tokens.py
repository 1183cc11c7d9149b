"""Tokens: a record on each host device of the collectives that it runs.

A token is an integer on the device. Its lower half is the number of the instruction whose
collective the device is in, counted from 1, or 0 if it is in none. Its upper half counts the
collectives that have ended. So a token that does not change means a device that makes no progress.

Guarantees:
    After a call that has succeeded, no device is in a collective. After a call that has failed,
    `reset` restores that.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

_ENDED = 2**32


def tokens(names: Sequence[str]) -> list[tf.Variable]:
    """Returns the token of each device; all programs on a device share it."""
    return [_token(name) for name in names]


@functools.cache
def _token(name: str) -> tf.Variable:
    with tf.device(name):
        return tf.Variable(0, dtype=tf.int64)


def begin(token: tf.Tensor, number: int) -> tf.Operation:
    """Records on a device that the collective of an instruction begins."""
    return _add(token, number + 1)


def end(token: tf.Tensor, number: int) -> tf.Operation:
    """Records that the collective of an instruction has ended."""
    return _add(token, _ENDED - (number + 1))


def touch(token: tf.Tensor) -> tf.Operation:
    """Records nothing, but runs in the order of the records."""
    return _add(token, 0)


def _add(token: tf.Tensor, change: int) -> tf.Operation:
    value = tf.constant(change, tf.int64)
    return tf.raw_ops.AssignAddVariableOp(resource=token, value=value)


def read(tokens: Sequence[tf.Variable]) -> list[int]:
    """Returns the values of tokens."""
    return [int(token.numpy()) for token in tokens]


def instruction(value: int) -> int | None:
    """Returns the number of the instruction whose collective a device is in, from its token."""
    return value % _ENDED - 1 if value % _ENDED else None


def reset(tokens: Sequence[tf.Variable]) -> None:
    """Sets tokens to 0: their devices are in no collective."""
    for token in tokens:
        token.assign(0)
