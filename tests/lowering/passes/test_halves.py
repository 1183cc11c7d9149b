"""Programs in halves: the same numbers, the same bytes, and two chains where there was one."""

from collections import Counter

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering import backends
from meshdsl.lowering.options import Options
from meshdsl.lowering.passes.halves import in_halves
from meshdsl.lowering.passes.prefetch import prefetch
from meshdsl.lowering.passes.verify import verify
from tests.lowering.passes.running import assert_same
from tests.property.pads import poisoned
from tests.property.programs import make_case


def dims_of(program):
    names = {
        d.name
        for instruction, _ in program.block.walk()
        for value in instruction.outputs
        for d in value.local
    }
    return sorted(names)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")  # of rules and options that change nothing
def test_halves_of_any_dim_keep_the_numbers(case_number):
    case = make_case(case_number)
    jitted = md.jit(case.function, case.mesh, case.layout, "numpy", options=case.options[0])
    before = jitted.lower(case.inputs)
    leaves = jax.tree.leaves(case.inputs, is_leaf=lambda x: isinstance(x, md.NamedArray))
    with poisoned():
        for dim in dims_of(before):
            after = in_halves(before, dim)
            if after is not before:
                assert_same(before, after, leaves)


BATCH, FEATURES, HIDDEN = md.dims(batch=8, features=4, hidden=8)
LAYOUT = "batch:data; hidden:model"


def layer(x, w):
    hidden = md.relu(md.einsum(x, w["up"], over="features"))
    return x + md.einsum(hidden, w["down"], over="hidden"), None


def loss(w, x):
    y, _ = md.scan(md.checkpoint(layer), x, w, dim="layers")
    return md.mean(md.square(y))


def gradient(layers=3, dtype="float64"):
    rng = np.random.default_rng(0)
    stack = md.Dimension("layers", layers)

    def array(*dims):
        return md.named(rng.standard_normal([d.size for d in dims]).astype(dtype), dims)

    w = {"up": array(stack, FEATURES, HIDDEN), "down": array(stack, HIDDEN, FEATURES)}
    return md.value_and_grad(loss), (w, array(BATCH, FEATURES))


def counts(program):
    found = Counter()
    for instruction, times in program.block.walk():
        found[instruction.op] += times
    return found


def test_each_half_has_its_own_collectives_and_weights_have_one():
    function, arguments = gradient()
    f = md.jit(function, "data:2,model:2", LAYOUT, "numpy", options=Options(bucket_bytes=0))
    before = f.lower(*arguments)
    after = in_halves(before, "batch")
    verify(after)
    assert_same(before, after, arguments)
    assert after.wire_bytes == before.wire_bytes
    assert before.flops <= after.flops <= 1.05 * before.flops  # halves of gradients are added

    def reduced(program):
        found = Counter()
        for instruction, times in program.block.walk():
            if instruction.op == "all_reduce":
                found[instruction.params["axes"], instruction.inputs[0].shape.names] += times
        return found

    old, new = reduced(before), reduced(after)
    assert old[("model",), ("batch", "features")] == 6
    assert new[("model",), ("batch", "features")] == 12
    weights = {key: count for key, count in old.items() if "batch" not in key[1]}
    assert weights and all(new[key] == count for key, count in weights.items())


def test_a_loop_carries_halves_and_nothing_is_put_together():
    function, arguments = gradient()
    f = md.jit(function, "data:2,model:2", LAYOUT, "numpy")
    before = f.lower(*arguments)
    after = in_halves(before, "batch")
    found = counts(after)
    assert found["concat"] == 0
    assert found["local_slice"] == 2  # of the argument
    carried = [
        (i.params["carries"], j.params["carries"])
        for i, j in zip(
            [i for i in before.block.instructions if i.op == "scan"],
            [i for i in after.block.instructions if i.op == "scan"],
            strict=True,
        )
    ]
    assert carried == [(1, 2), (1, 2)]


def test_an_odd_shard_stays_whole():
    x = md.spec([md.Dimension("batch", 6), FEATURES])
    program = md.jit(lambda x: md.exp(x), "data:2", "batch:data").lower(x)
    assert in_halves(program, "batch") is program
    assert in_halves(program, "other") is program
    assert in_halves(program, "features") is not program


def test_what_mixes_positions_of_the_dim_is_computed_whole():
    x = md.named(np.arange(8.0), [BATCH])
    f = md.jit(lambda x: md.exp(md.cumsum(md.square(x), "batch")), backend="numpy")
    before = f.lower(x)
    after = in_halves(before, "batch")
    found = counts(after)
    assert found["square"] == found["exp"] == 2
    assert (found["cumsum"], found["concat"]) == (1, 2)  # the sum's operand, and the result
    assert_same(before, after, [x])


def test_sums_of_half_precision_over_the_dim_are_rounded_once():
    function, arguments = gradient(dtype="float32")
    arguments = jax.tree.map(
        lambda a: md.cast(a, "bfloat16"),
        arguments,
        is_leaf=lambda x: isinstance(x, md.NamedArray),
    )
    program = md.jit(function, backend="numpy").lower(*arguments)
    sums = [
        instruction
        for instruction, _ in in_halves(program, "batch").block.walk()
        if instruction.op == "einsum" and instruction.outputs[0].local.find("batch") is None
    ]
    assert sums and {str(i.outputs[0].dtype) for i in sums} == {"float32"}


def test_a_loop_that_gathers_weights_ahead_is_computed_in_halves():
    function, arguments = gradient(layers=4)
    layout = "batch:data; w/features:data"
    before = md.jit(function, "data:4", layout, "numpy").lower(*arguments)
    after = in_halves(prefetch(before), "hidden")
    assert_same(before, after, arguments)
    loops = [i for i in after.block.instructions if i.op == "scan" and "ahead" in i.params]
    assert loops
    for scan in loops:  # both halves of a stack are read ahead, and stacks ahead come last
        stacks = len(scan.inputs) - scan.params["consts"] - scan.params["carries"]
        assert scan.params["ahead"] == tuple(range(stacks - len(scan.params["ahead"]), stacks))


@pytest.mark.parametrize("way", ["sum", "segment_sum", "conv"])
def test_halves_of_any_sum_are_rounded_once(way):
    """The sum of each half is too large for float16; that of both is 0."""
    x = np.array([4e4] * 4 + [-4e4] * 4, np.float16)
    inputs = [md.named(x, ["batch"])]
    if way == "segment_sum":
        inputs.append(md.named(np.zeros(8, np.int32), ["batch"]))

    def function(x, *group):
        if way == "sum":
            return md.sum(x, "batch")
        if way == "segment_sum":
            return md.segment_sum(x, *group, md.Dimension("groups", 3))
        image = md.outer(md.multiply, x, md.ones([md.Dimension("position", 2)], "float16"))
        window = md.ones([*md.dims(batch=8, window=1, out=1)], "float16")
        return md.conv(image, window, {"position": "window"}, "batch", "out")

    before = md.jit(function, backend="numpy").lower(*inputs)
    after = in_halves(before, "batch")
    assert after is not before
    found = backends.load("numpy").Executable(after).call_flat([each.data for each in inputs])
    assert not np.asarray(found[0]).any()
