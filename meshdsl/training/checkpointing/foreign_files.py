"""Weights of Hugging Face folders, as if they were files of our own; and such folders, written.

Guarantees:
    A process reads the blocks of its own devices, and holds no more than one tensor's block beside
    them.
    One error lists all tensors that are missing, that are not of the model, or have other shapes.
    What is read and written again is the same, to the bit.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from meshdsl.late import late
from meshdsl.training.checkpointing.nearest import Nearest
from meshdsl.training.checkpointing.weight_files import Stored, WeightFiles, shards, write
from meshdsl.training.state import by_path, spec_of

_MOST = 20  # the most problems in a message
_ALIGNED = 64  # bytes: the CPU backend of JAX uses such arrays as they are, without a copy
# Files that tell how text becomes tokens; they go out as they came in.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Has `transformers` read a `tokenizer.json` as it is.
_OF_FILE = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}) + "\n"


class ForeignFiles:
    """The tensors of a folder by the names of our parameters; opening it reads no numbers.

    Attributes:
        path: the folder.
        folder: what its `config.json` says.
        tensors: its parameters, by path.

    Raises:
        ValueError: the folder is of no model here, or its tensors are not those that its
            `config.json` describes; all of these are listed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder = late("folders of Hugging Face").Folder.read(path)
        self.path = self.folder.path.absolute()
        self._files = WeightFiles(self.path)
        model = self.folder.model
        self._table = self.folder.family.table(model.config, by_path(spec_of(model.init)))
        self._names = self._checked()
        self.tensors = {name: self._described(name) for name in self._table.specs}

    def read(self, name: str, index: Sequence[tuple[int, int]], dtype: np.dtype) -> np.ndarray:
        """Reads and returns a block of a parameter, from a start to a stop in each dim.

        Raises:
            ValueError: the file cannot be read any more.
        """
        block = _aligned([stop - start for start, stop in index], dtype)
        for piece in self._table.pieces(name, index):
            stored = self._names[piece.name]
            whole = self._files.tensors[stored]
            block[piece.at] = piece.arranged(self._files.read(stored, piece.index, whole.dtype))
        return block

    def _described(self, name: str) -> Stored:
        pieces = {self._names[piece.name] for piece in self._table.pieces(name)}
        stored = [self._files.tensors[each] for each in pieces]
        kinds = {(each.dtype, each.kind) for each in stored}
        dims = self._table.specs[name].dims
        (dtype, kind), *others = sorted(kinds, key=lambda each: each[1])
        for other, _ in others:  # the widest: reading it loses nothing
            if dtype is not None and other is not None:
                dtype = np.promote_types(dtype, other)
        return Stored(stored[0].file, dims.sizes, dtype, kind, dims.names)

    def _checked(self) -> dict[str, str]:
        """Returns the names in the files of the tensors of the family.

        Raises:
            ValueError: tensors are missing, needless or of another shape.
        """
        family, tensors = self.folder.family, self._files.tensors
        shapes = self._table.shapes()
        named = {_usual(name, family, shapes): name for name in tensors}
        problems = list[str]()
        ignored = family.ignores(self.folder.settings)
        needless = [name for name in named if name not in shapes and not _matches(name, ignored)]
        nearest = Nearest(needless)
        for name, shape in shapes.items():
            stored = tensors.get(named.get(name, ""))
            if stored is None:
                near = nearest(name) if len(problems) < _MOST else []
                hint = f"; there is {' and '.join(near)}" if near else ""
                problems.append(f"{name}: missing{hint}")
            elif stored.sizes != shape:
                problems.append(f"{name}: {list(stored.sizes)}, needs {list(shape)}")
        nearest = Nearest(shapes)
        for name in needless:
            near = nearest(name) if len(problems) < _MOST else []
            hint = f"; it has {near[0]}" if near else ""
            file = tensors[named[name]].file.name
            problems.append(f"{name}: not of such a model (in {file}){hint}")
        if problems:
            rest = [f"... and {len(problems) - _MOST} more"] if len(problems) > _MOST else []
            first = (
                f"the tensors in {self.path} are not those of the {family.name} model that its "
                "config.json describes; download both anew, or take the config.json that the "
                "weights were saved with"
            )
            raise ValueError("\n  ".join([first, *problems[:_MOST], *rest]))
        return named


def weight_files(path: str | os.PathLike[str]) -> WeightFiles | ForeignFiles:
    """Returns the weights in a file, a folder of our own, or one of Hugging Face.

    Raises:
        ValueError: they cannot be read, or are not what the folder says.
    """
    if late("folders of Hugging Face").is_folder(path):
        return ForeignFiles(path)
    return WeightFiles(path)


def write_foreign(
    out: Path,
    model: Any,
    specs: Mapping[str, Any],
    fetch: Callable[[Sequence[str]], Mapping[str, np.ndarray]],
    round_to: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]],
    max_shard_size: int,
    origin: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    begin: int | None = None,
    end: int | None = None,
) -> list[Path]:
    """Writes a folder of Hugging Face.

    Args:
        model: whose parameters they are.
        specs: the dims of the parameters as they are stored, and the dtypes to be written.
        fetch: returns parameters by their paths.
        round_to: returns parameters in these dtypes; may change its argument.
        origin: the folder that the model came from: its tokenizer goes out with it.
        tokenizer: a file of the `tokenizers` library that goes out, if the folder has none.
        begin, end: the tokens that begin and end a document, of a model without origin.

    Returns:
        The files of tensors.

    Raises:
        ValueError: no family has such models, or the folder cannot be written.
    """
    foreign = late("folders of Hugging Face")
    source = foreign.Folder.read(origin) if origin is not None else None
    family, settings = foreign.family_for(model.config, source and source.family.name)
    table = family.table(model.config, specs)
    if table.unknown:
        listed = ", ".join(table.unknown[:_MOST])
        raise ValueError(f"the {family.name} models of Hugging Face have no {listed}")
    shapes, sources = table.shapes(), table.sources()
    dtypes = {name: specs[paths[0]].dtype for name, paths in sources.items()}
    sizes = {n: int(np.prod(s, dtype=np.int64)) * dtypes[n].itemsize for n, s in shapes.items()}
    order = sorted(sizes, key=lambda name: list(specs).index(sources[name][0]))
    groups = shards({name: sizes[name] for name in order}, max_shard_size)
    kept: dict[str, np.ndarray] = {}  # parameters of which several tensors are made

    def made(names: Sequence[str]) -> dict[str, np.ndarray]:
        tensors = {}
        for name in names:
            for path in [path for path in kept if path not in sources[name]]:
                del kept[path]
            new = [path for path in sources[name] if path not in kept]
            kept.update(round_to(dict(fetch(new))) if new else {})
            tensors[name] = np.empty(shapes[name], dtypes[name])
            for path in sources[name]:
                for piece in table.pieces(path):
                    if piece.name == name:
                        piece.written(tensors[name], kept[path][piece.at])
        return tensors

    settings |= {"torch_dtype": str(next(iter(dtypes.values())))}
    # What reads the folder takes a family's usual number for a token that `config.json` leaves out.
    settings = dict.fromkeys(_TOKENS) | settings if source is None else settings
    settings |= _tokens(source, begin, end)
    text = json.dumps(settings, indent=2) + "\n"
    beside: dict[str, Callable[[Path], object]] = {"config.json": partial(_written, text)}
    for file in COMPANIONS:
        if source is not None and (source.path / file).is_file():
            beside[file] = partial(_copied, source.path / file)
    if tokenizer is not None and "tokenizer.json" not in beside:
        beside["tokenizer.json"] = partial(_copied, Path(tokenizer))
        if "tokenizer_config.json" not in beside:  # else `transformers` takes the family's class
            beside["tokenizer_config.json"] = partial(_written, _OF_FILE)
    return write(out, groups, made, lambda names: {"format": "pt"}, beside)


def _written(text: str, to: Path) -> None:
    to.write_text(text, encoding="utf-8")


def _copied(file: Path, to: Path) -> None:
    shutil.copyfile(file, to)


def _tokens(source: Any, begin: int | None, end: int | None) -> dict[str, int]:
    """Returns the tokens with a meaning: those that a folder names, or else those of the run."""
    if source is None:
        known = {"bos_token_id": begin, "eos_token_id": end}
        return {name: token for name, token in known.items() if token is not None}
    return {name: source.settings[name] for name in _TOKENS if name in source.settings}


def _usual(name: str, family: Any, shapes: Mapping[str, Any]) -> str:
    """Returns what the family calls a tensor, which some folders name otherwise."""
    for ending, usual in family.renamed:
        if name.endswith(ending):
            name = name.removesuffix(ending) + usual
    return (
        name if name in shapes or f"{family.prefix}{name}" not in shapes else family.prefix + name
    )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _aligned(sizes: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns an array of no numbers yet whose memory JAX can use as it is."""
    count = int(np.prod(sizes, dtype=np.int64)) * dtype.itemsize
    room = np.empty(count + _ALIGNED, np.uint8)
    start = -room.ctypes.data % _ALIGNED
    return room[start : start + count].view(dtype).reshape(sizes)
