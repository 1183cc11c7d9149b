"""What one device's own work takes: the bytes that have to move, and the products."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl.layouts.hardware import hardware
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.costs.roofline import local_work
from meshdsl.lowering.program import Block, Instruction, Value
from meshdsl.tensors.dims import Shape

row, column, inner = md.dims(row=64, column=128, inner=256)
MIB = 2**20


def work(f, *shapes, mesh=None, layout=None):
    """Returns flops and bytes of a function's program, and its instructions with their work."""
    block = md.jit(f, mesh, layout).lower(*[md.spec(shape) for shape in shapes]).block
    found = local_work(block)
    return sum(w.flops for w in found.values()), sum(w.bytes for w in found.values()), found


def test_a_product_reads_its_operands_once_and_writes_its_result():
    flops, count, _ = work(
        lambda x, y: md.einsum(x, y, over="inner"), [row, inner], [inner, column]
    )
    assert flops == 2 * 64 * 128 * 256
    assert count == 4 * (64 * 256 + 256 * 128 + 64 * 128)


def test_a_split_product_does_its_share():
    flops, count, _ = work(
        lambda x, y: md.einsum(x, y, over="inner"),
        [row, inner],
        [inner, column],
        mesh="a:4",
        layout="row:a",
    )
    assert flops == 2 * 16 * 128 * 256
    assert count == 4 * (16 * 256 + 256 * 128 + 16 * 128)


def test_elementwise_work_is_done_in_passing_and_counts_no_arithmetic():
    flops, count, _ = work(lambda x: 3 * (x + 1) * x - 2, [row, column])
    assert (flops, count) == (0, 2 * 4 * 64 * 128)


def test_what_is_computed_in_passing_is_not_written_before_a_reduction():
    _, count, _ = work(lambda x: md.sum(x * x + 1, "column"), [row, column])
    assert count == 4 * (64 * 128 + 64)


def test_a_costly_result_with_two_readers_is_written_and_read():
    def f(x):
        y = md.exp(x)
        return md.sum(y, "row"), md.sum(y, "column")

    _, count, _ = work(f, [row, column])
    whole = 4 * 64 * 128
    assert count == 4 * whole + 4 * (64 + 128)  # x read, y written, y read twice, both sums written
    _, count, _ = work(lambda x: md.sum(md.exp(x), "row"), [row, column])
    assert count == whole + 4 * 128


def test_a_product_hands_its_result_to_its_one_elementwise_reader():
    def f(x, y):
        return md.exp(md.einsum(x, y, over="inner"))

    _, count, _ = work(f, [row, inner], [inner, column])
    assert count == 4 * (64 * 256 + 256 * 128 + 64 * 128)


def test_a_product_casts_as_it_reads():
    def f(x, y):
        return md.einsum(md.cast(x, "bfloat16"), md.cast(y, "bfloat16"), over="inner")

    _, count, _ = work(f, [row, inner], [inner, column])
    assert count == 4 * (64 * 256 + 256 * 128) + 2 * 64 * 128


def test_views_cost_nothing():
    _, count, found = work(lambda x: x.rename(row="line"), [row, column])
    assert count == 0
    assert all(w.flops == 0 for w in found.values())


def test_a_look_up_reads_what_it_results_in():
    table, few = md.dims(vocab=100_000, few=8)

    def f(t, i):
        return md.take(t, i, "vocab")

    block = md.jit(f).lower(md.spec([table, column]), md.spec([few], "int32")).block
    count = sum(w.bytes for w in local_work(block).values())
    assert 2 * 4 * 8 * 128 <= count <= 2 * 4 * 8 * 128 + 200


def test_an_update_in_place_moves_the_piece_alone():
    half = md.dims(row=32)
    shape, dtype = Shape([row, column]), np.dtype("float32")
    given, whole = (Value(shape, dtype, TensorLayout(), shape) for _ in range(2))
    part = Shape([*half, column])
    piece = Value(part, dtype, TensorLayout(), part)
    update = Instruction("local_update", (given, piece), (whole,))
    (done,) = local_work(Block((given, piece), (update,), (whole,))).values()
    assert done.bytes == 2 * 4 * 32 * 128


@pytest.mark.parametrize(("size", "limit"), [(64, "memory"), (8192, "compute")])
def test_the_slower_of_arithmetic_and_memory_counts(size, limit):
    a, b, c = md.dims(a=size, b=size, c=size)
    _, _, found = work(lambda x, y: md.einsum(x, y, over="b"), [a, b], [b, c])
    ((one, done),) = [(i, w) for i, w in found.items() if i.op == "einsum"]
    v5p = hardware("v5p")
    seconds, what = done.seconds(v5p, one)
    assert what == limit
    arithmetic = 2 * size**3 / v5p.peak(np.dtype("float32"))
    assert seconds == pytest.approx(max(arithmetic, 3 * 4 * size**2 / v5p.memory_bandwidth))
