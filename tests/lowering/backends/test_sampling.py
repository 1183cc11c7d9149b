"""The operations whose cycles make a table of costs."""

import itertools
import json
import os
import subprocess
import sys
from importlib.util import find_spec

import jax
import pytest

from meshdsl.layouts import costs
from meshdsl.layouts.costs import (
    ATTENTION_BLOCKS,
    ELEMENTWISE,
    GRADIENT,
    PRODUCTS,
    SCORES,
    path_of,
)
from meshdsl.lowering.backends.jax import sampling, sampling_scores
from meshdsl.lowering.backends.jax.sampling import sampled, samples, write_table
from meshdsl.lowering.backends.jax.sampling_attention import FEATURES, SIDES, bundles

NEEDS_LIBTPU = pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu")


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
    rows = json.loads(path_of("v5p").read_text())["families"]
    found = {(family, tuple(sizes)) for family in rows for *sizes, _ in rows[family]}
    blocks = {
        (family, sizes)
        for family in (ATTENTION_BLOCKS, GRADIENT[ATTENTION_BLOCKS])
        for sizes in itertools.product(SIDES, FEATURES)
    }
    blocks |= {
        (family, sizes)
        for family in (SCORES, GRADIENT[SCORES])
        for sizes in itertools.product(sampling_scores.SIDES, sampling_scores.FEATURES)
    }
    assert found == {(sample.family, sample.sizes) for sample in samples()} | blocks


@pytest.mark.parametrize("side", sampling_scores.SIDES)
def test_scores_are_sampled_in_several_blocks_of_their_side(side):
    sizes = sampling_scores.sizes_of(side, 64)
    assert sizes.blocks == (side, side) and not sizes.at_once
    assert sizes.lead.volume == 4 * sizes.lead_block.volume


@NEEDS_LIBTPU
def test_the_cycles_of_scores_are_those_of_the_table():
    cycles = sampling_scores.cycles("v5e", 128, 128)
    rows = [_rows(family) for family in (SCORES, GRADIENT[SCORES])]
    assert cycles == tuple(row[-1] for family in rows for row in family if row[:2] == [128, 128])


def test_a_table_keeps_the_families_that_are_not_sampled_again(monkeypatch, tmp_path):
    monkeypatch.setattr(costs, "_FOLDER", tmp_path)
    monkeypatch.setattr(sampling, "version", lambda name: "0.0")
    write_table("v5p", {PRODUCTS: [[64, 64, 64, 9]]})
    write_table("v5p", {ATTENTION_BLOCKS: [[128, 64, 7], [128, 128, 8]]})
    table = json.loads((tmp_path / "v5p.json").read_text())
    assert table["families"] == {
        PRODUCTS: [[64, 64, 64, 9]],
        ATTENTION_BLOCKS: [[128, 64, 7], [128, 128, 8]],
    }
    assert table["origin"].endswith(", 3 operations") and table["unit"] == "cycles"


def test_the_bundles_of_kernels_are_read_by_their_names(tmp_path):
    for kernel, count in (("fwd_residuals", 10), ("dq_no_residuals", 20), ("dkv", 30)):
        file = tmp_path / f"17-splash_mha_{kernel}.1-71-schedule-analysis_final_bundles.txt"
        file.write_text(f"Schedule analysis:\n\ttotal scheduled bundles:    {count}\n")
    assert bundles(tmp_path) == {"fwd": 10, "dq": 20, "dkv": 30}
    file.write_text("Schedule analysis:\n")
    with pytest.raises(ValueError, match=r"dkv.*: there is no number of bundles in this schedule"):
        bundles(tmp_path)


@NEEDS_LIBTPU
def test_the_compiler_schedules_the_kernels_of_attention(tmp_path):
    """In a process of its own: the compiler reads where to write once, when it is first used."""
    code = (
        "from meshdsl.lowering.backends.jax import sampling_attention as s; "
        "s._compile('v5e', 128, 128)"
    )
    flags = f"--xla_jf_dump_to={tmp_path} --xla_jf_dump_llo_text=true"
    env = {**os.environ, "LIBTPU_INIT_ARGS": flags}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, capture_output=True)
    found = bundles(tmp_path)
    (forward,) = (row[-1] for row in _rows(ATTENTION_BLOCKS) if row[:2] == [128, 128])
    (backward,) = (row[-1] for row in _rows(GRADIENT[ATTENTION_BLOCKS]) if row[:2] == [128, 128])
    assert found["fwd"] == forward and found["dq"] + found["dkv"] == backward


def _rows(family):
    return json.loads(path_of("v5e").read_text())["families"][family]


def test_a_kind_of_tpu_without_cycles_is_named():
    with pytest.raises(ValueError, match="no cycles of 'v3'; choose one of v4, v5e, v5p, v6e"):
        sampled("v3")
