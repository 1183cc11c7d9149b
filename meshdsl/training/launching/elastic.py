"""Which numbers of processes a job can go on with, and on which meshes.

One axis of the mesh becomes shorter, the others stay, and so do the devices of each process and the
batch: microbatches become so many that a device holds no more rows of each than before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshdsl.layouts.mesh import Mesh
from meshdsl.tensors.dims import did_you_mean

# The variable by which processes are told the job's microbatches, which its checkpoints have.
MICROBATCHES = "MESHDSL_LAUNCH_MICROBATCHES"


@dataclass(frozen=True)
class Elastic:
    """How a job goes on with fewer processes: `Elastic(Mesh.parse("data:8"), "data", 4, 16, 1)`.

    Attributes:
        mesh: the mesh of all processes.
        axis: the axis that becomes shorter.
        processes: how many the job has if none is lost.
        batch: the rows of a batch.
        microbatches: into how many parts each process set divides it, on the whole mesh.

    Raises:
        ValueError: the mesh lacks the axis, or processes have unequal numbers of devices.
    """

    mesh: Mesh
    axis: str
    processes: int
    batch: int
    microbatches: int = 1

    def __post_init__(self) -> None:
        if self.axis not in self.mesh.sizes:
            hint = did_you_mean(self.axis, self.mesh.names)
            raise ValueError(f"the mesh {self.mesh} has no axis {self.axis!r}{hint}")
        if self.mesh.size % self.processes:
            raise ValueError(
                f"{self.mesh.size} devices of the mesh {self.mesh} do not divide evenly among "
                f"{self.processes} processes"
            )

    def size(self, processes: int) -> int:
        """Returns the size of the axis with so many processes; 0: they cannot form a mesh."""
        devices = processes * (self.mesh.size // self.processes)
        rest = self.mesh.size // self.mesh.sizes[self.axis]
        return 0 if devices % rest else devices // rest

    def counts(self) -> list[int]:
        """Returns the numbers of processes that can go on, the largest first."""
        return [count for count in range(self.processes, 0, -1) if self.size(count)]

    def mesh_of(self, processes: int) -> Mesh:
        """Returns the mesh of so many processes, one of `counts`."""
        size = self.size(processes)
        axes = [(name, size if name == self.axis else n) for name, n in self.mesh.axes]
        return Mesh(tuple(axes), self.mesh.slow)

    def microbatches_of(self, processes: int) -> int:
        """Returns into how many microbatches they divide a batch."""
        least = math.ceil(self.microbatches * self.mesh.sizes[self.axis] / self.size(processes))
        return next((n for n in range(least, self.batch) if self.batch % n == 0), self.batch)

    @property
    def variables(self) -> dict[str, str]:
        """The variables of the environment of all processes."""
        return {MICROBATCHES: str(self.microbatches)}

    def flags(self, processes: int) -> list[str]:
        """Returns the flags of `train` for so many processes."""
        if processes == self.processes:
            return []
        return [
            f"--mesh_shape={self.mesh_of(processes)}",
            f"--microbatches={self.microbatches_of(processes)}",
        ]
