"""Built-in schedules by name."""

import pytest

from meshdsl.lowering.pipelines.named import NAMES, OF_ROUNDS, WITH_ROUNDS, named


@pytest.mark.parametrize("name", NAMES)
def test_each_name_has_a_schedule_of_that_name(name):
    schedule = named(name, 4, 8)
    assert schedule.name == name
    assert (schedule.stages, schedule.microbatches) == (4, 8)
    assert schedule.chunks == 4 * schedule.rounds


def test_every_schedule_is_listed_once():
    assert sorted(NAMES) == sorted([*WITH_ROUNDS, *OF_ROUNDS])


@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_rounds_are_the_chunks_of_a_stage(name):
    assert [named(name, 3, 6, v).rounds for v in (1, 2, 3, None)] == [1, 2, 3, 2]


def test_a_name_that_is_misspelt_is_refused_with_the_near_one():
    message = "there is no pipeline schedule `zb-h2`. Did you mean `zb-h1`\\? The built-in ones are"
    with pytest.raises(ValueError, match=message):
        named("zb-h2", 2, 2)
    with pytest.raises(
        ValueError, match=r"`quick`\. The built-in ones are gpipe, 1f1b, interleaved"
    ):
        named("quick", 2, 2)


def test_rounds_that_a_schedule_does_not_have_are_refused():
    message = "`1f1b` has 1 chunk per stage, not 2: omit the rounds, or use one of interleaved,"
    with pytest.raises(ValueError, match=message):
        named("1f1b", 2, 2, 2)
    with pytest.raises(ValueError, match="`zbv` has 2 chunks per stage, not 1: omit the rounds"):
        named("zbv", 2, 2, 1)


@pytest.mark.parametrize("numbers", [(0, 2, 1), (2, 0, 1), (2, 2, 0)])
def test_numbers_must_be_positive(numbers):
    with pytest.raises(ValueError, match="=0 of pipeline schedule `circular`: give 1 or more"):
        named("circular", *numbers)
