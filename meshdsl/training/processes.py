"""What the processes of a job agree on."""

from __future__ import annotations

import jax
import numpy as np


def everywhere(true: bool) -> bool:
    """Returns whether something holds in every process; all of them must ask."""
    if jax.process_count() == 1:
        return true
    from jax.experimental import multihost_utils

    return bool(multihost_utils.process_allgather(np.array(true)).all())
