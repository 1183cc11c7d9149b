"""Data: from files to batches of examples.

`corpus` reads what `--data` names (`files`, `entries`) as documents of tokens (`records`,
`tokenizers`, `tokenizing`, `token_files`, `documents`), splits them (`splits`), and cuts them into
examples (`windows`, `packing`). `batches` shuffles any examples (`examples`, `mixtures`).
`data_files` sees whether files have changed between two runs, `cache_sums` whether a cache is
damaged.
"""

from meshdsl.training.data.batches import Batches, Part, ordered_batches, shuffled_batches
from meshdsl.training.data.cache_sums import compared
from meshdsl.training.data.corpus import Component, Corpus, Splits
from meshdsl.training.data.data_files import DataFiles
from meshdsl.training.data.documents import Documents, Tokens
from meshdsl.training.data.entries import parse_entries
from meshdsl.training.data.examples import Arrays, Batch, Source
from meshdsl.training.data.files import text_files
from meshdsl.training.data.mixtures import Mixture
from meshdsl.training.data.packing import PackedRows
from meshdsl.training.data.splits import parse_ratios, splits_of
from meshdsl.training.data.token_files import TokenFile, write_token_file
from meshdsl.training.data.tokenizers import Bytes, FileTokenizer, check_vocabulary, load_tokenizer
from meshdsl.training.data.windows import SEPARATOR, VOCABULARY, DocumentWindows

__all__ = [
    "SEPARATOR",
    "VOCABULARY",
    "Arrays",
    "Batch",
    "Batches",
    "Bytes",
    "Component",
    "Corpus",
    "DataFiles",
    "DocumentWindows",
    "Documents",
    "FileTokenizer",
    "Mixture",
    "PackedRows",
    "Part",
    "Source",
    "Splits",
    "TokenFile",
    "Tokens",
    "check_vocabulary",
    "compared",
    "load_tokenizer",
    "ordered_batches",
    "parse_entries",
    "parse_ratios",
    "shuffled_batches",
    "splits_of",
    "text_files",
    "write_token_file",
]
