"""Ranges: the sizes of operations that are measured on a kind of device.

A virtual CPU device is measured at the sizes of small models, in float32. A GPU or a TPU is
measured at those of large ones: its products reach their best rate from some thousand rows on, and
GPUs have fused kernels of attention in half precision only.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from meshdsl.layouts.costs import Sizes

FLOAT32, BFLOAT16 = "float32", "bfloat16"


@dataclass(frozen=True)
class Ranges:
    """The sizes to measure.

    Attributes:
        products: by dtype, what the rows, the inner dim and the columns of a product can be.
        most_flops: of one product.
        batched: by dtype, the sides of the products of a batch of eight.
        moved, read: bytes of elementwise work, and of reductions.
        elements: of a function.
        attention: by dtype, the matrices of scores, their side and the features.
        most_scores: of one attention.
        row_counts, row_bytes, table_rows: of look-ups and scatters.
        payloads: bytes of collectives.
    """

    products: Mapping[str, tuple[int, ...]]
    most_flops: int
    batched: Mapping[str, tuple[int, ...]]
    moved: tuple[int, ...]
    read: tuple[int, ...]
    elements: int
    attention: Mapping[str, tuple[Sizes, ...]]
    most_scores: int
    row_counts: tuple[int, ...]
    row_bytes: tuple[int, ...]
    table_rows: tuple[int, ...]
    payloads: tuple[int, ...]

    @staticmethod
    def of(platform: str) -> Ranges:
        """Returns the sizes for a platform, as JAX names it: cpu, gpu, tpu."""
        return OF_CPUS if platform == "cpu" else OF_ACCELERATORS


def _powers(first: int, last: int, step: int) -> tuple[int, ...]:
    """Returns powers of two by their exponents, both ends included."""
    return tuple(2**power for power in range(first, last + 1, step))


OF_CPUS = Ranges(
    products={FLOAT32: (16, 64, 256, 1024), BFLOAT16: (64, 512)},
    most_flops=2**29,
    batched={FLOAT32: (16, 64, 256)},
    moved=_powers(12, 26, 2),
    read=_powers(12, 24, 3),
    elements=2**16,
    attention={FLOAT32: tuple(itertools.product((1, 8, 32), (32, 128, 512), (16, 64)))},
    most_scores=2**22,
    row_counts=(64, 1024),
    row_bytes=(64, 1024, 4096),
    table_rows=(64, 1024),
    payloads=(2**13, 2**16, 2**18, 2**21, 2**23),
)
OF_ACCELERATORS = Ranges(
    products={BFLOAT16: (256, 1024, 4096, 16384), FLOAT32: (512, 4096)},
    most_flops=2**41,
    batched={BFLOAT16: (128, 1024)},
    moved=_powers(14, 32, 3),
    read=_powers(15, 30, 3),
    elements=2**26,
    attention={BFLOAT16: tuple(itertools.product((16, 128), (512, 2048, 8192), (64, 128)))},
    most_scores=2**32,
    row_counts=(1024, 16384),
    row_bytes=(256, 2048, 8192),
    table_rows=(1024, 65536),
    payloads=_powers(14, 29, 3),
)
