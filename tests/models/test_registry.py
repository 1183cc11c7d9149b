"""Models by name, by module and by file; each mistake is one clear message."""

import sys
from pathlib import Path

import pytest

import meshdsl as md
from meshdsl import models, optim
from meshdsl.models.named import Named
from meshdsl.models.unet3d import UNet3DConfig
from meshdsl.training.batch_entries import MissingEntry
from meshdsl.training.state import create, spec_of
from meshdsl.training.step import make_train_step

TINY = """
import meshdsl as md
from meshdsl.models import Model

SCALE = 3.0

def init(key):
    return {"w": md.random.normal(key, [md.Dimension("embed", 4)])}

def loss(params, batch):
    return md.sum(params["w"]) * SCALE

model = Model("tiny", init, loss)

def tiny():
    return model

def wrong():
    return 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(TINY)
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "own.py").write_text(TINY)
    (package / "broken.py").write_text("import no_such_library\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [n for n in sys.modules if n.split(".")[0] in ("my_package", "my_models")]:
        del sys.modules[name]


def message(name, overrides=""):
    with pytest.raises(ValueError) as caught:
        models.load(name, overrides)
    return str(caught.value)


@pytest.mark.parametrize("place", ["my_models.py", "./my_models.py", "my_package.own", "my_models"])
@pytest.mark.parametrize("attribute", ["tiny", "model"])
def test_a_users_own_model_is_found(folder, place, attribute):
    before = list(sys.path)
    model = models.load(f"{place}:{attribute}")
    assert model.name == "tiny"
    assert set(model.batch_spec(2, 3)) == {"tokens", "targets"}
    assert sys.path == before


def test_an_absolute_path_is_found_from_anywhere(folder, monkeypatch):
    monkeypatch.chdir("/")
    assert models.load(f"{folder}/my_models.py:tiny").name == "tiny"


def test_overrides_change_the_configuration():
    model = models.load("gpt2_small", "layers=8,embed=512,heads=8")
    assert model.name == "gpt2_small"
    assert (model.config.layers, model.config.kv_size) == (8, 64)
    assert model.with_overrides("layers=2").config.embed == 512


def test_an_unknown_name_shows_the_choices():
    assert message("llama_8b") == (
        "unknown model 'llama_8b'. Did you mean `llama3_8b` or `llama_7b`? Choose from "
        f"{', '.join(models.NAMES)}, or give your own as my_package.my_models:name or "
        "my_models.py:name, or the path of a folder of Hugging Face"
    )


def test_mistakes_in_overrides_name_the_model():
    assert message("gpt_mini", "layrs=8,heads=x").splitlines()[:2] == [
        "gpt_mini with 'layrs=8,heads=x': 2 problems",
        "  layrs=8: there is no field `layrs`. Did you mean `layers`? Choose from layers, "
        "embed, heads, vocab, max_length, kv_heads, kv, d_ff, norm, norm_order, "
        "norm_unit_offset, norm_eps, positions, rotary_base, rotary_window_base, "
        "rotary_scaling, rotary_factor, "
        "rotary_low, rotary_high, rotary_original, rotary_short, "
        "rotary_long, rotary_magnitude, relative_buckets, relative_distance, "
        "attention, scaled, query_scale, attention_soft_cap, logit_soft_cap, query_key_norm, "
        "window, window_pattern, query_rank, kv_rank, rotary_kv, mlp, experts, "
        "experts_per_token, shared_experts, capacity, report_dropped, dispatch, expert_peers, "
        "dense_layers, dense_d_ff, router_score, router_normalise, router_scale, "
        "router_groups, router_chosen_groups, router_group_score, router_bias, "
        "balance_weight, router_z_weight, bias, qkv_bias, tied, scaled_embedding, remat, "
        "policy, policy.params, policy.compute, policy.output",
    ]


def test_a_missing_file_module_or_attribute_is_told(folder):
    assert message("models.py:tiny") == (
        f"there is no file models.py (looked for {folder}/models.py)"
    )
    assert message("my_package.owns:tiny") == (
        "there is no module 'my_package.owns' for my_package.owns"
    )
    assert message("other.my_models:tiny") == "there is no module 'other' for other.my_models"
    assert message("my_package/own:tiny").endswith("; for a file, write my_package/own.py")
    assert message("my_models.py:tinny") == (
        "my_models.py has no 'tinny'. Did you mean `tiny`? It has md, Model, SCALE, init, loss, "
        "model, tiny, wrong"
    )


def test_an_attribute_that_is_no_model_is_told(folder):
    expected = "is a {}; it should be a meshdsl.models.Model, or a function without arguments that"
    assert expected.format("int") in message("my_models.py:wrong")
    assert expected.format("float") in message("my_models.py:SCALE")
    assert "init(key) needs arguments" in message("my_models.py:init")


def test_a_users_own_failing_import_is_not_hidden(folder):
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        models.load("my_package.broken:tiny")


def test_a_model_without_configuration_takes_no_overrides(folder):
    assert message("my_models.py:tiny", "layers=2") == (
        "tiny takes no overrides (layers=2): give its Model a config and a rebuild"
    )


def test_a_configuration_without_its_family_is_named_with_the_file():
    with pytest.raises(
        ValueError, match=r"UNet3DConfig is no TransformerConfig: .*models/named\.py"
    ):
        Named(UNet3DConfig(), 2, 16)


def test_a_loss_that_reads_what_the_batch_lacks_is_told_what_it_has(folder):
    model = models.load("my_models.py:tiny")
    step = make_train_step(lambda params, batch: md.sum(batch["inputs"]), optim.Lion(0.1))
    state = spec_of(create(model.init, optim.Lion(0.1)))
    with pytest.raises(MissingEntry, match="the loss reads inputs of a batch that has targets"):
        md.jit(step).lower(state, model.batch_spec(2, 3))


def test_the_guide_lists_every_named_model():
    text = (Path(__file__).parents[2] / "docs" / "guides" / "models.md").read_text()
    assert [name for name in models.NAMES if f"`{name}`" not in text] == []
