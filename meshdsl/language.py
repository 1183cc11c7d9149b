"""The public language: `__all__` lists each word of `import meshdsl as md`.

The package loads this module with the first word that a program uses. Layers and optimizers, at the
end of the imports, are written in the language themselves.
"""

import importlib
from typing import TYPE_CHECKING

from meshdsl.gradients.autodiff import grad, value_and_grad
from meshdsl.gradients.directions import hessian_vector_product, jacobian, jvp
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import Placement
from meshdsl.lowering.options import Options
from meshdsl.ops import *
from meshdsl.ops import random
from meshdsl.ops.elementwise.activations import *
from meshdsl.ops.elementwise.arithmetic import *
from meshdsl.ops.elementwise.bits import *
from meshdsl.ops.elementwise.complex_numbers import *
from meshdsl.ops.elementwise.special import *
from meshdsl.ops.products import fft, linalg
from meshdsl.precision.rewriting import with_precision
from meshdsl.precision.rules import Precision
from meshdsl.running.inspection import inspect
from meshdsl.running.jit import Jitted, jit
from meshdsl.running.placing import place
from meshdsl.tensors.dims import Dimension, Shape, dims
from meshdsl.tensors.module import Module, static
from meshdsl.tensors.named_array import NamedArray, Spec, named, spec, unnamed
from meshdsl.tensors.policy import Policy
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, TracedTensor

# isort: split
from meshdsl import nn, optim  # which are written in the language

if TYPE_CHECKING:
    from meshdsl.imports.jax.equinox import from_equinox
    from meshdsl.imports.jax.function import from_jax
    from meshdsl.reports.notebook.showing import show

__all__ = [
    "Dimension",
    "Graph",
    "Jitted",
    "Layout",
    "Mesh",
    "Module",
    "NamedArray",
    "Options",
    "Partition",
    "Placement",
    "Policy",
    "Precision",
    "Shape",
    "Spec",
    "Tensor",
    "TracedTensor",
    "abs",
    "acos",
    "acosh",
    "add",
    "all",
    "angle",
    "any",
    "arange",
    "argmax",
    "argmin",
    "argsort",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "attention",
    "avg_pool",
    "bessel_i0e",
    "bessel_i1e",
    "bincount",
    "bit_and",
    "bit_not",
    "bit_or",
    "bit_xor",
    "broadcast",
    "cast",
    "cbrt",
    "ceil",
    "celu",
    "check_finite",
    "checkpoint",
    "clip",
    "complex",
    "concat",
    "cond",
    "conj",
    "conv",
    "conv_transpose",
    "cos",
    "cosh",
    "count_nonzero",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "custom_gradient",
    "diff",
    "digamma",
    "dims",
    "divide",
    "divmod",
    "dynamic_slice",
    "dynamic_update_slice",
    "einsum",
    "elu",
    "equal",
    "erf",
    "erf_inv",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "fft",
    "flip",
    "floor",
    "floor_divide",
    "from_equinox",
    "from_jax",
    "full",
    "gelu",
    "grad",
    "greater",
    "greater_equal",
    "grouped_einsum",
    "hard_sigmoid",
    "hard_silu",
    "hard_tanh",
    "hessian_vector_product",
    "histogram",
    "hypot",
    "imag",
    "index",
    "inspect",
    "isfinite",
    "isinf",
    "isnan",
    "jacobian",
    "jit",
    "jvp",
    "leaky_relu",
    "less",
    "less_equal",
    "lgamma",
    "linalg",
    "linear_recurrence",
    "local",
    "log",
    "log1p",
    "log2",
    "log10",
    "log_sigmoid",
    "log_softmax",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "logit",
    "logsumexp",
    "map",
    "max",
    "max_pool",
    "maximum",
    "mean",
    "median",
    "merge",
    "min",
    "minimum",
    "mish",
    "mod",
    "multiply",
    "name",
    "named",
    "nan_to_num",
    "negative",
    "nn",
    "nonzero",
    "norm",
    "not_equal",
    "nth_largest",
    "one_hot",
    "ones",
    "optim",
    "outer",
    "pad",
    "place",
    "polygamma",
    "population_count",
    "power",
    "power_of_two",
    "primitive",
    "print",
    "prod",
    "random",
    "real",
    "reciprocal",
    "relu",
    "relu6",
    "remainder",
    "rename",
    "repeat",
    "round",
    "rsqrt",
    "scan",
    "scatter",
    "searchsorted",
    "segment_max",
    "segment_mean",
    "segment_min",
    "segment_sum",
    "selu",
    "shift",
    "shift_left",
    "shift_right",
    "show",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "sinh",
    "slice",
    "softmax",
    "softplus",
    "softsign",
    "sort",
    "spec",
    "split",
    "split_into",
    "sqrt",
    "square",
    "stack",
    "static",
    "std",
    "stop_gradient",
    "subtract",
    "sum",
    "take",
    "take_along",
    "tan",
    "tanh",
    "tile",
    "top_k",
    "transpose",
    "trunc",
    "unnamed",
    "unstack",
    "upsample",
    "value_and_grad",
    "var",
    "where",
    "while_loop",
    "with_precision",
    "xlog1py",
    "xlogy",
    "zeros",
    "zeta",
]


# Few programs use these: others do not wait for what they import.
_LATER = {
    "from_equinox": "meshdsl.imports.jax.equinox",
    "from_jax": "meshdsl.imports.jax.function",
    "show": "meshdsl.reports.notebook.showing",
}


def __getattr__(name: str) -> object:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
