"""The simulated time of attention without a fused kernel."""

from dataclasses import replace

import numpy as np
import pytest

import meshdsl as md
from meshdsl.layouts.costs import costs_of
from meshdsl.lowering.attention_sizes import AttentionSizes
from meshdsl.lowering.costs.attention import attention_seconds, scores_in_blocks
from tests.layouts.test_costs import TABLES

OPS = ("attention", "attention_gradient")


def attended(batch, heads, rows, columns, features=64, biased=True):
    """Returns the attention of a loss and of its gradient, as they are lowered for one device."""
    b, h, m, k = md.dims(batch=batch, heads=heads, memory_length=columns, kv=features)
    r = md.Dimension("length", rows)
    bias = {"bias": md.spec([m])} if biased else {}

    def loss(q, k, v, given):
        return md.sum(md.cast(md.attention(q, k, v, **given), "float32"))

    q, of_memory = md.spec([b, r, h, k], "bfloat16"), md.spec([b, m, h, k], "bfloat16")
    program = md.jit(md.value_and_grad(loss, (0, 1, 2))).lower(q, of_memory, of_memory, bias)
    return [i for i, _ in program.block.walk() if i.op in OPS]


@pytest.mark.parametrize("name", TABLES)
def test_a_share_of_the_scores_takes_no_less_than_its_share_of_a_bound(name):
    """One block of a device is priced in another way than the blocks of all scores."""
    costs = costs_of(name)
    for length, features in ((512, 64), (1024, 64), (2048, 128)):
        for whole, part in zip(
            attended(64, 8, length, length, features),
            attended(1, 1, length, length, features),
            strict=True,
        ):
            assert AttentionSizes.of(part).at_once and not AttentionSizes.of(whole).at_once
            share = AttentionSizes.of(part).scores / AttentionSizes.of(whole).scores
            bound = attention_seconds(costs, whole, own=True, least=True)
            assert attention_seconds(costs, part, own=False) >= share * bound
            assert attention_seconds(costs, whole, own=True) >= bound


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("batch", [8, 32, 64, 256])
def test_one_query_takes_as_long_as_its_keys_and_values(name, batch):
    (attention,) = attended(batch, 32, 1, 8192, 128)[:1]
    moved = sum(value.bytes for value in attention.inputs[1:3])
    bandwidth = costs_of(name).hardware.memory_bandwidth
    assert attention_seconds(costs_of(name), attention, own=True) >= 0.7 * moved / bandwidth


def test_pads_of_blocks_are_computed():
    plain = attended(32, 16, 577, 577)[0]
    assert AttentionSizes.of(plain).blocks == (296, 296)
    even = attended(32, 16, 592, 592)[0]
    one, other = (attention_seconds(costs_of("v5p"), each, own=True) for each in (plain, even))
    assert one == pytest.approx(other)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("block", [(2, 2), (4, 3), (3, 4), (16, 16)])
def test_blocks_that_are_all_hidden_are_not_computed(causal, window, block):
    high, wide = block
    for rows, columns in ((12, 12), (13, 7), (5, 16)):
        padded = -(-rows // high) * high, -(-columns // wide) * wide
        behind = np.arange(padded[0])[:, None] - np.arange(padded[1])
        shown = np.ones(padded, bool)
        if causal:
            shown &= behind >= 0
        if window is not None:
            shown &= abs(behind) < window
        # A row of blocks visits the columns between the first and the last that it may see.
        count = 0
        for start in range(0, rows, high):
            seen = np.flatnonzero(shown[start : start + high].any(0))
            count += seen[-1] // wide - seen[0] // wide + 1 if len(seen) else 0
        found = scores_in_blocks(rows, columns, high, wide, causal, window)
        assert found == count * high * wide


def test_chosen_blocks_are_those_of_the_instruction():
    attention = attended(64, 8, 1024, 1024)[0]
    chosen = replace(attention, params={**attention.params, "blocks": (64, 256)})
    sizes = AttentionSizes.of(chosen)
    assert sizes.blocks == (64, 256) and sizes.lead_block == sizes.lead
