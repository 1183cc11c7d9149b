"""Attention by its definition: all scores at once, in float64.

Arrays are laid as [devices, lead dims, rows or columns, features], with size 1 where a dim is
missing, so that products are those of matrices.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.lowering.attention_sizes import AttentionSizes
from meshdsl.lowering.backends.common.arrange import align
from meshdsl.lowering.backends.numpy import namespace as xp
from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.parameters import Attention, AttentionGradient, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dims import Shape

_HIDDEN = -1e30


class _Attention:
    """One instruction with its operands laid out, and its scores."""

    def __init__(self, instruction: Instruction, inputs: Arrays) -> None:
        self.params = parameters_of(instruction, Attention)
        self.sizes = sizes = AttentionSizes.of(instruction)
        self.instruction = instruction
        self.q_dims = Shape([*sizes.lead, sizes.rows, sizes.features])
        self.k_dims = Shape([*sizes.lead, sizes.columns, sizes.features])
        self.v_dims = Shape([*sizes.lead, sizes.columns, *sizes.values])
        self.out_dims = Shape([*sizes.lead, sizes.rows, *sizes.values])
        self.sum_dims = Shape([*sizes.lead, sizes.rows])
        self.q, self.k = (
            self.lay(inputs[i], i, dims) for i, dims in ((0, self.q_dims), (1, self.k_dims))
        )
        self.v = self.flat(self.lay(inputs[2], 2, self.v_dims))
        self.masks = {
            name: self.lay(inputs[i], i, sizes.full)
            for i, name in enumerate(self.params["given"], 3)
        }
        self.scores, self.slope = self._scores()

    def lay(self, array: np.ndarray, which: int, dims: Shape) -> np.ndarray:
        """Returns an operand in the order of some dims, in float64 if it is of floats."""
        laid = align(xp, array, self.instruction.inputs[which].local, dims)
        return laid if laid.dtype.kind in "biu" else laid.astype(np.float64)

    def flat(self, array: np.ndarray) -> np.ndarray:
        """Returns an array with its value features as one axis."""
        at = array.ndim - len(self.sizes.values)
        return array.reshape(*array.shape[:at], -1)

    def _scores(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the scores, -inf where hidden, and their slope by the scaled products."""
        scores = self.q @ self.k.swapaxes(-1, -2) * self.params["scale"]
        slope = np.ones_like(scores)
        if (cap := self.params["soft_cap"]) is not None:
            bent = np.tanh(scores / cap)
            scores, slope = cap * bent, 1 - bent**2
        if "bias" in self.masks:
            scores = scores + self.masks["bias"]
            scores = np.where(scores <= _HIDDEN, -np.inf, scores)
        for visible in self._visible():
            scores = np.where(visible, scores, -np.inf)
        return scores, slope

    def _visible(self) -> list[np.ndarray]:
        params, masks, found = self.params, self.masks, []
        if params["causal"] or params["window"] is not None:
            rows = np.arange(self.sizes.rows.size)[:, None] + params["offset"]
            columns = np.arange(self.sizes.columns.size)
            here = masks.get("positions", rows).astype(np.int64)
            behind = here - masks.get("memory_positions", columns)
            if params["causal"]:
                found.append(behind >= 0)
            if params["window"] is not None:
                found.append(np.abs(behind) < params["window"])
        if "segments" in masks:
            found.append(masks["segments"] == masks["memory_segments"])
        found += [masks[name] for name in ("mask", "present", "active") if name in masks]
        return found

    def unlay(self, array: np.ndarray, dims: Shape, which: int) -> np.ndarray:
        """Returns a result as an output has it, summed over the dims that the output lacks."""
        value = self.instruction.outputs[which]
        array = array.reshape(-1, *dims.sizes)
        missing = [i for i, dim in enumerate(dims) if value.local.find(dim.name) is None]
        array = array.sum(tuple(i + 1 for i in missing))
        kept = Shape(dim for i, dim in enumerate(dims) if i not in missing)
        return align(xp, array, kept, value.local).astype(value.dtype)


def _attention(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[np.ndarray]:
    this = _Attention(instruction, inputs)
    largest = np.maximum(this.scores.max(-1, keepdims=True), _HIDDEN)
    weights = np.exp(this.scores - largest)
    total = weights.sum(-1, keepdims=True)
    mixed = weights @ this.v / np.where(total == 0, 1, total)
    sums = np.where(total == 0, _HIDDEN, np.log(total) + largest)
    return [this.unlay(mixed, this.out_dims, 0), this.unlay(sums, this.sum_dims, 1)]


def _gradient(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[np.ndarray]:
    this = _Attention(instruction, inputs[:-3])
    last = len(inputs)
    sums = this.lay(inputs[-2], last - 2, this.sum_dims)[..., None]
    mixed, arriving = (
        this.flat(this.lay(inputs[i], i, this.out_dims)) for i in (last - 3, last - 1)
    )
    weights = np.exp(this.scores - sums)
    delta = (mixed * arriving).sum(-1, keepdims=True)
    to_scores = weights * (arriving @ this.v.swapaxes(-1, -2) - delta)
    to_product = to_scores * this.slope * this.params["scale"]
    found = [
        this.unlay(to_product @ this.k, this.q_dims, 0),
        this.unlay(to_product.swapaxes(-1, -2) @ this.q, this.k_dims, 1),
        this.unlay(weights.swapaxes(-1, -2) @ arriving, this.v_dims, 2),
    ]
    if parameters_of(instruction, AttentionGradient)["bias_gradient"]:
        found.append(this.unlay(to_scores, this.sizes.full, 3))
    return found


EMITTERS: Mapping[str, Emitter] = {
    "attention": _attention,
    "attention_gradient": _gradient,
}
