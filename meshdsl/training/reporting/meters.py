"""What is measured of a run from outside: time, throughput, how well devices are used, memory.

Model FLOPs utilisation is what the model asks for (see `Programs.model_flops`) over what the
devices could do at most in half precision (Chowdhery et al. 2022, appendix B): what is computed
again, and padding, do not count as work.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshdsl.layouts.hardware import hardware_of
from meshdsl.tensors.dtypes import as_dtype


@dataclass(frozen=True)
class Meters:
    """Reads what there is to measure.

    Attributes:
        tokens_per_batch: of the full batch; None: tokens are not counted.
        model_flops: of a step with the full batch, on all devices.
        devices: how many there are.
        runtime: the backend's.
    """

    tokens_per_batch: int | None
    model_flops: int
    devices: int
    runtime: Any

    def read(self, seconds: float, share: float) -> dict[str, float]:
        """Returns metrics by name; those that cannot be had are left out.

        Args:
            seconds: a step took, on average.
            share: which part of a full batch it had, on average.
        """
        found = {"step_seconds": seconds}
        if self.tokens_per_batch is not None:
            found["tokens_per_second"] = self.tokens_per_batch * share / seconds
        rate = self.model_flops * share / seconds / self.devices
        found["tflops_per_device"] = rate / 1e12
        hardware = hardware_of(self.runtime.device_kind())
        if hardware is not None:
            found["mfu"] = rate / hardware.peak(np.dtype(as_dtype("bfloat16")))
        memory = self.runtime.memory_peak()
        if memory is not None:
            found["memory_bytes"] = memory
        found["host_memory_bytes"] = host_memory_peak()
        return found


def host_memory_peak() -> int:
    """Returns the most bytes that this process has held in the host's memory."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
