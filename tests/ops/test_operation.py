"""How mistakes in operations are told, and how functions compose."""

import copy
import pickle
import traceback

import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md

a, b = md.dims(a=2, b=3)


def test_an_error_in_a_scan_body_of_the_user_keeps_its_own_message():
    def body(carry, _):
        return int("seven"), None

    with pytest.raises(ValueError, match="invalid literal") as error:
        md.jit(lambda x: md.scan(body, x, None, dim=a)[0]).trace(md.spec([b]))
    assert "scan" not in str(error.value)


def test_a_jitted_function_is_an_ordinary_one_inside_another():
    double = md.jit(lambda x: x * 2)
    x = md.named(np.ones(3, "f4"), [b])
    np.testing.assert_array_equal(md.jit(lambda x: double(x) + 1)(x), [3, 3, 3])


def test_several_results_without_has_aux_have_no_gradient():
    with pytest.raises(ValueError, match=r"return \(value, aux\) and pass has_aux=True"):
        md.jit(md.value_and_grad(lambda x: (md.sum(x), md.sum(x * x)))).trace(md.spec([b]))


def test_checkpoint_leaves_flags_and_numbers_to_the_function():
    @md.checkpoint
    def function(x, count, *, twice):
        return x * count * (2 if twice else 1)

    x = md.named(np.ones(3, "f4"), [b])
    np.testing.assert_array_equal(md.jit(lambda x: function(x, 3, twice=True))(x), [6, 6, 6])


def test_dims_may_be_given_where_names_are():
    def function(x):
        return x.rename(a=md.Dimension("c", 2)).merge(["c", b], md.Dimension("d", 6))

    assert md.jit(function).trace(md.spec([a, b])).outputs[0].shape.names == ("d",)
    with pytest.raises(ValueError, match="dim `a` has size 2, but c=5 is to name it"):
        md.jit(lambda x: x.rename(a=md.Dimension("c", 5))).trace(md.spec([a, b]))


ARRAY = np.ones((2, 3), "f4")
NAMED = md.named(ARRAY, [a, b])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: md.einsum(ARRAY, NAMED, over="b"), "einsum: `tensors` takes tensors, not ndarray"),
        (lambda: md.einsum([NAMED, NAMED], over="b"), "einsum: `tensors` takes tensors, not list"),
        (lambda: md.einsum(NAMED, 2.0, over="b"), "einsum: `tensors` takes tensors, not float;"),
        (lambda: md.take(ARRAY, NAMED, "a"), "take: `table` takes tensors, not ndarray"),
        (lambda: md.softmax(ARRAY, "a"), "`x` takes tensors, not ndarray; name the dims"),
        (lambda: md.argmax(ARRAY, "a"), r"argmax: .* of an array, as in md\.named\(array, dims\)"),
        (
            lambda: md.einsum("ab,ab->a", NAMED, NAMED),
            "dims have names, so 'ab,ab->a' is not needed: write md.einsum",
        ),
    ],
)
def test_what_stands_for_a_tensor_is_named(call, text):
    with pytest.raises(ValueError, match=text) as error:
        call()
    assert "test_operation.py" in str(error.value)


def test_a_literal_has_the_data_of_when_it_was_traced():
    data = np.ones(3, "f4")
    fixed = md.named(data, [b])
    for backend in ("numpy", "jax"):
        f = md.jit(lambda x: x + fixed + fixed, backend=backend)
        x = md.named(np.zeros(3, "f4"), [b])
        np.testing.assert_array_equal(f(x), [2, 2, 2])
        data[:] = 5
        np.testing.assert_array_equal(f(x), [2, 2, 2])
        data[:] = 1
    assert [op.name for op in f.trace(x).operations].count("literal") == 1


def test_an_index_ramp_must_fit_its_dtype():
    with pytest.raises(ValueError, match="int8 holds whole numbers from -128 to 127, not 299"):
        md.jit(lambda: md.arange(md.Dimension("n", 300), "int8")).trace()


def test_half_precision_means_do_not_overflow():
    ones = md.named(np.ones(100_000, "f2"), ["n"])
    assert float(md.jit(md.mean, backend="numpy")(ones)) == 1.0


def test_a_copy_of_a_named_array_is_a_copy():
    array = md.named(np.zeros(3, "f4"), [b])
    other = np.array(array)
    other[0] = 9
    assert np.asarray(array)[0] == 0


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda x: md.sum(x, dim="a"),
            "unexpected keyword argument 'dim'; it is called as md.sum(x",
        ),
        (
            lambda x: md.sum(x, dim="a"),
            "md.sum(x, over=None); the dims are over=, by name, not dim=",
        ),
        (lambda x: md.mean(x, axis=0), "the dims are over=, by name, not axis="),
        (lambda x: md.max(x, keepdims=True), "'keepdims'; it is called as md.max(x, over=None)"),
        (lambda x: md.sum(x, "a", "b"), "several dims are one list: over=['a', 'b']"),
        (lambda x: x.sum("a", "b"), "several dims are one list: over=['a', 'b']"),
        (lambda x: x.transpose("b", "a"), "several dims are one list: dims=['b', 'a']"),
        (
            lambda x: x.transpose(),
            "missing a required argument: 'dims'; it is called as md.transpose",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_told_with_how_it_is_called(call, text):
    x = md.ones(md.dims(a=2, b=3))
    for run in (call, md.jit(call)):
        with pytest.raises(ValueError) as error:
            run(x)
        assert text in str(error.value)
        assert "test_operation.py" in str(error.value)


def test_a_type_error_inside_of_an_operation_stays_one():
    def broken(x):
        return md.map(lambda row: len(3), x, "a")

    with pytest.raises(TypeError, match="has no len"):
        broken(md.ones(md.dims(a=2, b=3)))


class MyError(ValueError):
    """A mistake of which only the user knows."""


@pytest.mark.parametrize("kind", [MyError, ValueError, TypeError, AttributeError])
def test_an_exception_of_the_users_in_a_function_of_theirs_stays_as_it_is(kind):
    cause = KeyError("cause")

    def mine(h):
        raise kind("my own problem") from cause

    def within_jax(h):
        return md.from_jax(lambda a: mine(a) or jnp.abs(a))(h)

    def mlp(x):
        return md.nn.mlp(x, w, x, activation=mine)

    def gated(x):
        return md.nn.gated_mlp(x, w, w, x, activation=mine)

    def of_jax(x):
        return md.nn.mlp(x, w, x, activation=within_jax)

    def moe(x):
        return md.nn.moe(x, md.nn.route(x, router, choices=1), mine)

    x, w = md.ones(md.dims(length=2, embed=3)), md.ones(md.dims(embed=3, d_ff=2))
    router = md.ones(md.dims(embed=3, routed=2))
    for call in (mlp, gated, of_jax, moe):
        for run in (call, md.jit(call), md.grad(lambda x, call=call: md.sum(call(x)))):
            with pytest.raises(kind) as error:
                run(x)
            assert type(error.value) is kind
            assert str(error.value) == "my own problem"
            assert error.value.__cause__ is cause
            assert traceback.extract_tb(error.value.__traceback__)[-1].name == "mine"


def test_an_error_of_numpys_in_a_function_of_the_users_stays_as_it_is():
    def inverse(h):
        return np.linalg.inv(np.zeros((2, 2)))

    x, w = md.ones(md.dims(length=2, embed=3)), md.ones(md.dims(embed=3, d_ff=2))
    with pytest.raises(np.linalg.LinAlgError, match=r"^Singular matrix$"):
        md.jit(lambda x: md.nn.mlp(x, w, x, activation=inverse))(x)


def test_an_error_of_an_operation_can_be_copied_and_pickled():
    with pytest.raises(ValueError) as caught:
        md.reciprocal(md.named(np.ones(3, "i4"), ["embed"]))
    error = caught.value
    error.add_note("a note")
    for other in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert (other.name, other.part, other.reason) == ("reciprocal", "divide", error.reason)
        assert (other.user, other.source) == (error.user, error.source)
        assert other.__notes__ == ["a note"]
