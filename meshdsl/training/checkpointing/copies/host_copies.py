"""Copies of the state in a host's memory, one after every step, for restarts.

Each process copies the blocks of its own devices into files of a folder that is in memory, such as
`/dev/shm`. They outlive the process, so that all processes can go on from the last step that all of
them have finished. The files are those of local checkpoints, without checksums: memory needs none.

Where other processes go on, or on another mesh, each takes the blocks that it needs from the copies
on its own host, and the rest from other hosts. If a host is gone and others have replicas of its
blocks, nothing is missing.

Guarantees:
    A copy is complete or absent: its folder gets the name of its step after its last byte.
    Every process has its copy of a step before it begins the next one, and keeps that of the step
    before. So whenever they end, there is a step that all of them have, and none is lost but the
    one at hand.
    What the processes go on from stays until all have copies of the step after it.
    Copies of different starts are never mixed; see `held_copies`.
    A run that ends as it should leaves no copies, and neither does one whose replicas differ.
"""

from __future__ import annotations

import json
import mmap
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from meshdsl.layouts.machine import cores
from meshdsl.training.checkpointing.blocks import array_of, blocks_of, holders_of
from meshdsl.training.checkpointing.copies.block_server import (
    BlockClient,
    BlockServer,
    Unreachable,
)
from meshdsl.training.checkpointing.copies.held_copies import (
    Blocks,
    Version,
    blocks_of_all,
    described,
    host_of,
    look,
)
from meshdsl.training.checkpointing.copies.held_parts import HeldParts
from meshdsl.training.checkpointing.copies.starts import Starts
from meshdsl.training.checkpointing.local_checkpoints import LocalFolder, Unfit
from meshdsl.training.checkpointing.newest import ABOUT, BESIDE, BLOCKS, NEEDS, START, copies_in
from meshdsl.training.checkpointing.shared_disk import check_apart
from meshdsl.training.health.replicas import ReplicasDiffer
from meshdsl.training.processes.joining import gathered, names_here, together

_KEPT = 2  # copies that a process keeps: of its last step, and of the one before
_PART = "copy.part"  # the name of a copy that is not complete
_PIECE = 2**25  # bytes that a thread copies before it takes the next ones
# Of a host, at most. One thread copies about 10 GB/s; eight reach what most memories can.
_THREADS = 8


class HostCopies(LocalFolder):
    """This process's copies.

    Args:
        path: the folder, in which each process has its own one.
        run: the id of the run.
        kept: the folder of checkpoints, which numbers the starts.

    Raises:
        ValueError: it cannot be written to, has copies of another run, or is on a disk that hosts
            share; in all processes.
    """

    def __init__(self, path: Path, run: str, kept: Path) -> None:
        super().__init__(path, run)
        self.source = ""  # what a message says of the copies that were restored last
        self._buffers: dict[int, dict[str, np.ndarray]] = {}  # of the files of each step's copy
        self._needs: list[list[int]] = []
        self._copied = 0  # how many this process has made
        self._full = False
        self._said_so = False  # that this start has taken a step
        self._warned = False  # that it could not be said
        here = ""
        with together():
            try:
                here = host_of(self.path.parent)
            except OSError as error:
                raise ValueError(f"cannot read {self.path.parent}: {error.strerror}") from error
        hosts = gathered(here)
        check_apart(self.path.parent, hosts)
        self._here = [number for number, host in enumerate(hosts) if host == here]
        self._leads = self._here[0] == jax.process_index()  # it answers for its host
        threads = min(_THREADS, cores()) // len(self._here)
        self._threads = ThreadPoolExecutor(max(threads, 1), "copies")
        self._starts = Starts.read(kept)  # where it counts, that of the first process
        self._starts.take(json.loads(gathered(json.dumps(self._starts.said()))[0]))
        self._held = look(self.path.parent, self._leads, self._starts)
        self._chosen: tuple[Version, Blocks] | None = None  # what `about` was of
        self._went_on_from = 0
        with together():
            if jax.process_index() == 0:
                try:
                    self._starts.begin(self._held.last)
                except OSError as error:
                    raise ValueError(
                        f"cannot write to {self._starts.file}: {error.strerror}"
                    ) from error
        number, self._secret = json.loads(
            gathered(json.dumps([self._starts.last, secrets.token_hex(16)]))[0]
        )
        self._start = [number, self._secret[:8]]

    def _check_owner(self) -> None:
        for name, _, about in copies_in(self.path.parent):
            if about.get("run") != self._run:
                raise ValueError(
                    f"{self.path.parent / name} has local checkpoints of another run; choose "
                    "another folder, or delete it"
                )

    def save(self, step: int, arrays: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Copies the blocks on this process's devices; returns when the copy is complete.

        If the memory is full, it warns, and copies no more.
        """
        if self._full:
            return
        try:
            self._needs = self._needs or holders_of(arrays)
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
            return
        self.abandon_others()

    def abandon_others(self) -> None:
        """Says once, in the first process, that this start has taken a step; see `Starts.went_on`.

        If it cannot be written down, it warns, and the next call tries again.
        """
        if self._said_so or jax.process_index():
            return
        try:
            self._starts.went_on(self._start[0], self._went_on_from)
            self._said_so = True
        except OSError as error:
            if not self._warned:
                warnings.warn(
                    f"cannot write to {self._starts.file}: {error.strerror}. Until it can be "
                    "written, a restart may go on from copies of an earlier start, which a host "
                    "that was away may hold",
                    stacklevel=4,
                )
            self._warned = True

    def _copy(
        self, step: int, blocks: Mapping[str, np.ndarray], regions: Any, about: Mapping[str, Any]
    ) -> None:
        part = self.path / _PART
        for later in () if self._copied else self.own():
            if later >= step:  # of a run that this one did not go on from
                shutil.rmtree(self.path / str(later))
        if self._copied == 1 and self._leads:  # all processes have their first one
            self._delete_of_others()
        self._copied += 1
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
            pairs = [(buffers[name], _bytes(block)) for name, block in blocks.items()]
            for _ in self._threads.map(np.copyto, *zip(*_pieces(pairs), strict=True)):
                pass  # which raises what a thread did
        description = {**about, "run": self._run, "blocks": regions, START: self._start}
        description[NEEDS] = self._needs
        description[BESIDE] = [f"process.{number}" for number in self._here]
        (part / ABOUT).write_text(json.dumps(description))
        part.rename(self.path / str(step))
        self._buffers[step] = buffers

    def _delete_of_others(self) -> None:
        """Deletes the copies of processes of earlier starts that have another number here now."""
        for folder in self.path.parent.glob("process.*"):
            if folder.name not in {f"process.{number}" for number in self._here}:
                shutil.rmtree(folder, ignore_errors=True)

    def steps(self) -> list[int]:
        """Returns the steps of which there are copies; all processes must call this."""
        self._held = look(self.path.parent, self._leads, self._starts)
        return self._held.steps

    def about(self, step: int) -> Any:
        """Returns the description beside the arrays; all processes must call this.

        Raises:
            Damaged: in every process, if a copy is not as it was written.
            ValueError: in every process, if one cannot be read.
            Unfit: in every process, if hosts that are gone had parts of it.
        """
        missing: str | None = None
        for version in self._held.at(step):
            with self._reading(step):
                own = self._held.folders[version].get(jax.process_index(), [])
                text = described(self.path.parent, version, own)
            blocks = blocks_of_all(gathered(text))
            self._chosen = version, blocks
            lacking = blocks.missing()
            if lacking is None:
                return blocks.about
            missing = missing or lacking
        raise Unfit(
            f"copies in memory of later steps are not used: no host that is left has all blocks of "
            f"{missing}. Replicas on other hosts would have them; see `meshdsl explain --failures`"
        )

    def load(self, step: int, like: Mapping[str, Any], places: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arrays of a step after `about`; all processes must call this.

        Raises:
            Unfit: in every process, if one cannot get blocks from another host.
            Damaged, ValueError: as in `about`.
        """
        assert self._chosen is not None
        version, blocks = self._chosen
        with ExitStack() as stack:
            port = 0
            with together():
                if self._leads:
                    server = BlockServer(self.path.parent, self._secret)
                    port = stack.enter_context(server).port
            said = [json.loads(text) for text in gathered(json.dumps([names_here(), port]))]
            addresses = {number: one for number, one in enumerate(said) if one[1]}
            client = stack.enter_context(BlockClient(addresses, self._secret))
            held = HeldParts(self.path.parent, version, blocks, self._here[0], client)
            parts = stack.enter_context(held)
            arrays, problem = {}, ""
            with self._reading(step):
                try:
                    for path, leaf in like.items():
                        regions = parts.regions(path)
                        arrays[path] = array_of(parts, path, leaf, places[path], regions)
                except Unreachable as error:
                    problem = str(error)
            # Nobody stops to answer before all have what they need.
            ends = [json.loads(text) for text in gathered(json.dumps([problem, client.received]))]
        for number, (problem, _) in enumerate(ends):
            if problem:
                raise Unfit(
                    f"copies in memory of step {step} are not used: process {number} needs blocks "
                    f"of another host, and {problem}"
                )
        count, came = len(self._held.folders[version]), sum(size for _, size in ends)
        self.source = f"copies in the memory of {count} host{'s' * (count > 1)}"
        if came:
            self.source += f"; {came / 2**20:,.1f} MiB went from one to another"
        return arrays

    def go_on_from(self, step: int, copied: bool) -> None:
        """Deletes all copies but those that were restored; all processes must call this.

        Args:
            step: the step that was restored; 0: training starts anew.
            copied: whether it was restored from copies.
        """
        self._went_on_from = step
        kept = self._chosen[0] if self._chosen is not None and copied else None
        others = {one: hosts for one, hosts in self._held.folders.items() if one != kept}
        if not others:
            return
        for version, hosts in others.items():
            for name in hosts.get(jax.process_index(), ()):  # those that this process answers for
                shutil.rmtree(self.path.parent / name / str(version.step), ignore_errors=True)
        self._buffers = {one: own for one, own in self._buffers.items() if copied and one == step}
        gathered("")  # nobody copies before

    def set_aside(self, step: int) -> None:
        """Deletes the copies of a step, one of which is damaged."""
        for folder in self.path.parent.glob(f"process.*/{step}") if self._leads else ():
            shutil.rmtree(folder, ignore_errors=True)
        self._found_damaged.discard(step)
        gathered("")

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._threads.shutdown()
        if error[0] is None or issubclass(error[0], ReplicasDiffer):
            self._buffers.clear()
            shutil.rmtree(self.path, ignore_errors=True)
            if self._leads:
                self._delete_of_others()
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


def _pieces(pairs: list[tuple[np.ndarray, np.ndarray]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields pairs of parts, so that threads share the work evenly."""
    for to, block in pairs:
        for start in range(0, len(block), _PIECE):
            yield to[start : start + _PIECE], block[start : start + _PIECE]


def _bytes(block: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array, without a copy."""
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8)
