"""What a run measures of itself: utilisation, memory and profiles."""

import gzip

import numpy as np
import pytest

import meshdsl as md
from meshdsl.layouts.hardware import hardware_of
from meshdsl.models import load
from meshdsl.optim import AdamW
from meshdsl.tensors.named_array import spec
from meshdsl.training.programs import Place, Programs
from meshdsl.training.recipe import Recipe
from meshdsl.training.reporting.meters import Meters, host_memory_peak
from meshdsl.training.reporting.profiling import ProfiledSteps
from tests.training import classifier


class Runtime:
    """Devices whose driver calls them by a name."""

    def __init__(self, kind, memory):
        self.device_kind = lambda: kind
        self.memory_peak = lambda: memory


def test_utilisation_is_the_models_work_over_the_peak():
    meters = Meters(1000, 550 * 10**12, 4, Runtime("TPU v4", 7))
    found = meters.read(2.0, 0.5)
    assert found["tokens_per_second"] == 250
    assert found["tflops_per_device"] == pytest.approx(550 / 2 / 4 / 2)
    assert found["mfu"] == pytest.approx(550 / 2 / 4 / 2 / 275)
    assert found["memory_bytes"] == 7


def test_what_cannot_be_had_is_left_out():
    found = Meters(None, 10**12, 1, Runtime("cpu", None)).read(1.0, 1.0)
    assert set(found) == {"step_seconds", "tflops_per_device", "host_memory_bytes"}
    assert found["host_memory_bytes"] == pytest.approx(host_memory_peak(), rel=0.5)
    assert host_memory_peak() > 50 * 2**20


def test_devices_are_known_by_what_drivers_call_them():
    assert hardware_of("NVIDIA H100 80GB HBM3").name == "h100"
    assert hardware_of("TPU v6 lite").name == "v6e"
    assert hardware_of("NVIDIA H200 NVL") is None  # slower than the form on boards


@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_models_work_is_that_of_the_formula(remat):
    """6 flops for each weight and token, and 12 for each score and feature (PaLM, appendix B)."""
    model = load("gpt_mini", f"layers=4,embed=256,heads=4,kv=64,d_ff=1024,remat={remat}")
    batch, length = 4, 128
    recipe = Recipe(model.init, model.loss, AdamW(1e-3), microbatches=2)
    place = Place("data:2", "batch:data", "numpy", None)
    programs = Programs(recipe, place, 1, {None: model.batch_spec(batch, length)}, {})
    blocks = 4 * (4 * 256 * 4 * 64 + 2 * 256 * 1024)
    unembed = 256 * model.config.vocab
    scores = 12 * 4 * 4 * 64 * length
    expected = batch * length * (6 * (blocks + unembed) + scores)
    assert programs.model_flops(None) == pytest.approx(expected, rel=0.02)


def test_several_steps_in_a_call_ask_for_the_work_of_each():
    recipe = Recipe(classifier.init, classifier.loss, AdamW(1e-3))
    place = Place(None, None, "numpy", None)
    stacked = {
        name: spec([md.Dimension("steps", 3), *one.dims], one.dtype)
        for name, one in classifier.BATCH.items()
    }
    once = Programs(recipe, place, 1, {None: classifier.BATCH}, {})
    many = Programs(recipe, place, 3, {None: stacked}, {})
    assert many.model_flops(None) == once.model_flops(None)


def run(workdir, **options):
    return classifier.run(workdir, **{"steps": 6, "log_every": 6, "backend": "jax"} | options)


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_profile_shows_the_layers(at_once, tmp_path):
    run(tmp_path, profile=ProfiledSteps(2, 3), steps_per_call=at_once)
    (profile,) = (tmp_path / "profile").rglob("*.xplane.pb")
    content = profile.read_bytes()
    assert b"loss/einsum" in content and b"backward/loss/einsum" in content
    (trace,) = (tmp_path / "profile").rglob("*.trace.json.gz")
    assert b"traceEvents" in gzip.decompress(trace.read_bytes())


def test_a_profile_of_steps_that_are_not_taken_is_not_there(tmp_path):
    run(tmp_path, profile=ProfiledSteps(7, 8))
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profile": ProfiledSteps(1, 2)}, "a profile needs a workdir, where it is written"),
        ({"backend": "numpy"}, "backend numpy has no devices to profile; take another"),
    ],
)
def test_profiles_that_cannot_be_are_told(options, message, tmp_path):
    workdir = None if "profile" in options else tmp_path
    with pytest.raises(ValueError, match=message):
        run(workdir, **{"profile": ProfiledSteps(1, 2)} | options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ten", "needs the first and the last step, as in 10:13, got 'ten'"),
        ("10:", "needs the first and the last step"),
        ("5:3", "there are no steps 5:3; the first step is 1"),
        ("0:3", "there are no steps 0:3"),
    ],
)
def test_steps_to_profile_are_read_from_text(text, message):
    assert ProfiledSteps.parse("10:13") == ProfiledSteps(10, 13)
    assert ProfiledSteps.parse("4") == ProfiledSteps(4, 4)
    with pytest.raises(ValueError, match=message):
        ProfiledSteps.parse(text)


def test_the_test_batches_are_gone_through_once_at_the_end(tmp_path):
    def evaluated(result, name):
        return [line[f"{name}_loss"] for line in result.history if f"{name}_loss" in line]

    both = {
        "eval_batches": classifier.batches(2, seed=9),
        "test_batches": classifier.batches(3, seed=10),
    }
    result = run(tmp_path, log_every=2, eval_every=2, backend="numpy", **both)
    assert len(evaluated(result, "eval")) == 3
    (found,) = evaluated(result, "test")
    swapped = {"eval_batches": both["test_batches"]}
    again = run(tmp_path / "again", backend="numpy", **swapped)
    np.testing.assert_allclose(evaluated(again, "eval")[-1], found, atol=1e-6)
