"""Named configurations: their published sizes, and fields that stay consistent."""

import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.models import TransformerConfig


def parameters(name, overrides=""):
    graph = md.jit(models.load(name, overrides).init).trace(md.random.key(0))
    return sum(t.shape.volume for t in graph.outputs)


@pytest.mark.parametrize(
    ("name", "count"),
    [("gpt2_small", 124_439_808), ("gpt2_medium", 354_823_168), ("gpt2_xl", 1_557_611_200)],
)
def test_gpt2_has_its_published_parameters(name, count):
    assert parameters(name, "vocab=50257") == count


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


@pytest.mark.parametrize("name", models.NAMES)
def test_every_vocabulary_and_hidden_size_splits_into_eight(name):
    config = models.load(name).config
    assert config.vocab % 128 == config.d_ff_size % 8 == config.embed % 8 == 0


def test_derived_fields_follow_an_override():
    config = models.load("gpt_mini", "embed=512,heads=4").config
    assert (config.kv_size, config.d_ff_size) == (128, 2048)
    gated = models.load("gpt_mini", "activation=gated_silu").config
    assert gated.d_ff_size == 768


def test_sizes_that_do_not_fit_are_told_together():
    with pytest.raises(ValueError) as caught:
        TransformerConfig(2, 30, 4, 64, 8, kv_heads=3)
    assert str(caught.value) == (
        "embed=30 does not divide into heads=4; give kv; "
        "heads=4 do not share kv_heads=3 equally; "
        "rotary positions turn features in pairs, but kv=7 is odd"
    )


def test_values_that_no_field_takes_are_told_together():
    with pytest.raises(ValueError) as caught:
        TransformerConfig(0, 32, 4, 64, 8, d_ff=-1, norm="batch")  # type: ignore[arg-type]
    assert str(caught.value) == (
        "layers=0: needs to be at least 1; d_ff=-1: needs to be at least 1; "
        "norm='batch': choose from rms, layer"
    )
