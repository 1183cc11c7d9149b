"""Programs run as they are, before and after a pass."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from meshdsl.lowering import backends
from meshdsl.lowering.passes.verify import verify
from meshdsl.lowering.program import SpmdProgram


def run(program: SpmdProgram, inputs: Any, backend: str = "numpy") -> list[np.ndarray]:
    """Returns the results of a program, which must be well formed."""
    verify(program)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(inputs)]
    results = backends.load(backend).Executable(program).call_flat(leaves)
    return [np.asarray(result) for result in results]


def assert_same(
    before: SpmdProgram, after: SpmdProgram, inputs: Any, backend: str = "numpy"
) -> None:
    """The two programs give the same numbers, up to the order of summation."""
    pairs = zip(run(before, inputs), run(after, inputs, backend), strict=True)
    for want, found in pairs:
        assert want.dtype == found.dtype
        scale = np.abs(want * 1.0).max(initial=1.0)
        assert np.abs(want * 1.0 - found * 1.0).max(initial=0.0) <= 1e-9 * scale
