"""Dimensions and shapes: the named half of every tensor.

A `Dimension` is a name with a size; a `Shape` is an ordered tuple of dimensions with distinct
names. Both are immutable and hashable. There is one object for all dimensions of one name and size,
so that comparing and hashing shapes takes no Python code. Layouts, models and reports use names.
Order matters only to how data is stored and to `np.asarray`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from meshdsl.late import late

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


STEPS = "steps"  # the dim that stacks arguments and results of several runs in one call


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Dimension:
    """One named dim of a tensor, with its global size.

    Raises:
        ValueError: the name is not an identifier, or the size is not a positive integer.

    Examples:
        >>> batch = md.Dimension("batch", 8)
        >>> print(batch, batch.name, batch.size)
        batch=8 batch 8
        >>> batch is md.Dimension("batch", 8)  # one object for one name and size
        True
    """

    name: str
    size: int

    def __new__(cls, name: str, size: int) -> Dimension:
        if type(size) is int and (known := _known.get((name, size))) is not None:
            return known
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} cannot name a dim: use letters, digits and underscores, "
                "not starting with a digit"
            )
        if isinstance(size, bool) or not hasattr(size, "__index__") or size < 1:
            raise ValueError(f"dim `{name}` needs a positive integer size, got {size!r}")
        self = object.__new__(cls)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "size", int(size))
        return _known.setdefault((name, int(size)), self)

    def __reduce__(self) -> tuple:
        return Dimension, (self.name, self.size)

    def __str__(self) -> str:
        return f"{self.name}={self.size}"

    def _repr_html_(self) -> str | None:
        """Returns the name and the size for notebooks."""
        return late("value in a notebook")(self)


_known: dict[tuple[str, int], Dimension] = {}
DimLike: TypeAlias = Dimension | str
DimsLike: TypeAlias = DimLike | Sequence[DimLike]


RANDOM_KEY = Dimension("random_key", 2)  # the last dim of a key: its two words
RAW_KEY = Dimension("raw_key", 2)  # that of a raw key of JAX, which is an array of numbers


class Shape(tuple[Dimension, ...]):
    """Ordered dimensions with distinct names: `Shape([batch, embed])`.

    Raises:
        ValueError: one name occurs twice.

    Examples:
        >>> shape = md.Shape(md.dims(batch=8, embed=4))
        >>> print(shape, shape.sizes, shape.volume)
        [batch=8, embed=4] (8, 4) 32
        >>> shape.get("embed")
        Dimension(name='embed', size=4)
    """

    __slots__ = ()

    def __new__(cls, dims: Iterable[Dimension] = ()) -> Shape:
        self = super().__new__(cls, dims)
        if len(self) > 1 and len({dim.name for dim in self}) != len(self):
            twice = sorted({d.name for d in self if sum(e.name == d.name for e in self) > 1})
            raise ValueError(
                f"a tensor cannot have two dims of one name: `{', '.join(twice)}` occurs twice in "
                f"{self}. Rename one of them, as in x.rename(length='memory_length')"
            )
        return self

    @property
    def names(self) -> tuple[str, ...]:
        return _names(self)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(dim.size for dim in self)

    @property
    def volume(self) -> int:
        """The number of elements."""
        return _volume(self)

    def find(self, name: str) -> Dimension | None:
        """Returns the dim called `name`, or None."""
        for dim in self:
            if dim.name == name:
                return dim
        return None

    def get(self, dim: DimLike) -> Dimension:
        """Returns the dim meant by a `Dimension` or a name.

        Raises:
            ValueError: there is none of that name (nearest names shown), or its size differs.
        """
        name = name_of(dim)
        own = self.find(name)
        if own is None:
            raise ValueError(f"no dim `{name}` in {self}{did_you_mean(name, self.names)}")
        if not isinstance(dim, str) and dim.size != own.size:
            raise ValueError(f"dim `{name}` has size {own.size} in {self}, not {dim.size}")
        return own

    def select(self, dims: DimsLike) -> Shape:
        """Returns the dims that are named, in the order of the arguments; errors as in `get`."""
        return Shape(self.get(dim) for dim in as_list(dims))

    def position(self, name: str) -> int:
        """Returns the index of the dim called `name`, which must exist."""
        return self.names.index(name)

    def without(self, names: Iterable[str]) -> Shape:
        """Returns the dims whose names are not among `names`, in order."""
        gone = set(names)
        return Shape(dim for dim in self if dim.name not in gone)

    def __str__(self) -> str:
        return "[" + ", ".join(map(str, self)) + "]"

    __repr__ = __str__

    def _repr_html_(self) -> str | None:
        """Returns the dims for notebooks."""
        return late("value in a notebook")(self)


def dims(**sizes: int) -> tuple[Dimension, ...]:
    """Makes dimensions in keyword order.

    Examples:
        >>> batch, embed = md.dims(batch=8, embed=256)
        >>> print(batch, embed)
        batch=8 embed=256
    """
    return tuple(Dimension(name, size) for name, size in sizes.items())


def unused(name: str, *shapes: Shape) -> str:
    """Returns a name for a dim of an operation's own: like `name`, ending in `_`, in no shape."""
    candidate = f"{name.rstrip('_')}_"
    while any(shape.find(candidate) is not None for shape in shapes):
        candidate += "_"
    return candidate


def name_of(dim: DimLike) -> str:
    """Returns the name of a dim.

    Raises:
        ValueError: it is neither a Dimension nor a name, such as the number of an axis.
    """
    if isinstance(dim, str):
        return dim
    if isinstance(dim, Dimension):
        return dim.name
    if isinstance(dim, tuple | list):
        raise ValueError(_nested(dim))
    hint = "; dims have names, not numbers" if isinstance(dim, int) else ""
    raise ValueError(f"a dim is a Dimension or a name, got {dim!r}{hint}")


def as_list(dims: DimsLike) -> list[DimLike]:
    """Returns one dim or several as a list."""
    if isinstance(dims, str | Dimension):
        return [dims]
    if not isinstance(dims, Iterable):
        raise ValueError(f"a dim is a Dimension or a name, and dims a list of them; got {dims!r}")
    listed = list(dims)
    for each in listed:
        if isinstance(each, tuple | list):
            raise ValueError(_nested(each))
    return listed


def _nested(dims: Sequence) -> str:
    """Returns the message for several dims, or a tuple of one, where a dim is expected."""
    if len(dims) == 1 and isinstance(dims[0], Dimension):
        (dim,) = dims
        return (
            "a tuple of one dim stands where a dim is expected: md.dims returns a tuple, so write "
            f"`{dim.name}, = md.dims({dim})`, with a comma, or md.Dimension({dim.name!r}, "
            f"{dim.size})"
        )
    return f"a list of dims stands where a dim is expected: {dims!r}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns `. Did you mean ...?` for the nearest known names, or an empty string."""
    near = nearest(name, known)
    return f". Did you mean {' or '.join(f'`{n}`' for n in near)}?" if near else ""


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Returns the known names that are most like a name: two, one or none."""
    listed = list(known)
    near = difflib.get_close_matches(name, listed, n=2, cutoff=0.6)
    return near or [other for other in listed if _has_letters_of(name, other)][:2]


def misspelt(one: str, other: str) -> bool:
    """Whether two names are probably one with a slip: `embed` and `emebd`, `head` and `heads`.

    They differ in one word of four letters or more, by the order of its letters, by one letter
    inside or by a plural's s; or by an underscore (`d_ff`, `dff`), or a doubled letter (`d_fff`).
    Numbers, first and last letters and short words differ on purpose: `a1` and `a2`, `row` and
    `rows`, `x_in` and `y_in`.
    """
    pairs = list(zip(one.split("_"), other.split("_"), strict=False))
    if one.count("_") != other.count("_"):
        bare = one.replace("_", ""), other.replace("_", "")
        return (
            bare[0] == bare[1] and len(bare[0]) > 2 and (one[0], one[-1]) == (other[0], other[-1])
        )
    apart = [pair for pair in pairs if pair[0] != pair[1]]
    if len(apart) != 1 or not all(map(str.isalpha, apart[0])):
        return False
    short, long = sorted(apart[0], key=len)
    return _slip(short, long) or _doubled(short, long) or (len(short) > 3 and long == f"{short}s")


def slips(one: Shape, other: Shape) -> list[tuple[Dimension, Dimension]]:
    """Returns the pairs of dims of two shapes whose names differ by a slip.

    Both have one size, and neither name is in the other shape.
    """
    if set(one.names) == set(other.names):
        return []
    return [
        (mine, theirs)
        for mine in one.without(other.names)
        for theirs in other.without(one.names)
        if mine.size == theirs.size and misspelt(mine.name, theirs.name)
    ]


def _doubled(short: str, long: str) -> bool:
    """Whether words differ by a repetition of a letter: `ff` and `fff`."""
    near = [n for n in range(1, len(long)) if long[n] == long[n - 1]]
    return len(short) > 1 and any(long[:n] + long[n + 1 :] == short for n in near)


def _slip(short: str, long: str) -> bool:
    """Whether words differ by the order of their letters, or by one letter inside."""
    if len(short) < 4 or len(long) - len(short) > 1:
        return False
    if sorted(short) == sorted(long):
        return True
    start = next(
        (i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short)
    )
    inside = 0 < start < len(short)
    rest = start + 1 if len(short) == len(long) else start
    return inside and rest < len(short) and short[rest:] == long[start + 1 :]


def _has_letters_of(name: str, other: str) -> bool:
    """Whether names begin alike and have nearly the same letters, in any order: `rwoo`, `row`."""
    letters = difflib.SequenceMatcher(None, sorted(name), sorted(other))
    return name[:1] == other[:1] and min(len(name), len(other)) > 2 and letters.ratio() >= 0.8


# Lowering asks for the names and the volume of a few shapes thousands of times.


@lru_cache(maxsize=1 << 12)
def _names(shape: Shape) -> tuple[str, ...]:
    return tuple(dim.name for dim in shape)


@lru_cache(maxsize=1 << 12)
def _volume(shape: Shape) -> int:
    total = 1
    for dim in shape:
        total *= dim.size
    return total
