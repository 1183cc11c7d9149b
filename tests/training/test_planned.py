"""`train(layout="auto")`: a layout is found, kept in the workdir, and taken again."""

import json

import pytest

from meshdsl.training.checkpointing.saving import Saving
from meshdsl.training.planned import keep, kept
from tests.training import classifier


def test_what_is_kept_is_read_again_and_damage_is_nothing(tmp_path):
    assert kept(None) is None and kept(tmp_path) is None
    keep(tmp_path / "new", {"devices": "8"}, {"layout": "batch:data"})
    assert kept(tmp_path / "new") == ({"devices": "8"}, {"layout": "batch:data"})
    (tmp_path / "new" / "plan.json").write_text('{"asked": 1}')
    assert kept(tmp_path / "new") is None


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "layout", "devices", "backend"),
    [
        ("auto", "auto", "8", "jax"),
        ("data:2,model:4", "batch:data; auto", "data:2 model:4", "numpy"),
    ],
)
def test_losses_are_those_of_one_device(mesh, layout, devices, backend, tmp_path, capsys):
    plain = classifier.run(steps=4, log_every=2)
    options = {"log_every": 2, "mesh": mesh, "layout": layout, "saving": Saving(every=2)}
    options |= {"backend": backend, "quiet": False}
    first = classifier.run(tmp_path, steps=2, **options)
    record = json.loads((tmp_path / "plan.json").read_text())
    assert record["asked"]["mesh"] == devices
    line = f"layout {record['found']['layout']} on mesh {record['found']['mesh']}"
    assert line in capsys.readouterr().out
    # A layout that no search would find, to see that it is taken.
    record["found"]["layout"] = "label:data" if layout != "auto" else "batch:data"
    record["found"]["mesh"] = devices if layout != "auto" else "data:4"
    (tmp_path / "plan.json").write_text(json.dumps(record))
    second = classifier.run(tmp_path, steps=4, **options)
    assert f"layout {record['found']['layout']} on" in capsys.readouterr().out
    assert first.losses + second.losses == pytest.approx(plain.losses, rel=1e-5)
