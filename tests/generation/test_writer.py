"""Writers, against the full forward pass, and against themselves on other layouts."""

import functools
import gc
from dataclasses import replace

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.generation import Place, Sampling, Writer
from meshdsl.models import transformer
from meshdsl.models.model import Decoding

SIZES = "layers=2,embed=16,heads=4,d_ff=8,vocab=61"
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 6], [9]]
TABLE = {"vocab", "embed"}
PLACES = {
    "one device": Place(backend="numpy"),
    "tensor parallel": Place(
        "data:2,model:2", "batch:data; heads:model; vocab:model; optimizer/embed:data", "numpy"
    ),
    "flash-decoding": Place(
        "data:2,model:2", "batch:data; memory_length:model; params/embed:data", "numpy"
    ),
    "jax": Place("data:2,model:2", "batch:data; memory_length:model", "jax"),
}
DRAWS = {
    "greedy": Sampling(temperature=0),
    "drawn": Sampling(seed=3),
    "filtered": Sampling(0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.3, seed=3),
}


@functools.cache
def trained(name="gpt_mini", overrides=SIZES):
    """Returns a model, and parameters as numpy arrays, whose scores differ clearly."""
    model = models.load(name, overrides)
    params = md.jit(model.init, backend="numpy")(md.random.key(0))
    return model, params


def written(place, sampling=None, prompts=PROMPTS, numbers=None, model=None, **sizes):
    model, params = model or trained()
    given = {"prompt_tokens": 9, "new_tokens": 6, "batch_size": 3, **sizes}
    writer = Writer(model, sampling=sampling, place=place, **given)
    writer.load(params)
    return np.stack(list(writer.write(prompts, numbers)), 1).tolist()


def test_greedy_text_is_that_of_the_full_forward_pass():
    model, params = trained()
    at_once = md.jit(functools.partial(transformer.logits, model.config), backend="numpy")
    texts = written(PLACES["one device"], Sampling(temperature=0), chunk=4)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        wanted = list(prompt)
        for _ in range(6):
            tokens = md.named(np.array([wanted], "int32"), ["batch", "length"])
            wanted.append(int(np.asarray(at_once(params, tokens))[0, -1].argmax()))
        assert prompt + text == wanted


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("where", ["tensor parallel", "flash-decoding"])
def test_a_seed_gives_the_same_text_on_every_layout(where, draw):
    assert written(PLACES[where], DRAWS[draw]) == written(PLACES["one device"], DRAWS[draw])


@pytest.mark.slow
def test_the_jax_backend_writes_the_same():
    sampling = DRAWS["filtered"]
    assert written(PLACES["jax"], sampling) == written(PLACES["one device"], sampling)


def test_a_text_does_not_depend_on_those_beside_it_nor_on_chunks():
    sampling, place = DRAWS["filtered"], PLACES["one device"]
    together = written(place, sampling)
    for number, prompt in enumerate(PROMPTS):
        alone = written(place, sampling, [prompt], [number], batch_size=1, chunk=2)
        assert alone == [together[number]]
    other = written(place, sampling, [PROMPTS[0]], [1], batch_size=1)
    assert other != [together[0]]


@pytest.mark.parametrize("model", [("gpt_mini", SIZES), ("t5_mini", f"{SIZES},decoder_start=3")])
def test_layers_are_taken_apart_where_no_rule_splits_them(model):
    scoped = "blocks/attention/query/heads:model; embed:-"  # fits the paths of both
    places = {
        "apart": Place("model:2", scoped, "numpy"),
        "asked": Place("model:2", scoped, "numpy", unrolls=False),
        "split": Place("model:2", "layers:model", "numpy"),
    }
    texts = [written(place, model=trained(*model)) for place in places.values()]
    assert texts[0] == texts[1] == texts[2]

    def stacked(place):
        writer = Writer(trained(*model)[0], prompt_tokens=4, new_tokens=2, place=place)
        inputs = writer.programs.steps[1].program.block.inputs
        of_blocks = [v for v in inputs if v.shape.find("kv")]
        assert of_blocks
        return {v.shape.find("layers") is not None for v in of_blocks}

    assert stacked(places["asked"]) == stacked(places["split"]) == {True}
    # The encoder of T5 has read the prompt before the first step.
    assert False in stacked(places["apart"])


@pytest.mark.long
def test_no_stack_stays_in_memory_once_it_is_taken_apart():
    writer = Writer(trained()[0], prompt_tokens=1, new_tokens=1, place=Place())
    params = md.jit(trained()[0].init)(md.random.key(0))
    before = sum(array.nbytes for array in jax.live_arrays())
    writer.load(params)
    gc.collect()
    after = sum(array.nbytes for array in jax.live_arrays())
    assert after <= before + 1000
    assert after >= sum(array.nbytes for array in jax.tree.leaves(writer._params)) > 1000


def test_seeds_give_different_texts():
    texts = [written(PLACES["one device"], Sampling(seed=seed)) for seed in (1, 2)]
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("t5_mini", f"{SIZES},kv=4"),
        ("deepseek_mini", f"{SIZES},kv=4,kv_rank=8,query_rank=8,rotary_kv=4,window=4"),
    ],
)
def test_other_families_write_the_same_alone_and_together(name, overrides):
    model, place = trained(name, overrides), PLACES["one device"]
    together = written(place, DRAWS["filtered"], model=model)
    for number, prompt in enumerate(PROMPTS):
        alone = written(place, DRAWS["filtered"], [prompt], [number], model=model, batch_size=1)
        assert alone == [together[number]]


def test_the_encoder_of_t5_reads_the_prompt():
    model, params = trained("t5_mini", f"{SIZES},kv=4")
    texts = written(PLACES["one device"], Sampling(temperature=0), model=(model, params))
    from meshdsl.models import t5

    at_once = md.jit(functools.partial(t5.logits, model.config), backend="numpy")
    prompt, text = PROMPTS[0], texts[0]
    wanted = [prompt[-1]]
    for _ in range(6):
        given = [np.array([each], "int32") for each in (prompt[:-1], wanted)]
        given = [md.named(each, ["batch", "length"]) for each in given]
        wanted.append(int(np.asarray(at_once(params, *given))[0, -1].argmax()))
    assert text == wanted[1:]


def test_a_decoder_with_a_token_to_start_with_leaves_the_prompt_to_the_encoder():
    model, params = trained("t5_mini", f"{SIZES},kv=4,decoder_start=0")
    texts = written(PLACES["one device"], Sampling(temperature=0), model=(model, params))
    from meshdsl.models import t5

    at_once = md.jit(functools.partial(t5.logits, model.config), backend="numpy")
    for prompt, text in zip(PROMPTS, texts, strict=True):
        wanted = [0, *text]
        given = [np.array([each], "int32") for each in (prompt, wanted[:-1])]
        given = [md.named(each, ["batch", "length"]) for each in given]
        assert np.asarray(at_once(params, *given))[0].argmax(-1).tolist() == text


def test_nothing_is_compiled_after_the_writer_is_made(monkeypatch):
    from meshdsl.running.jit import Jitted

    model, params = trained()
    place = PLACES["one device"]
    writer = Writer(model, prompt_tokens=9, new_tokens=4, batch_size=2, place=place, chunk=4)
    monkeypatch.setattr(Jitted, "_compile", None)
    monkeypatch.setattr(Jitted, "_lower", None)
    writer.load(params)
    for prompts in (PROMPTS[:1], PROMPTS[1:], [[1] * 4, [2] * 5]):
        assert len(list(writer.write(prompts))) == 4


@pytest.mark.parametrize("name", ["gpt_mini", "t5_mini"])
def test_half_precision_parameters_are_cast_once(name):
    model, _ = trained(name, f"{SIZES},policy.compute=bfloat16")
    place = PLACES["one device"]
    writer = Writer(model, prompt_tokens=4, new_tokens=2, place=place)
    block = writer.programs.steps[1].program.block
    (prepared,) = {each.dtype.name for each in block.inputs if each.shape.find("kv")}
    assert prepared == "bfloat16"
    # The embedding that is looked up, and its copy that makes the scores.
    tables = [each.dtype.name for each in block.inputs if set(each.shape.names) == TABLE]
    assert sorted(tables) == ["bfloat16", "float32"]
    made = [value.shape.names for each in block.instructions for value in each.outputs]
    assert not [names for names in made if set(names) == TABLE]


def test_a_table_in_the_dtype_of_steps_has_no_copy():
    writer = Writer(trained()[0], prompt_tokens=4, new_tokens=2, place=PLACES["one device"])
    inputs = writer.programs.steps[1].program.block.inputs
    assert len([each for each in inputs if set(each.shape.names) == TABLE]) == 1


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ({"temperature": -1.0}, "temperature=-1.0: needs to be at least 0"),
        (
            {"top_p": 0.0, "min_p": 2.0, "top_k": -1},
            "top_k=-1: needs to be at least 0; top_p=0.0: needs to be above 0 and at most 1; "
            "min_p=2.0: needs to be from 0 to 1",
        ),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: needs to be above 0"),
    ],
)
def test_numbers_out_of_range_are_all_told(numbers, problem):
    with pytest.raises(ValueError) as error:
        Sampling(**numbers)
    assert str(error.value) == problem


def test_mistakes_have_messages():
    def message(function, *arguments, **options):
        with pytest.raises(ValueError) as error:
            function(*arguments, **options)
        return str(error.value)

    assert message(Writer, models.load("bert_mini"), prompt_tokens=4, new_tokens=2) == (
        "bert_mini does not write text: decoder-only transformers and T5 do, and a Model of your "
        "own with a `decoding`"
    )
    assert message(Writer, replace(trained()[0], config=None), prompt_tokens=4, new_tokens=2) == (
        "gpt_mini does not say how many tokens there are: give its Model a `config` with `vocab`"
    )
    decoding = trained()[0].decoding
    assert message(Decoding, decoding.step).startswith(
        "a Decoding begins a cache by `empty`, or by"
    )
    assert message(replace, decoding, encode=decoding.empty).endswith("give one of them")
    assert message(replace, decoding, start=3, window=7) == (
        "`unrolled` decodes the same model, but has another start, window"
    )
    learned = models.load("gpt_mini", f"{SIZES},positions=learned,max_length=8")
    assert message(Writer, learned, prompt_tokens=7, new_tokens=3) == (
        "gpt_mini has learned max_length=8 positions, too few for a prompt of 7 tokens and 3 new "
        "ones"
    )
    place = Place("model:2", "hedas:model", "numpy")
    text = message(Writer, trained()[0], prompt_tokens=4, new_tokens=2, place=place)
    assert (
        "`hedas:model` names a dim that this program does not have. Did you mean `heads`?" in text
    )
    writer = Writer(trained()[0], prompt_tokens=4, new_tokens=2, place=PLACES["one device"])
    assert message(lambda: next(writer.write([[1]]))) == (
        "the writer has no parameters: load(params) first"
    )
    assert (
        message(lambda: next(writer.write([[1], [2]]))) == "the writer takes 1 to 1 prompts, got 2"
    )
    assert message(lambda: next(writer.write([[]]))) == (
        "prompt 0 has 0 tokens; the writer takes 1 to 4"
    )


def test_the_last_positions_of_a_model_can_be_written_to():
    learned = trained("gpt_mini", f"{SIZES},positions=learned,max_length=8")
    texts = written(
        PLACES["one device"], prompts=[[1] * 5], model=learned, prompt_tokens=5, new_tokens=4
    )
    assert len(texts[0]) == 4
