"""Files of every kind, made for tests."""

import tokenizers
from array_record.python.array_record_module import ArrayRecordWriter

WORDS = ["a", "named", "dim", "of", "tensor", "<eos>"]


def write_tokenizer(path, words=WORDS, ids=None):
    """Writes a tokenizer whose tokens are words; others are left out."""
    vocabulary = dict(zip(words, ids or range(len(words)), strict=True))
    model = tokenizers.models.WordLevel(vocabulary, unk_token="a")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return str(path)


def write_array_record(path, documents):
    writer = ArrayRecordWriter(str(path), "group_size:2")
    for document in documents:
        writer.write(document)
    writer.close()


def write_parquet(path, **columns):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
