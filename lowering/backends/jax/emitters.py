"""The emitters of all instructions, by kind, from the families."""

from __future__ import annotations

from collections.abc import Mapping

from meshdsl.lowering.backends.common import exchange, structure
from meshdsl.lowering.backends.common.families import combined
from meshdsl.lowering.backends.jax import collectives, control, debug, local
from meshdsl.lowering.backends.jax.machine import Emitter
from meshdsl.lowering.backends.jax.operations import (
    attention,
    convolution,
    cumulative,
    elementwise,
    fft,
    grouped,
    indexing,
    linalg,
    pooling,
    random,
    recurrence,
    reduction,
    scaling,
    slicing,
    sorting,
)

EMITTERS: Mapping[str, Emitter] = combined(
    attention,
    collectives,
    control,
    convolution,
    cumulative,
    debug,
    elementwise,
    exchange,
    fft,
    grouped,
    indexing,
    linalg,
    local,
    pooling,
    random,
    recurrence,
    reduction,
    scaling,
    slicing,
    sorting,
    structure,
)
