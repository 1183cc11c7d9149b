"""Zig-zag order: the same numbers, and every device with as much to do."""

import itertools

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.attention_sizes import AttentionSizes
from meshdsl.lowering.backends.numpy import emitters
from meshdsl.lowering.options import Options
from tests.lowering.partition.attention.test_ring import BOTH, WHERE, check

CAUSAL = ["causal", "segments", "bias", "soft cap"]
SAME = "length:a+b; memory_length:a+b", "length:b+a; memory_length:b+a"  # in one order
DEALT = [case for case in WHERE if BOTH in case[1] or case[1] in SAME]


@pytest.mark.long
@pytest.mark.parametrize("number", range(3))
def test_values_and_gradients_are_those_of_one_device(number):
    size = [16, 7, 9][number]
    check(size, size, CAUSAL, DEALT[number::3], context="ring", zigzag=True)


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 7, 9, 30])
def test_on_every_mesh_they_are(size):
    check(size, size, CAUSAL, DEALT, context="ring", zigzag=True)


@pytest.mark.long
def test_jax_gives_the_same():
    check(24, 24, ["bias"], [("x:3", BOTH)], "jax", context="ring", zigzag=True)


def ring(devices, size, zigzag, backend="numpy"):
    length, memory, kv = md.dims(length=size, memory_length=size, kv=4)
    chosen = Options(context="ring", zigzag=zigzag)
    given = {"mesh": f"x:{devices}", "layout": BOTH, "options": chosen, "backend": backend}
    q, k = md.named(np.ones((size, 4)), [length, kv]), md.named(np.ones((size, 4)), [memory, kv])
    return md.jit(lambda q, k, v: md.attention(q, k, v, causal=True), **given), (q, k, k)


def scores(monkeypatch, devices, size, zigzag):
    """Returns how many scores each device computes in each attention that it runs."""
    found = []
    plain = emitters.EMITTERS["attention"]

    def counted(machine, instruction, inputs):
        sizes = AttentionSizes.of(instruction)
        given = instruction.params["given"]
        on = inputs[3 + given.index("active")] if "active" in given else np.ones(devices)
        found.append(on.reshape(devices) * sizes.scores)
        return plain(machine, instruction, inputs)

    function, inputs = ring(devices, size, zigzag)
    with monkeypatch.context() as patched:
        patched.setitem(emitters.EMITTERS, "attention", counted)
        function(*inputs)
    return np.array(found)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_every_device_computes_as_much_in_every_step(devices, monkeypatch):
    """Of blocks of one in n: n for the last device, one for the first; else (n + 1) / 2 for all."""
    block = (32 // devices) ** 2
    plain = scores(monkeypatch, devices, 32, False)
    assert (plain.sum(0) == block * np.arange(1, devices + 1)).all()
    dealt = scores(monkeypatch, devices, 32, True)
    assert (dealt == dealt[:, :1]).all()
    assert (dealt.sum(0) == block * (devices + 1) / 2).all()


def test_flops_are_those_of_the_busiest_device():
    counted = [
        function.lower(*inputs).flops for function, inputs in (ring(8, 64, z) for z in (0, 1))
    ]
    products = 2 * (4 + 4) * 8 * 8
    assert counted[0] > products * 8 > counted[1] > products * 4.5


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_dealing_out_sends_queries_keys_values_and_results_once(devices):
    function, inputs = ring(devices, 64, True)
    found = function.lower(*inputs).collectives
    parts = list(itertools.chain(*(one.parts or (one,) for one in found)))
    chunk = 32 // devices * 4 * 8
    around = sum(p.wire_bytes * p.count for p in parts if p.payload_bytes == 2 * chunk)
    dealt = sum(p.wire_bytes * p.count for p in parts if p.payload_bytes == chunk)
    assert around == 2 * (devices - 1) * 2 * chunk
    assert 4 * chunk <= dealt <= 4 * 2 * chunk
    assert jax.tree.leaves(function(*inputs))[0].shape == (64, 4)
