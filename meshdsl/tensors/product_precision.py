"""The precision of products in JAX: `jax.default_matmul_precision`.

A program keeps that under which it was compiled. A call under another one compiles another.
"""

from __future__ import annotations

import jax


def product_precision() -> str | None:
    """Returns JAX's setting for products whose precision is not given; None: the platform's."""
    value: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return value
