"""What a step spends its time on, and the advice about it."""

import re

import pytest

import meshdsl as md
from meshdsl.reports.explain.explanation import explain
from meshdsl.reports.explain.limits import (
    called,
    dtype_of_products,
    step_time,
    too_large,
    what_limits,
)
from meshdsl.tensors.dtypes import as_dtype
from tests.reports.explain.steps import LARGE, explained


def test_what_takes_time_has_words():
    assert called("compute") == "products of matrices"
    assert called("memory") == "memory bandwidth"
    assert called("over data+model") == "the network over axes data+model"
    assert called("over model") == "the network over axis model"


def test_the_report_begins_with_the_time_and_what_takes_it():
    _, found = explained()
    line = found.timeline
    text = str(found).replace("\n", " ")
    assert "at the peaks of TPU v5p: " in text
    assert "if all that is sent travels beside the work" in text
    assert what_limits(line).startswith("the network over axis model (")
    assert f"most is spent on {what_limits(line)}" in " ".join(text.split())


def test_one_device_does_not_wait_for_others():
    found = explained(mesh=None, layout=None)[1]
    assert "travels" not in step_time(found)
    assert what_limits(found.timeline).startswith("memory bandwidth (")
    assert found.faster == _HALF_BYTES


_HALF_BYTES = "half precision moves half the bytes (--policy=params=float32,compute=bfloat16)"


def test_the_dtype_of_most_products_is_in_the_first_line():
    n, m = md.dims(n=64, m=64)

    def products(x, y):  # 2 * 64^3 flops in the dtype of x, and 2 * 64^2 in float32
        square = md.einsum(x, x.rename({"n": "k"}), over="m")
        return md.einsum(md.cast(square, "float32"), y, over="k")

    for dtype in ("bfloat16", "float64"):
        specs = md.spec([n, m], dtype), md.spec(md.dims(k=64), "float32")
        program = md.jit(products).lower(*specs)
        assert dtype_of_products(program) == as_dtype(dtype)
        assert str(explain(program)).split("\n")[0].endswith(f"/device/step in {dtype}")
    assert str(explained()[1]).split("\n")[0].endswith("/device/step in float32")


def test_a_program_without_products_has_no_dtype():
    program = md.jit(lambda x: x + 1).lower(md.spec(md.dims(n=4)))
    assert dtype_of_products(program) is None
    assert str(explain(program)).split("\n")[0].endswith("/device/step")


def test_hardware_without_half_precision_is_not_met_with_it():
    program, _ = explained(mesh=None, layout=None)
    assert explain(program, "v5p").faster == _HALF_BYTES
    assert "half precision" not in explain(program, "cpu").faster


def test_half_precision_is_not_advised_twice():
    n, m = md.dims(n=64, m=64)

    def product(x, y):
        return md.einsum(x, y, over="m")

    half = [md.spec([n, m], "bfloat16"), md.spec([m], "bfloat16")]
    assert explain(md.jit(product).lower(*half)).faster == ""


def test_products_in_float32_are_met_with_half_precision_where_it_is_faster():
    program, _ = explained(mesh="data:8 model:8", **LARGE)
    assert explain(program, "v5p").timeline.limit == "compute"
    # Its products are one pass of bfloat16 anyway, of operands that have twice the bytes.
    assert explain(program, "v5p").faster == _HALF_BYTES
    assert explain(program, "h100").timeline.limit == "compute"
    assert explain(program, "h100").faster == (
        "--policy=params=float32,compute=bfloat16 multiplies 2.0 times as fast"
    )


def test_a_busy_axis_is_met_with_its_largest_collective():
    _, found = explained()
    assert found.faster.startswith("most of that is the all_reduce of ")
    assert "tests/reports/explain/steps.py:" in found.faster
    assert found.faster.endswith(
        "with more devices on other axes and fewer on this one, each sends less; " + _HALF_BYTES
    )


def test_gradients_on_the_wire_are_met_with_a_larger_batch():
    _, found = explained(mesh="data:8", layout="batch:data", batch=8, length=2)
    assert found.timeline.limit == "over data"
    assert found.faster.endswith(
        "a larger batch sends no more of it, and spreads it over more work; " + _HALF_BYTES
    )


def test_an_axis_that_reaches_past_the_fast_network_is_told():
    program, _ = explained(mesh="model:32", layout="d_ff:model; vocab:model", d_ff=256, vocab=128)
    found = explain(program, "h100")
    assert found.timeline.limit == "over model"
    assert "the fast network joins 8 devices: keep this axis inside them" in found.faster


def test_a_peak_that_does_not_fit_is_told():
    _, found = explained()
    assert too_large(found) == ""
    _, large = explained(mesh="data:2 model:4", **LARGE)
    assert too_large(large) == "does not fit: TPU v5p has 95.0 GiB"
    assert " TiB  of 95.0 GiB: does not fit; reached at " in str(large)


def test_a_peak_that_fits_is_told_beside_the_memory_of_a_device():
    _, found = explained()
    assert re.search(r"\n  peak +[\d.]+ .iB  of 95\.0 GiB: fits; reached at ", str(found))


@pytest.mark.parametrize("hardware", ["cpu", "h100"])
def test_the_hardware_is_named(hardware):
    program, _ = explained()
    assert {"cpu": "one CPU core", "h100": "NVIDIA H100 SXM"}[hardware] in str(
        explain(program, hardware)
    )


def test_an_axis_that_splits_nothing_is_told():
    assert explained(layout="batch:data")[1].faster == (
        "no rule splits a dim over axis `model`: its 4 devices do the same work; " + _HALF_BYTES
    )
