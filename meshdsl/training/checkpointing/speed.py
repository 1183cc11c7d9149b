"""How long a checkpoint takes: as the one before it, or by its bytes and the speed of the disk."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import jax
import numpy as np

from meshdsl.tensors.named_array import NamedArray

_PROBE = 2**24  # bytes that are written to measure the speed of a disk


def seconds_to_save(last: float | None, arrays: Mapping[str, NamedArray], folder: Path) -> float:
    """Returns about how long a checkpoint takes: as long as the last one, or by its bytes.

    Args:
        last: the seconds of the last one, if there was one.
        arrays: those that are saved, by path.
        folder: where they are written; its speed is measured if there was no last one.
    """
    return last if last is not None else own_bytes(arrays) / _speed(folder)


def own_bytes(arrays: Mapping[str, NamedArray]) -> int:
    """Returns the bytes of arrays that this process writes: one replica of each shard."""
    total = 0
    for array in arrays.values():
        if isinstance(array.data, jax.Array):
            shards = array.data.addressable_shards
            total += sum(shard.data.nbytes for shard in shards if shard.replica_id == 0)
        else:
            total += math.prod(array.dims.sizes) * np.dtype(array.dtype).itemsize
    return total


def _speed(folder: Path) -> float:
    """Returns how many bytes a disk takes in a second, by writing some; infinite if it refuses."""
    file = folder / f"speed.{os.getpid()}.part"
    began = time.monotonic()
    try:
        with file.open("wb") as out:
            out.write(bytes(_PROBE))
            out.flush()
            os.fsync(out.fileno())
    except OSError:  # saving reports it
        return float("inf")
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)
    return _PROBE / max(time.monotonic() - began, 1e-6)
