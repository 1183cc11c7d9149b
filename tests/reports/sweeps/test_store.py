"""The results on disk: what a process leaves, however it ends, is what the next one finds."""

import json
import resource
from dataclasses import replace

import pytest

from meshdsl.reports.sweeps.result import Result
from meshdsl.reports.sweeps.store import FILE, Store

ONE = Result(
    "data:2 model:4",
    "batch:data; kopf:„Größe“",
    devices=8,
    seconds=1.5,
    quartiles=(1.25, 2.0),
    wire_bytes={"data": 3.0, "data+model": 0.5},
    peak_bytes=7,
    fits=True,
    notes=("a note",),
)


def test_results_and_rounds_are_found_again(tmp_path):
    with Store(tmp_path) as store:
        store.add("one", ONE)
        store.add_round("one", [0.5, 0.25])
        store.add_round("one", [1.0])
    with Store(tmp_path) as store:
        assert store.known("one") == ONE
        assert store.known("two") is None
        assert store.rounds == {"one": [[0.5, 0.25], [1.0]]}


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_line_that_was_not_finished_is_cut_off(tmp_path, cut):
    with Store(tmp_path) as store:
        store.add("one", ONE)
        store.add("two", ONE)
    file = tmp_path / FILE
    file.write_bytes(file.read_bytes()[:-cut])
    with Store(tmp_path) as store:
        assert (store.known("one"), store.known("two")) == (ONE, None)
        store.add("three", ONE)
    with Store(tmp_path) as store:
        assert (store.known("one"), store.known("three")) == (ONE, ONE)
    assert [json.loads(line)["key"] for line in file.read_text().splitlines()] == ["one", "three"]


def test_lines_of_another_kind_are_passed_over(tmp_path):
    lines = ["[]", "{}", '"text"', "nonsense", '{"key": "one", "result": {"mesh": "data:2"}}']
    (tmp_path / FILE).write_text("\n".join(lines) + "\n")
    with Store(tmp_path) as store:
        assert (store.results, store.rounds) == ({}, {})


def test_what_had_a_passing_reason_or_lost_its_page_is_measured_again(tmp_path):
    with Store(tmp_path) as store:
        store.add("layout", replace(ONE, reason="it does not fit"))
        store.add("crash", replace(ONE, reason="SIGKILL", passing=True))
        store.add("page", replace(ONE, page="pages/page.html"))
        assert store.known("layout") is not None
        assert store.known("crash") is None
        assert store.known("page") is None
        (tmp_path / "pages" / "page.html").write_text("")
        assert store.known("page") is not None


def test_one_process_at_a_time_holds_a_folder(tmp_path):
    with Store(tmp_path), pytest.raises(ValueError) as error:
        Store(tmp_path)
    assert str(error.value) == f"another sweep is at work in {tmp_path}"
    Store(tmp_path).close()


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError) as error:
        Store(tmp_path / "file")
    assert str(error.value) == f"cannot write results to {tmp_path / 'file'}: not a directory"


def test_a_full_disk_is_told_and_nothing_is_lost(tmp_path):
    with Store(tmp_path) as store:
        store.add("one", ONE)
        size, before = (tmp_path / FILE).stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
        for room, reason in [(10, "no space left on device"), (10, "file too large")]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, before[1]))
            try:
                with pytest.raises(ValueError) as error:
                    store.add("two", ONE)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            assert str(error.value) == f"cannot write results to {tmp_path}: {reason}"
    with Store(tmp_path) as store:
        assert (store.known("one"), store.known("two")) == (ONE, None)
        assert (tmp_path / FILE).stat().st_size == size
