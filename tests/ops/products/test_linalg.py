"""Linear algebra: values are numpy's, two derivatives are JAX's, on any layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl import linalg
from tests.ops.agreement import assert_agree, assert_close, message, random, run

batch, i, j, side = md.dims(batch=3, i=4, j=4, side=2)
LAYOUTS = ["batch:data; i:model", "i:data; j:model", "j:data+model", "batch:model+data"]


def positive(dims=(batch, i, j), seed=0):
    x = random(dims, seed=seed).data
    return md.named(x @ np.swapaxes(x, -1, -2) + 2 * np.eye(x.shape[-1]), list(dims))


def regular(dims=(batch, i, j), seed=0):
    x = random(dims, seed=seed)
    return md.named(x.data + 3 * np.eye(x.data.shape[-1]), list(dims))


def numbered(dims, seed=0):
    return md.named(random(dims, seed=seed).data, list(dims))


def lower(x, i="i", j="j"):
    return linalg.cholesky(x, i, j)


SQUARE = {
    "cholesky": (lower, jnp.linalg.cholesky, positive),
    "inverse": (
        lambda x: linalg.inverse(x, "i", "j").transpose(["batch", "j", "i"]),
        jnp.linalg.inv,
        regular,
    ),
    "log_determinant": (
        lambda x: linalg.slogdet(x, "i", "j")[1],
        lambda x: jnp.linalg.slogdet(x)[1],
        regular,
    ),
    "determinant": (lambda x: linalg.determinant(x, "i", "j"), jnp.linalg.det, regular),
    "eigenvalues": (
        lambda x: linalg.eigh(x, "i", "j", "k")[0],
        lambda x: jnp.linalg.eigh(x)[0],
        positive,
    ),
    "singular values": (
        lambda x: linalg.svd(x, "i", "j", "k")[1],
        lambda x: jnp.linalg.svd(x, full_matrices=False)[1],
        regular,
    ),
    "diagonal": (
        lambda x: linalg.diagonal(x, "i", "j"),
        lambda x: jnp.diagonal(x, axis1=1, axis2=2),
        regular,
    ),
    "trace": (
        lambda x: linalg.trace(x, "i", "j"),
        lambda x: jnp.trace(x, axis1=1, axis2=2),
        regular,
    ),
    "upper triangle": (
        lambda x: linalg.triangle(x, "i", "j", lower=False),
        jnp.triu,
        regular,
    ),
    "strict lower triangle": (
        lambda x: linalg.triangle(x, "i", "j", strict=True),
        lambda x: jnp.tril(x, -1),
        regular,
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SQUARE)
def test_functions_of_square_matrices_with_two_derivatives(name):
    ours, theirs, made = SQUARE[name]
    assert_agree(ours, theirs, made(), order=2)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["cholesky", "inverse", "determinant", "eigenvalues"])
def test_on_a_mesh(name, layout):
    ours, theirs, made = SQUARE[name]
    x = made()

    def model(x):
        value, slope = md.value_and_grad(lambda x: md.sum(md.sin(ours(x))))(x)
        return ours(x), value, slope

    expected = theirs(x.data)
    slope = jax.grad(lambda x: jnp.sin(theirs(x)).sum())(x.data)
    for backend in ("numpy", "jax"):
        found = run(model, x, mesh="data:2,model:2", layout=layout, backend=backend)
        assert_close(found[0], expected)
        assert_close(found[1], np.sin(expected).sum())
        assert_close(found[2], slope)


SOLVERS = {
    "solve": (lambda a, b: linalg.solve(a, b, "i", "j"), jnp.linalg.solve),
    "lower": (
        lambda a, b: linalg.triangular_solve(a, b, "i", "j"),
        functools.partial(jax.scipy.linalg.solve_triangular, lower=True),
    ),
    "upper": (
        lambda a, b: linalg.triangular_solve(a, b, "i", "j", lower=False),
        functools.partial(jax.scipy.linalg.solve_triangular, lower=False),
    ),
    "unit": (
        lambda a, b: linalg.triangular_solve(a, b, "i", "j", unit_diagonal=True),
        functools.partial(jax.scipy.linalg.solve_triangular, lower=True, unit_diagonal=True),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_with_two_derivatives(name):
    ours, theirs = SOLVERS[name]
    a, b = regular(), random([batch, i, side], seed=1)
    assert_agree(ours, jax.vmap(theirs), a, b, order=2)


@pytest.mark.long
@pytest.mark.parametrize("layout", [*LAYOUTS, "side:data; i:model"])
@pytest.mark.parametrize("name", ["solve", "lower"])
def test_solvers_on_a_mesh(name, layout):
    ours, theirs = SOLVERS[name]
    a, b = regular(), random([batch, i, side], seed=1)

    def loss(a, b):
        return md.sum(md.sin(ours(a, b)))

    def reference(a, b):
        return jnp.sin(jax.vmap(theirs)(a, b)).sum()

    expected = jax.grad(reference, (0, 1))(a.data, b.data)
    for backend in ("numpy", "jax"):
        arguments = {"mesh": "data:2,model:2", "layout": layout, "backend": backend}
        assert_close(run(ours, a, b, **arguments), jax.vmap(theirs)(a.data, b.data))
        for mine, other in zip(
            run(md.grad(loss, (0, 1)), a, b, **arguments), expected, strict=True
        ):
            assert_close(mine, other)


def test_batches_and_right_sides_are_told_apart_by_name():
    a, b = regular([i, j]), random([side, i, batch])
    x = run(lambda a, b: linalg.solve(a, b, "i", "j"), a, b)
    assert x.dims.names == ("side", "j", "batch")
    assert_close(np.einsum("ij,sjb->sib", a.data, x.data), b.data)
    many, one = regular(), random([i])
    x = run(lambda a, b: linalg.solve(a, b, "i", "j"), many, one)
    assert_close(np.einsum("bij,bj->bi", many.data, x.data), np.broadcast_to(one.data, (3, 4)))
    gradient = run(md.grad(lambda b, a: md.sum(linalg.solve(a, b, "i", "j"))), one, many)
    assert_close(gradient, np.linalg.inv(many.data).sum((0, 1)))


def test_a_cholesky_factor_solves():
    a, b = positive(), random([batch, i, side], seed=1)
    found = run(lambda a, b: linalg.cholesky_solve(lower(a), b, "i", "j"), a, b)
    assert_close(found, np.linalg.solve(a.data, b.data))


FACTORS = {
    "tall": md.dims(batch=2, i=5, j=3),
    "square": md.dims(batch=2, i=4, j=4),
    "wide": md.dims(batch=2, i=3, j=5),
}


@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.parametrize("shape", FACTORS)
def test_qr_multiplies_back_and_is_unique(shape, backend):
    x = numbered(FACTORS[shape])

    def model(x):
        q, r = linalg.qr(x, "i", "j", "k")
        return q, r, md.einsum(q, r, over="k")

    for layout in ("batch:data; i:model", "i:data; j:model"):
        arguments = {"mesh": "data:2,model:2", "layout": layout, "backend": backend}
        q, r, product = run(model, x, **arguments)
        assert_close(product, x.data)
        assert_close(
            np.einsum("bik,bil->bkl", q, q),
            np.broadcast_to(np.eye(q.data.shape[2]), (2, *q.data.shape[2:] * 2)),
        )
        assert_close(np.tril(r.data, -1), 0 * r.data)
        assert (np.diagonal(r.data, axis1=1, axis2=2) >= 0).all()


@pytest.mark.long
@pytest.mark.parametrize("shape", ["tall", "square"])
def test_the_gradient_of_qr(shape):
    x = numbered(FACTORS[shape])

    def signed(x):
        q, r = jnp.linalg.qr(x)
        sign = jnp.sign(jnp.diagonal(r, axis1=1, axis2=2))
        return q * sign[:, None], r * sign[:, :, None]

    assert_agree(lambda x: linalg.qr(x, "i", "j", "k")[0], lambda x: signed(x)[0], x, order=2)
    assert_agree(lambda x: linalg.qr(x, "i", "j", "k")[1], lambda x: signed(x)[1], x, order=2)


def test_eigenvectors_and_their_gradient():
    x = positive()

    def expected(x):
        w, v = jnp.linalg.eigh(x)
        at = jnp.argmax(jnp.abs(v), axis=-2, keepdims=True)
        return w, v * jnp.sign(jnp.take_along_axis(v, at, axis=-2))

    assert_agree(lambda x: linalg.eigh(x, "i", "j", "k")[1], lambda x: expected(x)[1], x, order=2)
    for backend in ("numpy", "jax"):
        w, v = run(lambda x: linalg.eigh(x, "i", "j", "k"), x, backend=backend)
        assert_close(np.einsum("bik,bk,bjk->bij", v, w, v), x.data)


@pytest.mark.long
@pytest.mark.parametrize("shape", FACTORS)
def test_svd_multiplies_back_and_its_gradient(shape):
    x = numbered(FACTORS[shape])

    def model(x):
        return md.einsum(*linalg.svd(x, "i", "j", "k"), out=x.dims)

    for backend in ("numpy", "jax"):
        assert_close(run(model, x, backend=backend), x.data)

    def signed(x):
        u, s, v = jnp.linalg.svd(x, full_matrices=False)
        at = jnp.argmax(jnp.abs(u), axis=-2, keepdims=True)
        sign = jnp.sign(jnp.take_along_axis(u, at, axis=-2))
        return u * sign, s, v * jnp.swapaxes(sign, -1, -2)

    for part in range(3):
        assert_agree(
            lambda x, part=part: linalg.svd(x, "i", "j", "k")[part],
            lambda x, part=part: signed(x)[part],
            x,
            tolerance=1e-9,
        )


def test_complex_systems_and_their_cotangents():
    a = md.named(regular([i, j]).data + 1j * random([i, j], seed=2).data, [i, j])
    b = md.named(random([i, side], seed=3).data + 1j * random([i, side], seed=4).data, [i, side])

    def loss(a, b):
        return md.sum(md.abs(linalg.solve(a, b, "i", "j")))

    def reference(a, b):
        return jnp.abs(jnp.linalg.solve(a, b)).sum()

    for backend in ("numpy", "jax"):
        found = run(md.grad(loss, (0, 1)), a, b, backend=backend)
        expected = jax.grad(reference, (0, 1))(a.data, b.data)
        for mine, other in zip(found, expected, strict=True):
            assert_close(mine.data.real, other.real)
            assert_close(mine.data.imag, other.imag)


def test_what_has_no_answer_is_not_a_number():
    x = md.named(np.array([[[1.0, 2], [2, 1]], [[4, 0], [0, 9]]]), ["b", "i", "j"])
    for backend in ("numpy", "jax"):
        low = np.asarray(run(lower, x, backend=backend))
        assert np.isnan(low[0][np.tril_indices(2)]).all()
        assert_close(low[1], [[2, 0], [0, 3]])
        zero = md.named(np.zeros((2, 2)), ["i", "j"])
        sign, log = run(lambda x: linalg.slogdet(x, "i", "j"), zero, backend=backend)
        assert float(sign) == 0 and float(log) == -np.inf
        solved = run(lambda a: linalg.inverse(a, "i", "j"), zero, backend=backend)
        assert not np.isfinite(solved).any()


@pytest.mark.parametrize("name", ["cholesky", "inverse", "eigenvalues", "singular values"])
def test_single_precision_is_rounding_away(name):
    ours, _, made = SQUARE[name]
    x = made()
    expected = run(ours, x)
    single = md.named(x.data.astype(np.float32), list(x.dims))
    for backend in ("numpy", "jax"):
        found = run(ours, single, backend=backend)
        assert found.dtype == np.float32
        assert_close(np.asarray(found, float), expected.data, 1e-5)


def test_small_matrices():
    found = run(lambda: [linalg.identity(i, j), linalg.identity(i, side, "int32")])
    assert np.array_equal(found[0], np.eye(4)) and np.array_equal(found[1], np.eye(4, 2))
    x = random([batch, i])
    found = run(lambda x: linalg.with_diagonal(x, "i", j), x)
    assert np.array_equal(found.data, np.stack([np.diag(row) for row in x.data]))


def test_mistakes_are_told():
    x, wide = random([batch, i, j]), random([i, side])
    b = random([batch, i])
    cases = [
        (lambda: linalg.cholesky(x, "i", "i"), "cholesky: rows and columns are one dim, `i`; a"),
        (lambda: linalg.diagonal(x, "i", "i"), "diagonal: rows and columns are one dim, `i`; a"),
        (lambda: linalg.trace(x, "i", "i"), "diagonal: rows and columns are one dim, `i`; a"),
        (lambda: linalg.triangle(x, "i", "i"), "triangle: rows and columns are one dim, `i`; a"),
        (lambda: linalg.cholesky(wide, "i", "side"), "needs a square matrix, got i=4 rows and si"),
        (lambda: linalg.qr(x, "i", "jj", "k"), "qr: no dim `jj` in [batch=3, i=4, j=4]. Did you"),
        (lambda: linalg.qr(x, "i", "j", "batch"), "`batch` is a dim of f64[batch=3, i=4, j=4] al"),
        (
            lambda: linalg.eigh(x, "i", "j", md.Dimension("k", 3)),
            "eigh: the inner dim of the factors has size 4, but k=3 is to name it",
        ),
        (lambda: linalg.solve(x, random([j]), "i", "j"), "solve: no dim `i` in [j=4]"),
        (lambda: linalg.solve(x, random([i, j]), "i", "j"), "the right side has the dim `j`, whi"),
        (
            lambda: linalg.solve(x, md.named(b.data.astype("float32"), b.dims), "i", "j"),
            "solve: dtypes differ: f64 and f32; cast one of them",
        ),
        (
            lambda: linalg.cholesky(md.cast(x, "bfloat16"), "i", "j"),
            "cholesky: needs float32 or float64, got bf16; cast first",
        ),
    ]
    for function, text in cases:
        assert text in message(function)
    text = message(md.grad(lambda x: md.sum(linalg.qr(x, "side", "i", "k")[1])), wide)
    assert (
        "qr has a gradient only for matrices with at least as many rows as columns, not fo" in text
    )
