"""Flags are made of records: what a record says of a field is the help of its flag."""

import pytest

from meshdsl.cli import flags
from meshdsl.cli.parsing import record_flags
from meshdsl.cli.parsing.table import FLAGS
from meshdsl.training import (
    Data,
    Evaluation,
    LossScaling,
    Recipe,
    Reporting,
    Saving,
    Stops,
)
from meshdsl.training.settings import record, setting, settings

OWN_DEFAULTS = {"clip_norm": 1.0, "eval_every": 100}


@pytest.mark.parametrize("kind", [Data, Evaluation, LossScaling, Recipe, Reporting, Saving, Stops])
def test_every_flag_of_a_record_has_its_default(kind):
    values, _ = flags.read([])
    for name, flag in record_flags.names_of(kind).items():
        assert values[flag].value == OWN_DEFAULTS.get(flag, settings(kind)[name].default)
    made = record_flags.values_of(kind, values)
    assert {*made} == {*record_flags.names_of(kind)}


def test_the_help_of_a_flag_is_what_its_field_means():
    keep, best = settings(Saving)["keep"].says, settings(Saving)["keep_best"].says
    assert FLAGS["keep"][2] == keep
    assert FLAGS["keep_best"][2] == best.replace("held-out batches", "held-out text")
    assert "`trainable`" in settings(Recipe)["init_from"].says
    assert "what --trainable names" in FLAGS["init_from"][2]


def test_flags_make_the_record_that_python_makes():
    values, problems = flags.read(["--checkpoint_every=5", "--noresume", "--exit_at_step=3"])
    assert problems.found == []
    assert Saving(**record_flags.values_of(Saving, values)) == Saving(every=5, resume=False)
    assert Stops(**record_flags.values_of(Stops, values)) == Stops(at_step=3)


def test_a_field_that_no_text_can_say_must_be_named_as_no_flag():
    @record
    class Hook:
        """Code that a run calls."""

        function: object = setting("What is called.", default=None)

    with pytest.raises(ValueError, match=r"^--function has no reader: add one to _READERS, or"):
        record_flags._of_record(Hook)
