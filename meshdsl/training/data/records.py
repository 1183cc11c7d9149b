"""The documents of a file: text files, ArrayRecord and Parquet, by the suffix of the name.

A text file is one document; every record of an ArrayRecord file, and every row of a Parquet file,
is one. They are read as bytes of text, and nothing in them is executed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ARRAY_RECORD = (".arrayrecord", ".array_record", ".riegeli")
PARQUET = (".parquet", ".pq")
TOKENS = (".bin",)


def read_documents(path: Path, column: str = "text") -> Iterator[tuple[str, bytes]]:
    """Yields the documents of a file, each with its position for errors.

    Args:
        column: the column of a Parquet file that has the text.

    Raises:
        ValueError: the file does not have the format of its name, the column or a library is
            missing.
        OSError: the file cannot be read.
    """
    if path.suffix in ARRAY_RECORD:
        yield from _array_record(path)
    elif path.suffix in PARQUET:
        yield from _parquet(path, column)
    else:
        yield str(path), path.read_bytes()


def _array_record(path: Path, at_once: int = 256) -> Iterator[tuple[str, bytes]]:
    import grain

    try:
        with grain.sources.ArrayRecordDataSource(str(path)) as source:
            for start in range(0, len(source), at_once):
                numbers = range(start, min(start + at_once, len(source)))
                for number, record in zip(numbers, source.__getitems__(numbers), strict=True):
                    yield f"{path}, record {number}", bytes(record)
    except (RuntimeError, IndexError) as error:
        reason = str(error).partition("\n")[0] or "it is damaged"
        raise ValueError(f"{path} is not a whole ArrayRecord file: {reason}") from None


def _parquet(path: Path, column: str) -> Iterator[tuple[str, bytes]]:
    with _opened(path) as file:
        schema = file.schema_arrow
        if column not in schema.names:
            raise ValueError(
                f"{path} has no column `{column}`, but {', '.join(schema.names)}: name the "
                "one that holds the text with --data_column"
            )
        kind = schema.field(column).type
        if not any(is_text(kind) for is_text in _text_kinds()):
            raise ValueError(f"{path}: the column `{column}` is {kind}, not text")
    for number, value in parquet_rows(path, column, binary=True):
        if value is not None:
            yield f"{path}, row {number}", value


def parquet_type(path: Path, column: str) -> Any:
    """Returns pyarrow's type of a column of a Parquet file; None: it has no such column.

    Raises:
        ValueError: the file is no Parquet file, or the library is missing.
    """
    with _opened(path) as file:
        schema = file.schema_arrow
        return schema.field(column).type if column in schema.names else None


def parquet_rows(path: Path, column: str, binary: bool = False) -> Iterator[tuple[int, Any]]:
    """Yields the number and the value of each row in a column of a Parquet file.

    Args:
        binary: whether text comes as bytes.

    Raises:
        ValueError: the file is no Parquet file, or the library is missing.
    """
    pyarrow = _pyarrow(path)
    with _opened(path) as file:
        number = 0
        for batch in file.iter_batches(columns=[column]):
            values = batch.column(0)
            for value in (values.cast(pyarrow.large_binary()) if binary else values).to_pylist():
                yield number, value
                number += 1


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Opens a Parquet file; what is wrong with it is a ValueError."""
    pyarrow = _pyarrow(path)
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not a whole Parquet file: {error}") from None


def _pyarrow(path: Path) -> Any:
    """Returns the library that reads a Parquet file.

    Raises:
        ValueError: it is missing.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            f"{path} is read by the `pyarrow` library: pip install 'meshdsl[data]'"
        ) from None
    return pyarrow


def _text_kinds() -> tuple:
    from pyarrow import types

    return types.is_string, types.is_large_string, types.is_binary, types.is_large_binary
