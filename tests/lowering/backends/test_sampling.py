"""The operations whose cycles make a table of costs."""

import json

import jax
import pytest

from meshdsl.layouts.costs import ELEMENTWISE, PRODUCTS, path_of
from meshdsl.lowering.backends.jax.sampling import sampled, samples


def test_every_operation_is_sampled_once():
    sizes = [(sample.family, sample.sizes) for sample in samples()]
    assert len(set(sizes)) == len(sizes)
    assert {family for family, _ in sizes} == {PRODUCTS, ELEMENTWISE}


def test_elementwise_work_moves_the_bytes_of_its_sizes():
    for sample in samples():
        if sample.family == ELEMENTWISE:
            given = [jax.ShapeDtypeStruct(shape, sample.dtype) for shape in sample.shapes]
            arrays = [*given, jax.eval_shape(sample.function, *given)]
            assert sum(one.size * one.dtype.itemsize for one in arrays) == sample.sizes[0]


def test_the_tables_have_what_is_sampled():
    rows = json.loads(path_of("v5p").read_text())["cycles"]
    found = {(family, tuple(sizes)) for family in rows for *sizes, _ in rows[family]}
    assert found == {(sample.family, sample.sizes) for sample in samples()}


def test_a_kind_of_tpu_without_cycles_is_named():
    with pytest.raises(ValueError, match="no cycles of 'v3'; choose one of v4, v5e, v5p, v6e"):
        sampled("v3")
