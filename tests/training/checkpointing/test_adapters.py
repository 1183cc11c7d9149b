"""Adapters merged on the host, against numpy."""

import numpy as np

import meshdsl as md
from meshdsl.training.checkpointing.adapters import merging


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
