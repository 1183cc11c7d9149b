"""Attention by its definition: all scores at once, in float64.

Arrays are [devices, *lead, rows or columns, features], with size 1 where a dim is missing, so that
all products are products of matrices.
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
    """An attention instruction with its operands in the order of products, and its scores."""

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
            self.align(inputs[i], i, dims) for i, dims in ((0, self.q_dims), (1, self.k_dims))
        )
        self.v = self.flat(self.align(inputs[2], 2, self.v_dims))
        self.masks = {
            name: self.align(inputs[i], i, sizes.full)
            for i, name in enumerate(self.params["given"], 3)
        }
        self.scores, self.slope = self._scores()

    def align(self, array: np.ndarray, number: int, dims: Shape) -> np.ndarray:
        """Returns an operand with some dims, in that order; floats in float64."""
        aligned = align(xp, array, self.instruction.inputs[number].local, dims)
        return aligned if aligned.dtype.kind in "biu" else aligned.astype(np.float64)

    def flat(self, array: np.ndarray) -> np.ndarray:
        """Returns an array with all value features merged into one axis."""
        at = array.ndim - len(self.sizes.values)
        return array.reshape(*array.shape[:at], -1)

    def _scores(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the scores, -inf where hidden, and the derivative of the soft cap.

        The derivative is by the scaled products.
        """
        scores = self.q @ self.k.swapaxes(-1, -2) * self.params["scale"]
        slope = np.ones_like(scores)
        if (cap := self.params["soft_cap"]) is not None:
            squashed = np.tanh(scores / cap)
            scores, slope = cap * squashed, 1 - squashed**2
        if "bias" in self.masks:
            scores = scores + self.masks["bias"]
            scores = np.where(scores <= _HIDDEN, -np.inf, scores)
        for visible in self._visible():
            scores = np.where(visible, scores, -np.inf)
        return scores, slope

    def _visible(self) -> list[np.ndarray]:
        """Returns masks; a score is visible if all are true."""
        params, masks, visible = self.params, self.masks, []
        if params["causal"] or params["window"] is not None:
            rows = np.arange(self.sizes.rows.size)[:, None] + params["offset"]
            columns = np.arange(self.sizes.columns.size)
            queries = masks.get("positions", rows).astype(np.int64)
            behind = queries - masks.get("memory_positions", columns)
            if params["causal"]:
                visible.append(behind >= 0)
            if params["window"] is not None:
                visible.append(np.abs(behind) < params["window"])
        if "segments" in masks:
            visible.append(masks["segments"] == masks["memory_segments"])
        visible += [masks[name] for name in ("mask", "present", "active") if name in masks]
        return visible

    def as_output(self, array: np.ndarray, dims: Shape, number: int) -> np.ndarray:
        """Returns an array with the dims of an output, summed over the dims that this lacks."""
        value = self.instruction.outputs[number]
        array = array.reshape(-1, *dims.sizes)
        missing = [i for i, dim in enumerate(dims) if value.local.find(dim.name) is None]
        array = array.sum(tuple(i + 1 for i in missing))
        present = Shape(dim for i, dim in enumerate(dims) if i not in missing)
        return align(xp, array, present, value.local).astype(value.dtype)


def _attention(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[np.ndarray]:
    attention = _Attention(instruction, inputs)
    largest = np.maximum(attention.scores.max(-1, keepdims=True), _HIDDEN)
    weights = np.exp(attention.scores - largest)
    total = weights.sum(-1, keepdims=True)
    result = weights @ attention.v / np.where(total == 0, 1, total)
    sums = np.where(total == 0, _HIDDEN, np.log(total) + largest)
    return [
        attention.as_output(result, attention.out_dims, 0),
        attention.as_output(sums, attention.sum_dims, 1),
    ]


def _gradient(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[np.ndarray]:
    attention = _Attention(instruction, inputs[:-3])
    last = len(inputs)
    sums = attention.align(inputs[-2], last - 2, attention.sum_dims)[..., None]
    result, cotangent = (
        attention.flat(attention.align(inputs[i], i, attention.out_dims))
        for i in (last - 3, last - 1)
    )
    weights = np.exp(attention.scores - sums)
    delta = (result * cotangent).sum(-1, keepdims=True)
    grad_scores = weights * (cotangent @ attention.v.swapaxes(-1, -2) - delta)
    grad_product = grad_scores * attention.slope * attention.params["scale"]
    gradients = [
        attention.as_output(grad_product @ attention.k, attention.q_dims, 0),
        attention.as_output(grad_product.swapaxes(-1, -2) @ attention.q, attention.k_dims, 1),
        attention.as_output(weights.swapaxes(-1, -2) @ cotangent, attention.v_dims, 2),
    ]
    if parameters_of(instruction, AttentionGradient)["bias_gradient"]:
        gradients.append(attention.as_output(grad_scores, attention.sizes.full, 3))
    return gradients


EMITTERS: Mapping[str, Emitter] = {
    "attention": _attention,
    "attention_gradient": _gradient,
}
