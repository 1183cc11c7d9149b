"""Special functions: SciPy's, on aligned dims."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy import special  # type: ignore[import-untyped]

from meshdsl.lowering.backends.numpy.machine import Emitter
from meshdsl.lowering.backends.numpy.operations.elementwise import elementwise

EMITTERS: Mapping[str, Emitter] = {
    "bessel_i0e": elementwise(special.i0e),
    "bessel_i1e": elementwise(special.i1e),
    "digamma": elementwise(lambda x: np.where(x == 0, np.nan, special.digamma(x))),
    "erf": elementwise(special.erf),
    "erf_inv": elementwise(special.erfinv),
    "erfc": elementwise(special.erfc),
    "lgamma": elementwise(special.gammaln),
    "polygamma": elementwise(special.polygamma),
    "xlog1py": elementwise(special.xlog1py),
    "xlogy": elementwise(special.xlogy),
    "zeta": elementwise(special.zeta),
}
