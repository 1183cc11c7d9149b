"""What a report says of a pipeline."""

from meshdsl.reports.explain.explanation import explain
from tests.lowering.pipelining.steps import DENSE_FIRST, GPT, T5, layers, lower


def text_of(*args, **options):
    return str(explain(lower(*args, **options)))


def test_stages_bubble_and_grid_are_shown():
    text = text_of(GPT, 4, "pipe:2", "layers:pipe")
    assert "pipeline layers:pipe: 2 stages of 1 chunk of 2 layers; 4 microbatches" in text
    assert "5 ticks with forward passes, 5 with backward passes; bubble 20.0% of them" in text
    assert "by stage, at most: 3 1" in text
    assert "stage 0   F0 F1  . F2 B0 F3 B1  . B2 B3" in text
    assert "stage 1    . F0 B0 F1 B1 F2 B2 F3 B3  ." in text
    assert "layout layers:pipe\n" in text


def test_layers_that_fill_chunks_up_are_told():
    text = text_of(layers(GPT, 5), 4, "pipe:2", "layers:pipe")
    assert "16.7% of the layers' work is for none: 5 layers are computed as 2 × 3" in text


def test_stacks_that_are_no_part_of_it_are_told():
    text = text_of(DENSE_FIRST, 4, "pipe:2", "layers:pipe")
    assert "not part of it, computed by every stage: layers=1 at" in text


def test_stacks_that_follow_each_other_are_told():
    text = text_of(T5, 4, "pipe:2", "layers:pipe")
    assert "2 stages of 1 chunk of each of 2 stacks, one after the other; 4 micro" in text
    assert "chunks 0 to 1: 2 layers each of the layers=4 at models/layers/block.py" in text
    assert "stage 0   0F0 0F1 2F0 0F2 2F1   . 0F3 2F2 2B0" in text
    assert "bubble 20.0% of them" in text  # as that of one stack


def test_advice_splits_nothing_over_the_axis_of_the_pipeline():
    text = text_of(GPT, 4, "pipe:2", "layers:pipe")
    assert ":pipe?" not in text
    assert "/embed:pipe" not in text
