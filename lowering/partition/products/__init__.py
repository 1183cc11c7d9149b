"""Partition rules of products, mirroring `meshdsl.ops.products`; attention has its own folder."""
