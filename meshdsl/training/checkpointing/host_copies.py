"""Copies of the state in a host's memory, one after every step, for a restart on the same host.

Each process copies the blocks of its own devices into files of a folder that is in memory, such as
`/dev/shm`. They outlive the process, so that all processes can go on from the last step that all of
them have finished. The files are those of local checkpoints, without checksums: memory needs none.

Guarantees:
    A copy is complete or absent: its folder gets the name of its step after its last byte.
    Every process has its copy of a step before it begins the next one, and keeps that of the step
    before. So whenever they end, there is a step that all of them have, and none is lost but the
    one at hand.
    A run that ends as it should leaves no copies, and neither does one whose replicas differ.
"""

from __future__ import annotations

import json
import mmap
import shutil
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from meshdsl.training.checkpointing.blocks import blocks_of
from meshdsl.training.checkpointing.local_checkpoints import BLOCKS, LocalFolder
from meshdsl.training.checkpointing.newest import ABOUT
from meshdsl.training.health.replicas import ReplicasDiffer

_KEPT = 2  # copies that a process keeps: of its last step, and of the one before
_PART = "copy.part"  # the name of a copy that is not complete


class HostCopies(LocalFolder):
    """This process's copies.

    Args:
        path: the folder, in which each process has its own one.
        run: the id of the run.

    Raises:
        ValueError: it cannot be written to, or has copies of another run; in all processes.
    """

    def __init__(self, path: Path, run: str) -> None:
        super().__init__(path, run)
        self._buffers: dict[int, dict[str, np.ndarray]] = {}  # of the files of each step's copy
        self._begun = False
        self._full = False

    def save(self, step: int, arrays: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Copies the blocks on this process's devices; returns when the copy is complete.

        If the memory is full, it warns, and copies no more.
        """
        if self._full:
            return
        try:
            self._copy(step, *blocks_of(arrays), about)
        except (OSError, SafetensorError) as error:
            self._full = True
            shutil.rmtree(self.path / _PART, ignore_errors=True)
            reason = getattr(error, "strerror", None) or str(error)
            warnings.warn(
                f"cannot copy the state to {self.path}: {reason}. The run goes on without copies; "
                "a restart goes on from the last checkpoint",
                stacklevel=4,
            )

    def _copy(
        self, step: int, blocks: Mapping[str, np.ndarray], regions: Any, about: Mapping[str, Any]
    ) -> None:
        part = self.path / _PART
        for later in () if self._begun else self.own():
            if later >= step:  # of a run that this one did not go on from
                shutil.rmtree(self.path / str(later))
        self._begun = True
        own = self.own()
        buffers = None
        if len(own) >= _KEPT:
            buffers = self._buffers.pop(own[0], None)
            (self.path / str(own[0])).rename(part)
            if buffers is None:  # of an earlier start
                shutil.rmtree(part)
        if buffers is None:
            part.mkdir()
            save_file(dict(blocks), part / BLOCKS)
            buffers = _buffers(part / BLOCKS)
        else:
            for name, block in blocks.items():
                np.copyto(buffers[name], _bytes(block))
        description = {**about, "run": self._run, "blocks": regions}
        (part / ABOUT).write_text(json.dumps(description))
        part.rename(self.path / str(step))
        self._buffers[step] = buffers

    def about(self, step: int) -> Any:
        """Returns the description beside the arrays; all processes must call this.

        Raises:
            Damaged: in every process, if a copy is not as it was written.
            ValueError: in every process, if one cannot be read.
        """
        with self._reading(step):
            return self._read(step)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None or issubclass(error[0], ReplicasDiffer):
            self._buffers.clear()
            shutil.rmtree(self.path, ignore_errors=True)
            with suppress(OSError):  # others are still in it
                self.path.parent.rmdir()


def _buffers(file: Path) -> dict[str, np.ndarray]:
    """Returns the bytes of each tensor in a file of safetensors; writing to them changes the file.

    The format: the size of a header in 8 bytes, the header in JSON, which says from where to where
    each tensor is, and the tensors.
    """
    with file.open("r+b") as opened:
        memory = np.frombuffer(mmap.mmap(opened.fileno(), 0), np.uint8)
    begin = 8 + int.from_bytes(memory[:8].tobytes(), "little")
    header = json.loads(memory[8:begin].tobytes())
    return {
        name: memory[begin + entry["data_offsets"][0] : begin + entry["data_offsets"][1]]
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _bytes(block: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array, without a copy."""
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8)
