"""CSV files of schedules: what PyTorch writes is read, and what is written is read back."""

from dataclasses import replace

import pytest

from meshdsl.lowering.pipelines import csv_files
from meshdsl.lowering.pipelines.named import NAMES, named


def test_a_file_has_a_line_per_stage_in_pytorch_notation():
    assert csv_files.text(named("1f1b", 2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_all_kinds_of_cells_are_read_and_written():
    content = (
        "0UNSHARD,0F0,2SEND_F0,,7I0,7W0,(0F7;7B3)OVERLAP_F_B,0RESHARD,0REDUCE_GRAD\n,1RECV_F0,1B0\n"
    )
    assert csv_files.text(csv_files.parse(content)) == content


def test_line_ends_of_any_system_are_read():
    assert csv_files.parse("0F0,0B0\r\n1F0,1B0\r\n") == csv_files.parse("0F0, 0B0\n1F0,1B0")


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_written_is_read_back(name, tmp_path):
    schedule = named(name, 3, 5)
    file = tmp_path / f"{name}.csv"
    csv_files.write(schedule, file)
    assert csv_files.read(file) == replace(schedule, name=str(file))


def test_actions_without_chunks_are_told_once():
    with pytest.raises(ValueError, match="`mine` has 7 actions without the number of") as error:
        csv_files.parse("F0,F1,B0,B1\n1F0,F0,B0,F1", name="mine")
    assert "`F0`: write it in front, such as `0F0` for chunk 0" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_all_cells_that_are_not_actions_are_listed():
    with pytest.raises(ValueError) as error:
        csv_files.parse("0F0,0X0\n1F0,1F,1B0", name="mine")
    lines = str(error.value).splitlines()
    assert lines[0] == "schedule `mine` has cells that are not actions:"
    assert lines[1].startswith("  1. line 1, column 2: `0X0` is not an action. Write the chunk")
    assert (
        lines[2]
        == "  2. line 2, column 2: `1F`: F needs a microbatch: write `1F0` for the first one"
    )


def test_an_empty_file_is_refused():
    with pytest.raises(
        ValueError, match=r"schedule `mine` has no action\. Write one line per stage"
    ):
        csv_files.parse(",,\n", name="mine")


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"mine.csv cannot be read: No such file.*built-in"):
        csv_files.read(tmp_path / "mine.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe0")
    with pytest.raises(ValueError, match=r"bytes.csv cannot be read"):
        csv_files.read(tmp_path / "bytes.csv")
