"""Optimizers, schedules and clipping, written in the language: traced and lowered with the step."""

from meshdsl.optim import schedules
from meshdsl.optim.adafactor import Adafactor, AdafactorState
from meshdsl.optim.adamw import AdamState, AdamW
from meshdsl.optim.averages import Ema, EmaState
from meshdsl.optim.clipping import clip_by_global_norm, global_norm
from meshdsl.optim.from_optax import FromOptax, as_optimizer, from_optax
from meshdsl.optim.lion import Lion, LionState
from meshdsl.optim.masks import Excluding
from meshdsl.optim.muon import Muon, MuonState
from meshdsl.optim.optimizer import Mask, Mirror, Optimizer, is_matrix, update_each, zeros_like
from meshdsl.optim.schedules import Schedule
from meshdsl.optim.sgd import Sgd, SgdState

__all__ = [
    "Adafactor",
    "AdafactorState",
    "AdamState",
    "AdamW",
    "Ema",
    "EmaState",
    "Excluding",
    "FromOptax",
    "Lion",
    "LionState",
    "Mask",
    "Mirror",
    "Muon",
    "MuonState",
    "Optimizer",
    "Schedule",
    "Sgd",
    "SgdState",
    "as_optimizer",
    "clip_by_global_norm",
    "from_optax",
    "global_norm",
    "is_matrix",
    "schedules",
    "update_each",
    "zeros_like",
]
