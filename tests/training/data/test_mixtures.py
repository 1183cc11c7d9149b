"""Mixtures: each source gives its share, and goes through epochs of its own."""

from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshdsl.training.data import Arrays, Mixture, shuffled_batches
from meshdsl.training.data.mixtures import Shares

WEIGHTS = st.lists(st.fractions(Fraction(1, 20), 5, max_denominator=20), min_size=1, max_size=6)


@settings(max_examples=40)
@given(weights=WEIGHTS, far=st.integers(0, 10**15))
def test_before_any_position_every_source_has_given_its_share(weights, far):
    shares, given_so_far = Shares(weights), [0] * len(weights)
    for position in range(300):
        source, number = shares[position]
        assert number == given_so_far[source]  # none is left out, and none comes twice
        given_so_far[source] += 1
        for count, weight in zip(given_so_far, weights, strict=True):
            assert abs(count - (position + 1) * weight / sum(weights)) <= len(weights)
    source, number = shares[far]
    assert abs(number - far * weights[source] / sum(weights)) <= len(weights)


@pytest.mark.long
@settings(max_examples=8)
@given(
    parts=st.lists(st.tuples(st.integers(100, 200), st.integers(1, 5)), min_size=2, max_size=4),
    seed=st.integers(0, 5),
)
def test_each_source_gives_all_its_examples_before_any_comes_twice(parts, seed):
    sources = [Arrays({"of": np.full(n, k), "row": np.arange(n)}) for k, (n, _) in enumerate(parts)]
    mixed = Mixture(tuple(sources), tuple(Fraction(weight) for _, weight in parts))
    batches = islice(shuffled_batches(mixed, 100, seed), 12)
    found = [row for b in batches for row in zip(b["of"], b["row"], strict=True)]
    for number, (size, _) in enumerate(parts):
        rows = [row for of, row in found if of == number]
        for start in range(0, len(rows) - size + 1, size):
            assert sorted(rows[start : start + size]) == list(range(size))


def test_rows_are_those_of_the_sources_one_after_another():
    sources = [Arrays({"row": np.arange(n * 10).reshape(n, 10) + n}) for n in (3, 1, 5)]
    mixed = Mixture(tuple(sources), (Fraction(1), Fraction(2), Fraction(1, 3)))
    joined = np.concatenate([source.arrays["row"] for source in sources])
    rows = np.array([8, 0, 3, 3, 4, 2])
    np.testing.assert_array_equal(mixed[rows]["row"], joined[rows])
    assert len(mixed) == 9


def test_a_mixture_without_a_weight_for_each_source_is_refused():
    source = Arrays({"row": np.arange(3)})
    with pytest.raises(ValueError, match=r"it has 2 sources and the weights 1$"):
        Mixture((source, source), (Fraction(1),))
    with pytest.raises(ValueError, match=r"it has 1 sources and the weights 0$"):
        Mixture((source,), (Fraction(0),))
    with pytest.raises(ValueError, match=r"it has 0 sources and the weights none$"):
        Mixture((), ())
