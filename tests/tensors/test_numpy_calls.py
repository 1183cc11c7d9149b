"""Numpy's functions on NamedArrays pair elements by name, or answer; never by position."""

import io

import numpy as np
import pytest

import meshdsl as md

A = np.arange(9, dtype=np.float32).reshape(3, 3)
X = md.named(A, ["r", "c"])
Y = md.named(np.array(A[::-1]), ["c", "r"])
B = np.asarray(Y).T  # Y in X's order


def told(function):
    """Returns the message of an error, which must name a line of this file."""
    with pytest.raises(ValueError) as error:
        function()
    text, at, line = str(error.value).rpartition("\n  at ")
    assert at
    assert "test_numpy_calls.py:" in line
    return text


@pytest.mark.parametrize(
    "ufunc",
    [np.maximum, np.add, np.subtract, np.arctan2, np.less, np.true_divide, np.not_equal],
    ids=lambda ufunc: ufunc.__name__,
)
def test_a_ufunc_of_unlike_dims_goes_by_name(ufunc):
    if ufunc is np.arctan2:
        assert "np.arctan2 does not know arrays whose dims differ" in told(lambda: ufunc(X, Y))
        return
    found = ufunc(X, Y + 1)
    assert isinstance(found, md.NamedArray)
    assert found.dims == X.dims
    np.testing.assert_allclose(found, ufunc(A, B + 1), rtol=1e-6)
    traced = md.jit(ufunc)(X, Y + 1)
    np.testing.assert_array_equal(found, traced)


def test_a_ufunc_of_a_row_pairs_it_by_name():
    row = md.named(np.array([0, 3, 6], np.float32), ["r"])
    np.testing.assert_array_equal(np.add(X, row), A + np.asarray(row)[:, None])


def test_what_has_no_meaning_by_name_is_refused():
    assert "np.heaviside does not know arrays whose dims differ" in told(lambda: np.heaviside(X, Y))
    assert "np.add does not know arrays whose" in told(lambda: np.add.outer(X, Y))
    assert "np.add does not know arrays whose" in told(lambda: np.add(X, Y, out=np.zeros((3, 3))))
    assert "does not say which dim is summed over" in told(lambda: np.matmul(X, Y))
    assert "tensors never change" in told(lambda: np.add(A, A, out=X))
    assert "tensors never change" in told(lambda: np.add(X, X, out=X))


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (lambda: np.dot(X, Y), "np.dot pairs elements by position, but the dims are [r=3, c=3] "),
        (lambda: np.dot(X, Y), "md.einsum(x, y, over='dim')"),
        (lambda: np.where(X > 3, X, Y), "write md.where(mask, x, y)"),
        (lambda: np.allclose(X, Y), "give the arrays one order of dims first, as in y.transpose("),
        (lambda: np.array_equal(X, Y), "where positions are meant, np.asarray(x)"),
        (lambda: np.concatenate([X, Y]), "write md.concat([x, y], 'dim')"),
        (lambda: np.clip(A, X, Y), "write md.clip(x, low, high)"),
    ],
)
def test_other_functions_of_unlike_dims_are_refused(function, advice):
    assert advice in told(function)


def test_functions_of_one_array_or_of_like_dims_are_those_of_numpy():
    assert type(np.sin(X)) is np.ndarray
    assert type(np.maximum(X, X)) is np.ndarray
    assert type(np.maximum(X, 3)) is np.ndarray
    assert type(np.maximum(A, X)) is np.ndarray
    np.testing.assert_array_equal(np.add.reduce(X), A.sum(0))
    np.testing.assert_array_equal(np.matmul(X, X), A @ A)
    np.testing.assert_array_equal(np.where(X > 3, X, X), A)
    np.testing.assert_array_equal(np.concatenate([X, X], axis=1), np.concatenate([A, A], 1))
    assert np.allclose(X, A)
    assert np.mean(X, axis=0).tolist() == A.mean(0).tolist()
    out = np.zeros_like(A)
    np.maximum(X, 1, out=out)
    np.testing.assert_array_equal(out, np.maximum(A, 1))


@pytest.mark.long
def test_operators_with_an_array_of_numpy_stay_ours():
    for function in (lambda: A + X, lambda: A == X, lambda: A < X):
        assert "ndarray is not an operand" in str(told_of(function))
    assert "`@` does not say" in told(lambda: A @ X)
    array = A.copy()

    def added(array=array):
        array += X

    assert "ndarray is not an operand" in str(told_of(added))
    assert isinstance(np.float32(2) * X, md.NamedArray)
    assert isinstance(np.float32(2) < X, md.NamedArray)


def told_of(function):
    with pytest.raises(ValueError) as error:
        function()
    return error.value


def test_functions_that_take_each_array_by_itself_take_unlike_ones():
    file = io.BytesIO()
    np.savez(file, x=X, y=Y)
    file.seek(0)
    np.testing.assert_array_equal(np.load(file)["y"], Y)
    assert np.result_type(X, Y) == np.float32
    np.testing.assert_array_equal(np.einsum("ij,ji->ij", X, Y), A * B)


def test_what_is_traced_goes_by_name_whichever_comes_first():
    def model(y):
        return np.maximum(X, y), np.maximum(y, X)

    for found in md.jit(model)(Y):
        np.testing.assert_array_equal(md.transpose(found, ["r", "c"]), np.maximum(A, B))
    with pytest.raises(ValueError, match=r"np\.where does not know traced tensors"):
        md.jit(lambda y: np.where(X > 3, X, y))(Y)


def test_arrays_on_a_mesh_go_by_name_too():
    split = md.place(X, "data:3", "r:data")
    found = np.maximum(split, Y)
    assert found.layout == split.layout
    np.testing.assert_array_equal(found, np.maximum(A, B))
