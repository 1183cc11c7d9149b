"""The numbers by which TensorFlow tells groups of devices and their collectives apart.

Every process finds them by itself, and they must agree. So they follow from what is the same in all
processes, the names of devices and the program, and not from what a process has done before.

Guarantees:
    In one process no two groups share a number, nor do collectives of two programs. Programs may
    share theirs if they send the same in the same order; one call runs at a time.
    Where two would share one, which 2^31 numbers make rare, the later one takes another.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence

from meshdsl.lowering.program import Block, SpmdProgram, Value

NOBODY = 2**31 - 1  # the group of no collective of a program
_BLOCK = 1024  # instances of a program, which are numbered in a row
_groups: dict[int, str] = {}
_blocks: dict[int, str] = {}


def group_key(devices: Sequence[str]) -> int:
    """Returns the number of a group, of the full names of its devices."""
    return _number(" ".join(sorted(devices)), _groups, NOBODY - 1) + 1


def instance_keys(program: SpmdProgram, devices: Sequence[str]) -> Iterator[int]:
    """Yields the numbers of a program's collectives, in the order in which they are emitted.

    Args:
        devices: the full names of all devices of the mesh.
    """
    text = fingerprint(program, devices)
    for count in itertools.count():
        block = _number(f"{text} {count}", _blocks, 2**31 // _BLOCK - 1)
        yield from range(1 + block * _BLOCK, 1 + (block + 1) * _BLOCK)


def fingerprint(program: SpmdProgram, devices: Sequence[str]) -> str:
    """Returns what tells programs apart by what their devices send, the same in every process."""
    told = hashlib.blake2b(digest_size=16)
    for line in [str(program.mesh), *devices, *_lines(program.block)]:
        told.update(f"{line}\n".encode())
    return told.hexdigest()


def _lines(block: Block) -> Iterator[str]:
    for one in block.instructions:
        params = sorted(one.params.items()) if one.is_collective else []
        sent = [f"{name}={value}" for name, value in params if name != "sources"]
        yield " ".join([one.op, *map(_type, (*one.inputs, *one.outputs)), *sent])
        for body in one.bodies:
            yield "{"
            yield from _lines(body)
            yield "}"


def _type(value: Value) -> str:
    return f"{value.dtype.name}{value.local.sizes}"


def _number(text: str, taken: dict[int, str], limit: int) -> int:
    """Returns a number below `limit` that follows from a text and is taken by no other."""
    for turn in itertools.count():
        digest = hashlib.blake2b(f"{text} {turn}".encode(), digest_size=8).digest()
        number = int.from_bytes(digest) % limit
        if taken.setdefault(number, text) == text:
            return number
    raise AssertionError
