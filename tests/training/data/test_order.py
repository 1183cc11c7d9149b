"""In which order examples come: shuffled anew in every epoch, or fixed, for evaluation."""

import os
import subprocess
import sys
import threading
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshdsl.training.data import Arrays, ordered_batches, shuffled_batches


def numbered(count: int) -> Arrays:
    return Arrays({"number": np.arange(count)})


def numbers(batches: list[dict[str, np.ndarray]]) -> list[int]:
    return np.concatenate([batch["number"] for batch in batches]).tolist()


@settings(max_examples=25)
@given(count=st.integers(1, 60), data=st.data(), seed=st.integers(0, 2**40))
def test_each_epoch_visits_every_example_once(count, data, seed):
    batch_size = data.draw(st.integers(1, count))
    batches = islice(
        shuffled_batches(numbered(count), batch_size, seed), 3 * count // batch_size + 1
    )
    epochs = np.reshape(numbers(list(batches))[: 3 * count], (3, count))
    for epoch in epochs:
        assert sorted(epoch) == list(range(count))


def test_every_epoch_has_an_order_of_its_own():
    first, second = np.reshape(
        numbers(list(islice(shuffled_batches(numbered(50), 10, 0), 10))), (2, 50)
    )
    assert first.tolist() != second.tolist()


def test_one_seed_gives_one_order_and_another_seed_another():
    def order(seed: int) -> list[int]:
        return numbers(list(islice(shuffled_batches(numbered(100), 8, seed), 30)))

    assert order(3) == order(3)
    assert order(3) != order(4)


def test_the_order_is_the_same_in_another_process():
    code = (
        "from meshdsl.training.data import Arrays, shuffled_batches\n"
        "import numpy as np\n"
        "print(next(shuffled_batches(Arrays({'n': np.arange(1000)}), 5, 11))['n'].tolist())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
        timeout=300,
    )
    here = next(shuffled_batches(Arrays({"n": np.arange(1000)}), 5, 11))["n"].tolist()
    assert run.stdout.strip() == str(here)
    assert run.stderr == ""


def test_a_stored_state_resumes_at_the_exact_batch():
    batches = shuffled_batches(numbered(30), 4, seed=5)
    list(islice(batches, 10))
    state = batches.state()
    expected = numbers(list(islice(batches, 5)))
    resumed = shuffled_batches(numbered(30), 4, seed=5)
    resumed.restore(state)
    assert numbers(list(islice(resumed, 5))) == expected


def test_held_out_batches_come_in_order_and_the_same_on_every_pass():
    batches = ordered_batches(numbered(23), 5)
    assert numbers(list(batches)) == numbers(list(batches)) == list(range(20))


@given(examples=st.integers(1, 200), data=st.data(), count=st.integers(1, 30))
@settings(max_examples=25)
def test_a_limited_pass_is_spread_evenly_over_the_examples(examples, data, count):
    batch_size = data.draw(st.integers(1, examples))
    batches = list(ordered_batches(numbered(examples), batch_size, count))
    assert len(batches) == min(count, examples // batch_size)
    chosen = numbers(batches)
    gaps = np.diff([*chosen, examples])
    assert chosen[0] == 0
    assert (gaps >= 1).all()
    assert gaps.max() - gaps.min() <= 1


def test_reading_batches_starts_no_thread():
    before = threading.active_count()
    batches = shuffled_batches(numbered(30), 4, seed=5)
    next(batches)
    list(ordered_batches(numbered(30), 4))
    assert threading.active_count() == before


def test_arrays_are_batched_row_by_row():
    digits = Arrays({"image": np.ones((3, 8, 8)), "label": np.arange(3)})
    batch = digits[np.array([2, 1])]
    assert batch["image"].shape == (2, 8, 8)
    assert batch["label"].tolist() == [2, 1]


def test_arrays_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"one row for each example, got image 1,797, label 10"):
        Arrays({"image": np.zeros((1797, 64)), "label": np.zeros(10)})
    with pytest.raises(ValueError, match=r"one row for each example, got none"):
        Arrays({})


def test_numbers_out_of_range_are_refused_by_name():
    with pytest.raises(ValueError, match=r"batch_size must be at least 1, got 0"):
        shuffled_batches(numbered(5), 0, seed=0)
    with pytest.raises(ValueError, match=r"seed must be at least 0, got -1"):
        shuffled_batches(numbered(5), 2, seed=-1)
    with pytest.raises(ValueError, match=r"count must be at least 1, got 0"):
        ordered_batches(numbered(5), 2, count=0)


@pytest.mark.parametrize(
    "read", [lambda s: shuffled_batches(s, 6, 0), lambda s: ordered_batches(s, 6)]
)
def test_fewer_examples_than_one_batch_are_refused(read):
    message = r"batch_size=6 needs at least 6 examples, there are only 5"
    with pytest.raises(ValueError, match=message):
        read(numbered(5))
