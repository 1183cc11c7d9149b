"""Idioms of Python, numpy and JAX: each works, or answers with the way to say it here."""

import copy
import math
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md

X = md.named(np.arange(12, dtype=np.float32).reshape(3, 4), ["row", "column"])
W = md.named(np.ones((4, 5), np.float32), ["column", "depth"])
T = md.named(2.0, [])


def told(function, *arguments, traced):
    """Returns the message of an error, less the user's line, which must be in this file."""
    with pytest.raises((ValueError, TypeError, AttributeError)) as error:
        if traced:
            md.jit(function).trace(*arguments)
        else:
            function(*arguments)
    text, at, line = str(error.value).partition("\n  at ")
    assert at
    assert "test_idioms.py:" in line.replace("operand", "")
    return text


BOTH = [
    (lambda x: x @ W, "`@` does not say which dim is summed over: write md.einsum(x, y, over='col"),
    (lambda x: x.T, "has no `.T`: dims have names, so no product needs it; to reorder them, write"),
    (lambda x: x.T, "write x.transpose(['column', 'row'])"),
    (lambda x: x.swapaxes(0, 1), "has no `.swapaxes`: dims have names"),
    (lambda x: x.reshape(12), "write x.merge(['row', 'column'], 'name'), or x.split('column', ["),
    (lambda x: x.flatten(), "has no `.flatten`: dims have names; write x.merge(["),
    (lambda x: x.at[0].set(1), "has no `.at`: write md.scatter(x, indices, values, 'row') or md.w"),
    (lambda x: x.astype("int32"), "has no `.astype`: write x.cast('float32')"),
    (lambda x: x.ndim, "has no `.ndim`: write len(x.dims)"),
    (lambda x: x.std(), "has no `.std`: write md.std(x, ...)"),
    (lambda x: x.block_until_ready(), "has no `.block_until_ready`: "),
    (lambda x: x.clone(), "has no `.clone`: tensors never change, so x itself will do"),
    (lambda x: x.cuda(), "has no `.cuda`: devices are those of md.jit's mesh"),
    (lambda x: x.device, "has no `.device`: "),
    (lambda x: x.requires_grad, "has no `.requires_grad`: write md.grad(loss)(params)"),
    (len, "has no first dim to count: write x.dims.get('dim').size"),
    (lambda x: 1 in x, "`in` goes through a first dim, which there is not: write md.any(x == val"),
    (lambda x: operator.setitem(x, 0, 1), "tensors never change: write md.scatter(x, indices, va"),
    (lambda x: round(x, 2), "tensors round to whole numbers: write md.round(x * 100) / 100"),
    (lambda x: x[0], "name the dim and what of it: write x['row', 0]"),
    (lambda x: x[1:3], "name the dim and what of it: write x['row', 1:5]"),
    (
        lambda x: x[md.arange(md.Dimension("at", 2)), 0],
        "name the dim and what of it: write x['row', in",
    ),
    (lambda x: x[np.array([0, 1]), 0], "name the dim and what of it: write x['row', indices]"),
    (lambda x: x[[0, 1]], "name the dim and what of it: write x['row', indices]"),
    (lambda x: x.argmax(), "say along which dim: write md.argmax(x, 'dim')"),
    (lambda x: x.argmin(), "say along which dim: write md.argmin(x, 'dim')"),
    (lambda x: x["column"], "name the dim and what of it: write x['column', 1:5]"),
    (lambda x: x[0, 1], "dims have names, not numbers: write x['row', 0]['column', 1]"),
    (lambda x: x[:, 2], "dims have names, not numbers: write x['column', 2]"),
    (lambda x: x[x > 0], "a mask leaves a size that depends on numbers: write md.where(mask, x, 0"),
    (lambda x: x.sum(axis=0), "dims have names, not numbers: write md.sum(x, 'dim'), not axis="),
    (lambda x: x.argmax(axis=0), "write md.argmax(x, 'dim'), not axis="),
    (jnp.sin, "functions of JAX do not take "),
    (jnp.sum, "write md's, as in md.sin(x), md.grad(f), md.jit(f), or "),
    (lambda x: jnp.ones((3, 4)) + x, "functions of JAX do not take "),
    (lambda x: jax.lax.dynamic_slice(x, (0, 0), (1, 2)), "functions of JAX do not take "),
    (lambda x: jax.lax.slice_in_dim(x, 0, 1), "functions of JAX do not take "),
    (lambda x: jax.lax.dynamic_update_slice(x, x, (0, 0)), "functions of JAX do not take "),
    (lambda x: jax.lax.conv(x, x, (1,), "SAME"), "functions of JAX do not take "),
    (lambda x: jax.lax.conv_general_dilated(x, x, (1,), "SAME"), "functions of JAX do not take "),
    (lambda x: jax.lax.batch_matmul(x, x), "functions of JAX do not take "),
    (lambda x: jax.lax.full_like(x, 1), "functions of JAX do not take "),
    (lambda x: jax.grad(lambda y: md.sum(y * y))(x), "functions of JAX do not take "),
]


@pytest.mark.parametrize("traced", [False, True], ids=["named", "traced"])
@pytest.mark.parametrize(("function", "text"), BOTH)
def test_each_is_answered_with_our_way_of_saying_it(function, text, traced):
    assert text in told(function, X, traced=traced)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            lambda t: int(t),
            "the value of f32[] is not known while tracing: compute with tensors, or return it",
        ),
        (float, "the value of f32[] is not known"),
        (complex, "the value of f32[] is not known"),
        (lambda t: range(t), "the value of f32[] is not known"),
        (math.sqrt, "the value of f32[] is not known"),
        (np.asarray, "the numbers of f32[] are not known while tracing"),
        (lambda t: t.item(), "has no `.item`: return the tensor from the traced function, then"),
        (lambda t: t.data, "has no `.data`: return the tensor from the traced function"),
        (lambda t: f"{t:.2f}", "read the result, or md.print(x)"),
        (np.sum, "np.sum does not know traced tensors: see md's operations"),
        (np.shape, "np.shape does not know traced tensors: see md's operations"),
        (lambda t: jax.lax.reshape(t, (1,)), "functions of JAX do not take the traced tensor f32"),
        (lambda t: jax.lax.transpose(t, ()), "functions of JAX do not take the traced tensor f32"),
        (lambda t: jax.lax.top_k(t, 1), "functions of JAX do not take the traced tensor f32"),
        (lambda t: np.ones(3) @ t, "`@` does not say which dim is summed over"),
        (lambda t: np.add.reduce(t), "np.add does not know traced tensors"),
        (jax.jit(lambda t: t), "functions of JAX do not take the traced tensor f32[]"),
        (jax.vmap(lambda t: t), "functions of JAX do not take the traced tensor f32[]"),
    ],
)
def test_a_traced_tensor_has_no_numbers(function, text):
    assert text in told(function, T, traced=True)


def test_pmap_takes_no_tensors():
    def function(x):
        return jax.pmap(lambda row: row * 2)(x)

    with pytest.raises(ValueError, match="functions of JAX do not take tensors with named dims"):
        md.jit(function).trace(X)


def test_an_error_of_ones_own_stays():
    def function(x):
        return int(x.dims[0]) + x

    with pytest.raises(TypeError, match="not 'Dimension'"):
        md.jit(function).trace(X)


def test_a_number_can_be_read_from_an_array():
    assert (int(T), float(T), complex(T), bool(T), T.item(), f"{T:.2f}") == (
        2,
        2,
        2,
        True,
        2,
        "2.00",
    )
    assert math.sqrt(T * 2) == 2
    assert round(T).dims == ()
    trees = jax.tree.map(jnp.asarray, [X], is_leaf=lambda x: isinstance(x, md.Tensor))
    for array in (jnp.asarray(X), jnp.array(X), *trees):
        assert np.asarray(array).tolist() == np.asarray(X).tolist()


def test_ufuncs_of_numpy_are_operations_on_traced_tensors():
    def model(x):
        return np.sin(x) + np.abs(np.negative(x)), np.add(x, x), np.float32(2) * x

    found, doubled, twice = md.jit(model)(X)
    np.testing.assert_allclose(found, np.sin(X) + np.abs(X), rtol=1e-6)
    np.testing.assert_array_equal(doubled, twice)
    assert np.sin(X).shape == (3, 4)
    text = "add: ndarray is not an operand; use a tensor, a Python number, or md.named("
    assert text in told(lambda x: np.ones((3, 4)) + x, X, traced=True)


def test_a_name_that_nothing_has_is_an_attribute_error():
    for x in (X, md.spec([], "float32")):
        assert not hasattr(x, "T")
        assert not hasattr(x, "__cuda_array_interface__")
    with pytest.raises(AttributeError, match=r"no attribute 'renam'. Did you mean `rename`"):
        X.renam  # noqa: B018
    for other in (pickle.loads(pickle.dumps(X)), copy.deepcopy(X), copy.copy(X)):
        np.testing.assert_array_equal(other, X)


@pytest.mark.long
def test_compiled_functions_are_part_of_what_jax_traces():
    square = md.jit(lambda x: md.sum(x * x), mesh="data:2", layout="row:data")  # with pads
    norm = md.jit(lambda x: {"norm": md.sum(x * x)})
    for function in (square, lambda x: norm(x)["norm"]):
        for _ in range(2):
            assert float(jax.jit(function)(X)) == 506
            slope = jax.grad(lambda x, f=function: f(x).data)(X)
            np.testing.assert_array_equal(slope, 2 * np.asarray(X))
            assert float(function(X)) == 506
    with pytest.raises(ValueError, match="for backend 'numpy', which cannot run inside"):
        jax.jit(md.jit(md.sum, backend="numpy"))(X)


def test_vmap_hides_a_dim():
    for function in (lambda x: x * 2, md.jit(lambda x: x * 2)):
        with pytest.raises(ValueError, match=r"have shape \(4,\) here: jax.vmap hides a dim"):
            jax.vmap(function)(X)
    rows = jax.vmap(lambda row: (md.named(row, ["column"]) * 2).data)(X.data)
    np.testing.assert_array_equal(rows, 2 * np.asarray(X))
    inside = jax.vmap(lambda row: md.named(row, ["column"]) * 2)(X.data)
    with pytest.raises(ValueError, match=r"have shape \(3, 4\) here: jax.vmap hides a dim"):
        inside + 1


@pytest.mark.parametrize(
    "function", [jax.nn.relu, jax.lax.sin, lambda t: jax.lax.add(t, t)], ids=["relu", "sin", "add"]
)
def test_primitives_of_jax_are_answered_too(function):
    def model(x):
        return function(x)  # the line that is shown

    for run in (md.jit(model), md.grad(model), model):
        with pytest.raises(ValueError) as error:
            run(X)
        text, _, line = str(error.value).partition("\n  at ")
        assert text.startswith("functions of JAX do not take ")
        assert "named dims" in text or "whose dims have names" in text
        assert "write md's, as in md.sin(x)" in text
        assert "test_idioms.py:" in line
        assert "jax.lax.add(t, t)" in line or line.endswith("# the line that is shown")
    with pytest.raises(TypeError, match="no such"):
        md.jit(lambda x: fails("no such"))(X)


@pytest.mark.parametrize(
    "function",
    [
        lambda t: jax.lax.exp(t),
        lambda t: jax.lax.mul(jnp.ones((3, 4)), t),
        lambda t: jax.lax.reduce_sum(t, (0,)),
        lambda t: jax.lax.reshape(t, (12,)),
        lambda t: jax.lax.transpose(t, (1, 0)),
        lambda t: jax.lax.convert_element_type(t, jnp.int32),
        lambda t: jax.lax.select(t, t, t),
        lambda t: jax.lax.top_k(t, 2),
        lambda t: jax.lax.sort(t),
        lambda t: jax.lax.cumsum(t),
        lambda t: jax.lax.concatenate([t, t], 0),
        lambda t: jax.lax.dot(t, np.ones((4, 5), np.float32)),
        lambda t: jax.lax.full_like(t, 1),
        lambda t: jnp.zeros_like(t, dtype=jnp.int32),
        lambda t: jax.nn.one_hot(t, 4),
        lambda t: jnp.vectorize(jnp.sin)(t),
        lambda t: jax.random.normal(t),
    ],
)
def test_primitives_of_jax_are_answered_outside_of_traced_functions(function):
    text = told(function, X, traced=False)
    assert text == (
        "functions of JAX do not take NamedArray(f32[row=3, column=4]), whose dims have names: "
        "write md's, as in md.sin(x), md.grad(f), md.jit(f), or give its data: x.unpadded()"
    )
    assert str(X).startswith("f32[row=3, column=4] [[")


def fails(text):
    raise TypeError(text)


@pytest.mark.parametrize("value", [np.ones(3), jnp.ones(3), "a", None], ids=lambda v: str(type(v)))
def test_a_result_that_is_no_tensor_is_named(value):
    def model(x):
        return {"sum": md.sum(x), "more": (1, value)}

    if value is None:
        assert md.jit(model)(X)["more"][1] is None
        return
    for run in (md.jit(model), md.jit(lambda x: md.checkpoint(model)(x))):
        with pytest.raises(ValueError) as error:
            run(X)
        kind = type(value).__name__
        assert (
            f"a traced function returns tensors, but result/more/1 is of type {kind}: return a "
            "tensor, a Python number, or md.named(array, dims)"
        ) in str(error.value)
        assert "  in the function of tests/tensors/test_idioms.py:" in str(error.value)


@pytest.mark.parametrize("traced", [False, True], ids=["named", "traced"])
def test_tangents_are_given_in_tuples(traced):
    for function in (
        lambda x: md.jvp(md.sin, x, x),
        lambda x: md.jvp(md.sin, (x,), x),
        lambda x: md.hessian_vector_product(md.sum, x, x),
    ):
        text = told(function, X, traced=traced)
        assert "give tuples, with one item per argument: md." in text


def test_as_jax_names_a_keyword_that_it_does_not_take():
    def double(x):
        return x * 2

    with pytest.raises(TypeError) as error:
        md.jit(double).as_jax(X)(x=X.data)
    assert str(error.value) == (
        "double.as_jax got an unexpected keyword `x`: it takes arrays by position, the leaves in "
        "order: x"
    )


def test_where_takes_a_plain_condition():
    for condition in (True, np.bool_(True), md.named(True, [])):
        for run in (lambda f: f(X), lambda f: md.jit(f)(X)):
            found = run(lambda x, c=condition: md.where(c, x, 0.0))
            np.testing.assert_array_equal(found, X)
    assert "where: the condition must be bool, got s32" in told(
        lambda x: md.where(1, x, 0.0), X, traced=False
    ).replace("\n", " ")
