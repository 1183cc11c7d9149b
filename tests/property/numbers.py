"""Random elementwise mathematics beyond the basics: special functions, bits, complex numbers."""

from __future__ import annotations

from collections.abc import Callable

import meshdsl as md
from meshdsl.tensors.tensor import Tensor
from tests.property.author import VOLUME, Author, meet, together


def special(author: Author) -> None:
    x = author.operand()
    unit, above = 0.8 * md.tanh(x), md.square(md.tanh(x)) + 0.6
    functions: list[tuple[Callable[[], Tensor], float]] = [
        (lambda: md.lgamma(above), 1.0),
        (lambda: md.digamma(above), 3.0),
        (lambda: md.erf_inv(unit), 1.0),
        (lambda: md.erfc(x), 2.0),
        (lambda: md.bessel_i0e(x), 1.0),
        (lambda: md.xlogy(unit, above), 1.0),
        (lambda: md.logit(0.4 * unit + 0.5), 3.0),
        (lambda: md.tan(unit), 2.0),
        (lambda: md.asin(unit) + md.acos(0.9 * unit), 4.0),
        (lambda: md.atan(x) - md.asinh(unit), 3.0),
        (lambda: md.sinh(unit) + md.cosh(unit), 4.0),
        (lambda: md.atanh(unit), 2.0),
        (lambda: md.acosh(above + 1.2), 2.0),
        (lambda: md.atan2(unit, above), 2.0),
        (lambda: md.exp2(unit) + md.log2(above), 3.0),
        (lambda: md.elu(x + author.amount()), author.bounds[x] + 1),
        (lambda: md.leaky_relu(x + author.amount()), author.bounds[x] + 1),
        (lambda: md.mish(x), author.bounds[x] + 1),
        (lambda: md.log_sigmoid(x), author.bounds[x] + 1),
        (lambda: md.gelu(x, approximate=False), author.bounds[x] + 1),
    ]
    function, bound = author.one(functions)
    author.keep(function(), bound)


def bits(author: Author) -> None:
    if not author.integers:
        return
    x, y = author.one(author.integers), author.one(author.integers)
    if together([x, y]).volume > VOLUME or max(author.bounds[x], author.bounds[y]) > 1e6:
        return
    kind = author.one(["and", "or", "xor", "not", "left", "right", "count", "floor", "mod"])
    bound = 2 * max(author.bounds[x], author.bounds[y]) + 2
    pairs: dict[str, Callable[[], Tensor]] = {
        "and": lambda: meet(md.bit_and, x, y),
        "or": lambda: meet(md.bit_or, x, y),
        "xor": lambda: meet(md.bit_xor, x, y),
        "not": lambda: md.bit_not(x),
        "left": lambda: md.shift_left(x, 1),
        "right": lambda: md.shift_right(x, 1),
        "count": lambda: md.population_count(x),
        "floor": lambda: x // 3,
        "mod": lambda: x % 4,
    }
    author.keep(pairs[kind](), max(bound, 64))


def complex_numbers(author: Author) -> None:
    found = author.operands(2)
    if found is None:
        return
    x, y = found
    z = meet(md.complex, x, y)
    over = author.subset(z.shape.names)
    if over and author.rng.random() < 0.5:
        z = md.sum(z * meet(md.complex, md.cos(x), 0.5 * md.sin(y)), over)
    elif author.rng.random() < 0.5:
        z = md.conj(z) * md.exp(meet(md.complex, 0 * x, md.tanh(y)))
    part = author.one([md.real, md.imag])
    bound = (author.bounds[x] + author.bounds[y]) * 4 * (z.shape.volume and 1)
    author.keep(md.tanh(0.1 * part(z)), bound)


def linalg(author: Author) -> None:
    found = author.along()
    if found is None or found[1].size > 6:
        return
    x, row = found
    column = f"{row.name}_col"
    if len(column) > 12 or x.shape.find(column) is not None:
        return
    if x.shape.volume * row.size > VOLUME:
        return
    low = md.sin(x)
    square = md.outer(md.multiply, low, md.rename(low, {row.name: column}))
    matrix = square + 2.0 * md.linalg.identity(row, md.Dimension(column, row.size), x.dtype)
    kind = author.one(["solve", "cholesky", "slogdet", "inverse", "eigenvalues"])
    if kind == "solve":
        author.keep(md.linalg.solve(matrix, md.cos(x), row.name, column), 2.0)
    elif kind == "cholesky":
        author.keep(md.linalg.cholesky(matrix, row.name, column), 3.0)
    elif kind == "slogdet":
        author.keep(md.linalg.slogdet(matrix, row.name, column)[1], 12.0)
    elif kind == "inverse":
        author.keep(md.linalg.inverse(matrix, row.name, column), 2.0)
    else:
        steps = 1.0 + md.cast(md.arange(row), "float64")
        spread = matrix + md.linalg.with_diagonal(steps, row.name, md.Dimension(column, row.size))
        values = md.linalg.eigh(spread, row.name, column, author.resized(row.name))[0]
        author.keep(values, 12.0)


def waves(author: Author) -> None:
    found = author.along()
    if found is None or found[1].size < 2:
        return
    x, dim = found
    kind = author.one(["power", "back", "complex"])
    if kind == "complex":
        z = md.fft.fft(x, dim.name)
        author.keep(md.tanh(0.1 * (md.real(z) - md.imag(z))), 1.0)
        return
    z = md.fft.rfft(x, dim.name)
    if kind == "power":
        name = author.resized(dim.name)
        power = md.square(md.real(z)) + md.square(md.imag(z))
        author.keep(md.log1p(power).rename({dim.name: name}), 20.0)
    else:
        y = md.fft.irfft(z, dim.name, dim)
        author.keep(y, author.bounds[x] * dim.size)


OPERATIONS = {special: 1.5, bits: 0.6, complex_numbers: 0.4, linalg: 0.6, waves: 0.5}
