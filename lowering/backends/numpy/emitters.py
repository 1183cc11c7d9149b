"""The emitters of all instructions, by kind, from the families."""

from __future__ import annotations

from collections.abc import Mapping

from meshdsl.lowering.backends.common import structure
from meshdsl.lowering.backends.common.families import combined
from meshdsl.lowering.backends.numpy import collectives, control, debug, exchange, local
from meshdsl.lowering.backends.numpy.machine import Emitter
from meshdsl.lowering.backends.numpy.operations import (
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
