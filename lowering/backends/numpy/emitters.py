"""What one device does for each instruction, gathered from the families."""

from __future__ import annotations

from collections.abc import Mapping

from meshdsl.lowering.backends.numpy import collectives, control, debug, exchange, local
from meshdsl.lowering.backends.numpy.machine import Emitter
from meshdsl.lowering.backends.numpy.operations import (
    attention,
    bits,
    convolution,
    creation,
    cumulative,
    einsum,
    elementwise,
    fft,
    indexing,
    joining,
    linalg,
    pooling,
    random,
    recurrence,
    reduction,
    scaling,
    shape,
    slicing,
    sorting,
    special,
)

EMITTERS: Mapping[str, Emitter] = {
    **bits.EMITTERS,
    **attention.EMITTERS,
    **collectives.EMITTERS,
    **control.EMITTERS,
    **convolution.EMITTERS,
    **creation.EMITTERS,
    **debug.EMITTERS,
    **cumulative.EMITTERS,
    **einsum.EMITTERS,
    **elementwise.EMITTERS,
    **exchange.EMITTERS,
    **fft.EMITTERS,
    **indexing.EMITTERS,
    **joining.EMITTERS,
    **linalg.EMITTERS,
    **local.EMITTERS,
    **pooling.EMITTERS,
    **random.EMITTERS,
    **recurrence.EMITTERS,
    **reduction.EMITTERS,
    **scaling.EMITTERS,
    **shape.EMITTERS,
    **slicing.EMITTERS,
    **sorting.EMITTERS,
    **special.EMITTERS,
}
