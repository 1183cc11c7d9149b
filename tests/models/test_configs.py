"""Named configurations: their published sizes, and fields that stay consistent."""

import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.models import TransformerConfig, load
from meshdsl.models.bert import BertConfig
from meshdsl.models.resnet import ResNetConfig
from meshdsl.models.unet3d import UNet3DConfig


def parameters(name, overrides=""):
    graph = md.jit(models.load(name, overrides).init).trace(md.random.key(0))
    return sum(t.shape.volume for t in graph.outputs)


@pytest.mark.parametrize(
    ("name", "count"),
    [("gpt2_small", 124_439_808), ("gpt2_medium", 354_823_168), ("gpt2_xl", 1_557_611_200)],
)
def test_gpt2_has_its_published_parameters(name, count):
    assert parameters(name) == count


def test_llama_has_its_published_parameters():
    assert parameters("llama_7b") == 6_738_415_616
    assert parameters("llama3_8b") == 8_030_261_248


def test_gpt3_has_174_6_billion_parameters():
    assert parameters("gpt3_175b") == pytest.approx(174.6e9, abs=0.05e9)
    model = models.load("gpt3_175b")
    assert (model.batch_size, model.length) == (1536, 2048)


def test_gpt_mini_is_small_and_reads_bytes():
    model = models.load("gpt_mini")
    assert (model.config.vocab, model.batch_size, model.length) == (256, 16, 128)
    assert (model.config.kv_size, model.config.d_ff_size) == (32, 1024)
    assert parameters("gpt_mini") == 3_213_568


def test_mixtral_has_its_published_parameters():
    assert parameters("mixtral_8x7b") == 46_702_792_704


def test_bert_has_its_published_parameters():
    """Besides what the head for masked tokens has of its own."""
    head = 768 * 768 + 3 * 768 + 30522
    assert parameters("bert_base") == 109_482_240 + head


def test_t5_has_its_published_parameters():
    """As its checkpoints have them: one table of distances per stack, one of tokens for all."""
    assert parameters("t5_small") == 60_506_624
    assert parameters("t5_base") == 222_903_552


def test_resnets_have_their_published_parameters():
    assert parameters("resnet50") == 25_557_032
    assert parameters("resnet18") == 11_689_512


LANGUAGE = [name for name in models.NAMES if hasattr(models.load(name).config, "vocab")]


@pytest.mark.parametrize("name", LANGUAGE)
def test_every_hidden_size_splits_into_eight(name):
    config = models.load(name).config
    assert config.d_ff_size % 8 == config.embed % 8 == 0


def test_derived_fields_follow_an_override():
    config = models.load("gpt_mini", "embed=512,heads=4").config
    assert (config.kv_size, config.d_ff_size) == (128, 2048)
    gated = models.load("gpt_mini", "mlp=swiglu").config
    assert gated.d_ff_size == 768


def test_sizes_that_do_not_fit_are_told_together():
    with pytest.raises(ValueError) as caught:
        TransformerConfig(2, 30, 4, 64, 8, kv_heads=3)
    assert str(caught.value) == (
        "embed=30 does not divide into heads=4; give kv; "
        "heads=4 do not share kv_heads=3 equally; "
        "rotary positions turn features in pairs, but kv=7 is odd"
    )


def test_kinds_that_do_not_go_together_are_told():
    def message(**fields):
        with pytest.raises(ValueError) as caught:
            TransformerConfig(2, 32, 4, 64, 8, **fields)
        return str(caught.value)

    assert message(attention="latent", kv_heads=2, positions="alibi") == (
        "latent attention has keys for every head; leave kv_heads out; "
        "latent attention needs positions=rotary, not alibi"
    )
    assert message(attention="latent", rotary_kv=3) == (
        "rotary positions turn features in pairs, but rotary_kv=3 is odd"
    )
    assert message(rotary_scaling="longrope", rotary_short=(1.0,) * 4, rotary_long=(2.0, 0.0)) == (
        "rotary_long: 2 numbers; rotary_scaling=longrope needs 4, above 0, one for each pair of "
        "features"
    )
    assert message(rotary_long=(2.0,)) == "rotary_long: 1 numbers; rotary_scaling=none needs 0"
    assert message(rotary_magnitude=2.0) == (
        "rotary_magnitude=2: needs to be above 0, and a rotary_scaling"
    )
    assert message(rotary_scaling="dynamic", kv=2) == (
        "rotary_scaling=dynamic needs kv of at least 4, not 2"
    )
    short = {"rotary_short": (1.0,) * 4, "rotary_long": (1.0,) * 4, "rotary_original": 1}
    assert message(rotary_scaling="longrope", **short) == (
        "rotary_scaling=longrope needs rotary_original of at least 2"
    )
    assert message(rotary_window_base=10.0, positions="alibi") == (
        "rotary_window_base needs positions=rotary, not alibi; "
        "rotary_window_base is for layers with a window; give window"
    )
    assert message(experts=2, experts_per_token=3) == "experts_per_token=3 of experts=2: too many"
    assert message(shared_experts=2) == "shared_experts=2 stand beside others; give experts"
    assert message(experts=4, dispatch="sort", capacity=1.5) == (
        "dispatch=sort with expert_peers=1 drops nothing; leave capacity=1.5 out"
    )
    assert message(experts=4, capacity=0) == "capacity=0: needs to be above 0; none drops nothing"
    assert message(experts=4, capacity=float("nan")).startswith("capacity=nan: needs to be above")
    assert message(experts=4, report_dropped=True) == (
        "report_dropped: without a capacity nothing is dropped; leave it out"
    )
    assert message(experts=4, dispatch="sort", expert_peers=3) == (
        "experts=4 do not divide among expert_peers=3"
    )
    assert message(experts=4, expert_peers=2) == "expert_peers=2 needs dispatch=sort, not einsum"
    with pytest.raises(
        ValueError, match=r"mask_token=90 is not in the vocab=64; chosen=0: a share"
    ):
        BertConfig(2, 32, 4, 64, 8, mask_token=90, chosen=0)
    with pytest.raises(ValueError) as caught:
        ResNetConfig(blocks=(2, 0), filters=(8, 8), strides=(1,), stem=0)
    assert str(caught.value) == (
        "blocks=(2, 0): each needs to be at least 1; stem=0: needs to be at least 1; "
        "each stage needs one number of each: blocks of 2, filters of 2, strides of 1"
    )
    with pytest.raises(ValueError, match="levels=0: needs to be at least 1; norm='rms': choose"):
        UNet3DConfig(levels=0, norm="rms")


def test_values_that_no_field_takes_are_told_together():
    with pytest.raises(ValueError) as caught:
        TransformerConfig(0, 32, 4, 64, 8, d_ff=-1, norm="batch")  # type: ignore[arg-type]
    assert str(caught.value) == (
        "layers=0: needs to be at least 1; d_ff=-1: needs to be at least 1; "
        "norm='batch': choose from rms, layer"
    )


def test_dispatch_by_sorting_leaves_the_models_own_capacity_out():
    config = load("mixtral_mini", "dispatch=sort").config
    assert (config.dispatch, config.capacity) == ("sort", None)
    among_peers = load("mixtral_mini", "dispatch=sort,expert_peers=4")
    assert among_peers.config.capacity == 1.25
    assert among_peers.with_overrides("expert_peers=1").config.capacity is None
    assert load("mixtral_mini", "layers=1").config.capacity == 1.25
    with pytest.raises(ValueError, match="drops nothing; leave capacity=2 out"):
        load("mixtral_mini", "dispatch=sort,capacity=2")
    with pytest.raises(ValueError, match=r"drops nothing; leave capacity=1\.25 out"):
        load("mixtral_mini", "capacity=1.25,dispatch=sort")
