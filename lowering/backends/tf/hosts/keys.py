"""Keys: the numbers by which TensorFlow identifies groups of devices and their collectives.

Every process computes them by itself, and all must agree. So they depend only on what is the same
in all processes, the names of devices and the program, and not on what a process has done before.

Guarantees:
    In one process no two groups have the same key, and no collectives of two programs. Programs
    may share keys if they send the same in the same order; one call runs at a time.
    If two keys collide, which is rare among 2^31, the later group or program gets another one.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence

from meshdsl.lowering.program import Block, SpmdProgram, Value

NOBODY = 2**31 - 1  # the key of a group that no program uses
_BLOCK = 1024  # consecutive keys of a program's collectives
_groups: dict[int, str] = {}
_blocks: dict[int, str] = {}


def group_key(devices: Sequence[str]) -> int:
    """Returns the key of a group, from the full names of its devices."""
    return _number(" ".join(sorted(devices)), _groups, NOBODY - 1) + 1


def instance_keys(program: SpmdProgram, devices: Sequence[str]) -> Iterator[int]:
    """Yields the keys of a program's collectives, in the order in which they are emitted.

    Args:
        devices: the full names of all devices of the mesh.
    """
    text = fingerprint(program, devices)
    for count in itertools.count():
        block = _number(f"{text} {count}", _blocks, 2**31 // _BLOCK - 1)
        yield from range(1 + block * _BLOCK, 1 + (block + 1) * _BLOCK)


def fingerprint(program: SpmdProgram, devices: Sequence[str]) -> str:
    """Returns a digest of a program's collectives and devices, the same in every process."""
    digest = hashlib.blake2b(digest_size=16)
    for line in [str(program.mesh), *devices, *_lines(program.block)]:
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def _lines(block: Block) -> Iterator[str]:
    """Yields the instructions of a block as text, with the parameters of collectives."""
    for instruction in block.instructions:
        params = sorted(instruction.params.items()) if instruction.is_collective else []
        sent = [f"{name}={value}" for name, value in params if name != "sources"]
        yield " ".join(
            [instruction.op, *map(_type, (*instruction.inputs, *instruction.outputs)), *sent]
        )
        for body in instruction.bodies:
            yield "{"
            yield from _lines(body)
            yield "}"


def _type(value: Value) -> str:
    return f"{value.dtype.name}{value.local.sizes}"


def _number(text: str, used: dict[int, str], limit: int) -> int:
    """Returns a number below `limit` that is a digest of a text, and that no other text has."""
    for attempt in itertools.count():
        digest = hashlib.blake2b(f"{text} {attempt}".encode(), digest_size=8).digest()
        number = int.from_bytes(digest) % limit
        if used.setdefault(number, text) == text:
            return number
    raise AssertionError
