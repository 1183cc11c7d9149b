"""Flops of linear algebra and Fourier transforms, counted by hand."""

import pytest

import meshdsl as md

batch, i, j, side = md.dims(batch=4, i=8, j=8, side=3)
X = md.spec([batch, i, j])


def flops(function, *args, **where):
    return md.jit(function, **where).lower(*args).flops


@pytest.mark.parametrize(
    "function, each",
    [
        (lambda x: md.linalg.cholesky(x, "i", "j"), 8**3 / 3),
        (lambda x: md.linalg.slogdet(x, "i", "j"), 2 * 8**3 / 3),
        (lambda x: md.linalg.qr(x, "i", "j", "k"), 8 / 3 * 8**3),
        (lambda x: md.linalg.eigh(x, "i", "j", "k"), 9 * 8**3),
        (lambda x: md.linalg.svd(x, "i", "j", "k"), 22 * 8**3),
        (lambda x: md.fft.rfft(x, "i"), 2.5 * 64 * 3),
        (lambda x: md.fft.ifft(md.cast(x, "complex64"), "i"), 5 * 64 * 3),
    ],
)
def test_each_matrix_counts_its_leading_term(function, each):
    assert flops(function, X) == int(4 * each)
    on_mesh = flops(function, X, mesh="data:2", layout="batch:data")
    assert on_mesh == int(2 * each)


def test_right_sides_count_by_themselves():
    b = md.spec([batch, i, side])
    found = flops(lambda x, b: md.linalg.solve(x, b, "i", "j"), X, b)
    assert found == int(4 * 2 * 8**3 / 3 + 2 * 64 * 4 * 3)
    found = flops(lambda x, b: md.linalg.triangular_solve(x, b, "i", "j"), X, b)
    assert found == 64 * 4 * 3


def test_complex_numbers_count_four_times():
    x, b = md.spec([i, j], "complex64"), md.spec([i, side], "complex64")
    found = flops(lambda x, b: md.linalg.triangular_solve(x, b, "i", "j"), x, b)
    assert found == 4 * 64 * 3
