"""The example's kernel is nn.rms_norm, with its gradients, on any layout."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

import meshdsl as md
from meshdsl import nn
from tests.ops.agreement import message

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fused_rms_norm.py"
batch, length, embed = md.dims(batch=6, length=5, embed=16)


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


@pytest.mark.parametrize(
    ("mesh", "layout", "moved"),
    [
        (None, "", []),
        ("data:2,model:2", "batch:data; length:model", ["all_reduce"]),
        ("data:3", "embed:data", None),
    ],
)
def test_it_agrees_with_the_function_of_the_library(example, mesh, layout, moved):
    rng = np.random.default_rng(0)
    x = md.named(rng.normal(size=(6, 16, 5)), [batch, embed, length])
    scale = md.named(rng.normal(size=16), [embed])

    def step(norm):
        return md.value_and_grad(lambda x, s: md.sum(md.sin(norm(x, "embed", s))), (0, 1))

    expected = md.jit(step(nn.rms_norm))(x, scale)
    jitted = md.jit(step(example["rms_norm"]), mesh, layout)
    value, gradients = jitted(x, scale)
    assert np.allclose(value, expected[0], rtol=1e-12)
    for mine, other in zip(gradients, expected[1], strict=True):
        assert mine.dims == other.dims
        assert np.allclose(mine, other, rtol=1e-10, atol=1e-12)
    if moved is not None:
        assert {c.kind for c in jitted.lower(x, scale).collectives} == set(moved)


def test_a_mistake_is_told_like_any_other(example):
    x, scale = md.spec([batch, embed]), md.spec([batch])
    text = message(lambda x, scale: example["rms_norm"](x, "embed", scale), x, scale)
    assert text.startswith(
        "fused_rms_norm: scale must have the last dim of x, embed=16, not [batch=6]"
    )


def test_it_runs_as_a_program(monkeypatch, capsys):
    arguments = ["--mesh_shape=data:4,model:2", "--layout=batch:data;length:model"]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *arguments])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    last = capsys.readouterr().out.splitlines()[-1]
    assert float(last.removeprefix("largest difference of value and gradients: ")) < 1e-4
