"""Reading: what prompts a model takes, and how programs read them.

Prompts of different lengths end at one position: shorter ones begin with pads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshdsl.generation.programs import ROWS, Programs, Sizes
from meshdsl.generation.sampling import Sampling
from meshdsl.models.model import Model
from meshdsl.ops import random
from meshdsl.tensors.named_array import NamedArray, named

_CHUNK = 128  # the most tokens of a prompt that are read at once, by default
_TOKENS = ["batch", "length"]


def sizes_of(
    model: Model, prompt_tokens: int, new_tokens: int, batch_size: int, chunk: int | None
) -> Sizes:
    """Returns the sizes of programs that read prompts and write new tokens.

    Args:
        chunk: how many tokens of a prompt are read at once. None: up to 128.

    Raises:
        ValueError: the model writes no text, or texts are longer than its positions.
    """
    check_writes(model)
    check_lengths(model, prompt_tokens, new_tokens)
    read = max(1, prompt_tokens - splits_prompts(model))
    chunk = chunk or min(_CHUNK, 1 << (read - 1).bit_length())
    return Sizes(batch_size, -(-read // chunk) * chunk, new_tokens, chunk)


def splits_prompts(model: Model) -> bool:
    """Whether an encoder reads all tokens of a prompt but the last one, and the decoder that."""
    assert model.decoding is not None
    return model.decoding.empty is None and model.decoding.start is None


def check_prompts(prompts: Sequence[Sequence[int]], most: int, most_tokens: int) -> None:
    """Checks that prompts fit a writer.

    Raises:
        ValueError: there are none or too many, or one is empty or too long.
    """
    if not 1 <= len(prompts) <= most:
        raise ValueError(f"the writer takes 1 to {most} prompts, got {len(prompts)}")
    for number, prompt in enumerate(prompts):
        if not 1 <= len(prompt) <= most_tokens:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens; the writer takes 1 to {most_tokens}"
            )


def settings(
    samplings: Sequence[Sampling], numbers: Sequence[int], reports: bool | None = None
) -> dict[str, NamedArray]:
    """Returns the settings of rows that do not depend on prompts, by name: `ROWS`, and `key`.

    Args:
        reports: whether steps are to have the probabilities of the tokens of these rows. None: the
            programs have none.
    """
    rows = {
        name: named(np.array([getattr(each, name) for each in samplings], dtype), ["batch"])
        for name, dtype in ROWS.items()
        if name not in ("number", "read")
    }
    keys = np.stack([np.asarray(random.key(each.seed)) for each in samplings])
    rows["key"] = named(keys, ["batch", random.KEY.name])
    if reports is not None:
        rows["reports"] = named(np.full(len(samplings), reports), ["batch"])
    rows["number"] = named(np.array([n % 2**32 for n in numbers], np.uint32), ["batch"])
    return rows


def read_prompts(
    programs: Programs,
    params: Any,
    prompts: Sequence[Sequence[int]],
    rows: Mapping[str, NamedArray],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads prompts, one for each row.

    Args:
        params: prepared.
        rows: as of `settings`.

    Returns:
        What the step after the last of their tokens gives, and what is `fixed` in all steps.
    """
    *_, read = in_chunks(programs, params, prompts, rows)
    return read, read["fixed"]


def in_chunks(
    programs: Programs,
    params: Any,
    prompts: Sequence[Sequence[int]],
    rows: Mapping[str, NamedArray],
    scored: bool = False,
    written: Sequence[int] = (),
) -> Iterator[dict[str, Any]]:
    """Reads prompts as `read_prompts`, and yields what each step gives, with what is `fixed`.

    Args:
        scored: whether steps have the probabilities `read` of the tokens of a prompt, which are
            `targets`: [batch, length], the token after each position.
        written: the tokens of the text of the only prompt so far; they are read as well.
    """
    sizes = programs.sizes
    if programs.encodes and programs.start is not None:
        source, pads = aligned_right(prompts, sizes.prompt)
        first = np.full((len(prompts), 1), programs.start, np.int32)
    elif programs.encodes:
        source, pads = aligned_right(prompts, sizes.prompt + 1)
        first, source = source[:, -1:], source[:, :-1]
    else:
        prompts = [[*prompt, *written] for prompt in prompts]
        longest = max(map(len, prompts))
        text, pads = aligned_right(prompts, -(-longest // sizes.chunk) * sizes.chunk)
        source = None
    if programs.encodes:
        text = np.append(first, np.array(written, np.int32).reshape(len(first), -1), 1)
    # The pads of an encoder's prompt are none of the decoder's.
    before = np.full(len(prompts), text.shape[1], np.int32) - (0 if programs.encodes else pads)
    before -= len(written)
    fixed = {**rows, "read": named(before, ["batch"])}
    given = None if source is None else named(source, _TOKENS)
    begun = programs.begin(params, given, named(pads, ["batch"]), fixed)
    read: dict[str, Any] = begun
    size = 1 if programs.encodes else min(sizes.chunk, text.shape[1])
    for begin in range(0, text.shape[1], size):
        piece = named(text[:, begin : begin + size], _TOKENS)
        arguments = [params, read["state"], begun["fixed"], piece]
        if not scored:
            yield {**(read := programs.steps[size](*arguments)), "fixed": begun["fixed"]}
            continue
        assert programs.reading is not None
        targets = np.roll(text, -1, 1)[:, begin : begin + size]
        read = programs.reading(*arguments, named(targets, _TOKENS))
        yield {**read, "fixed": begun["fixed"], "targets": targets}


def aligned_right(
    prompts: Sequence[Sequence[int]], width: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Returns prompts that end at the last of `width` positions, and the number of pads of each."""
    text = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(text, prompts, strict=True):
        row[width - len(prompt) :] = prompt
    return text, np.array([width - len(prompt) for prompt in prompts], np.int32)


def check_writes(model: Model) -> None:
    """Checks that a model writes text.

    Raises:
        ValueError: it does not, or does not say how many tokens there are.
    """
    if model.decoding is None:
        raise ValueError(
            f"{model.name} does not write text: decoder-only transformers and T5 do, and a Model "
            "of your own with a `decoding`"
        )
    if not hasattr(model.config, "vocab"):
        raise ValueError(
            f"{model.name} does not say how many tokens there are: give its Model a `config` with "
            "`vocab`"
        )


def limits(model: Model) -> tuple[int | None, Callable[[int], int | None]]:
    """Returns the most tokens of a prompt, and a function from its tokens to the most after it.

    The positions that a model has learned limit them. None: any number.
    """
    assert model.decoding is not None
    most = model.decoding.max_length
    if most is None:
        return None, lambda prompt: None
    if model.decoding.empty is None:  # encoder and decoder have positions of their own
        return most + splits_prompts(model), lambda prompt: most
    return most, lambda prompt: most + 1 - prompt  # the last token is not read


def check_lengths(model: Model, prompt_tokens: int, new_tokens: int) -> None:
    """Checks that texts fit the positions that a model has learned.

    Raises:
        ValueError: they do not.
    """
    assert model.decoding is not None
    most, new = limits(model)
    room = new(prompt_tokens)
    if most is not None and room is not None and (prompt_tokens > most or new_tokens > room):
        raise ValueError(
            f"{model.name} has learned max_length={model.decoding.max_length} positions, too few "
            f"for a prompt of {prompt_tokens} tokens and {new_tokens} new ones"
        )
