"""Optimizers by name, with the usual settings for language models."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshdsl.optim.adafactor import Adafactor
from meshdsl.optim.adamw import AdamW
from meshdsl.optim.lion import Lion
from meshdsl.optim.muon import Muon
from meshdsl.optim.optimizer import Mask, Optimizer, is_matrix
from meshdsl.optim.schedules import Schedule
from meshdsl.optim.sgd import Sgd
from meshdsl.tensors.dims import did_you_mean

_B2 = 0.95  # of Adam for language models (Brown et al. 2020, appendix B)
_RMS = 0.2  # of Muon's updates, so that AdamW's rates fit (Liu et al. 2025, section 2.2)

_MADE: Mapping[str, Callable[[float | Schedule, float, Mask], Optimizer]] = {
    "adamw": lambda rate, decay, mask: AdamW(rate, b2=_B2, weight_decay=decay, mask=mask),
    "adafactor": lambda rate, decay, mask: Adafactor(rate, weight_decay=decay, mask=mask),
    "lion": lambda rate, decay, mask: Lion(rate, weight_decay=decay, mask=mask),
    "muon": lambda rate, decay, mask: Muon(
        rate, b2=_B2, consistent_rms=_RMS, weight_decay=decay, mask=mask
    ),
    "sgd": lambda rate, decay, mask: Sgd(rate, momentum=0.9, weight_decay=decay, mask=mask),
}
NAMES = tuple(_MADE)
DEFAULT = "adamw"


def by_name(
    name: str,
    learning_rate: float | Schedule,
    weight_decay: float = 0.0,
    mask: Mask = is_matrix,
) -> Optimizer:
    """Returns the optimizer of a name out of `NAMES`: `by_name("muon", 1e-3)`.

    Raises:
        ValueError: the name is unknown, or a number is out of range.
    """
    if name not in _MADE:
        hint = did_you_mean(name, NAMES)
        raise ValueError(f"unknown optimizer {name!r}; choose one of {', '.join(NAMES)}{hint}")
    return _MADE[name](learning_rate, weight_decay, mask)
