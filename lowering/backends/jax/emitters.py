"""What one device does for each instruction, gathered from the families."""

from __future__ import annotations

from collections.abc import Mapping

from meshdsl.lowering.backends.jax import (
    collectives,
    control,
    creation,
    einsum,
    elementwise,
    exchange,
    indexing,
    random,
    reduction,
    shape,
)
from meshdsl.lowering.backends.jax.machine import Emitter

EMITTERS: Mapping[str, Emitter] = {
    **collectives.EMITTERS,
    **control.EMITTERS,
    **creation.EMITTERS,
    **einsum.EMITTERS,
    **elementwise.EMITTERS,
    **exchange.EMITTERS,
    **indexing.EMITTERS,
    **random.EMITTERS,
    **reduction.EMITTERS,
    **shape.EMITTERS,
}
