"""Batches: the same for any number of processes and workers, also after a stop in the middle."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction
from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshdsl.training.data import Arrays, Mixture, Part, ordered_batches, shuffled_batches


def numbered(count, start=0):
    return Arrays({"number": np.arange(start, start + count)})


def joined(lists):
    return list(chain.from_iterable(lists))


def mixture(*sizes_and_weights):
    sources, weights, start = [], [], 0
    for size, weight in sizes_and_weights:
        sources.append(numbered(size, start))
        weights.append(Fraction(weight))
        start += size
    return Mixture(tuple(sources), tuple(weights))


def numbers(batches):
    return [batch["number"].tolist() for batch in batches]


# grain takes long to shuffle very few examples
SOURCES = st.one_of(
    st.integers(300, 900).map(numbered),
    st.lists(st.tuples(st.integers(200, 500), st.integers(1, 9)), min_size=1, max_size=3).map(
        lambda parts: mixture(*parts)
    ),
)


@pytest.mark.long
@settings(max_examples=15)
@given(
    source=SOURCES,
    share=st.integers(4, 40),
    seed=st.integers(0, 9),
    before=st.integers(1, 5),
    after=st.integers(1, 7),
    stop=st.integers(0, 12),
)
def test_any_processes_see_the_same_batches_also_after_a_stop(
    source, share, seed, before, after, stop
):
    count, batch_size = 12, len(source) // share
    whole = numbers(islice(shuffled_batches(source, batch_size, seed), count))

    def run(processes, state, count):
        parts = [
            shuffled_batches(source, batch_size, seed, part=Part(number, processes))
            for number in range(processes)
        ]
        for batches in parts:
            if state is not None:
                batches.restore(state)
        taken = [numbers(islice(batches, count)) for batches in parts]
        states = [batches.state() for batches in parts]
        assert all(state == states[0] for state in states)
        whole = [joined(rows) for rows in zip(*taken, strict=True)]
        return whole, json.loads(json.dumps(states[0]))

    first, state = run(before, None, stop)
    second, _ = run(after, state, count - stop)
    assert first + second == whole


@pytest.mark.parametrize("source", [numbered(3), mixture((2, 1), (4, 3))])
def test_more_processes_than_rows_see_the_same_batches(source):
    whole = numbers(islice(shuffled_batches(source, 2, 0), 9))
    parts = [shuffled_batches(source, 2, 0, part=Part(number, 3)) for number in range(3)]
    taken = [numbers(islice(batches, 9)) for batches in parts]
    assert [joined(rows) for rows in zip(*taken, strict=True)] == whole


@pytest.mark.long
@settings(max_examples=15)
@given(stop=st.integers(0, 9), old=st.integers(1, 99), new=st.integers(1, 99))
def test_another_batch_size_goes_on_at_the_same_example(stop, old, new):
    source = numbered(400)
    order = joined(numbers(islice(shuffled_batches(source, 400, 3), 4)))
    batches = shuffled_batches(source, old, 3)
    list(islice(batches, stop))
    state = batches.state()
    assert state["position"] == stop * old
    resumed = shuffled_batches(source, new, 3)
    resumed.restore(state)
    found = joined(numbers(islice(resumed, 4)))
    assert found == order[stop * old : stop * old + 4 * new]


def check_workers(count, source, before, after):
    """Compares reading by workers, stopped and gone on with, with reading in this thread."""
    size = len(source) // 7
    whole = numbers(islice(shuffled_batches(source, size, 1), count))
    batches = shuffled_batches(source, size, 1, workers=before)
    first = numbers(islice(batches, count // 2))
    state = batches.state()
    batches.close()
    resumed = shuffled_batches(source, size, 1, part=Part(1, 2), workers=after, ahead=2)
    resumed.restore(state)
    second = numbers(islice(resumed, count - count // 2))
    resumed.close()
    assert first == whole[: count // 2]
    assert second == [rows[size // 2 :] for rows in whole[count // 2 :]]
    assert not multiprocessing.active_children()


@pytest.mark.long
def test_workers_read_the_same_batches():
    check_workers(9, mixture((300, 2), (200, 1)), 2, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (4, 1), (0, 4)])
def test_any_number_of_workers_reads_the_same_batches(before, after):
    check_workers(23, numbered(500), before, after)


def test_a_thread_that_reads_ahead_changes_nothing_and_ends_with_the_iterator():
    before = set(threading.enumerate())
    batches = shuffled_batches(numbered(300), 40, 5, ahead=3)
    plain = shuffled_batches(numbered(300), 40, 5)
    assert numbers(islice(batches, 20)) == numbers(islice(plain, 20))
    started = set(threading.enumerate()) - before
    assert len(started) == 1
    batches.close()
    for thread in started:
        thread.join(20)
        assert not thread.is_alive()
    assert batches.state()["position"] == 800  # what was given, not what was read ahead


PARENT = """
import multiprocessing, sys
import numpy as np
from meshdsl.training.data import Arrays, shuffled_batches
if __name__ == "__main__":
    batches = shuffled_batches(Arrays({"n": np.arange(500)}), 5, 1, workers=2)
    next(batches)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_workers_end_when_their_process_is_killed(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, tmp_path / "parent.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    for pid in workers:
        os.kill(pid, signal.SIGINT)  # what Ctrl-C sends to all of them does nothing
    time.sleep(0.5)
    assert all(os.path.exists(f"/proc/{pid}") for pid in workers)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 120
    while any(alive(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.stdin.close()
    parent.stdout.close()


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@given(size=st.integers(0, 100), processes=st.integers(1, 12))
def test_the_parts_of_processes_cover_a_batch_evenly(size, processes):
    parts = [range(100)[Part(number, processes).rows(size)] for number in range(processes)]
    assert [row for part in parts for row in part] == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_parts_of_ordered_batches_join_to_the_whole():
    whole = numbers(ordered_batches(numbered(23), 5, 3))
    parts = [numbers(ordered_batches(numbered(23), 5, 3, part=Part(n, 2))) for n in range(2)]
    assert [a + b for a, b in zip(*parts, strict=True)] == whole


def test_a_state_of_other_data_is_refused_with_every_difference():
    state = shuffled_batches(numbered(30), 4, 5).state()
    assert state == {"position": 0, "seed": 5, "examples": 30}
    with pytest.raises(ValueError) as error:
        shuffled_batches(numbered(31), 4, 6).restore({**state, "position": -1})
    assert str(error.value) == (
        "the data is not that of the stored state, so a run cannot go on in it: seed was 5, and is "
        "6; examples was 30, and is 31; position must be a whole number of at least 0, got -1"
    )
    other = mixture((10, 1), (20, 2))
    with pytest.raises(ValueError, match=r"weights was \['1', '2'\], and is \['1', '3'\]"):
        shuffled_batches(mixture((10, 1), (20, 3)), 4, 5).restore(
            shuffled_batches(other, 4, 5).state()
        )


def test_processes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"process must be from 0 to 2, got 3"):
        Part(3, 3)
    with pytest.raises(ValueError, match=r"processes must be at least 1, got 0"):
        Part(0, 0)
    with pytest.raises(ValueError, match=r"workers must be at least 0, got -1"):
        shuffled_batches(numbered(5), 2, 0, workers=-1)
    with pytest.raises(ValueError, match=r"ahead must be at least 0, got -2"):
        shuffled_batches(numbered(5), 2, 0, ahead=-2)


# Each change of the size starts worker processes anew, which takes seconds.
@pytest.mark.long
@pytest.mark.parametrize(("workers", "sizes"), [(0, [8, 8, 3, 3, 20, 8]), (1, [8, 8, 3, 3])])
def test_batches_of_another_size_follow_without_a_gap(workers, sizes):
    ones = shuffled_batches(numbered(400), 1, seed=2)
    batches = shuffled_batches(numbered(400), 8, seed=2, workers=workers, ahead=2)
    try:
        for size in sizes:
            batches.resize(size)
            seen = batches.peek()["number"].tolist()
            assert seen == next(batches)["number"].tolist() == joined(numbers(islice(ones, size)))
    finally:
        batches.close()


def test_of_each_batch_the_rows_asked_for_are_read():
    whole, some = (shuffled_batches(numbered(400), 8, seed=2) for _ in range(2))
    some.resize(8, slice(2, 5))
    for _ in range(3):
        assert next(some)["number"].tolist() == next(whole)["number"].tolist()[2:5]
    whole, some = (ordered_batches(numbered(400), 8) for _ in range(2))
    some.resize(8, slice(2, 5))
    assert numbers(some) == [batch[2:5] for batch in numbers(whole)]


def test_a_batch_larger_than_the_data_is_told():
    with pytest.raises(ValueError, match="batch_size=401 needs at least 401 examples"):
        shuffled_batches(numbered(400), 8, seed=2).resize(401)
