"""Files that change between two runs are named, whatever has changed in them."""

import os
import time

import pytest

from meshdsl.training.data import DataFiles, data_files


@pytest.fixture
def paths(tmp_path):
    found = [tmp_path / "a.bin", tmp_path / "b.txt"]
    found[0].write_bytes(bytes(range(256)) * 40)
    found[1].write_text("some text")
    return found


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(data_files, "_PIECE", 1000)


def read(paths):
    """Returns what a run that has read everything stores of its files."""
    files = DataFiles(paths)
    with files.reading() as check:
        while any(None in file["sums"] for file in files.state()):
            check()
    return files.state()


def change(path, at, keep_time=False):
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    step = 0 if keep_time else 10**9
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + step))


def test_the_same_files_do_not_differ(paths):
    assert DataFiles(paths).differences(read(paths)) == []
    assert DataFiles(paths).differences(None) == []


@pytest.mark.parametrize("keep_time", [False, True])
def test_a_byte_that_changes_is_named_with_its_file(paths, keep_time):
    state = read(paths)
    change(paths[0], 5500, keep_time)
    (line,) = DataFiles(paths).differences(state)
    assert line == f"{paths[0]} has other bytes than before, between 5,000 and 6,000"


def test_of_many_bytes_those_that_look_unchanged_are_compared_beside_the_run(paths, monkeypatch):
    monkeypatch.setattr(data_files, "_AT_START", 100)
    state = read(paths)
    change(paths[0], 5500, keep_time=True)
    files = DataFiles(paths)
    assert files.differences(state) == []
    reason = r"changed since the checkpoint: .*a.bin has other bytes .* between 5,000 and 6,000"
    with pytest.raises(ValueError, match=reason), files.reading() as check:
        for _ in range(12_000):  # two minutes, on a machine that others share
            check()
            time.sleep(0.01)
    assert files.state() == state  # so that the next run is refused as well
    files.accept()
    assert files.state() != state
    change(paths[0], 5500)
    assert DataFiles(paths).differences(state) == []  # it is as it was, at another time


def test_what_is_seen_after_the_last_report_is_reported_at_the_end(paths, monkeypatch):
    monkeypatch.setattr(data_files, "_AT_START", 100)
    state = read(paths)
    change(paths[0], 5500, keep_time=True)
    for failure in (None, KeyError("of the run")):
        files = DataFiles(paths)
        assert files.differences(state) == []
        reason = "of the run" if failure else r"a.bin has other bytes .* between 5,000 and 6,000"
        with pytest.raises(KeyError if failure else ValueError, match=reason), files.reading():
            while any(len(file.sums) < len(file.pieces) for file in files._files):
                time.sleep(0.01)
            if failure:
                raise failure


def test_a_run_that_is_over_early_warns_of_what_it_has_not_compared(paths, monkeypatch):
    monkeypatch.setattr(data_files, "_AT_START", 100)
    state = read(paths)
    monkeypatch.setattr(data_files, "_RATE", 1)  # the thread waits after its first piece
    files = DataFiles(paths)
    assert files.differences(state) == []
    with pytest.warns(UserWarning, match=r"checkpoint's: 9,249 bytes were not"), files.reading():
        while not files._files[0].sums:
            time.sleep(0.01)


def test_a_file_of_another_size_or_one_more_is_named(paths, tmp_path):
    state = read(paths)
    with paths[1].open("a") as file:
        file.write(".")
    assert DataFiles(paths).differences(state) == [f"{paths[1]} had 9 bytes, and has 10"]
    assert "2 files in the checkpoint, 1 here" in DataFiles(paths[:1]).differences(state)[0]


def test_a_copy_elsewhere_is_the_same_data(paths, tmp_path):
    state = read(paths)
    (tmp_path / "copy").mkdir()
    copies = [path.rename(tmp_path / "copy" / path.name) for path in paths]
    assert DataFiles(copies).differences(state) == []


def test_what_was_not_read_to_its_end_cannot_be_compared(paths):
    state = DataFiles(paths).state()  # of a run that was killed at once
    assert DataFiles(paths).differences(state) == []
    change(paths[0], 0)
    (line,) = DataFiles(paths).differences(state)
    assert line.startswith(f"{paths[0]} has another name or time of change than before, and no")


def test_every_piece_has_a_checksum_which_later_runs_keep(paths, monkeypatch):
    monkeypatch.setattr(data_files, "_AT_START", 100)
    state = read(paths)
    assert [len(file["sums"]) for file in state] == [11, 1]
    later = DataFiles(paths)
    assert later.differences(state) == [] and later.state() == state


def test_a_file_that_is_gone_is_an_error_that_names_it(paths):
    paths[0].unlink()
    with pytest.raises(ValueError, match=r"a.bin cannot be read: No such file"):
        DataFiles(paths)
