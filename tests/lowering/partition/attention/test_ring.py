"""Ring attention: what it computes, with NaN in pads, and what it sends, against closed forms."""

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.options import Options
from meshdsl.ops.products.attention_reference import attention_reference
from tests.ops.agreement import assert_close, random, run
from tests.property.pads import poisoned

batch, heads, group, kv, value = md.dims(batch=2, heads=2, group=2, kv=4, value=3)
RNG = np.random.default_rng(0)
BOTH = "length:x; memory_length:x"
WHERE = [
    ("x:2", BOTH),
    ("x:3", BOTH),
    ("x:4", BOTH),
    ("x:5", BOTH),
    ("x:8", BOTH),
    ("a:2,b:3", "length:a+b; memory_length:a+b"),
    ("a:2,b:3", "length:b+a; memory_length:b+a"),
    ("a:2,b:2", "length:a+b; memory_length:b+a"),
    ("x:2,y:2", "length:x; memory_length:x+y"),
    ("x:3,y:2", f"{BOTH}; heads:y"),
    ("x:2,y:2", f"{BOTH}; kv:y; value:y"),
    ("x:3", "group:x; memory_length:x"),
]


def problem(rows, columns):
    """Returns queries, keys, values and a bias, and options by name."""
    length, memory = md.Dimension("length", rows), md.Dimension("memory_length", columns)
    inputs = [
        random([batch, length, heads, group, kv], seed=1),
        random([batch, memory, heads, kv], seed=2),
        random([batch, memory, heads, value], seed=3),
        random([heads, memory], seed=4),
    ]

    def whole(numbers, *dims):
        return md.named(np.asarray(numbers, np.int32), list(dims))

    segments = whole(np.sort(RNG.integers(0, 3, (2, rows))), batch, length)
    of_memory = whole(np.sort(RNG.integers(0, 3, (2, columns))), batch, memory)
    return inputs, {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window": 3},
        "causal window": {"causal": True, "window": 4},
        "wide window": {"causal": True, "window": 2 * columns // 3},
        "queries at the end": {"causal": True, "positions": columns - rows + 1},
        "positions": {"causal": True, "positions": whole(RNG.permutation(rows), length)},
        "a rolling memory": {
            "causal": True,
            "window": 4,
            "positions": 2,
            "memory_positions": whole(np.roll(np.arange(columns), 2), memory),
        },
        "segments": {"causal": True, "segments": segments, "memory_segments": of_memory},
        "bias": {"causal": True, "bias": True},
        "mask": {"mask": md.named(RNG.random((2, columns)) < 0.7, [batch, memory])},
        "soft cap": {"causal": True, "soft_cap": 0.5},
    }


def both(function, options):
    """Returns a function giving the result and its gradients by everything."""

    def loss(q, k, v, bias):
        given = {**options, "bias": bias} if "bias" in options else options
        result = function(q, k, v, **given)
        return md.sum(md.sin(result) * 1.5), result

    return lambda *x: md.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(*x)


def check(rows, columns, names, where, backend="numpy", **chosen):
    inputs, variants = problem(rows, columns)
    for name in names or variants:
        expected = jax.tree.leaves(run(both(attention_reference, variants[name]), *inputs))
        for mesh, layout in where:
            given = {"mesh": mesh, "layout": layout, "options": Options(**chosen)}
            function = md.jit(both(md.attention, variants[name]), backend=backend, **given)
            if chosen["context"] == "ring":
                assert "permute" in {c.kind for c in function.lower(*inputs).collectives}
            if backend == "numpy":
                with poisoned():
                    found = function(*inputs)
            else:
                found = function(*inputs)
            for mine, other in zip(jax.tree.leaves(found), expected, strict=True):
                try:
                    assert_close(mine, other)
                except AssertionError as error:
                    error.add_note(f"{name} on {mesh}, {layout}")
                    raise


SIZES = [(8, 8), (7, 7), (6, 9)]


@pytest.mark.long
@pytest.mark.parametrize("number", range(3))
def test_values_and_gradients_are_those_of_one_device(number):
    check(*SIZES[number], None, WHERE[number::3], context="ring")


@pytest.mark.slow
@pytest.mark.parametrize("context", ["ring", "auto", "gather", "sums"])
@pytest.mark.parametrize(("rows", "columns"), [*SIZES, (24, 24)])
def test_whatever_is_chosen_values_and_gradients_are_those_of_one_device(rows, columns, context):
    check(rows, columns, None, WHERE, context=context)


@pytest.mark.long
def test_jax_gives_the_same():
    check(24, 24, ["bias"], [("x:4", BOTH)], "jax", context="ring")
    check(24, 24, ["positions"], [("x:2,y:2", f"{BOTH}; heads:y")], "jax", context="ring")


# What is sent.

WIDE = 16


def lowered(devices, gradient=False, dtype="float32", size=64, context="ring", **options):
    length, memory, features = md.dims(length=size, memory_length=size, kv=WIDE)
    q, k = md.spec([length, features], dtype), md.spec([memory, features], dtype)

    def loss(q, k, v):
        return md.sum(md.cast(md.sin(md.attention(q, k, v, **options)), "float32"))

    function = (lambda *x: md.grad(loss, (0, 1, 2))(*x)) if gradient else loss
    chosen = Options(context=context)
    jitted = md.jit(function, mesh=f"x:{devices}", layout=BOTH, options=chosen)
    return jitted.lower(q, k, k)


def permutes(program):
    parts = [part for one in program.collectives for part in one.parts or (one,)]
    return [part for part in parts if part.kind == "permute"]


@pytest.mark.parametrize("devices", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("causal", [False, True])
def test_keys_and_values_move_once_less_than_there_are_devices(devices, causal):
    found = permutes(lowered(devices, causal=causal))
    block = -(-64 // devices) * WIDE * 4
    blocks = [one for one in found if "kv" in one.dims.names]
    assert {one.wire_bytes for one in blocks} == {block}
    assert sum(one.count for one in blocks) == 2 * (devices - 1)
    masks = [one for one in found if one not in blocks]  # which hide pads that are not hidden so
    assert bool(masks) == (64 % devices > 0 and not causal)


@pytest.mark.parametrize("devices", [2, 4, 8, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_backwards_their_gradients_move_as_often_and_in_their_dtype(devices, dtype):
    """The first move of keys and values is that of the forward pass, which stands beside it."""
    found = permutes(lowered(devices, gradient=True, dtype=dtype, causal=True))
    backward = [one for one in found if one.source.backward]
    block = 64 // devices * WIDE * (2 if dtype == "bfloat16" else 4)
    assert {one.wire_bytes for one in found} == {block}
    assert sum(one.count for one in backward) == 4 * (devices - 1) - 2


@pytest.mark.parametrize(("window", "hops"), [(2, 1), (9, 1), (10, 2), (20, 3)])
def test_what_a_window_hides_from_everybody_is_not_sent(window, hops):
    forward = permutes(lowered(8, causal=True, window=window))
    assert sum(one.count for one in forward) == 2 * hops
    both = permutes(lowered(8, gradient=True, causal=True, window=window))
    assert sum(one.count for one in both) == 4 * hops  # the blocks are there still; their gradients


def test_a_causal_ring_sends_nothing_from_the_last_device_to_the_first():
    found = permutes(lowered(4, causal=True))
    assert not [pair for one in found for pair in one.groups if pair == (3, 0)]
    assert [pair for one in permutes(lowered(4)) for pair in one.groups if pair == (3, 0)]


def test_programs_do_not_grow_with_the_number_of_devices():
    def instructions(devices):
        program = lowered(devices, gradient=True, causal=True)
        return len([one for one, _ in program.block.walk()])

    assert instructions(8) == instructions(64)


def test_a_ring_holds_less_than_all_keys_and_values():
    """Two blocks of each, and their gradients, for all of them."""
    ring, gather = (
        lowered(16, True, size=4096, causal=True, context=context).peak_bytes
        for context in ("ring", "gather")
    )
    whole = 2 * 4096 * WIDE * 4
    assert ring < gather - whole


def test_the_next_block_is_on_its_way_before_the_present_one_is_computed_on():
    program = lowered(8, causal=True)
    (scan,) = [one for one in program.block.instructions if one.op == "scan"]
    for block in (program.block, scan.body):
        order = [one.op for one in block.instructions if one.op in ("permute", "attention")]
        assert order[:2] == ["permute", "attention"]
