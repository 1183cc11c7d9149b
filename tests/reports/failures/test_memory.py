"""The bytes of a parameter that replicas of the optimizer take, as the guide has them."""

import json
import math

import jax
import pytest

import meshdsl as md
from meshdsl.reports.failures import failures
from tests.cli.commands import explained

SHARES = "; optimizer/embed:data"
FSDP = "; params/embed:data" + SHARES


@pytest.mark.parametrize("devices", [4, 8, 16])
@pytest.mark.parametrize(
    ("holders", "shares", "bytes_of_parameter"),
    [
        (1, "", lambda d: 12),
        (1, SHARES, lambda d: 4 + 8 / d),
        (2, SHARES, lambda d: 4 + 16 / d),
        (1, FSDP, lambda d: 12 / d),
        (2, FSDP, lambda d: 24 / d),
    ],
)
def test_adamw_keeps_float32_parameters_and_two_moments(
    devices, holders, shares, bytes_of_parameter, capsys
):
    mesh = f"--mesh_shape=replica:{holders},data:{devices // holders}"
    layout = f"--layout=batch:replica+data{shares}"
    policy = "--policy=params=float32,compute=bfloat16"
    values = json.loads(explained(capsys, mesh, layout, policy, "--failures", "--json"))
    whole = json.loads(explained(capsys, policy, "--failures", "--json"))
    kinds = "params", "optimizer/mean", "optimizer/mean_square"
    (parameters,) = [s["bytes_of_device"] / 4 for s in whole["states"] if s["name"] == "params"]
    kept = sum(s["bytes_of_device"] for s in values["states"] if s["name"] in kinds)
    assert kept / parameters == bytes_of_parameter(devices)


def kept_by_published_steps(mesh, layout):
    """Returns the bytes of a parameter on a device, with 16-bit parameters and master weights."""
    rows, embed = md.dims(rows=24, embed=64)

    def step(state):
        master, mean, square = (state["optimizer"][k] for k in ("master", "mean", "square"))
        gradient = md.cast(state["gradients"], "float32")
        mean, square = 0.9 * mean + gradient, 0.9 * square + gradient * gradient
        master = master - mean
        kept = {"master": master, "mean": mean, "square": square, "gradient": gradient}
        params = md.cast(master, "bfloat16")
        return {"state": {"params": params, "gradients": params * 0.5, "optimizer": kept}}

    def state(make):
        names = "master", "mean", "square", "gradient"
        optimizer = {name: make("float32") for name in names}
        return {"params": make("bfloat16"), "gradients": make("bfloat16"), "optimizer": optimizer}

    spec = state(lambda dtype: md.spec([rows, embed], dtype))
    program = md.jit(step, mesh, layout, donate="state").lower(spec)
    assert len(program.output_paths) == len(jax.tree.leaves(spec))
    return failures(program, 1).bytes_of_device / math.prod((24, 64))


@pytest.mark.parametrize("devices", [4, 8, 16])
def test_published_figures_are_those_of_master_weights_and_gradients(devices):
    shares = "optimizer/embed:data"
    assert kept_by_published_steps(f"data:{devices}", "") == 20
    assert kept_by_published_steps(f"data:{devices}", shares) == 4 + 16 / devices
    twice = f"replica:2,data:{devices // 2}"
    assert kept_by_published_steps(twice, shares) == 4 + 32 / devices
