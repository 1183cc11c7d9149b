"""Reporting: what a run reports while it trains, and how often."""

from __future__ import annotations

from meshdsl.training.reporting.profiling import ProfiledSteps
from meshdsl.training.settings import TRUTH, Of, Whole, check, record, setting


@record
class Reporting:
    """What a run reports, and how often: `Reporting(log_every=100)`.

    Raises:
        ValueError: values are of another kind, or numbers are too small.

    Examples:
        >>> from meshdsl.training import Reporting
        >>> reporting = Reporting(log_every=100, tokens_per_batch=16 * 128)
        >>> reporting.log_every, reporting.quiet
        (100, False)
    """

    log_every: int = setting("Steps between two reports.", Whole(1), default=10)
    tokens_per_batch: int | None = setting(
        "Tokens of a full batch, for `tokens_per_second`. Default: they are not counted.",
        Whole(),
        default=None,
    )
    profile: ProfiledSteps | None = setting(
        "First and last step of a profile, as 10:13, for TensorBoard, in the workdir.",
        Of(ProfiledSteps, "is ProfiledSteps(...) of meshdsl.training.reporting.profiling"),
        default=None,
    )
    quiet: bool = setting("Show no progress.", TRUTH, default=False)
    settings: str | None = setting(
        "The settings of the run as TOML, kept as run.toml in the workdir.",
        Of(str, "is a text"),
        default=None,
    )

    def __post_init__(self) -> None:
        check(self)
