"""Slide: how a window moves along one dim, as convolution and pooling use it.

Position o of a result and position w of the window meet element x of the operand where

    base * x = stride * o + dilation * w - low

has an integer solution inside of the operand; elsewhere they meet zero. That is a convolution with
strides, a dilated window, `base - 1` zeros between the elements of x and `low` zeros before them.
The equation has the same form for all three positions, so both gradients of a convolution are
slides too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Slide:
    """One window over one dim.

    Attributes:
        x, window, out: the dim's name in the operand, of the window, and in the result; the names
            may be equal, since they belong to different tensors.
        stride, dilation: steps of the window and inside of it, in positions of the operand with
            its zeros; negative ones go backwards, none is zero.
        base: the distance between elements of the operand, at least 1.
        low: by how much the window begins before the first element; may be negative.
    """

    x: str
    window: str
    out: str
    stride: int = 1
    dilation: int = 1
    base: int = 1
    low: int = 0

    def normal(self) -> Slide:
        """Returns the same slide with a positive base."""
        if self.base > 0:
            return self
        return Slide(
            self.x, self.window, self.out, -self.stride, -self.dilation, -self.base, -self.low
        )

    def to_operand(self) -> Slide:
        """Returns the slide over the result, with the same window, that gives the operand."""
        back = Slide(
            self.out, self.window, self.x, self.base, -self.dilation, self.stride, -self.low
        )
        return back.normal()

    def to_window(self) -> Slide:
        """Returns the slide over the operand, with the result as window, that gives the window."""
        return Slide(self.x, self.out, self.window, self.dilation, self.stride, self.base, self.low)

    def ahead(self, windows: int) -> Slide:
        """Returns the slide with a positive dilation for a window of a size, read from its end."""
        if self.dilation > 0:
            return self
        low = self.low - self.dilation * (windows - 1)
        return replace(self, dilation=-self.dilation, low=low)

    def reach(self, outs: int, windows: int) -> tuple[int, int]:
        """Returns the first and last position, counting zeros, that results and windows reach."""
        corners = [
            self.stride * o + self.dilation * w - self.low
            for o in (0, outs - 1)
            for w in (0, windows - 1)
        ]
        return min(corners), max(corners)
