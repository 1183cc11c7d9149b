"""Health: the faults of devices and processes that a run looks for."""

from __future__ import annotations

from meshdsl.training.settings import Number, Whole, check, record, setting


@record
class Health:
    """The faults that a run looks for beside its steps: `Health(replica_check_every=100)`.

    Raises:
        ValueError: values are of another kind, or numbers are too small.

    Examples:
        >>> from meshdsl.training import Health
        >>> health = Health(replica_check_every=100, step_timeout=600)
        >>> health.replica_check_every, health.straggler_steps
        (100, 20)
    """

    replica_check_every: int | None = setting(
        "Compare the bits of all replicas of the state every so many steps, and before it is "
        "saved; a device that differs is named and ends the run.",
        Whole(1),
        default=None,
    )

    step_timeout: int | None = setting(
        "Seconds that a step, a wait for data or a save may take; a process that gets nowhere for "
        "longer says where it is, and ends.",
        Whole(1),
        default=None,
    )

    straggler_factor: float | None = setting(
        "Report a process that takes so many times as long as the median of the others, 1.5: its "
        "devices compute slowly, or wait for its data.",
        Number(),
        default=None,
    )
    straggler_steps: int = setting(
        "Steps for which it must be slow before it is reported.", Whole(1), default=20
    )

    def __post_init__(self) -> None:
        check(self)
        if self.straggler_factor is not None and self.straggler_factor <= 1:
            raise ValueError(
                f"straggler_factor must be above 1, got {self.straggler_factor:g}: the median "
                "itself is 1 times the median"
            )
