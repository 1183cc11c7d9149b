"""The documents of a file: text files, ArrayRecord and Parquet, by the suffix of the name.

A text file is one document; every record of an ArrayRecord file, and every row of a Parquet file,
is one. They are read as bytes of text, and nothing in them is executed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            f"{path} is read by the `pyarrow` library: pip install 'meshdsl[data]'"
        ) from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            if column not in schema.names:
                raise ValueError(
                    f"{path} has no column `{column}`, but {', '.join(schema.names)}: name the "
                    "one that holds the text with --data_column"
                )
            kind = schema.field(column).type
            if not any(is_text(kind) for is_text in _text_kinds()):
                raise ValueError(f"{path}: the column `{column}` is {kind}, not text")
            number = 0
            for batch in file.iter_batches(columns=[column]):
                for value in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                    if value is not None:
                        yield f"{path}, row {number}", value
                    number += 1
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not a whole Parquet file: {error}") from None


def _text_kinds() -> tuple:
    from pyarrow import types

    return types.is_string, types.is_large_string, types.is_binary, types.is_large_binary
