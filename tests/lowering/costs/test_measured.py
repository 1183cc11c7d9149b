"""The time of instructions by a calibration, against the figures that stand in it."""

import pytest

import meshdsl as md
from meshdsl.layouts.calibration import find_hardware
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.costs.measured import MeasuredCosts
from meshdsl.lowering.costs.roofline import local_work
from meshdsl.lowering.costs.schedule import WORK
from meshdsl.lowering.costs.simulation import simulate
from meshdsl.ops.products import linalg
from tests.layouts.calibrations import small, written

A, B, C = md.dims(a=64, b=64, c=64)
SHARING = {(1,): 1e-4, (8,): 4e-4}


def spec(*dims, dtype="float32"):
    return md.spec(list(dims), dtype)


def program(function, *specs, mesh=None, layout=None):
    return md.jit(function, mesh, layout).lower(*specs)


def costs_of(lowered, **families):
    """Returns the costs of a program's instructions, and the instructions by their names."""
    costs = MeasuredCosts(small(**families), lowered.mesh)
    work = local_work(lowered.block, products="alone")
    found = {one.op: (one, work.get(one)) for one in lowered.block.instructions}
    return costs, found


def simulated(tmp_path, lowered, **families):
    return simulate(lowered, find_hardware(written(tmp_path, **families)))


def product(x, y):
    return md.einsum(x, y, over="b")


def test_a_product_takes_what_was_measured(tmp_path):
    lowered = program(product, spec(A, B), spec(B, C))
    schedule = simulated(tmp_path, lowered)
    assert schedule.seconds == pytest.approx(1e-5)
    assert schedule.estimated == {} and schedule.estimated_seconds == 0
    assert schedule.origin.startswith("8 measurements of 2026-01-01 (")


def test_the_gradient_of_a_weight_has_figures_of_its_own():
    leading = {"products/float32/leading": {(1, 64, 64, 64): 7e-5}}
    for first, second, seconds in [
        ((A, B), (B, C), 1e-5),  # forward
        ((A, B), (C, B), 1e-5),  # gradient of the operand
        ((B, A), (B, C), 7e-5),  # gradient of the weight
    ]:
        costs, found = costs_of(program(product, spec(*first), spec(*second)), **leading)
        assert costs.work(*found["einsum"]) == pytest.approx(seconds)


def test_a_product_of_another_dtype_is_estimated_by_the_one_that_was_measured(tmp_path):
    lowered = program(product, spec(A, B, dtype="bfloat16"), spec(B, C, dtype="bfloat16"))
    schedule = simulated(tmp_path, lowered)
    assert schedule.estimated == {"einsum": "products/float32/rows"}
    assert schedule.estimated_seconds == pytest.approx(1e-5)


def test_elementwise_work_takes_its_bytes_and_its_arithmetic():
    functions = {"functions/exp": {(65536,): 1e-3}, "functions/step": {(65536,): 1e-3}}
    lowered = program(lambda x: md.exp(x) * 2, spec(A, B))
    costs, found = costs_of(lowered, **functions)
    moved = costs.moved(2 * 4 * 64 * 64)
    per_exp = (1e-3 - costs.moved(2 * 4 * 65536)) / 65536
    per_step = (1e-3 - costs.moved(3 * 4 * 65536)) / 65536 / 16
    assert costs.work(*found["exp"]) == pytest.approx(64 * 64 * per_exp)  # fused: no bytes
    assert costs.work(*found["multiply"]) == pytest.approx(64 * 64 * per_step + moved)
    assert costs.estimated == {}


def test_a_function_of_two_operands_reads_both():
    bytes_of_three = costs_of(program(md.exp, spec(A, B)))[0].moved(3 * 4 * 65536)
    functions = {"functions/divide": {(65536,): bytes_of_three + 1e-3}}
    costs, found = costs_of(program(lambda x, y: x / y, spec(A, B), spec(A, B)), **functions)
    moved = costs.moved(3 * 4 * 64 * 64)
    assert costs.work(*found["divide"]) == pytest.approx(1e-3 * 64 * 64 / 65536 + moved)


def test_a_function_that_was_not_measured_is_as_slow_as_the_others():
    functions = {"functions/exp": {(65536,): 1e-3}}
    costs, found = costs_of(program(md.erf_inv, spec(A, B)), **functions)
    exp, _ = costs_of(program(md.exp, spec(A, B)), **functions)[1]["exp"], None
    assert costs.work(*found["erf_inv"]) == pytest.approx(costs.work(*exp))
    assert costs.estimated == {"erf_inv": "the other functions"}


def test_reductions_look_ups_and_scatters_have_their_own_figures():
    families = {
        "reductions/minor": {(16384,): 1e-3},
        "reductions/leading": {(16384,): 2e-3},
        "gathers": {(64, 256): 3e-3},
        "scatters": {(64, 256, 64): 4e-3},
    }
    ids, wide = spec(C, dtype="int32"), spec(A, B)
    for function, specs, op, seconds in [
        (lambda x: md.sum(x, over="b"), [wide], "sum", 1e-3),
        (lambda x: md.sum(x, over="a"), [wide], "sum", 2e-3),
        (lambda x, i: md.take(x, i, "a"), [wide, ids], "take", 3e-3),
        (
            lambda x, i: md.grad(lambda x: md.sum(md.take(x, i, "a")))(x),
            [wide, ids],
            "scatter_add",
            4e-3,
        ),
    ]:
        lowered = program(function, *specs)
        costs, found = costs_of(lowered, **families)
        assert costs.work(*found[op]) == pytest.approx(seconds, rel=0.05)
        # Without them, the bytes that they move stand for them, and this is said.
        costs, found = costs_of(lowered)
        assert 0 < costs.work(*found[op]) < 1e-3
        assert costs.estimated == {op: "elementwise work on as many bytes"}


def test_look_ups_and_scatters_along_a_later_dim_have_their_own_figures():
    families = {
        "gathers": {(64, 256): 3e-3},
        "gathers/later": {(64, 256): 7e-3},
        "scatters": {(64, 256, 64): 4e-3},
        "scatters/later": {(64, 256, 64): 8e-3},
    }
    ids, wide = spec(C, dtype="int32"), spec(A, B)

    def gradient(x, i):
        return md.grad(lambda x: md.sum(md.take(x, i, "b")))(x)

    for function, op, seconds in [
        (lambda x, i: md.take(x, i, "b"), "take", 7e-3),
        (gradient, "scatter_add", 8e-3),
    ]:
        lowered = program(function, wide, ids)
        costs, found = costs_of(lowered, **families)
        assert costs.work(*found[op]) == pytest.approx(seconds)
        kind = "gathers" if op == "take" else "scatters"
        costs, found = costs_of(lowered, **{kind: families[kind]})
        assert costs.work(*found[op]) < seconds and costs.estimated == {op: kind}


def test_touched_rows_cost_what_a_scatter_of_as_many_rows_does():
    def changed(x, i):
        return x - md.grad(lambda x: md.sum(md.take(x, i, "rows")))(x)

    table = md.dims(rows=2**14, width=64)
    lowered = program(changed, spec(*table), spec(md.Dimension("few", 16), dtype="int32"))
    costs, found = costs_of(lowered, scatters={(16, 256, 16): 4e-3})
    for op in ("row_sums", "add_rows"):
        assert costs.work(*found[op]) == pytest.approx(4e-3, rel=0.05)
        assert 0 < found[op][1].bytes < 2**14 * 64
    costs, found = costs_of(lowered)
    assert 0 < costs.work(*found["row_sums"]) < 1e-3
    assert costs.estimated == {"row_sums": "elementwise work on as many bytes"}


def test_a_dim_that_table_and_indices_share_does_not_make_a_row_strided():
    def looked_up(x, i):
        return md.take_along(x, i, "b")

    table, ids = spec(A, B, C), spec(A, md.Dimension("b", 16), dtype="int32")
    lowered = program(looked_up, table, ids)
    families = {"gathers": {(1024, 256): 3e-3}, "gathers/later": {(1024, 256): 9e-3}}
    costs, found = costs_of(lowered, **families)
    assert costs.work(*found["take"]) == pytest.approx(3e-3)


def test_what_no_family_has_is_estimated_by_its_flops_or_its_bytes():
    height, width = md.dims(height=16, width=16)
    sort, found = costs_of(program(lambda x: md.sort(x, "a"), spec(A, B)))
    assert sort.work(*found["sort"]) > 0
    assert sort.estimated == {"sort": "elementwise work on as many bytes"}
    solve, found = costs_of(
        program(lambda x: linalg.cholesky(x, "height", "width"), spec(height, width))
    )
    assert solve.work(*found["cholesky"]) > 0
    assert solve.estimated == {"cholesky": "products of as many flops"}


def test_a_collective_takes_what_was_measured_for_groups_of_its_size():
    x = spec(md.Dimension("a", 256 * 1024), md.Dimension("b", 8))
    for mesh, layout, seconds in [("m:2", "b:m", 2e-4), ("m:8", "b:m", 4e-4)]:
        lowered = program(lambda x: md.sum(x, over="b"), x, mesh=mesh, layout=layout)
        costs, found = costs_of(lowered)
        assert costs.transfer(found["all_reduce"][0]) == pytest.approx(seconds)


def test_gathers_along_the_first_dim_and_along_others_differ():
    families = {"all_gather/first": {(2, 8192): 1e-4}, "all_gather/later": {(2, 8192): 9e-4}}
    wide = spec(md.Dimension("a", 64), md.Dimension("b", 32))
    for dim, seconds in [("a", 1e-4), ("b", 9e-4)]:
        lowered = program(lambda x, dim=dim: md.sort(x, dim), wide, mesh="m:2", layout=f"{dim}:m")
        costs, found = costs_of(lowered, **families)
        assert costs.transfer(found["all_gather"][0]) == pytest.approx(seconds)
        assert costs.estimated == {}
    costs, found = costs_of(lowered, **{"all_gather/first": {(2, 8192): 1e-4}})
    assert costs.transfer(found["all_gather"][0]) == pytest.approx(1e-4)
    assert costs.estimated == {"all_gather": "all_gather/first"}
    # Of two devices each sends half of the payload: here in less than any collective takes.
    costs, found = costs_of(lowered)
    hardware = costs.calibration.hardware
    assert 4096 / hardware.link_bandwidth < hardware.latency == 2e-5
    assert costs.transfer(found["all_gather"][0]) == hardware.latency
    assert costs.estimated == {"all_gather": "the best bandwidth of collectives"}
    costs, found = costs_of(lowered, all_reduce={(2, 2**10): 1e-6})
    assert costs.transfer(found["all_gather"][0]) == pytest.approx(4096 / 2**10 * 1e-6)


def test_small_tensors_travel_in_one_buffer_on_cpus():
    def sums(x, y):
        return md.sum(x, over="b"), md.sum(y, over="b")

    wide = [md.Dimension("a", 128), md.Dimension("b", 8)]
    lowered = program(sums, spec(*wide), spec(*wide), mesh="m:2", layout="b:m")
    costs, found = costs_of(lowered)
    collective = found["all_reduce"][0]
    assert len(collective.parts) == 2
    # Together they have 1 KiB; they are copied into the buffer and out of it.
    assert costs.transfer(collective) == pytest.approx(2e-5 + costs.moved(4 * 1024))


def test_fewer_devices_share_less_and_more_devices_share_more():
    calibration = small(sharing=SHARING)
    of = {mesh: MeasuredCosts(calibration, Mesh.parse(mesh)).sharing for mesh in ("m:1", "m:8")}
    assert of == {"m:1": pytest.approx(0.25), "m:8": pytest.approx(1)}
    assert MeasuredCosts(calibration, Mesh.parse("m:16")).sharing == pytest.approx(2)
    assert MeasuredCosts(small(), Mesh.parse("m:1")).sharing == 1


def test_a_call_takes_the_time_of_its_arrays(tmp_path):
    lowered = program(product, spec(A, B), spec(B, C))
    dispatch = {"dispatch": {(1,): 1e-3, (2,): 2e-3}}
    schedule = simulated(tmp_path, lowered, **dispatch)
    call, einsum = schedule.events
    assert (call.kind, call.name, call.seconds) == (WORK, "call", pytest.approx(2e-3))
    assert schedule.seconds == pytest.approx(call.seconds + einsum.seconds)


def test_a_loop_copies_the_slices_that_products_read(tmp_path):
    layers = md.Dimension("layers", 4)

    def chain(x, weights):
        return md.scan(
            lambda x, w: (md.rename(md.einsum(x, w, over="b"), c="b"), None), x, weights, "layers"
        )[0]

    lowered = program(chain, spec(A, B), spec(layers, B, C))
    schedule = simulated(tmp_path, lowered)
    (loop,) = (event for event in schedule.events if event.count == 4)
    copy, einsum = loop.inside
    costs, _ = costs_of(lowered)
    assert copy.seconds == pytest.approx(costs.moved(2 * 4 * 64 * 64))
    assert einsum.seconds == pytest.approx(1e-5)


def test_attention_without_figures_is_made_of_products():
    def attend(q, k, v):
        return md.attention(q, k, v, "memory")

    length, memory, heads, features = md.dims(length=64, memory=64, heads=2, kv=64)
    q, k = spec(heads, length, features), spec(heads, memory, features)
    lowered = program(attend, q, k, k)
    costs, found = costs_of(lowered)
    op = next(name for name in found if name.startswith("attention"))
    assert costs.work(*found[op]) > 2 * costs.calibration.fits["products/float32/rows"].seconds(
        (2, 64, 64, 64)
    )
    assert costs.estimated == {op: "elementwise work on as many bytes"}
    costs, found = costs_of(lowered, attention={(2, 64, 64, 64): 5e-3})
    assert costs.work(*found[op]) == pytest.approx(5e-3)
