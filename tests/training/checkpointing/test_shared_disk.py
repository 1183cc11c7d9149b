"""A workdir that only some see, and copies that hosts share, are told before anything is saved."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import jax
import pytest

from meshdsl.training.checkpointing import shared_disk
from meshdsl.training.checkpointing.shared_disk import check_apart, check_shared


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


@pytest.fixture
def in_processes(monkeypatch):
    """Returns what calls a function in some "processes", threads that gather texts as those do."""

    def run(count, function):
        barrier, here = threading.Barrier(count, timeout=60), threading.local()
        texts = [""] * count

        def gathered(text):
            texts[here.index] = text
            barrier.wait()
            found = [*texts]
            barrier.wait()
            return found

        @contextmanager
        def together():
            problem = ""
            try:
                yield
            except ValueError as error:
                problem = str(error)
            if problems := [text for text in gathered(problem) if text]:
                raise ValueError(problems[0])

        def process(index):
            here.index = index
            try:
                return function(index)
            except ValueError as error:
                return str(error)

        monkeypatch.setattr(jax, "process_index", lambda: here.index)
        monkeypatch.setattr(shared_disk, "gathered", gathered)
        monkeypatch.setattr(shared_disk, "together", together)
        with ThreadPoolExecutor(count) as pool:
            return [*pool.map(process, range(count))]

    return run


@pytest.mark.parametrize(
    ("folders", "told"),
    [
        (["a", "a", "b"], False),  # two processes of one host, and one of another
        (["a", "b", "c"], False),
        (["shared", "a", "shared"], True),
        (["shared", "shared", "shared"], True),
    ],
)
def test_a_folder_of_copies_that_hosts_share_is_refused_and_stays_as_it_is(
    folders, told, in_processes, tmp_path
):
    """Else each host deletes the copies of the others, which it takes for those of lost ones."""
    hosts = [name if name != "shared" else f"host{n}" for n, name in enumerate(folders)]
    for name in {*folders}:
        (tmp_path / name).mkdir()
    found = in_processes(3, lambda index: check_apart(tmp_path / folders[index], hosts))
    if told:
        assert all("is on a disk that hosts share: " in text for text in found), found
        assert all("--host_copies=/dev/shm/" in text for text in found)
    else:
        assert found == [None] * 3
    assert not any([*(tmp_path / name).iterdir()] for name in folders)
