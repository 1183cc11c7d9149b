"""Optimizers by name."""

import pytest

from meshdsl.optim import Adafactor, AdamW, Lion, Muon, Sgd, is_matrix
from meshdsl.optim.by_name import NAMES, by_name


def test_every_name_makes_its_optimizer():
    kinds = {"adamw": AdamW, "adafactor": Adafactor, "lion": Lion, "muon": Muon, "sgd": Sgd}
    assert set(NAMES) == set(kinds)
    for name, kind in kinds.items():
        found = by_name(name, 0.1, 0.2)
        assert isinstance(found, kind)
        assert (found.learning_rate, found.weight_decay, found.mask) == (0.1, 0.2, is_matrix)


def test_a_name_that_there_is_not_is_an_error():
    with pytest.raises(ValueError) as error:
        by_name("adamv", 0.1)
    assert str(error.value) == (
        "unknown optimizer 'adamv'; choose one of adamw, adafactor, lion, muon, sgd. "
        "Did you mean `adamw`?"
    )
