"""The simulated time of attention without a fused kernel."""

from dataclasses import replace

import pytest

import meshdsl as md
from meshdsl.layouts.costs import costs_of
from meshdsl.lowering.attention_sizes import AttentionSizes
from meshdsl.lowering.costs.attention import attention_seconds
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


def test_chosen_blocks_are_those_of_the_instruction():
    attention = attended(64, 8, 1024, 1024)[0]
    chosen = replace(attention, params={**attention.params, "blocks": (64, 256)})
    sizes = AttentionSizes.of(chosen)
    assert sizes.blocks == (64, 256) and sizes.lead_block == sizes.lead
