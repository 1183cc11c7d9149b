"""`meshdsl explain --decode`: the step that writes a token, its caches, collectives and time."""

import json
import re

import pytest

from meshdsl import models
from meshdsl.generation import Place, Sampling, Writer
from tests.cli.commands import explained, refused

MODEL = ("--model=gpt_mini", "--model_args=layers=2,embed=32,heads=4,kv=8,d_ff=64")
SIZES = ("--batch_size=8", "--length=64", "--decode")
MESH = "--mesh_shape=data:2,model:4"
TENSOR = "batch:data; heads:model; d_ff:model; vocab:model"
FLASH = "batch:data; memory_length:model"
WHOLE = 2 * 2 * 64 * 32 * 4  # bytes of a text: two layers' keys and values of float32


def decoded(capsys, *arguments):
    return json.loads(explained(capsys, *arguments, "--json"))


@pytest.mark.parametrize("layout", [TENSOR, FLASH])
def test_caches_are_split_and_what_is_sent_is_what_generate_sends(capsys, layout):
    found = decoded(capsys, *MODEL, *SIZES, MESH, f"--layout={layout}; optimizer/embed:data")
    assert found["decode"]["cache_bytes_of_a_text"] == WHOLE
    assert found["decode"]["cache_bytes"] == 8 * WHOLE // 8  # eight texts on eight devices
    assert found["decode"]["tokens_per_second"] == pytest.approx(8 / found["seconds"], rel=1e-5)
    model = models.load("gpt_mini", MODEL[1].partition("=")[2])
    sizes = {"prompt_tokens": 32, "new_tokens": 32, "batch_size": 8}
    place = Place("data:2,model:4", layout, "numpy")
    writer = Writer(model, **sizes, sampling=Sampling(temperature=0), place=place)
    sent = writer.programs.steps[1].program.collectives
    assert found["collectives"] == sum(each.count for each in sent) > 0
    assert found["wire_bytes"] == sum(each.count * each.wire_bytes for each in sent)


def test_the_report_has_the_figures_in_words(capsys):
    report = explained(capsys, *MODEL, *SIZES, MESH, f"--layout={TENSOR}")
    assert report.startswith("decode_step on data:2 model:4: 8 devices")
    text = " ".join(report.split())
    assert (
        "a step writes one token of each of 8 texts. Caches for 64 tokens take 32.0 KiB per "
        "device, and 32.0 KiB for each text over the mesh"
    ) in text
    assert "collectives for each token, in which a device sends" in text and "tokens/s" in text
    alone = explained(capsys, *MODEL, "--batch_size=1", "--length=64", "--decode")
    assert "one token of one text." in " ".join(alone.split())
    assert "note: nothing is sent; " in alone


@pytest.mark.parametrize(
    ("model", "each"),
    [
        # Latent vectors and rotated keys of a token; a window of 16, read in chunks of 32.
        ("deepseek_mini|layers=2,embed=32,heads=4,kv=8,kv_rank=8,rotary_kv=4", 2 * 64 * 12),
        ("gpt_mini|layers=1,embed=32,heads=4,kv=8,window=16", 64 * 64),
        # The decoder's 32 tokens, and the 32 that its encoder has read.
        ("t5_mini|layers=1,embed=32,heads=4,kv=8", 2 * 32 * 64),
    ],
)
def test_caches_are_those_of_the_family(capsys, model, each):
    name, _, overrides = model.partition("|")
    found = decoded(capsys, f"--model={name}", f"--model_args={overrides}", *SIZES)
    assert found["decode"]["cache_bytes_of_a_text"] == 4 * each


def test_a_page_has_the_figures(capsys, tmp_path):
    page = tmp_path / "step.html"
    explained(capsys, *MODEL, *SIZES, f"--html={page}")
    assert "A step writes one token of each of 8 texts" in page.read_text()


def test_caches_of_many_layers_are_one_row(capsys, tmp_path):
    page = tmp_path / "step.html"
    many = ("--model=gpt_mini", "--model_args=layers=6,embed=32,heads=4,kv=8,d_ff=64", *SIZES)
    explained(capsys, *many, f"--html={page}")
    rows = [re.sub("<[^>]*>", "", row) for row in page.read_text().split("<tr")]
    caches = [row for row in rows if "state/cache/layers" in row]
    assert len(caches) == 2 and all("/*" in row and "× 6" in row for row in caches)
    assert all("384 KiB" in row for row in caches)  # of keys, and of values


def test_nothing_else_than_the_step_is_lowered(capsys, monkeypatch):
    lowered = []

    def spied(place, function, *more):
        lowered.append(function.__name__)
        return found(place, function, *more)

    found = Place.lowered
    monkeypatch.setattr(Place, "lowered", spied)
    explained(capsys, *MODEL, *SIZES)
    assert lowered == ["_step"]


def test_what_cannot_be_explained_is_refused(capsys):
    told = refused(capsys, *MODEL, *SIZES, "--stage=placed", "--microbatches=2")
    assert "--decode prints a report of its own: leave out --stage" in told
    assert "--decode trains nothing: leave out --microbatches" in told
    told = refused(capsys, *MODEL, *SIZES, "--mesh_shape=data:2", "--layout=auto")
    assert "--decode: auto finds the best layout for training; name the mesh and layout" in told
    assert "bert_mini does not write text" in refused(capsys, "--model=bert_mini", "--decode")
    few = ("--model_args=positions=learned,max_length=32", "--length=64", "--decode")
    assert "has learned max_length=32 positions" in refused(capsys, "--model=gpt_mini", *few)
    told = refused(capsys, *MODEL, *SIZES, "--mesh_shape=data:2", "--layout=hedas:data")
    assert "Did you mean `heads`?" in told
