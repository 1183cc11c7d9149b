"""What is lost where sizes do not divide, in positions and in bytes."""

import pytest

import meshdsl as md
from meshdsl.reports.explain.explanation import explain
from meshdsl.reports.explain.pads import padded_dims, share
from tests.reports.explain.steps import explained

vocab, embed = md.dims(vocab=50_257, embed=10)


def table(mesh, layout):
    return md.jit(lambda params: params["w"] * 2, mesh, layout).lower(
        {"w": md.spec([vocab, embed])}
    )


def test_a_vocabulary_over_eight_devices_has_seven_pads():
    program = table("a:8", "vocab:a")
    value = program.block.instructions[-1].outputs[0]
    (one,) = padded_dims(value, program.mesh)
    assert (one.dim, one.axes, one.blocks, one.block) == (vocab, ("a",), 8, 6_283)
    assert one.pads == 7
    assert one.share == 7 / (8 * 6_283) == pytest.approx(share(value, program.mesh))


def test_pads_of_two_dims_multiply():
    program = table("a:8 b:4", "vocab:a; embed:b")
    value = program.block.instructions[-1].outputs[0]
    kept = 50_257 * 10 / (8 * 6_283 * 4 * 3)
    assert share(value, program.mesh) == pytest.approx(1 - kept)


def test_bytes_of_pads_are_told_for_each_tensor_and_together():
    program, found = explained(mesh="data:2 model:3", d_ff=256, heads=4)
    pads = found.pads
    heads = next(one for one in pads.dims if one.dim.name == "heads")
    assert (heads.blocks, heads.block, heads.pads, heads.share) == (3, 2, 2, 1 / 3)
    assert pads.dims[0] == heads  # what wastes most comes first
    for one in pads.tensors:
        local = one.value.bytes * program.mesh.extent(one.value.layout.split_axes)
        assert one.bytes == pytest.approx(
            one.value.bytes - _logical(one.value) * one.value.bytes / local
        )
    counts = [one.bytes for one in pads.tensors]
    assert counts == sorted(counts, reverse=True) and counts
    assert 0 < pads.peak_bytes < program.peak_bytes


def _logical(value):
    return value.shape.volume * value.dtype.itemsize


def test_sizes_that_divide_have_no_pads_and_the_report_says_nothing():
    _, found = explained()
    assert found.pads.dims == () and found.pads.tensors == () and found.pads.peak_bytes == 0
    assert "pads" not in str(found)


def test_the_report_tells_the_dims_that_waste_most():
    text = str(explained(mesh="data:2 model:3")[1])
    assert "\npads, where sizes do not divide: " in text
    (line,) = [line for line in text.split("\n") if line.startswith("  heads=4")]
    assert line.split()[:8] == ["heads=4", "model", "3", "×", "2", "2", "33", "%"]


def test_inputs_count_apart():
    found = explain(table("a:8", "vocab:a")).pads
    inputs = [one for one in found.tensors if one.name == "params/w"]
    assert found.input_bytes == pytest.approx(sum(one.bytes for one in inputs))
