"""Evaluation: held-out batches, and when a run evaluates on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from meshdsl.tensors.dims import DimsLike
from meshdsl.training.data.feeding import Named, iterator
from meshdsl.training.settings import Whole, check, record, setting


@record
class Evaluation:
    """What a run is evaluated with, and when: `Evaluation(held_out, eval_every=500)`.

    The metrics are averages over the batches: `eval_loss`, `test_loss` and so on.

    Raises:
        ValueError: values are of another kind, a number is too small, or batches can be gone
            through only once.

    Examples:
        >>> from meshdsl.training import Evaluation
        >>> held_out = [{"x": md.ones(md.dims(batch=2))}]
        >>> Evaluation(held_out, eval_every=500).eval_every
        500
    """

    eval_batches: Iterable[Mapping[str, Any]] | None = setting(
        "Held-out batches, gone through from the start by each evaluation.", default=None
    )
    eval_every: int | None = setting(
        "Steps between two evaluations on held-out batches. Default: one at the end.",
        Whole(1),
        default=None,
    )
    test_batches: Iterable[Mapping[str, Any]] | None = setting(
        "Others, gone through once, after the last step.", default=None
    )

    def __post_init__(self) -> None:
        check(self)
        once = [name for name, each in self._batches().items() if iterator(each, name) is each]
        if once:
            raise ValueError(
                f"{', '.join(once)} can be gone through only once; give a list of batches"
            )

    def named(self, dims: Mapping[str, DimsLike] | None, batch_dim: str) -> dict[str, Named]:
        """Returns the held-out batches by the name of the evaluation: `eval`, `test`.

        Args:
            dims: the dims of each entry of a batch.
            batch_dim: the dim along which processes share a batch.
        """
        return {
            name.removesuffix("_batches"): Named(each, dims, name, batch_dim)
            for name, each in self._batches().items()
        }

    def _batches(self) -> dict[str, Iterable[Mapping[str, Any]]]:
        batches = {"eval_batches": self.eval_batches, "test_batches": self.test_batches}
        return {name: each for name, each in batches.items() if each is not None}
