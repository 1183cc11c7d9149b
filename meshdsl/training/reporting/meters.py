"""Meters of a run: time, throughput, utilisation of devices, memory.

Model FLOPs utilisation is the model's operations (see `Programs.model_flops`) divided by the
devices' peak in half precision (Chowdhery et al. 2022, appendix B). Recomputation and padding do
not count as work.
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
    """Computes metrics of a run.

    Attributes:
        tokens_per_batch: the tokens of the full batch; None: tokens are not counted.
        model_flops: those of a step with the full batch, on all devices.
        devices: the number of devices.
        runtime: the backend's module `runtime`.
    """

    tokens_per_batch: int | None
    model_flops: int
    devices: int
    runtime: Any

    def read(self, seconds: float, share: float) -> dict[str, float]:
        """Returns metrics by name; unknown ones are left out.

        Args:
            seconds: the mean time of a step.
            share: the mean of a batch's size over that of a full batch.
        """
        metrics = {"step_seconds": seconds}
        if self.tokens_per_batch is not None:
            metrics["tokens_per_second"] = self.tokens_per_batch * share / seconds
        rate = self.model_flops * share / seconds / self.devices
        metrics["tflops_per_device"] = rate / 1e12
        hardware = hardware_of(self.runtime.device_kind())
        if hardware is not None:
            metrics["mfu"] = rate / hardware.peak(np.dtype(as_dtype("bfloat16")))
        memory = self.runtime.memory_peak()
        if memory is not None:
            metrics["memory_bytes"] = memory
        metrics["host_memory_bytes"] = host_memory_peak()
        return metrics


def host_memory_peak() -> int:
    """Returns this process's peak memory on the host, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
