"""The rows of published measurements, and how predictions are scored."""

import pytest

from meshdsl.layouts.mesh import Mesh
from tests.benchmarks.published import Prediction, errors, left_out, mean, predict
from tests.benchmarks.published_rows import all_rows, maxtext, parameters, step_flops

ROWS = all_rows()


@pytest.mark.parametrize("scale", [16, 32, 64, 128, 256, 512, 1024])
def test_a_maxtext_model_has_the_parameters_of_its_name(scale):
    assert parameters(maxtext(scale)) == pytest.approx(scale * 1e9, rel=0.1)


def test_the_other_models_have_the_parameters_of_their_names():
    for row in ROWS:
        if "MaxText" not in row.table:
            (word,) = (word for word in row.name.split() if word[-1] == "B" and word[0].isdigit())
            # One of the two tables of the vocabulary is not counted.
            assert parameters(row.config) == pytest.approx(float(word[:-1]) * 1e9, rel=0.17)


@pytest.mark.parametrize(
    ("table", "name", "share"),
    [
        ("MaxText v5e", "16B on 1 x 256 chips", 0.6110),
        ("MaxText v5e", "128B on 32 x 256 chips", 0.4625),
        ("MaxText v5p", "1024B on 1 x 2048 chips", 0.6480),
        ("torchtitan A100", "Llama 3 70B on 64 GPUs, recomputing: full, eager", 0.517),
    ],
)
def test_the_measured_share_of_the_peak_is_the_published_one(table, name, share):
    (row,) = (row for row in ROWS if (row.table, row.name) == (table, name))
    all_scores = "torchtitan" in table  # whose flops count hidden ones too
    flops = step_flops(row.config, row.batch, row.length, all_scores)
    devices = Mesh.parse(row.mesh).size
    found = flops / devices / row.seconds / row.hardware.flops[2]
    assert found == pytest.approx(share, rel=0.015)


def test_every_row_is_there_once_and_on_its_devices():
    assert len({(row.table, row.name, row.mesh) for row in ROWS}) == len(ROWS) == 61
    for row in ROWS:
        words = row.name.split(" on ")[1].split()
        devices = int(words[0]) * int(words[2]) if words[1] == "x" else int(words[0])
        assert Mesh.parse(row.mesh).size == devices


def test_one_number_from_the_others_is_the_best_for_them():
    assert left_out([1.0, 2.0, 2.0]) == [2.0, 2.0, 2.0]
    assert left_out([1.1, 1.1, 1.0, 1.0, 1.0]) == [1.0, 1.0, 1.1, 1.1, 1.1]


def test_errors_are_relative_and_scaled_by_the_others():
    rows = [row for row in ROWS if row.table == "Megatron-LM H100"]
    found = [Prediction(row, 1.25 * row.seconds) for row in rows]
    plain, scaled, trivial = errors(found)
    assert plain == pytest.approx([0.25] * 4) and scaled == pytest.approx([0.0] * 4)
    # Each share against one of another row: 0.39 to 0.47 here.
    assert 0.03 < mean(trivial) < 0.12


@pytest.mark.long
def test_a_step_is_predicted_within_a_third_of_its_time():
    for table in {row.table for row in ROWS}:
        row = next(row for row in ROWS if row.table == table)
        assert abs(predict(row).ratio - 1) < 1 / 3
