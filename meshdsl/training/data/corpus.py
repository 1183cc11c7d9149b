"""All the data of a run: reads the files of `--data` as tokens, and splits them.

Guarantees:
    The examples are a function of the files, the tokenizer, the length, the ratios and packing.
    No document (without ratios, no window) is in two splits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from meshdsl.training.data.chats import JSON_LINES, ChatFormat, are_chats, has_plain_text
from meshdsl.training.data.checks import check_at_least, numbered
from meshdsl.training.data.documents import Documents
from meshdsl.training.data.entries import parse_entries
from meshdsl.training.data.examples import Source
from meshdsl.training.data.files import find, in_utf8, matching
from meshdsl.training.data.mixtures import Mixture
from meshdsl.training.data.packing import PackedRows
from meshdsl.training.data.records import TOKENS
from meshdsl.training.data.splits import SPLITS, Ratios, splits_of
from meshdsl.training.data.tokenizers import Bytes, Tokenizer
from meshdsl.training.data.tokenizing import read_tokens
from meshdsl.training.data.windows import DocumentWindows

HELD_OUT = 20


def has_chats(data: str | None, column: str = "text") -> bool:
    """Whether `--data` names files of chats; examples then say which tokens are learned.

    Args:
        column: the column of Parquet files that has the text; one without it may have chats.
    """
    patterns = [pattern for entry in parse_entries(data) for pattern in entry.patterns]
    if any(pattern.endswith(JSON_LINES) for pattern in patterns):
        return True
    return any(are_chats(path, column) for pattern in patterns for path in matching(pattern))


def has_text(data: str | None, column: str = "text") -> bool:
    """Whether `--data` names text, whose documents can begin with a token; or no file at all.

    Token files and chats begin as they are written.

    Args:
        column: as of `has_chats`.
    """
    patterns = [pattern for entry in parse_entries(data) for pattern in entry.patterns]
    paths = [path for pattern in patterns for path in matching(pattern)]
    return not paths or any(
        has_plain_text(path, column) if are_chats(path, column) else path.suffix not in TOKENS
        for path in paths
    )


@dataclass(frozen=True, eq=False)
class Splits:
    """The examples of each split; None: the split has none."""

    train: Source
    valid: Source | None
    test: Source | None


@dataclass(frozen=True, eq=False)
class Component:
    """Documents of one source, and its weight in a mixture, if there is one."""

    name: str
    documents: Documents
    weight: Fraction | None


@dataclass(frozen=True, eq=False)
class Corpus:
    """The documents of a run.

    Attributes:
        components: the sources; several are a mixture.
        files: how many files they come from.
        unit: the word for a token, in the singular.
        paths: these files, and the indices of token files.
        caches: the files of the token caches of the others.
    """

    components: tuple[Component, ...]
    files: int
    unit: str
    paths: tuple[Path, ...]
    caches: tuple[Path, ...]

    @staticmethod
    def read(
        data: str | None,
        vocabulary: int,
        tokenizer: Tokenizer | None = None,
        column: str = "text",
        cache: Path | None = None,
        checked: int = 2**28,
        chats: ChatFormat | None = None,
    ) -> Corpus:
        """Reads what `--data` names.

        Args:
            data: as in `parse_entries`; None: the sources of Python's standard library, with a
                tokenizer without the few that are not UTF-8.
            vocabulary: the size of the model's vocabulary; ids are below it.
            tokenizer: the tokenizer of text; None: `Bytes`.
            column, cache, chats: as in `read_tokens`.
            checked: how many tokens of all files together are checked.

        Raises:
            ValueError: files are wrong or cannot be read; or checked tokens are outside of the
                vocabulary (others raise when they are read).
        """
        tokenizer = tokenizer or Bytes()
        entries = parse_entries(data)
        patterns = [pattern for entry in entries for pattern in entry.patterns]
        paths_of_patterns = find(patterns)
        total = sum(map(len, paths_of_patterns))
        marked = has_chats(data, column)
        components, problems, read = [], list[str](), set[Path]()
        for entry in entries:
            take = len(entry.patterns) or 1
            paths = sorted(
                {p for paths in paths_of_patterns[:take] for p in paths}, key=Path.as_posix
            )
            if not entry.patterns and not isinstance(tokenizer, Bytes):
                paths = in_utf8(paths)  # nobody has asked for the others
            paths_of_patterns, read = paths_of_patterns[take:], read | set(paths)
            tokens = read_tokens(paths, tokenizer, problems, column, cache, chats)
            documents = Documents.of(tokens, vocabulary, marked)
            problems += documents.outside(checked * len(paths) // total)
            components.append(Component(entry.name, documents, entry.weight))
        if problems:
            raise ValueError(numbered("cannot read the data", problems))
        mapped = any(path.suffix in TOKENS for path in read)
        paths, caches = sorted(read, key=Path.as_posix), list[Path]()
        for component in components:
            for file in component.documents.files:
                of_data = read.issuperset(file.paths[:1])
                (paths if of_data else caches).extend(file.paths)
        unit = "token" if mapped else tokenizer.unit
        unique = (tuple(dict.fromkeys(each)) for each in (paths, caches))
        return Corpus(tuple(components), len(read), unit, *unique)

    @property
    def size(self) -> int:
        """The number of tokens."""
        return sum(int(component.documents.sizes.sum()) for component in self.components)

    def fingerprint(self) -> str:
        """Returns a hash that tells different data apart; see `Tokens.fingerprint`."""
        digest = hashlib.sha256()
        for component in self.components:
            prints = [file.fingerprint() for file in component.documents.files]
            digest.update(f"{component.weight} {prints}".encode())
        return digest.hexdigest()[:16]

    def split(
        self,
        length: int,
        *,
        batch_size: int,
        ratios: Ratios | None = None,
        packing: bool = False,
    ) -> Splits:
        """Returns examples of `length` tokens: windows of the text, or packed documents.

        Args:
            length: tokens in an example.
            batch_size: the examples that each split must have at least.
            ratios: parts of the documents; None: one window (or row) in `HELD_OUT` is kept.
            packing: documents are packed into rows.

        Raises:
            ValueError: splits have too few examples; all of them are listed.
        """
        check_at_least(1, length=length, batch_size=batch_size)
        make: Callable[[Documents, int], DocumentWindows | PackedRows]
        make = PackedRows.of if packing else DocumentWindows.of
        problems: list[str] = []
        parts: list[list[Source]] = [[], [], []]
        for component in self.components:
            if ratios is None:
                pair = make(component.documents, length).split(HELD_OUT)
                made: list[Source | None] = [*pair, None]
            else:
                chosen = splits_of(len(component.documents), ratios)
                made = [
                    make(component.documents.chosen(chosen == number), length) if ratio else None
                    for number, ratio in enumerate(ratios)
                ]
            for name, sources, source in zip(SPLITS, parts, made, strict=True):
                if source is not None:
                    sources.append(source)
                    if not len(source) and len(self.components) > 1:
                        problems.append(f"`{component.name}` has no example for {name}")
        kind = "packed rows" if packing else "windows"
        for name, sources in zip(SPLITS, parts, strict=True):
            count = sum(map(len, sources))
            if sources and count < batch_size:
                problems.append(
                    f"there are {count} {kind} of {length} tokens for {name}, fewer than "
                    f"batch_size={batch_size}"
                )
        if problems:
            raise ValueError(self._too_little(problems, ratios))
        train, valid, test = (self._together(sources) for sources in parts)
        assert train is not None
        return Splits(train, valid, test)

    def _together(self, sources: list[Source]) -> Source | None:
        weights = [component.weight for component in self.components]
        if len(sources) < 2:
            return sources[0] if sources else None
        return Mixture(tuple(sources), tuple(weight or Fraction(1) for weight in weights))

    def _too_little(self, problems: list[str], ratios: Ratios | None) -> str:
        documents = sum(len(component.documents) for component in self.components)
        several = "s" if documents != 1 else ""
        has = f"{self.size:,} {self.unit}s in {documents:,} document{several}"
        title = numbered(f"the text is too short: it has {has}", problems)
        others = "" if ratios is None else ", or a larger part for that split"
        return f"{title}\n\n  Give more text, or a smaller batch_size or length{others}."
