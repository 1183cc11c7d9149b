"""What the backward pass of a model keeps and what it computes again, chosen by name.

`none` keeps all; `full` only what enters each block; `dots` also the results of matrix products and
attention; `names:attention_out+mlp_hidden` also the values of these names (`NAMES` lists those of
transformers); `keep_collectives` also what a layout makes collectives of.
"""

from __future__ import annotations

from collections.abc import Callable

import meshdsl as md
from meshdsl.tensors.dims import did_you_mean

KINDS = ("none", "full", "dots", "keep_collectives")
# What transformers name: what attention reads and leaves, what the activation of an MLP reads, and
# what the two parts add to the stream.
NAMES = (
    "attention_query",
    "attention_key",
    "attention_value",
    "attention_out",
    "attention_added",
    "mlp_gate",
    "mlp_hidden",
    "mlp_added",
)
_PREFIX = "names:"


def read(text: str) -> str:
    """Returns a policy as configurations write it, with `+` between names; `,` is read too.

    Raises:
        ValueError: there is no such policy, or no name is given.
    """
    if not text.startswith(_PREFIX):
        if text not in KINDS:
            raise ValueError(
                f"unknown choice {text!r}; choose one of {', '.join(KINDS)}, or names:... as in "
                f"names:attention_out,mlp_hidden{did_you_mean(text, KINDS)}"
            )
        return text
    names = [name.strip() for name in text[len(_PREFIX) :].replace(",", "+").split("+")]
    if not all(names):
        raise ValueError(f"{text!r}: give names, of {', '.join(NAMES)} or of your own")
    return _PREFIX + "+".join(names)


def rematerialised(function: Callable, policy: str) -> Callable:
    """Returns a function that computes again for its gradient what the policy does not keep.

    Raises:
        ValueError: when called: nothing in the function has a name that is to be kept.
    """
    if policy == "none":
        return function
    if policy.startswith(_PREFIX):
        return md.checkpoint(function, keep=policy[len(_PREFIX) :].split("+"))
    return md.checkpoint(
        function, collectives=policy == "keep_collectives", products=policy == "dots"
    )
