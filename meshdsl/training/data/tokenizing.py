"""Files to tokens: text is tokenised, in memory or once into a folder; token files are mapped.

Guarantees:
    Tokens are a function of the files and the tokenizer.
    Reading goes on after a file that cannot be read, so that one error lists all of them.
    With a folder, memory never has all of the text. A second run with the same files and tokenizer
    reads the cache of the first one (`token_cache`), and checks that it is undamaged
    (`cache_sums`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshdsl.training.data.chats import ChatFormat, are_chats, read_chats
from meshdsl.training.data.documents import Tokens
from meshdsl.training.data.records import TOKENS, read_documents
from meshdsl.training.data.token_cache import Unreadable, token_cache
from meshdsl.training.data.token_files import TokenFile, write_token_file
from meshdsl.training.data.tokenizers import Tokenizer

_AT_ONCE = 512  # documents that the tokenizer is given together, for its threads


class _Incomplete(Exception):
    """Something could not be read, so the cache is not written."""


def read_tokens(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    problems: list[str],
    column: str = "text",
    cache: Path | None = None,
    chats: ChatFormat | None = None,
) -> list[Tokens]:
    """Returns the tokens of files: those of all text together, then each token file's.

    Args:
        paths: in the order in which their documents follow one another.
        problems: a list, to which files are added that cannot be read or have a wrong format.
        column: the column of Parquet files that has the text.
        cache: the folder for the tokens of text; None: they stay in memory.
        chats: how chats become text. With files of chats among the files, tokens that are not
            learned are marked; see `chats`.
    """
    tokens: list[Tokens] = []
    text = [path for path in paths if path.suffix not in TOKENS]
    if text:
        documents = _tokenised(text, tokenizer, column, problems, chats)
        dtype = _dtype(tokenizer.vocabulary)
        if any(are_chats(path, column) for path in text):
            dtype = np.dtype("int32")
        if cache is None:
            tokens.append(_in_memory(text, documents, dtype))
        else:
            try:
                settings = [tokenizer.identity, column, dtype.name]
                settings += [] if chats is None else [chats.identity]
                tokens.append(_cached(cache, text, settings, documents, dtype, problems))
            except _Incomplete:
                pass
            except OSError as error:
                problems.append(f"tokens cannot be kept in {cache}: {error.strerror}")
            except ValueError as error:
                problems.append(str(error))
    for path in paths:
        if path.suffix in TOKENS:
            try:
                tokens.append(TokenFile(path))
            except OSError as error:
                problems.append(f"{path} cannot be read: {error.strerror}")
            except ValueError as error:
                problems.append(str(error))
    return tokens


def _tokenised(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    column: str,
    problems: list[str],
    chats: ChatFormat | None,
) -> Iterator[NDArray[np.integer]]:
    """Yields the tokens of documents; adds those that cannot be read to `problems`."""
    for path in paths:
        try:
            if are_chats(path, column):
                for chat in read_chats(path, chats, column):
                    yield chat.ids(tokenizer)
                continue
            documents = read_documents(path, column)
            while group := list(islice(documents, _AT_ONCE)):
                try:
                    yield from tokenizer.encode([text for _, text in group])
                except UnicodeDecodeError:
                    problems += _not_utf8(group)
                    break
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror or error}")
        except ValueError as error:
            problems.append(str(error))


def _not_utf8(documents: Sequence[tuple[str, bytes]]) -> list[str]:
    problems = []
    for where, text in documents:
        try:
            text.decode()
        except UnicodeDecodeError as error:
            problems.append(
                f"{where}: byte {error.start:,} is not UTF-8, which the tokenizer needs; without "
                "--tokenizer, text may be any bytes"
            )
    return problems


def _in_memory(
    paths: Sequence[Path], documents: Iterator[NDArray[np.integer]], dtype: np.dtype
) -> Tokens:
    ids, bounds = bytearray(), [0]
    for document in documents:
        ids += document.astype(dtype, copy=False).tobytes()
        bounds.append(bounds[-1] + document.size)
    name = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    return Tokens(name, np.frombuffer(ids, dtype), np.asarray(bounds, np.int64))


def _cached(
    folder: Path,
    paths: Sequence[Path],
    settings: Sequence[str],
    documents: Iterator[NDArray[np.integer]],
    dtype: np.dtype,
    problems: list[str],
) -> Tokens:
    def write(target: Path) -> None:
        write_token_file(target, _complete(documents, problems), dtype)

    try:
        return TokenFile(token_cache(folder, paths, list(settings), write))
    except Unreadable as error:
        for _ in _complete(documents, problems):  # so that problems list all files
            pass
        problems.append(str(error))
        raise _Incomplete from None


def _complete(
    documents: Iterator[NDArray[np.integer]], problems: list[str]
) -> Iterator[NDArray[np.integer]]:
    """Yields documents; raises `_Incomplete` at the end if reading them added problems."""
    before = len(problems)
    yield from documents
    if len(problems) > before:
        raise _Incomplete


def _dtype(vocabulary: int) -> np.dtype:
    """Returns the smallest dtype of token files for the ids of a vocabulary."""
    kinds = [np.dtype(name) for name in ("uint8", "uint16", "int32")]
    return next(kind for kind in kinds if vocabulary - 1 <= np.iinfo(kind).max)
