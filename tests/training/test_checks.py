"""What is wrong with numbers of steps is found by one function, before a run and in it."""

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.training.checkpointing.checkpoints import Checkpoints
from meshdsl.training.checkpointing.shared_checkpoints import described
from meshdsl.training.checks import misfit_of_steps


@pytest.mark.parametrize("mark", ["", "--"])
def test_steps_that_are_done_at_once_divide_all_numbers_of_steps(mark):
    numbers = {"steps": 6, "log_every": 7, "eval_every": None, "local_every": 4}
    assert misfit_of_steps(3, numbers, mark) == (
        f"{mark}steps_per_call=3: so many steps are done at once, which do not divide "
        f"{mark}log_every=7, {mark}local_every=4"
    )
    assert misfit_of_steps(1, numbers) is misfit_of_steps(2, {"steps": 6}) is None


def test_the_description_of_a_checkpoint_is_read_without_devices_or_arrays(tmp_path, monkeypatch):
    state = {"w": md.named(np.arange(3.0, dtype="f4"), ["x"])}
    with Checkpoints(tmp_path, config={"seed": "1"}) as checkpoints:
        checkpoints.save(4, state, {"place": 2})

    def forbidden(*_, **__):
        raise AssertionError("devices are looked for")

    for name in ("devices", "process_index", "process_count", "device_put"):
        monkeypatch.setattr(jax, name, forbidden)
    for file in (tmp_path / "4" / "state").rglob("*"):
        file.chmod(0)
    found = described(tmp_path / "4")
    assert (found["config"], found["position"]) == ({"seed": "1"}, {"place": 2})
    assert found["arrays"] == {"w": {"dims": [["x", 3]], "dtype": "float32"}}
