"""A workdir that only some of the processes see is told before anything is saved."""

from contextlib import nullcontext

import jax
import pytest

from meshdsl.training.checkpointing import shared_disk
from meshdsl.training.checkpointing.shared_disk import check_shared


@pytest.fixture
def as_process(monkeypatch):
    """Returns what makes this the process of a number, of two."""
    monkeypatch.setattr(shared_disk, "_PATIENCE", 0.1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(shared_disk, "together", nullcontext)
    monkeypatch.setattr(shared_disk, "gathered", lambda text: ['["host0", "1f"]', text])

    def become(number):
        monkeypatch.setattr(jax, "process_index", lambda: number)

    return become


def test_one_process_has_nothing_to_compare(tmp_path):
    check_shared(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_the_file_of_the_first_process_is_seen_and_removed(as_process, tmp_path):
    as_process(0)
    check_shared(tmp_path / "work")
    assert [*(tmp_path / "work").iterdir()] == []
    as_process(1)
    (tmp_path / "work" / "shared.1f").touch()
    check_shared(tmp_path / "work")


def test_a_disk_of_its_own_is_told(as_process, tmp_path):
    as_process(1)
    with pytest.raises(ValueError, match="is not the one of process 0, on host0: it is on a disk"):
        check_shared(tmp_path)
