"""From text to tokens: bytes, or a `tokenizer.json` of the `tokenizers` library.

A tokenizer's file is read as JSON by that library; nothing in it is executed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshdsl.tensors.dims import did_you_mean
from meshdsl.training.data.windows import SEPARATOR, VOCABULARY

# How vocabularies call what ends a document: GPT-2, LLaMA 1 and 2, LLaMA 3, Gemma, ..., BERT.
END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")


class Tokenizer(Protocol):
    """Makes tokens from documents; an end token follows each document.

    Attributes:
        name: the name in reports and errors.
        identity: a text that differs if the tokens may differ.
        vocabulary: ids are below it.
        unit: the word for a token, in the singular.
        end: the id of the end token.
    """

    name: str
    identity: str
    vocabulary: int
    unit: str
    end: int

    @property
    def begin(self) -> int | None:
        """The token that prompts begin with, which `encode` does not add. None: no token."""

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.integer]]:
        """Returns the tokens of each document.

        Raises:
            UnicodeDecodeError: the text is not UTF-8, which only bytes may be.
        """

    def located(self, text: str) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        """Returns the tokens of a text without an end, and the character where each begins."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, with U+FFFD for what is no UTF-8."""


class Bytes:
    """Every byte is a token; `SEPARATOR` ends a document."""

    name = identity = "bytes"
    vocabulary = VOCABULARY
    unit = "byte"
    end = SEPARATOR
    begin = None

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.integer]]:
        return [np.frombuffer(text + bytes([SEPARATOR]), np.uint8) for text in texts]

    def located(self, text: str) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
        begins = (ids & 0xC0) != 0x80  # other bytes go on with a character
        return ids, np.cumsum(begins) - 1

    def decode(self, tokens: Sequence[int]) -> str:
        # A model may have more tokens than there are bytes.
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, without the special tokens it may add.

    Raises:
        ValueError: the library is missing, the file is no tokenizer, or it lacks the end token.
    """

    unit = "token"

    def __init__(self, path: str | Path, end_token: str | None = None) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ValueError(
                "tokenizers are read by the `tokenizers` library: pip install 'meshdsl[data]'"
            ) from None
        self.name = str(path)
        try:
            content = Path(path).expanduser().read_bytes()
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
        try:
            self._inner: Any = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises no kind of its own
            raise ValueError(
                f"{path} is not a tokenizer.json of the `tokenizers` library: {error}"
            ) from None
        self._inner.no_truncation()
        self._inner.no_padding()
        self.vocabulary = max(self._inner.get_vocab().values(), default=-1) + 1
        self.end = self._end_id(end_token)
        self.identity = f"{hashlib.sha256(content).hexdigest()} {self.end}"

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.integer]]:
        decoded = [text.decode() for text in texts]
        encodings = self._inner.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.asarray([*encoding.ids, self.end], np.int64) for encoding in encodings]

    def located(self, text: str) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        encoding = self._inner.encode(text, add_special_tokens=False)
        starts = [start for start, _ in encoding.offsets]
        return np.asarray(encoding.ids, np.int64), np.asarray(starts, np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        known = [token for token in tokens if token < self.vocabulary]
        return str(self._inner.decode(known, skip_special_tokens=False))

    @property
    def begin(self) -> int | None:
        """The token that prompts begin with, by the file's post-processor, as in `transformers`."""
        bare, special = (self._inner.encode("a", add_special_tokens=b).ids for b in (False, True))
        return int(special[0]) if special[:1] != bare[:1] else None

    def _end_id(self, wanted: str | None) -> int:
        known = self._inner.get_vocab()
        for token in END_TOKENS if wanted is None else [wanted]:
            if token in known:
                return int(known[token])
        if wanted is None:
            raise ValueError(
                f"{self.name} has none of the usual tokens that end a document "
                f"({', '.join(END_TOKENS)}): name its own with --end_token"
            )
        raise ValueError(f"{self.name} has no token {wanted!r}{did_you_mean(wanted, known)}")


def load_tokenizer(path: str | None, end_token: str | None = None) -> Tokenizer:
    """Returns the tokenizer of a file, or `Bytes` without one; errors as of `FileTokenizer`."""
    if path is not None:
        return FileTokenizer(path, end_token)
    if end_token is not None:
        raise ValueError(f"the end token {end_token!r} is one of a tokenizer: give --tokenizer too")
    return Bytes()


class WithBegin:
    """A tokenizer whose documents begin with its token for that: `WithBegin(tokenizer)`.

    Raises:
        ValueError: the tokenizer has no such token.
    """

    def __init__(self, inner: Tokenizer) -> None:
        if inner.begin is None:
            raise ValueError(
                f"{inner.name} puts no token before texts, by its post-processor; leave out "
                "--begin_documents"
            )
        self._inner, self.begin = inner, inner.begin
        self.name, self.unit, self.end = inner.name, inner.unit, inner.end
        self.vocabulary = inner.vocabulary
        self.identity = f"{inner.identity} begins {inner.begin}"

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.integer]]:
        return [np.concatenate([[self.begin], ids]) for ids in self._inner.encode(texts)]

    def located(self, text: str) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        return self._inner.located(text)  # as without: the template of a chat begins it

    def decode(self, tokens: Sequence[int]) -> str:
        return self._inner.decode(tokens)


def check_vocabulary(tokenizer: Tokenizer, vocabulary: int, model: str) -> None:
    """Checks that a model's vocabulary has all tokens.

    Raises:
        ValueError: it has not.
    """
    if tokenizer.vocabulary > vocabulary:
        raise ValueError(
            f"{tokenizer.name} makes tokens of a vocabulary of {tokenizer.vocabulary:,}, but "
            f"{model} has {vocabulary:,}: take the tokenizer of the model, or "
            f"--model_args=vocab={tokenizer.vocabulary}"
        )
