"""Special functions: jax.lax and jax.scipy.special on aligned dims."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jax import lax
from jax.scipy import special

from meshdsl.lowering.backends.jax.machine import Emitter
from meshdsl.lowering.backends.jax.operations.elementwise import elementwise

EMITTERS: Mapping[str, Emitter] = {
    "bessel_i0e": elementwise(lax.bessel_i0e),
    "bessel_i1e": elementwise(lax.bessel_i1e),
    "digamma": elementwise(lax.digamma),
    "erf": elementwise(lax.erf),
    "erf_inv": elementwise(lax.erf_inv),
    "erfc": elementwise(lax.erfc),
    "lgamma": elementwise(lax.lgamma),
    "polygamma": elementwise(lambda n, x: lax.polygamma(*jnp.broadcast_arrays(n, x))),
    "xlog1py": elementwise(special.xlog1py),
    "xlogy": elementwise(special.xlogy),
    "zeta": elementwise(special.zeta),
}
