"""What tells that a checkpoint is damaged, and what only that it cannot be read."""

from pathlib import Path

import pytest

from meshdsl.training.checkpointing.read_errors import sorted_errors
from meshdsl.training.checkpointing.seals import Damaged

MEMORY = "RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.\nand more"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), "MemoryError"),
        (RuntimeError(MEMORY), r"RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes\."),
        (OSError(5, "Input/output error"), ".*Input/output error"),
        (ValueError("FAILED_PRECONDITION: a [OS error 16: EBUSY]"), "FAILED_PRECONDITION"),
    ],
)
def test_what_fails_elsewhere_is_told_with_the_checkpoint(error, told):
    with (
        pytest.raises(ValueError, match=f"cannot read checkpoint /runs/7: {told}") as raised,
        sorted_errors(Path("/runs/7")),
    ):
        raise error
    assert raised.value.__cause__ is error and "and more" not in str(raised.value)
    assert "Nothing has been changed" in str(raised.value)


@pytest.mark.parametrize(
    "error",
    [
        Damaged("a is not as it was written"),
        FileNotFoundError(2, "No such file"),
        ValueError("DATA_LOSS: a"),
        ValueError("NOT_FOUND: a [OS error 2: ENOENT]"),
    ],
)
def test_what_is_missing_or_changed_is_damage(error):
    with pytest.raises(Damaged), sorted_errors(Path("/runs/7")):
        raise error
