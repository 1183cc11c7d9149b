"""Calibrations as files: what they say of the hardware, and what is wrong with a bad one."""

import json
from pathlib import Path

import pytest

from meshdsl.layouts import calibration
from meshdsl.layouts.calibration import (
    Calibration,
    calibration_of,
    complete,
    find_hardware,
    read,
)
from tests.layouts.calibrations import MACHINE, small, written


def damaged(tmp_path, change):
    path = written(tmp_path)
    data = json.loads(Path(path).read_text())
    change(data)
    Path(path).write_text(json.dumps(data))
    return path


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = written(tmp_path)
    assert read(path) == small()
    assert read(path).path == path
    text = Path(path).read_text()
    assert json.loads(text)["machine"]["processor"] == MACHINE.processor
    assert "      [1, 64, 64, 64, 1e-05]," in text.splitlines()


def test_the_hardware_has_the_best_that_was_measured(tmp_path):
    # Of 8 devices an all_gather sends 7/8 of its payload, an all_reduce twice as much.
    path = written(tmp_path, all_gather={(8, 2**20): 1e-4}, permute={(8, 2**10): 3e-5})
    hardware = find_hardware(path)
    assert hardware.flops == {4: pytest.approx(2 * 256**3 / 1e-4)}
    assert hardware.memory_bandwidth == pytest.approx(2**20 / 1e-4)
    assert hardware.link_bandwidth == pytest.approx(7 / 8 * 2**20 / 1e-4)
    assert hardware.latency == 2e-5
    assert hardware.asynchronous == {"all_reduce"}
    assert hardware.memory_bytes == 2**30
    assert hardware.name == path
    assert hardware.title == f"8 cpu devices, as measured in {path}"


def test_a_family_that_was_not_measured_is_replaced_by_the_one_most_like_it():
    some = small()
    assert some.nearest("products/float32/rows").family == "products/float32/rows"
    assert some.nearest("products/bfloat16/rows").family == "products/float32/rows"
    assert some.nearest("products/float32/leading").family == "products/float32/rows"
    assert some.nearest("attention") is None


def test_names_of_hardware_and_files_are_both_hardware(tmp_path):
    assert find_hardware("v5p").name == "v5p"
    assert calibration_of("v5p") is None
    path = written(tmp_path)
    assert calibration_of(path) == small()
    with pytest.raises(ValueError, match=r"unknown hardware 'v5q'; .*v6e.*Did you mean `v5p`"):
        find_hardware("v5q")
    with pytest.raises(ValueError, match=r"or a file of `meshdsl calibrate --out=mine.json`"):
        find_hardware("mine")


def test_a_file_that_is_not_there_can_be_made():
    with pytest.raises(ValueError, match=r"cannot read no/such.json: no such file or directory"):
        find_hardware("no/such.json")
    with pytest.raises(ValueError, match=r"`meshdsl calibrate --out=no/such.json` writes it"):
        find_hardware("no/such.json")


def test_a_misspelt_file_has_its_neighbour_named(tmp_path):
    written(tmp_path)
    with pytest.raises(ValueError, match=r"cannot read .*mien.json: .*Did you mean `mine.json`\?"):
        find_hardware(str(tmp_path / "mien.json"))


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.5, 0.9, 0.99])
def test_a_file_cut_off_anywhere_is_damaged(tmp_path, share):
    path = written(tmp_path)
    text = Path(path).read_text().rstrip()
    Path(path).write_text(text[: int(share * len(text))])
    with pytest.raises(ValueError, match=r"mine.json is damaged: line \d+, column \d+: "):
        read(path)


def test_a_damaged_file_says_where(tmp_path):
    path = written(tmp_path)
    text = Path(path).read_text()
    Path(path).write_text(text[: len(text) // 2])
    with pytest.raises(
        ValueError, match=r"mine.json is damaged: line \d+, column \d+: .*remove it"
    ):
        read(path)
    Path(path).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"mine.json is damaged: it is not text"):
        read(path)


def test_a_file_of_another_version_says_which(tmp_path):
    path = damaged(tmp_path, lambda data: data.update(format=7))
    with pytest.raises(
        ValueError,
        match=r"of another version of meshdsl: it has format 7, and this version reads 1",
    ):
        read(path)


def test_a_file_that_is_something_else_is_refused(tmp_path):
    path = damaged(tmp_path, lambda data: data.pop("kind"))
    with pytest.raises(ValueError, match=r"mine.json is no calibration"):
        read(path)


def test_a_file_with_a_bad_part_says_which_and_what_to_do(tmp_path):
    path = damaged(tmp_path, lambda data: data.pop("clock"))
    again = r"Measure again: remove it, and run `meshdsl calibrate --out=.*mine.json`"
    with pytest.raises(ValueError, match=rf"mine.json is damaged: it has no 'clock'\. {again}"):
        read(path)
    path = damaged(tmp_path, lambda data: data.update(seconds=3))
    with pytest.raises(ValueError, match=rf"damaged: `seconds` is 3, .* object\. {again}"):
        read(path)


def test_a_file_without_products_cannot_be_simulated_with(tmp_path):
    path = damaged(tmp_path, lambda data: data["seconds"].pop("products/float32/rows"))
    assert read(path).machine == MACHINE
    with pytest.raises(ValueError, match=r"is not complete: it has no products\. `meshdsl cal"):
        complete(path)


def test_a_file_that_cannot_be_written_says_why(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write .*file/mine.json: (not a dir|file exists)"):
        small().write(str(tmp_path / "file" / "mine.json"))


def test_a_calibration_grows_family_by_family():
    empty = Calibration(MACHINE, "2026-01-01", "wall", 1)
    grown = empty.with_family("elementwise", {(4,): 1.0})
    assert empty.seconds == {} and grown.fits["elementwise"].seconds([4]) == 1.0


def test_names_of_files_end_in_json():
    assert calibration.is_file_name("mine.json") and not calibration.is_file_name("v5p")
