"""`layout="auto"` in Python: the results of one device, on a mesh of all of them."""

import numpy as np
import pytest

import meshdsl as md

ROWS, A, B = md.dims(rows=512, a=64, b=64)


def two_layers(x, first, second):
    return md.einsum(md.relu(md.einsum(x, first, over="a")), second, over="b")


def arguments():
    rng = np.random.default_rng(0)
    made = [("rows", "a"), ("a", "b"), ("b", "a")]
    sizes = {"rows": 512, "a": 64, "b": 64}
    return [md.named(rng.normal(size=[sizes[d] for d in dims]), dims) for dims in made]


@pytest.mark.parametrize(
    ("mesh", "layout", "backend"),
    [
        ("one:2,two:2", "auto", "numpy"),
        ("one:2,two:2", "rows:two; auto", "numpy"),
        ("auto", "auto", "jax"),
        (None, "auto", "jax"),
    ],
)
def test_the_results_are_those_of_one_device(mesh, layout, backend):
    args = arguments()
    f = md.jit(two_layers, mesh, layout, backend)
    want = np.maximum(np.asarray(args[0]) @ np.asarray(args[1]), 0) @ np.asarray(args[2])
    np.testing.assert_allclose(np.asarray(f(*args)), want, rtol=1e-10)
    assert f.mesh.size == (8 if backend == "jax" else 4)
    assert f.layout.rules
    if "rows" in layout:
        assert str(f.layout).startswith("rows:two")
    assert f.lower(*args).layout == f.layout  # the first signature decides for all


def test_stages_and_plain_functions_of_jax_have_the_layout_too():
    args = arguments()
    stages = md.jit(two_layers, "x:4", "auto", "numpy").stages(*args)
    assert stages.placement is not None
    plain = md.jit(two_layers, "auto", "auto").as_jax(*args)
    results = plain(*[np.asarray(x) for x in args])
    want = np.asarray(md.jit(two_layers)(*args))
    np.testing.assert_allclose(np.asarray(results[0]), want, rtol=1e-10)


@pytest.mark.parametrize(
    ("mesh", "layout", "backend", "says"),
    [
        ("auto", "rows:data", "jax", "mesh='auto' needs a layout .* layout='auto', or \"rows:d"),
        (None, "auto", "numpy", "backend 'numpy' does not say how many devices there are"),
        ("x:2", "rows; auto", "jax", "malformed layout"),
    ],
)
def test_what_cannot_be_completed_is_refused(mesh, layout, backend, says):
    with pytest.raises(ValueError, match=says):
        md.jit(two_layers, mesh, layout, backend)


def test_a_misspelt_rule_is_refused_with_the_arguments():
    f = md.jit(two_layers, "x:2", "row:x; auto", "numpy")
    with pytest.raises(ValueError, match="Did you mean `rows`"):
        f(*arguments())


def test_a_function_without_instructions_needs_no_rules_on_one_device():
    f = md.jit(lambda x: x, "x:1", "auto", "numpy")
    np.testing.assert_array_equal(f(arguments()[0]), arguments()[0])
    assert not f.layout.rules
