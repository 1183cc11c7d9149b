"""Reads the blocks of one version of the state, from this host's copies or from other hosts."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from safetensors import safe_open

from meshdsl.training.checkpointing.blocks import Part, Region, name_of, parts_of
from meshdsl.training.checkpointing.copies.block_server import BlockClient, Unreachable
from meshdsl.training.checkpointing.copies.held_copies import Blocks, Holder, Version
from meshdsl.training.checkpointing.newest import BLOCKS


class HeldParts:
    """The blocks of a version; an object is a `Part` while its block runs.

    Of several holders, one on this host is taken; else the work is spread over them, and where one
    does not send what it has, the next is asked.

    Args:
        folder: the folder of copies on this host.
        host: the process that answers for this host.
        client: what gets blocks of others.
    """

    def __init__(
        self, folder: Path, version: Version, blocks: Blocks, host: int, client: BlockClient
    ) -> None:
        self._folder, self._version, self._blocks = folder, version, blocks
        self._host, self._client = host, client
        self._files: dict[str, Part] = {}
        self._regions: dict[str, list[Region]] = {}
        self._stack = ExitStack()
        self._taken = jax.process_index()

    def regions(self, path: str) -> list[Region]:
        """Returns the regions of an array's blocks, by number."""
        if path not in self._regions:
            self._regions[path] = [*self._blocks.holders[path]]
        return self._regions[path]

    def __call__(self, path: str, number: int, within: tuple[slice, ...] | None) -> np.ndarray:
        region = self.regions(path)[number]
        *others, last = self._in_turn(self._blocks.holders[path][region])
        for holder in others:
            with suppress(Unreachable):
                return self._of(holder, path, region, within)
        return self._of(last, path, region, within)

    def _of(
        self, holder: Holder, path: str, region: Region, within: tuple[slice, ...] | None
    ) -> np.ndarray:
        """Returns a block of a holder, or a part of it; raises `Unreachable` if it sends none."""
        if holder.process == self._host:
            return self._file(holder.folder)(path, holder.number, within)
        asked = {
            "folder": holder.folder,
            "step": self._version.step,
            "name": name_of(path, holder.number),
            "within": None if within is None else [[part.start, part.stop] for part in within],
        }
        bounds = region if within is None else [(part.start, part.stop) for part in within]
        sizes = [stop - start for start, stop in bounds]
        dtype = np.dtype(self._blocks.about["arrays"][path]["dtype"])
        return self._client.part(holder.process, asked, sizes, dtype)

    def _in_turn(self, holders: list[Holder]) -> list[Holder]:
        """Returns holders in the order in which they are asked."""
        here = [holder for holder in holders if holder.process == self._host]
        if here:
            return here[:1]
        self._taken += 1
        first = self._taken % len(holders)
        return [*holders[first:], *holders[:first]]

    def _file(self, folder: str) -> Part:
        if folder not in self._files:
            file = self._folder / folder / str(self._version.step) / BLOCKS
            opened = self._stack.enter_context(safe_open(file, framework="numpy"))
            self._files[folder] = parts_of(opened)
        return self._files[folder]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._files.clear()
        self._stack.close()
