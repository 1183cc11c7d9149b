"""The operations of the language, one file per family."""

from meshdsl.ops.control.checkpoint import checkpoint, name
from meshdsl.ops.control.cond import cond
from meshdsl.ops.control.custom_gradient import custom_gradient
from meshdsl.ops.control.debug import check_finite, print
from meshdsl.ops.control.local import Partition, local, primitive
from meshdsl.ops.control.scan import map, scan
from meshdsl.ops.control.while_loop import while_loop
from meshdsl.ops.creation import arange, full, ones, zeros
from meshdsl.ops.elementwise.activations import *
from meshdsl.ops.elementwise.arithmetic import *
from meshdsl.ops.elementwise.bits import *
from meshdsl.ops.elementwise.broadcasting import outer
from meshdsl.ops.elementwise.complex_numbers import *
from meshdsl.ops.elementwise.special import *
from meshdsl.ops.indexing import (
    one_hot,
    scatter,
    take,
    take_along,
)
from meshdsl.ops.products.attention import attention
from meshdsl.ops.products.convolution import conv, conv_transpose
from meshdsl.ops.products.einsum import einsum
from meshdsl.ops.products.grouped import grouped_einsum
from meshdsl.ops.products.pooling import avg_pool, max_pool
from meshdsl.ops.reductions.counting import (
    bincount,
    count_nonzero,
    histogram,
    nonzero,
    searchsorted,
)
from meshdsl.ops.reductions.cumulative import cummax, cummin, cumprod, cumsum, linear_recurrence
from meshdsl.ops.reductions.reduction import all, any, argmax, argmin, max, mean, min, prod, sum
from meshdsl.ops.reductions.segments import segment_max, segment_mean, segment_min, segment_sum
from meshdsl.ops.reductions.softmax import log_softmax, logsumexp, softmax
from meshdsl.ops.reductions.statistics import median, norm, std, var
from meshdsl.ops.shapes.joining import concat, repeat, split_into, stack, tile, unstack
from meshdsl.ops.shapes.shape import broadcast, merge, rename, split, transpose
from meshdsl.ops.shapes.slicing import (
    diff,
    dynamic_slice,
    dynamic_update_slice,
    flip,
    index,
    pad,
    shift,
    slice,
)
from meshdsl.ops.shapes.upsampling import upsample
from meshdsl.ops.sorting import argsort, nth_largest, sort, top_k

__all__ = [
    "Partition",
    "all",
    "any",
    "arange",
    "argmax",
    "argmin",
    "argsort",
    "attention",
    "avg_pool",
    "bincount",
    "broadcast",
    "check_finite",
    "checkpoint",
    "concat",
    "cond",
    "conv",
    "conv_transpose",
    "count_nonzero",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "custom_gradient",
    "diff",
    "dynamic_slice",
    "dynamic_update_slice",
    "einsum",
    "flip",
    "full",
    "grouped_einsum",
    "histogram",
    "index",
    "linear_recurrence",
    "local",
    "log_softmax",
    "logsumexp",
    "map",
    "max",
    "max_pool",
    "mean",
    "median",
    "merge",
    "min",
    "name",
    "nonzero",
    "norm",
    "nth_largest",
    "one_hot",
    "ones",
    "outer",
    "pad",
    "primitive",
    "print",
    "prod",
    "rename",
    "repeat",
    "scan",
    "scatter",
    "searchsorted",
    "segment_max",
    "segment_mean",
    "segment_min",
    "segment_sum",
    "shift",
    "slice",
    "softmax",
    "sort",
    "split",
    "split_into",
    "stack",
    "std",
    "sum",
    "take",
    "take_along",
    "tile",
    "top_k",
    "transpose",
    "unstack",
    "upsample",
    "var",
    "while_loop",
    "zeros",
]
