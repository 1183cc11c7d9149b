"""Whole functions of JAX: losses and gradients on meshes, names, collectives, and mistakes."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.imports.jax.listing import share
from tests.imports.jax import gpt

MESH = "data:2,model:4"
TENSOR_PARALLEL = "batch:data; heads:model; d_ff:model; vocab:model"
SEQUENCE_PARALLEL = f"{TENSOR_PARALLEL}; length:model?"
FSDP = "batch:data; params/embed:data"
LAYOUTS = ("batch:data", TENSOR_PARALLEL, FSDP, SEQUENCE_PARALLEL)


def is_named(value):
    return isinstance(value, md.NamedArray)


@pytest.fixture(scope="module")
def program():
    return md.from_jax(gpt.jax_loss, gpt.NAMES)


@pytest.fixture(scope="module")
def arguments(program):
    return program.named(gpt.weights(), *gpt.batch())


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_are_those_of_jax_on_every_layout(program, arguments, layout):
    backend = "jax" if layout == SEQUENCE_PARALLEL else "numpy"
    expected, slopes = jax.value_and_grad(gpt.jax_loss)(gpt.weights(), *gpt.batch())
    step = md.jit(md.value_and_grad(program), MESH, layout, backend=backend)
    loss, gradients = step(*arguments)
    np.testing.assert_allclose(float(loss), expected, rtol=1e-5)
    ours = jax.tree.leaves(gradients, is_leaf=is_named)
    for mine, theirs in zip(ours, jax.tree.leaves(slopes), strict=True):
        np.testing.assert_allclose(np.asarray(mine), theirs, atol=1e-5)


def sent(function, arguments, layout):
    # Which weights are kept for the backward pass depends on the peak of memory, to the byte.
    options = md.Options(weights="again")
    program = md.jit(md.value_and_grad(function), MESH, layout, options=options).lower(*arguments)
    total = collections.Counter()
    for each in program.collectives:
        total[each.kind, each.axes] += each.wire_bytes * each.count
    return total


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_sends_what_the_same_model_in_the_language_sends(program, arguments, layout):
    assert sent(program, arguments, layout) == sent(gpt.named_loss, arguments, layout)


def test_names_of_the_arguments_name_every_dim(program, arguments):
    inferred = program.inferred(gpt.weights(), *gpt.batch())
    counted = share(inferred.naming, inferred.frame)
    assert counted.known == counted.every
    assert counted.every > 400
    of = dict(zip(inferred.paths, inferred.inputs, strict=True))
    assert of["params/blocks/1/out"] == ("heads", "kv", "embed")
    assert of["params/blocks/1/w_out"] == ("d_ff", "embed")
    assert of["params/positions"] == ("length", "embed")


def test_a_listing_shows_each_line_with_its_dims(program):
    text = program.listing(gpt.weights(), *gpt.batch())
    assert "100.0 % of" in text
    assert "f32[batch=8, heads=4, length=16, memory_length=16]" in text
    assert 'q = jnp.einsum("ble,ehk->blhk", h, p["query"])' in text


def test_square_matrices_and_repeated_sizes_stay_apart():
    program = md.from_jax(lambda x, w, v: (x @ w, v), {"x": "batch embed"})
    (_, _), (batch, out), _ = inputs = program.inferred(
        np.ones((4, 4), "f"), np.ones((4, 4), "f"), np.ones((4, 4), "f")
    ).inputs
    assert inputs[0] == ("batch", "embed")
    assert (batch, out) == ("embed", "w_1")
    assert inputs[2] == ("v_0", "v_1")


def test_a_residual_around_a_square_matrix_keeps_the_streams_name():
    program = md.from_jax(lambda x, w: x + x @ w, {"x": "batch embed", "return": "batch embed"})
    inferred = program.inferred(np.ones((2, 4), "f"), np.ones((4, 4), "f"))
    assert inferred.inputs[1] == ("embed", "embed_out")
    assert inferred.outputs == (("batch", "embed"),)


def test_merged_dims_are_called_after_their_parts():
    def heads(x, w):
        return (x @ w).reshape(*x.shape[:2], 4, 2)

    program = md.from_jax(heads, {"x": "batch length embed", "w": "_ (heads kv)"})
    inferred = program.inferred(np.ones((2, 3, 5), "f"), np.ones((5, 8), "f"))
    assert inferred.inputs[1] == ("embed", "heads_kv")
    assert inferred.outputs == (("batch", "length", "heads", "kv"),)


def test_patterns_trees_and_functions_name_dims():
    weights = {"a": {"w": np.ones((2, 3), "f")}, "b": [np.ones((3, 5), "f")]}

    def f(p):
        return p["a"]["w"] @ p["b"][0]

    expected = (("in", "hidden"), ("hidden", "out"))
    by_function = {("p/a/w", (2, 3)): "in hidden", ("p/b/0", (3, 5)): ["hidden", "out"]}
    for names in (
        {"p/**/w": "in hidden", "p/b/*": "... out"},
        {"p": {"a": {"w": "in hidden"}, "b": ["hidden out"]}},
        lambda path, sizes: by_function[path, sizes],
    ):
        assert md.from_jax(f, names).inferred(weights).inputs == expected


def test_loops_over_stacked_layers_name_their_dim():
    def f(x, layers):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), x, layers)

    program = md.from_jax(f, {"x": "batch embed", "layers": "layers _ _"})
    weights = np.random.default_rng(0).normal(size=(3, 4, 4)).astype(np.float32)
    x = np.ones((2, 4), np.float32)
    step = md.jit(program, "m:2", "embed:m")
    y, sums = step(*program.named(x, weights))
    expected, expected_sums = f(x, weights)
    np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(sums), expected_sums, rtol=1e-5)
    assert y.dims.names == ("batch", "embed")
    assert sums.dims.names == ("layers",)


def test_plain_arrays_are_named_when_the_program_is_called():
    program = md.from_jax(lambda x: 2 * x, {"x": "batch embed"})
    y = md.jit(program, "m:2", "batch:m")(np.ones((2, 4), np.float32))
    assert y.dims.names == ("batch", "embed")
    assert program(jnp.ones((2, 4))).dims.names == ("batch", "embed")


# Mistakes.


def test_names_that_contradict_each_other_show_both_uses():
    def f(x, y):
        z = x * 2
        return z + y  # here

    program = md.from_jax(f, {"x": "batch length", "y": "batch memory"})
    with pytest.raises(ValueError, match="contradict each other") as error:
        program.named(np.ones((2, 3)), np.ones((2, 3)))
    text = str(error.value)
    assert "`length` (dim 1 of x, first used at tests/imports/jax/test_function.py" in text
    assert "z = x * 2) and `memory` (dim 1 of y, first used at" in text
    assert "are one dim in `add` at" in text
    assert "return z + y  # here" in text


def test_a_primitive_without_translation_is_named_with_its_line():
    program = md.from_jax(lambda x: jnp.linalg.cholesky(x))
    with pytest.raises(ValueError, match=r"`cholesky` at .*test_function.py:\d+ ") as error:
        program.named(np.eye(3, dtype=np.float32))
    assert "md.local" in str(error.value)


def test_a_print_of_jax_is_refused_with_what_prints_here():
    def f(x):
        jax.debug.print("{}", x)
        return x

    with pytest.raises(
        ValueError, match=r"`debug_\w+` at .*; return what is printed, .* md\.print"
    ):
        md.from_jax(f, names={"x": "row"})(np.ones(3, np.float32))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"x": "batch"}, r"x \[2, 3\]: 'batch' names 1 dims, but it has 2"),
        ({"x": "batch batch"}, "has `batch` twice"),
        ({"y": "batch embed"}, "names\\['y'\\] matches no argument"),
        ({"x": "batch 2"}, "'2' cannot name a dim"),
        ({"x": "(batch embed"}, "without its other half"),
    ],
)
def test_names_that_do_not_fit_are_refused(names, message):
    with pytest.raises(ValueError, match=message):
        md.from_jax(lambda x: x, names).named(np.ones((2, 3), np.float32))


def test_arguments_by_keyword_alone_may_be_plain_arrays():
    def scaled(x, *, w, by=2.0):
        return jnp.mean((x @ w * by) ** 2)

    x, w = np.ones((4, 3), "f"), np.arange(6, dtype="f").reshape(3, 2)
    program = md.from_jax(scaled, {"x": "batch feature", "w": "_ hidden"})
    for run in (program, md.jit(program, "data:2", "batch:data", backend="numpy")):
        np.testing.assert_allclose(float(run(x, w=w, by=3.0)), scaled(x, w=w, by=3.0), rtol=1e-6)
    assert [str(each.dims) for each in program.named(x, w=w)] == [
        "[batch=4, feature=3]",
        "[feature=3, hidden=2]",
    ]
    slopes = md.grad(program)(x, w=w)  # by the argument at the first position
    np.testing.assert_allclose(np.asarray(slopes), jax.grad(scaled)(x, w=w), rtol=1e-6)


def test_numbers_that_are_equal_and_of_other_types_are_told_apart():
    program = md.from_jax(lambda x, n: x * n)
    x = md.named(np.arange(3, dtype="int32"), ["a"])
    whole, real = md.jit(lambda x: (program(x, 2), program(x, 2.0)))(x)
    assert (whole.dtype, real.dtype.kind) == (np.dtype("int32"), "f")
