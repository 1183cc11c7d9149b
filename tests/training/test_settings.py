"""Settings: what a record says of its fields, and which values it takes."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from meshdsl import training
from meshdsl.training.settings import (
    PATH,
    TRUTH,
    Number,
    Of,
    OneOf,
    Whole,
    check,
    record,
    setting,
    settings,
)

RECORDS = ["Data", "Evaluation", "Health", "LossScaling", "Recipe", "Reporting", "Saving", "Stops"]


@record
class Oven:
    """How a cake is baked.

    Raises:
        ValueError: it would burn.
    """

    degrees: int = setting("How hot the oven is.", Whole(20))
    fan: bool = setting("Whether the air is moved. Default: it is not.", TRUTH, default=False)
    timer: float | None = setting("Minutes until it is off.", Number(), default=None)
    notes: list[str] = setting("What the cook says.", default_factory=list)

    def __post_init__(self) -> None:
        check(self)


@pytest.mark.parametrize("name", RECORDS)
def test_what_train_takes_are_frozen_records_that_say_what_each_field_means(name):
    kind = getattr(training, name)
    for one, about in settings(kind).items():
        assert about.says[0].isupper() or about.says[0] in "(`"
        assert about.says.endswith(".")
        assert f"    {one}: {about.says[:20]}" in kind.__doc__
    assert kind.__dataclass_params__.frozen


def test_a_record_is_a_frozen_dataclass_with_its_settings_in_its_docstring():
    oven = Oven(180, timer=30)
    assert oven == Oven(180, False, 30, [])
    assert oven.notes is not Oven(180).notes
    with pytest.raises(dataclasses.FrozenInstanceError):
        oven.degrees = 200
    assert Oven.__doc__ == (
        "How a cake is baked.\n\nAttributes:\n"
        "    degrees: How hot the oven is.\n"
        "    fan: Whether the air is moved. Default: it is not.\n"
        "    timer: Minutes until it is off.\n"
        "    notes: What the cook says.\n\n"
        "Raises:\n    ValueError: it would burn."
    )


def test_all_values_that_do_not_fit_are_told_together():
    with pytest.raises(ValueError) as error:
        Oven(10, fan="yes", timer=-1)
    assert str(error.value) == (
        "Oven: degrees must be at least 20, got 10; fan is True or False, not 'yes'; "
        "timer is a number of at least 0, not -1"
    )
    with pytest.raises(ValueError, match=r"^Oven: degrees is a whole number, not None$"):
        Oven(None)


@pytest.mark.parametrize(
    ("kind", "fits", "others"),
    [
        (Whole(), [-3, 0, np.int64(5)], [True, 1.0, "1", None, np.ones(2)]),
        (Whole(1), [1, 10**12], [0, -1]),
        (Number(), [0, 0.5, np.float32(2)], [-0.1, True, "1", float("nan"), float("inf")]),
        (OneOf(("stop", "skip")), ["stop", "skip"], ["Stop", None, ["stop"]]),
        (PATH, ["x", Path("x")], [3, b"x"]),
        (Of(str, "is the name of a dim"), ["batch"], [3]),
    ],
)
def test_a_kind_knows_its_values(kind, fits, others):
    assert [value for value in fits if kind.problem("x", value)] == []
    assert all(kind.problem("x", value).startswith("x ") for value in others)
