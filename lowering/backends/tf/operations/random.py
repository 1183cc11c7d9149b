"""Counter-based random bits."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from meshdsl.lowering.backends.common.arrange import align
from meshdsl.lowering.backends.tf import namespace as xp
from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.threefry import threefry2x32
from meshdsl.lowering.parameters import RandomBits, parameters_of
from meshdsl.lowering.program import Instruction


class _Word:
    """32-bit words with the operators of uint32, which are functions in TensorFlow."""

    def __init__(self, bits: tf.Tensor) -> None:
        self.bits = bits

    def __add__(self, other: object) -> _Word:
        return _Word(self.bits + _bits(other))

    def __xor__(self, other: object) -> _Word:
        return _Word(tf.bitwise.bitwise_xor(self.bits, _bits(other)))

    def __or__(self, other: object) -> _Word:
        return _Word(tf.bitwise.bitwise_or(self.bits, _bits(other)))

    def __lshift__(self, other: object) -> _Word:
        return _Word(tf.bitwise.left_shift(self.bits, _bits(other)))

    def __rshift__(self, other: object) -> _Word:
        return _Word(tf.bitwise.right_shift(self.bits, _bits(other)))


def _bits(word: object) -> tf.Tensor:
    return word.bits if isinstance(word, _Word) else tf.constant(word, tf.uint32)


def _threefry(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    """Returns random words of a key for each counter (high, low): pairs, or their xor."""
    key, high, low = inputs
    shape = instruction.outputs[0].local.without(["random_key"])
    high, low = (
        tf.broadcast_to(align(xp, a, v.local, shape), shape.sizes)
        for a, v in zip((high, low), instruction.inputs[1:], strict=True)
    )
    own = instruction.inputs[0].local.without(["random_key"])
    keys = [align(xp, key[..., i], own, shape) for i in (0, 1)]
    words = threefry2x32(*map(_Word, (*keys, high, low)))
    first, second = (word.bits for word in words)
    if parameters_of(instruction, RandomBits)["pairs"]:
        return tf.stack([first, second], -1)
    return tf.bitwise.bitwise_xor(first, second)


EMITTERS: Mapping[str, Emitter] = {
    "threefry2x32": _threefry,
}
