"""Partition rules of factorizations, which are those of linear algebra."""

from __future__ import annotations

from meshdsl.lowering.partition.products.linalg import linalg

RULES = dict.fromkeys(["qr", "eigh", "svd"], linalg)
