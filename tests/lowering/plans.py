"""The collectives that a function needs on a layout, once its numbers are known to be right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import meshdsl as md
from meshdsl.lowering.passes.verify import verify
from meshdsl.lowering.program import SpmdProgram

MESH = "data:2,model:4"


def lowered(function: Callable, *inputs: Any, layout: str, mesh: str = MESH) -> SpmdProgram:
    """Returns the program, which is well formed and has the numbers of one device."""
    jitted = md.jit(function, mesh, layout, "numpy")
    found, expected = jitted(*inputs), md.jit(function, backend="numpy")(*inputs)
    for mine, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        mine, want = (np.asarray(each) * 1.0 for each in (mine, want))
        scale = np.abs(want).max(initial=1.0)
        assert np.abs(mine - want).max(initial=0.0) <= 1e-10 * scale
    program = jitted.lower(*inputs)
    verify(program)
    return program


def collectives(function: Callable, *inputs: Any, layout: str, mesh: str = MESH) -> list[str]:
    """Returns `all_reduce model 3 x [batch=8, embed=4]` for each, the count only if not 1.

    Of joined ones, every tensor is listed.
    """
    program = lowered(function, *inputs, layout=layout, mesh=mesh)
    found = []
    for c in (part for one in program.collectives for part in one.parts or (one,)):
        times = f"{c.count} x " if c.count != 1 else ""
        found.append(f"{c.kind} {'+'.join(c.axes)} {times}{c.dims}")
    return found
