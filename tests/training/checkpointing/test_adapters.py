"""Adapters merged on the host, against numpy; and weights that have none yet."""

import numpy as np
import pytest
from safetensors.numpy import save_file

import meshdsl as md
from meshdsl.models import load, with_lora
from meshdsl.training.checkpointing.adapters import merging
from meshdsl.training.checkpointing.weights import Weights
from meshdsl.training.state import by_path, spec_of


def test_sums_are_made_in_float32_and_rounded_once():
    rng = np.random.default_rng(0)
    shapes = {
        "w": {"layers": 2, "heads": 3, "embed": 4},
        "adapters/w/down": {"layers": 2, "embed": 4, "adapter": 2},
        "adapters/w/up": {"layers": 2, "adapter": 2, "heads": 3},
        "other": {"embed": 4},
    }
    specs = {path: md.spec(md.dims(**dims), "bfloat16") for path, dims in shapes.items()}
    arrays = {
        path: rng.normal(size=spec.dims.sizes).astype(spec.dtype) for path, spec in specs.items()
    }
    own, fetch = merging(specs, lambda names: {name: arrays[name] for name in names})
    assert [*own] == ["w", "other"]
    found = fetch(["w", "other"])
    assert [*found] == ["w", "other"] and found["w"].dtype == arrays["w"].dtype
    wide = {path: array.astype("float32") for path, array in arrays.items()}
    added = np.einsum("lea,lah->lhe", wide["adapters/w/down"], wide["adapters/w/up"])
    np.testing.assert_array_equal(found["w"], (wide["w"] + added).astype(found["w"].dtype))
    np.testing.assert_array_equal(found["other"], arrays["other"])


def test_without_adapters_nothing_changes():
    specs = {"w": md.spec(md.dims(x=2), "float32")}
    own, fetch = merging(specs, lambda names: {name: np.zeros(2) for name in names})
    assert own == specs and [*fetch(["w"])] == ["w"]


def test_adapters_that_are_trained_may_be_missing_where_patterns_only_leave_out(tmp_path):
    """`!embedding` trains all others, adapters too; those that it leaves out may not be missing."""
    model = load("gpt_mini", "layers=1,embed=8,heads=2,d_ff=8,vocab=8")
    shapes, file = by_path(spec_of(model.init)), tmp_path / "w.safetensors"
    save_file({name: np.zeros(one.dims.sizes, one.dtype) for name, one in shapes.items()}, file)
    like, added = spec_of(with_lora(model, "query:2").init), "adapters/blocks/attention/query"
    assert Weights(file).check(like, "!embedding") == {f"{added}/down", f"{added}/up"}
    with pytest.raises(ValueError, match=f"{added}/up: missing, and not trainable, so") as error:
        Weights(file).check(like, "!**/up")
    assert f"{added}/down: missing" not in str(error.value)
    assert str(error.value).endswith("they are initialised; patterns after `!` name none")


def test_a_model_may_have_more_dims_than_einsum_has_labels():
    specs = {f"w{i}": md.spec([md.Dimension(f"dim{i}", 2)], "float32") for i in range(60)}
    specs["z/w"] = md.spec(md.dims(zin=3, zout=4), "float32")
    specs["adapters/z/w/down"] = md.spec(md.dims(zin=3, adapter=2), "float32")
    specs["adapters/z/w/up"] = md.spec(md.dims(adapter=2, zout=4), "float32")
    _, fetch = merging(
        specs, lambda names: {name: np.ones(specs[name].dims.sizes, np.float32) for name in names}
    )
    np.testing.assert_array_equal(fetch(["z/w"])["z/w"], np.full((3, 4), 3.0))
