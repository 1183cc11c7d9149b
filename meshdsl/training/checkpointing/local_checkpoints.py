"""Frequent checkpoints on local disks, which the processes need not share.

Each process writes the blocks of its own devices, as safetensors, into a folder of its own
(`process.0`, `process.1`, ...). A checkpoint is used if every process has its part of it and needs
no other blocks.

Guarantees:
    A part is complete or absent: it is written under another name, with checksums, and renamed.
    Saving copies the blocks to the host and returns; the writing goes on during the next steps.
    Parts of a checkpoint are of one start of the run: a host that was away may have later steps of
    an earlier start, which the others did not go on from.
    No process begins to save before all have their parts of the previous checkpoint. Several
    processes keep two checkpoints. So whenever they end, there is one that all of them have.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from meshdsl.training.checkpointing.blocks import Region, array_of, blocks_of, covered, parts_of
from meshdsl.training.checkpointing.newest import ABOUT, BLOCKS
from meshdsl.training.checkpointing.read_errors import damage_of, entries, sorted_errors
from meshdsl.training.checkpointing.seals import Damaged, damage, seal
from meshdsl.training.processes.joining import gathered, together

_ENTRIES = ("run", "start", "arrays", "position", "config", "blocks")


class Unfit(Exception):
    """A checkpoint is undamaged, but cannot be used here; the message is what a warning says."""


def _is_of_one_start(step: str, parts: Sequence[Mapping[str, str | None]]) -> bool:
    """Whether the parts of a step, of which all processes have one, belong together."""
    return len({part[step] for part in parts} - {None}) <= 1


class LocalFolder:
    """This process's part of local checkpoints.

    Args:
        path: the folder, in which each process has its own one.
        run: the id of the run.

    Raises:
        ValueError: it cannot be written to, or has checkpoints of another run; in all processes.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path = path.absolute() / f"process.{jax.process_index()}"
        self._run = run
        self._start_id = gathered(uuid.uuid4().hex)[0]
        self._keep = 1 if jax.process_count() == 1 else 2
        self._writer = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None
        self._found_damaged: set[int] = set()
        with together():
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                for part in self.path.glob("*.part"):  # of a process that was killed
                    shutil.rmtree(part)
                self._check_owner()
            except OSError as error:
                raise ValueError(
                    f"cannot keep checkpoints in {self.path}: {error.strerror}. Choose another "
                    "folder"
                ) from error

    def _check_owner(self) -> None:
        for step in self.own():
            try:
                run = self._read(step)["run"]
            except Damaged:
                continue
            if run != self._run:
                raise ValueError(
                    f"{self.path} has local checkpoints of another run; choose another folder, or "
                    "delete it"
                )

    def own(self) -> list[int]:
        """Returns the steps of which this process has its part."""
        return sorted(int(path.name) for path in self.path.glob("*") if path.name.isdigit())

    def steps(self) -> list[int]:
        """Returns the steps of which every process has its part; all of them must call this.

        Raises:
            ValueError: in every process, if one cannot read its folder.
        """
        parts = [json.loads(text) for text in gathered(json.dumps(self._own_starts()))]
        shared = set.intersection(*map(set, parts))
        return sorted(int(step) for step in shared if _is_of_one_start(step, parts))

    def _own_starts(self) -> dict[str, str | None]:
        """Returns the start that wrote each part of this process; None: unknown, or damaged.

        All processes must call this.

        Raises:
            ValueError: in every process, if one cannot read its folder.
        """
        found: dict[str, str | None] = {}
        with together():
            try:
                for step in self.own():
                    try:
                        found[str(step)] = self._read(step)["start"]
                    except Damaged:  # whoever reads it says so
                        found[str(step)] = None
            except OSError as error:
                raise ValueError(
                    f"cannot read the checkpoints in {self.path}: {error.strerror}"
                ) from error
        return found

    def lacking(self, after: int) -> str | None:
        """Returns a message about a later step that only some have; all must call this."""
        mine = json.dumps([str(self.path), self._own_starts()])
        paths, parts = zip(*[json.loads(text) for text in gathered(mine)], strict=True)
        later = [int(step) for steps in parts for step in steps if int(step) > after]
        if not later:
            return None
        latest = str(max(later))
        without = [
            f"process {number} in {path}"
            for number, (path, steps) in enumerate(zip(paths, parts, strict=True))
            if latest not in steps
        ]
        unused = f"the local checkpoint of step {latest} is not used"
        if without:
            return f"{unused}: {', '.join(without)} has none"
        if not _is_of_one_start(latest, parts):
            return f"{unused}: its parts are of several starts of the run, in {', '.join(paths)}"
        return None

    def prepare(self, step: int) -> None:
        """Waits until every process has written the previous save; all of them must call this.

        It deletes parts of later steps, which belong to a run that this one did not go on from.

        Raises:
            ValueError: one of the processes could not write its part.
        """
        with together():
            self.wait()
            for other in self.own():
                if other >= step:
                    shutil.rmtree(self.path / str(other))

    def save(self, step: int, arrays: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Copies the blocks on this process's devices to the host; a thread writes them."""
        blocks, regions = blocks_of(arrays)
        description = {**about, "run": self._run, "start": self._start_id, "blocks": regions}
        self._writing = self._writer.submit(self._write, step, blocks, description)

    def _write(self, step: int, blocks: Mapping[str, np.ndarray], about: Any) -> None:
        aside, target = self.path / f"{step}.part", self.path / str(step)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        try:
            save_file(dict(blocks), aside / BLOCKS)
            (aside / ABOUT).write_text(json.dumps(about))
            seal(aside, [aside / BLOCKS, aside / ABOUT])
            for file in aside.iterdir():
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            aside.rename(target)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        for old in self.own()[: -self._keep]:
            shutil.rmtree(self.path / str(old), ignore_errors=True)

    def wait(self) -> None:
        """Waits until this process has written its part of the last save."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            writing.result()
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ValueError(
                f"cannot save a checkpoint in {self.path}: {reason}. Those before it are complete"
            ) from error

    def about(self, step: int) -> Any:
        """Returns the description beside the arrays; all processes must call this.

        Raises:
            Damaged: in every process, if a part is not as it was written.
            ValueError: in every process, if one cannot be read.
        """
        with self._reading(step):
            about = self._read(step)
            if problem := damage(self.path / str(step), alone=True):
                raise Damaged(problem)
        return about

    @contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Sorts errors of its block, which reads this process's part, and records damage."""
        with sorted_errors(self.path / str(step)):
            try:
                yield
            except Exception as error:
                if damage_of(error) is not None:
                    self._found_damaged.add(step)
                raise

    def _read(self, step: int) -> dict[str, Any]:
        file = self.path / str(step) / ABOUT
        older = {"start": None}  # parts of older versions have none
        return entries(lambda: {**older, **json.loads(file.read_text())}, _ENTRIES)

    def load(self, step: int, like: Mapping[str, Any], places: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arrays of a step; all processes must call this.

        Raises:
            Unfit: in every process, if one needs blocks that it does not have.
            Damaged, ValueError: as in `about`.
        """
        with self._reading(step):
            blocks = regions_of(self._read(step)["blocks"])
        lacks = any(
            not covered(leaf.dims.sizes, places[path], blocks[path]) for path, leaf in like.items()
        )
        if any(json.loads(text) for text in gathered(json.dumps(lacks))):
            raise Unfit(
                f"checkpoint {self.path / str(step)} is not used: it was saved with another mesh, "
                "layout or number of processes, and each process has only its own part of it"
            )
        arrays = {}
        with (
            self._reading(step),
            safe_open(self.path / str(step) / BLOCKS, framework="numpy") as file,
        ):
            for path, leaf in like.items():
                arrays[path] = array_of(parts_of(file), path, leaf, places[path], blocks[path])
        return arrays

    def set_aside(self, step: int) -> Path | None:
        """Renames this process's part, if it is the damaged one."""
        source, target = self.path / str(step), self.path / f"damaged.{step}"
        for number in itertools.count(2):
            if not target.exists():
                break
            target = self.path / f"damaged.{step}.{number}"
        if step in self._found_damaged:
            self._found_damaged.discard(step)
            source.rename(target)
        return target

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self.wait()
        finally:
            self._writer.shutdown()


def regions_of(blocks: Mapping[str, Any]) -> dict[str, list[Region]]:
    """Returns the regions of blocks by path, as a description has them."""
    return {
        path: [tuple((start, stop) for start, stop in region) for region in regions]
        for path, regions in blocks.items()
    }
