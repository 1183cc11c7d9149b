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


def test_a_stream_of_many_layers_is_written_once_in_a_while():
    """Each layer adds to it; without that, layer n would read what all before it have added."""

    def steps(x, *added):
        read = []
        for each in added:
            x = x + each
            read.append(md.sum(x, "column"))
        return read

    def moved(layers):
        return work(steps, *[[row, column]] * (1 + layers))[1] / (4 * 64 * 128)

    assert moved(2) == pytest.approx(2 + 3, rel=0.01)  # neither sum is written
    assert moved(32) < 4 * 32


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


def test_without_a_compiler_every_instruction_reads_and_writes_memory():
    def f(x):
        return md.sum(md.exp(x * x + 1), "column")

    block = md.jit(f).lower(md.spec([row, column])).block
    moved = {i.op: w.bytes for i, w in local_work(block, fused=False).items() if w.bytes}
    size = 4 * 64 * 128
    assert moved["multiply"] in (2 * size, 3 * size)  # x is read once or twice
    assert moved["exp"] == 2 * size
    assert moved["sum"] == size + 4 * 64
    assert sum(moved.values()) > sum(w.bytes for w in local_work(block).values())


def value(*dims):
    """Returns a local value of float32."""
    shape = Shape(dims)
    return Value(shape, np.dtype("float32"), TensorLayout(), shape)


def test_the_kernel_of_a_product_does_the_work_beside_it():
    half = md.Dimension("inner", 128)
    given, part, other = value(row, inner), value(row, half), value(half, column)
    product, added, result = (value(row, column) for _ in range(3))
    more = value(row, column)
    instructions = (
        Instruction("local_slice", (given,), (part,)),
        Instruction("einsum", (part, other), (product,)),
        Instruction("tanh", (product,), (added,)),
        Instruction("add", (added, more), (result,)),
    )
    block = Block((given, other, more), instructions, (result,))
    bound, within, alone = (
        {i.op: w.bytes for i, w in local_work(block, products=way).items() if w.bytes}
        for way in ("least", "within", "alone")
    )
    read, size = 4 * (64 * 128 + 128 * 128), 4 * 64 * 128
    # The slice is read where it is, and the sum is written without the product before it.
    assert within == {"einsum": read + 2 * size}
    # A library's product reads a copy, and writes a result that is read again.
    assert alone == {"local_slice": 2 * size, "einsum": read + size, "add": 3 * size}
    assert sum(within.values()) < sum(bound.values()) < sum(alone.values())
    (flops,) = (w.flops for w in local_work(block, products="within").values() if w.flops)
    assert flops == 2 * 64 * 128 * 128


def test_a_product_writes_into_the_place_of_an_update():
    half = md.Dimension("row", 32)
    given, result = value(row, column), value(row, column)
    x, y, piece = value(half, inner), value(inner, column), value(half, column)
    instructions = (
        Instruction("einsum", (x, y), (piece,)),
        Instruction("local_update", (given, piece), (result,)),
    )
    block = Block((given, x, y), instructions, (result,))
    for way, moved in (("within", 0), ("alone", 2 * 4 * 32 * 128)):
        product, update = local_work(block, products=way).values()
        assert product.bytes == 4 * (32 * 256 + 256 * 128 + 32 * 128)
        assert update.bytes == moved


def test_a_product_with_two_readers_is_written_for_both():
    x, y, z = value(row, inner), value(inner, column), value(row, column)
    once, twice = value(row, column), value(row, column)
    instructions = (
        Instruction("einsum", (x, y), (z,)),
        Instruction("exp", (z,), (once,)),
        Instruction("tanh", (z,), (twice,)),
    )
    block = Block((x, y), instructions, (once, twice))
    size = 4 * 64 * 128
    assert [w.bytes for w in local_work(block, products="within").values()][1:] == [2 * size] * 2
