"""The programs of a batch whose rows are texts that begin at different steps.

All rows share the position of the step, `Cache.start`: a row's text begins after as many pads as
make it end there.
"""

from __future__ import annotations

from typing import Any

from meshdsl import nn, ops
from meshdsl.generation.programs import Place, Programs, Sizes
from meshdsl.generation.sampling import FILTERS
from meshdsl.models.model import Cache, Model
from meshdsl.tensors.dims import Dimension
from meshdsl.tensors.named_array import Spec, spec
from meshdsl.tensors.tensor import Tensor


class RowPrograms(Programs):
    """The programs of a batch whose rows are texts that begin at different steps.

    All rows share the position of the step, `Cache.start`: a row's text begins after as many pads
    as make it end there. Slots hold the latest positions, so a text never outgrows them.

    Attributes:
        join: state, fixed, tokens [batch, length=1], the same of one text after its prompt, and the
            row, s32[] -> `state`, `fixed` and `tokens` with the text in that row.

    Args:
        most: the most positions that a text reads.
    """

    def __init__(
        self,
        model: Model,
        sizes: Sizes,
        place: Place,
        one: Programs,
        most: int,
        ranked: int = 0,
    ) -> None:
        self._most = most
        super().__init__(model, FILTERS, sizes, place, lengths=[1], ranked=ranked)
        tokens = [spec(each.sizes.tokens(1), "int32") for each in (self, one)]
        arguments = (self.state, self.fixed, tokens[0], one.state, one.fixed, tokens[1])
        where = spec([], "int32"), *self._where()
        # The tokens stay: the host reads those of a step after a later text has joined.
        self.join = place.program(self._join, [*arguments, *where], ["state", "fixed"])

    def _where(self) -> list[Spec]:
        """Returns what `join` takes beside the row."""
        return []

    def _step(
        self, params: Any, state: dict[str, Any], fixed: dict[str, Tensor], tokens: Tensor
    ) -> dict[str, Any]:
        # The rows of texts that have ended are read on, but stay in the model's positions.
        cache = state["cache"]
        pads = ops.maximum(cache.pads, cache.start - (self._most - 1))
        return super()._step(params, {**state, "cache": cache.replace(pads=pads)}, fixed, tokens)

    def _join(
        self,
        state: dict[str, Any],
        fixed: dict[str, Tensor],
        tokens: Tensor,
        text: dict[str, Any],
        text_fixed: dict[str, Tensor],
        text_tokens: Tensor,
        row: Tensor,
        *pages: Tensor,
    ) -> dict[str, Any]:
        def placed(rows: Tensor, one: Tensor) -> Tensor:
            return ops.dynamic_update_slice(rows, one, "batch", row)

        cache, one = state["cache"], text["cache"]
        joined = self._moved(cache, self._start(cache))
        pads = placed(joined.pads, one.pads + (joined.start - one.start))
        joined = self._with_text(joined.replace(pads=pads), one, row, *pages)
        if cache.memory is not None:
            memory = {name: placed(rows, one.memory[name]) for name, rows in cache.memory.items()}
            joined = joined.replace(
                memory=memory, memory_pads=placed(cache.memory_pads, one.memory_pads)
            )
        return {
            "state": {"cache": joined, "seen": placed(state["seen"], text["seen"])},
            "fixed": {name: placed(rows, text_fixed[name]) for name, rows in fixed.items()},
            "tokens": placed(tokens, text_tokens),
        }

    def _moved(self, cache: Cache, start: Tensor) -> Cache:
        """Returns the same cache with its positions counted anew, so that `start` is the step's."""
        return cache.replace(start=start, pads=cache.pads + (start - cache.start))

    def _with_text(self, cache: Cache, one: Cache, row: Tensor) -> Cache:
        """Returns a cache with the layers of one text in a row."""
        by = cache.start - one.start
        layers = {
            stack: {
                name: ops.dynamic_update_slice(
                    rows, _rolled(one.layers[stack][name], by), "batch", row
                )
                for name, rows in tensors.items()
            }
            for stack, tensors in cache.layers.items()
        }
        return cache.replace(layers=layers)

    def _start(self, cache: Cache) -> Tensor:
        """Returns the position of the step, counted anew so that it never overflows.

        The slots of all positions stay, and all positions of texts are at least 0.
        """
        slots = cache.room.size
        return cache.start % slots + -(-self._most // slots) * slots


class PagedRowPrograms(RowPrograms):
    """Those of rows whose texts share the slots of one cache; see `nn.Pages`.

    Before each step, the host says in `Cache.pages.next` which slot each row's token gets. `join`
    also takes the page of each page of the text, s32[page]; -1: none.

    Args:
        pages: of the cache.
        page: how many slots a page has.
    """

    def __init__(
        self,
        model: Model,
        sizes: Sizes,
        place: Place,
        one: Programs,
        most: int,
        ranked: int,
        pages: int,
        page: int,
    ) -> None:
        self._page, self._slots = page, Dimension("memory_length", pages * page)
        super().__init__(model, sizes, place, one, most, ranked)

    def _where(self) -> list[Spec]:
        return [spec([Dimension("page", -(-self._most // self._page))], "int32")]

    def _begin(
        self, params: Any, source: Tensor | None, pads: Tensor, rows: dict[str, Tensor]
    ) -> dict[str, Any]:
        begun = super()._begin(params, source, pads, rows)
        cache, batch = begun["state"]["cache"], pads.shape.get("batch")

        def shared(own: Tensor) -> Tensor:
            dims = [self._slots if d.name == self._slots.name else d for d in own.shape]
            return ops.zeros([d for d in dims if d != batch], own.dtype)

        layers = {
            stack: {name: shared(own) for name, own in tensors.items()}
            for stack, tensors in cache.layers.items()
        }
        pages = nn.Pages.empty(self._slots, batch, self._most)
        begun["state"]["cache"] = cache.replace(layers=layers, pages=pages)
        return begun

    def _start(self, cache: Cache) -> Tensor:
        return ops.full([], self._most, "int32")  # slots do not depend on it

    def _moved(self, cache: Cache, start: Tensor) -> Cache:
        assert cache.pages is not None
        positions = cache.pages.positions + (start - cache.start)
        return super()._moved(cache.replace(pages=cache.pages.replace(positions=positions)), start)

    def _with_text(self, cache: Cache, one: Cache, row: Tensor, *pages: Tensor) -> Cache:
        assert cache.pages is not None
        (pages_of_text,) = pages
        slots, read = self._slots, "read"  # of the text alone; a name that no layout splits
        last, own = one.start - 1, one.room.size
        positions = last - (last - ops.arange(Dimension(read, own))) % own  # as in `nn.Slots`
        position = positions - ops.index(one.pads, "batch", 0)
        page = ops.take(pages_of_text, ops.maximum(position, 0) // self._page, "page")
        there = (position >= 0) & (page >= 0)
        places = ops.where(there, page * self._page + position % self._page, -1)
        layers = {
            stack: {
                name: ops.scatter(
                    kept,
                    places,
                    ops.index(one.layers[stack][name], "batch", 0).rename({slots.name: read}),
                    slots,
                    unique=True,
                )
                for name, kept in tensors.items()
            }
            for stack, tensors in cache.layers.items()
        }
        before, by = cache.pages, cache.start - one.start
        # The slots of the text that the row had before are nobody's.
        rows = ops.where(before.rows == row, -1, before.rows)
        after = before.replace(
            rows=ops.scatter(rows, places, row, slots, unique=True),
            positions=ops.scatter(before.positions, places, positions + by, slots, unique=True),
        )
        return cache.replace(layers=layers, pages=after)


def _rolled(x: Tensor, by: Tensor) -> Tensor:
    """Returns a tensor whose slots are moved on by a number, at least 0, around their end."""
    slots = x.shape.get("memory_length")
    source = (ops.arange(slots) + (slots.size - by % slots.size)) % slots.size
    return ops.transpose(ops.take_along(x, source, slots), x.shape.names)
