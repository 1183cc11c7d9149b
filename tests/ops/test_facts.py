"""What primitives say of themselves is true of numbers, and cannot contradict itself."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.graphs.simplify import simplify
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.dtypes import as_dtype
from meshdsl.tensors.slide import Slide
from meshdsl.tracing.graph import Form, Graph, Operation, Primitive, Work
from meshdsl.tracing.trace import bind
from tests.ops.agreement import random
from tests.test_house import primitives

HERE = "tests/ops/test_facts.py"
PRIMITIVES = primitives()
a, b, c, k, n = md.dims(a=4, b=3, c=6, k=3, n=5)
TWO, TWELVE = md.Dimension("two", 2), md.Dimension("twelve", 12)
X, Y, Z = random([a, b]), random([b, c], seed=1), random([a, c], seed=2)
X_IS_LARGE = md.named(X.data > 0, [a, b])
WAVES = md.named(random([a, b]).data + 1j * random([a, b], seed=3).data, [a, b])
PLACES = md.named(np.array([3, 0, 1, 3, 2], np.int32), [n])
ALONG_B = {"dim": "b", "reverse": False, "exclusive": False}
CUT, d = md.dims(c=4, d=4)
SQUARE = md.named(random([a, d], seed=13).data + 4 * np.eye(4), [a, d])
X_OF_GROUPS = random([a, b, c], seed=14)
SLIDES = {"slides": (Slide("c", "k", "c"),), "sizes": (3,), "out": Shape([a, CUT])}

# An application of each primitive that says something: its operands and parameters.
SAMPLES: dict[str, tuple[Sequence[md.NamedArray], dict[str, Any]]] = {
    "full": ((), {"value": 2.0, "shape": X.dims, "dtype": X.dtype}),
    "arange": ((), {"shape": Shape([a]), "dtype": X.dtype}),
    "barrier": ((X, Y), {}),
    "name": ((X,), {"name": "called"}),
    "check_finite": ((X,), {}),
    "quantized": ((X, Y, X, Y, Z, Z, X), {}),
    "once_differentiable": ((X, Y), {}),
    "kept": ((X, Y), {"primitive": PRIMITIVES["exp"], "params": {}, "outputs": 1}),
    "rename": ((X,), {"names": {"a": "z"}}),
    "broadcast": ((X,), {"shape": Shape([c, b, a])}),
    "transpose": ((X,), {"shape": Shape([b, a])}),
    "split": ((Z,), {"whole": "c", "parts": Shape([TWO, k]), "shape": Shape([a, TWO, k])}),
    "merge": ((X,), {"whole": "twelve", "parts": Shape([b, a]), "shape": Shape([TWELVE])}),
    "window": (
        (X,),
        {"dim": "a", "start": -1, "size": 4, "stride": 1, "dilation": 1, "fill": 0, "wrap": False},
    ),
    "index": ((X,), {"dim": "a", "at": 1}),
    **{name: ((X,), {"over": ("b",)}) for name in ("sum", "prod", "max", "min")},
    **{name: ((X,), {"dim": "b"}) for name in ("argmax", "argmin")},
    "sort": ((X,), {"dim": "a", "descending": False}),
    "top_k": ((X,), {"dim": "a", "into": Dimension("best", 2)}),
    "einsum": ((X, Y), {"out": Shape([c, a])}),
    "convolve": ((Z, random([k], seed=4)), {"slides": SLIDES["slides"], "out": SLIDES["out"]}),
    **{name: ((Z,), SLIDES) for name in ("window_sum", "window_max")},
    **{
        f"scatter_{kind}": ((random([n, b]), PLACES), {"dim": "a", "shape": X.dims})
        for kind in ("add", "max", "min")
    },
    "update": ((X, random([k, a]), md.named(np.int32(1), [])), {"dim": "b", "part": "k"}),
    **{name: ((X,), ALONG_B) for name in ("cumsum", "cummax", "cummin")},
    **{name: ((WAVES,), {"dim": "b"}) for name in ("fft", "ifft")},
    "concat": ((X, random([md.Dimension("a", 5), b], seed=6)), {"dim": "a"}),
    "stack": ((X, random([a, b], seed=7)), {"dim": "copies"}),
    "take": ((X, PLACES), {"dim": "a"}),
    "grouped_einsum": (
        (random([n, b]), X_OF_GROUPS, PLACES),
        {"dim": "a", "out": Shape([n, c])},
    ),
    "grouped_outer": (
        (random([n, b]), random([n, c], seed=15), PLACES),
        {"dim": "a", "out": X_OF_GROUPS.dims},
    ),
    "window_match": (
        (random([a, CUT]), Z, random([a, c], seed=11)),
        {**SLIDES, "slack": 0.5, "extreme": 0},
    ),
    "linear_recurrence": ((X, random([a, b], seed=12)), ALONG_B),
    **{
        name: ((SQUARE, X), {"rows": "a", "columns": "d", **more})
        for name, more in (
            ("solve", {}),
            ("triangular_solve", {"lower": True, "unit_diagonal": False}),
        )
    },
    "rfft": ((Z,), {"dim": "c", "into": Dimension("waves", 4)}),
    "irfft": ((WAVES,), {"dim": "b", "into": Dimension("times", 4)}),
}

WHOLE = {name: p for name, p in PRIMITIVES.items() if p.form is Form.ELEMENTWISE}
MOVING = [name for name, p in PRIMITIVES.items() if p.form.moves]


def evaluate(primitive: Primitive, operands: Sequence[Any], params: Any) -> list[md.NamedArray]:
    """Returns the results of an operation, as the numpy backend computes them on one device."""
    run = md.jit(lambda *operands: list(bind(primitive, operands, params).outputs), backend="numpy")
    return run(*operands)


def sample_of(name: str) -> tuple[Sequence[md.NamedArray], dict[str, Any]]:
    if name in WHOLE:
        return elementwise_sample(name)
    assert name in SAMPLES, f"primitive `{name}` has no sample: add one to SAMPLES in {HERE}"
    return SAMPLES[name]


def elementwise_sample(name: str) -> tuple[Sequence[md.NamedArray], dict[str, Any]]:
    """Returns operands of a dtype that an operation takes: [a, b], then [b]."""
    if name == "cast":
        return (X,), {"dtype": X.dtype}
    if name == "select":
        return (X_IS_LARGE, X, random([b], seed=5)), {}
    count = len(inspect.signature(getattr(md, name)).parameters)
    numbers = [random(dims, 1.1, 3.9, seed) for seed, dims in enumerate([[a, b], [b]][:count])]
    for dtype in ("float64", "complex128", "int32", "bool"):
        operands = [md.named(np.asarray(x).astype(dtype), x.dims) for x in numbers]
        try:
            md.jit(lambda *given: bind(WHOLE[name], given).outputs[0]).trace(*operands)
        except ValueError:
            continue
        return operands, {}
    raise AssertionError(f"no operands for {name}")


def alike(found: Any, expected: Any) -> bool:
    found, expected = np.asarray(found), np.asarray(expected)
    return np.allclose(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


def permuted(array: md.NamedArray, dim: Any) -> md.NamedArray:
    """Returns an array with the positions of a dim, if it has that, in another order."""
    if dim not in array.dims:
        return array
    order = np.random.default_rng(9).permutation(dim.size)
    return md.named(np.take(np.asarray(array), order, array.dims.position(dim.name)), array.dims)


def kept_dims(primitive: Primitive, operands: Any, params: Any, result: Any) -> Iterator[Dimension]:
    """Yields the dims that a result and an operand have, but for the one that parameters name."""
    for dim in result.dims:
        if dim.name != params.get("dim") and any(dim in x.dims for x in operands):
            yield dim


def test_every_primitive_that_says_something_is_tried():
    says = {
        name
        for name, p in PRIMITIVES.items()
        if p.form is not Form.OTHER or p.positionwise or p.combines or p.linear or p.chooses
    }
    for name in says:
        assert sample_of(name)
    assert says == set(WHOLE) | set(SAMPLES)


def test_a_primitive_without_a_sample_is_named_with_the_file_to_add_it_to():
    with pytest.raises(
        AssertionError, match=r"`log_sums` has no sample: .* tests/ops/test_facts\."
    ):
        sample_of("log_sums")


@pytest.mark.parametrize("name", MOVING)
def test_what_moves_has_the_elements_of_its_operands_and_no_others(name):
    primitive, (operands, params) = PRIMITIVES[name], sample_of(name)
    results = evaluate(primitive, operands, params)
    for before, after in zip(operands[-len(results) :], results, strict=True):
        old, new = np.asarray(before), np.asarray(after)
        assert np.array_equal(np.unique(old), np.unique(new))
        if primitive.form in (Form.SAME, Form.RENAMED):
            assert np.array_equal(old, new)
        assert (before.dims == after.dims) or primitive.form is not Form.SAME
        if primitive.form is Form.ARRANGED:
            order = [before.dims.position(d.name) for d in after.dims if d in before.dims]
            shape = [d.size if d in before.dims else 1 for d in after.dims]
            assert np.array_equal(
                np.broadcast_to(old.transpose(order).reshape(shape), new.shape), new
            )
        if primitive.form is Form.REGROUPED:
            assert old.size == new.size


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_elementwise_reads_one_element_of_each_operand(name):
    primitive, (operands, params) = WHOLE[name], elementwise_sample(name)
    (before,) = evaluate(primitive, operands, params)
    for number, operand in enumerate(operands):
        data = np.array(operand)
        at = (1,) * data.ndim
        data[at] = np.roll(data, 1)[at] if data.dtype != np.bool_ else ~data[at]
        changed = [*operands]
        changed[number] = md.named(data, operand.dims)
        (after,) = evaluate(primitive, changed, params)
        touched = np.zeros(before.dims.sizes, bool)
        touched[tuple(1 if d in operand.dims else slice(None) for d in before.dims)] = True
        assert alike(np.asarray(after)[~touched], np.asarray(before)[~touched])


@pytest.mark.parametrize("name", [name for name, p in PRIMITIVES.items() if p.positionwise])
def test_what_is_positionwise_follows_its_operands_in_every_dim_that_it_keeps(name):
    primitive, (operands, params) = PRIMITIVES[name], sample_of(name)
    (result,) = evaluate(primitive, operands, params)
    for dim in kept_dims(primitive, operands, params, result):
        (found,) = evaluate(primitive, [permuted(x, dim) for x in operands], params)
        assert alike(found, permuted(result, dim)), dim


@pytest.mark.parametrize("name", [n for n, p in PRIMITIVES.items() if p.form is Form.REDUCTION])
def test_a_reduction_reads_the_dims_that_its_result_lacks_in_any_order(name):
    primitive, (operands, params) = PRIMITIVES[name], sample_of(name)
    (operand,), (result,) = operands, evaluate(primitive, operands, params)
    assert set(result.dims) < set(operand.dims)
    for dim in operand.dims:
        (found,) = evaluate(primitive, [permuted(operand, dim)], params)
        if dim in result.dims:
            assert alike(found, permuted(result, dim))
        elif not primitive.chooses:  # which tells places
            assert alike(found, result)


@pytest.mark.parametrize("name", [n for n, p in PRIMITIVES.items() if p.form is Form.GENERATED])
def test_what_is_generated_has_no_operands(name):
    operands, params = sample_of(name)
    (result,) = evaluate(PRIMITIVES[name], operands, params)
    assert np.asarray(result).shape == params["shape"].sizes


@pytest.mark.parametrize("name", [name for name, p in PRIMITIVES.items() if p.combines])
def test_results_are_combined_as_operands_are(name):
    primitive, ((first, *rest), params) = PRIMITIVES[name], sample_of(name)
    combine = {"sum": np.add, "max": np.maximum, "min": np.minimum}[primitive.combines]
    other = random(first.dims, seed=8)
    both = md.named(combine(first.data, other.data), first.dims)
    one, two, found = (
        np.asarray(evaluate(primitive, [x, *rest], params)[0]) for x in (first, other, both)
    )
    assert alike(found, combine(one, two))


def traced(primitive: Primitive, operands: Any, params: Any) -> Operation:
    """Returns an operation as it is traced."""
    graph = md.jit(lambda *given: list(bind(primitive, given, params).outputs)).trace(*operands)
    return graph.operations[-1]


@pytest.mark.parametrize("name", [name for name, p in PRIMITIVES.items() if p.linear])
def test_sums_and_multiples_pass_through_linear_operands(name):
    primitive, (operands, params) = PRIMITIVES[name], sample_of(name)
    linear = traced(primitive, operands, params).linear
    assert linear
    others = [random(x.dims, seed=20 + i) for i, x in enumerate(operands)]

    def at(values: dict[int, Any]) -> np.ndarray:
        given = [
            md.named(np.asarray(values.get(i, x)).astype(np.asarray(x).dtype), x.dims)
            for i, x in enumerate(operands)
        ]
        return np.asarray(evaluate(primitive, given, params)[0])

    for together in [linear] if primitive.additive else [(i,) for i in linear]:
        x = {i: np.asarray(operands[i]) for i in together}
        y = {i: np.asarray(others[i]) for i in together}
        sums = {i: 2 * x[i] - 3 * y[i] for i in together}
        assert alike(at(sums), 2 * at(x) - 3 * at(y)), together


def test_what_fills_or_rounds_is_not_linear():
    window, (operands, params) = PRIMITIVES["window"], SAMPLES["window"]
    assert traced(window, operands, {**params, "fill": 1.0}).linear == ()
    assert traced(window, operands, {**params, "fill": 1.0, "dilation": 2}).linear == ()
    assert traced(window, operands, {**params, "fill": 1.0, "start": 0}).linear == (0,)
    for before, after, exact in (
        ("float32", "float64", True),
        ("bfloat16", "float32", True),
        ("float64", "float32", False),
        ("float16", "bfloat16", False),
        ("int32", "float64", False),
    ):
        operand = md.spec([a], before)
        cast = traced(PRIMITIVES["cast"], [operand], {"dtype": np.dtype(as_dtype(after))})
        assert cast.linear == ((0,) if exact else ()), (before, after)


@pytest.mark.parametrize("name", [name for name, p in PRIMITIVES.items() if p.chooses])
def test_what_chooses_returns_elements_or_places(name):
    primitive, ((operand,), params) = PRIMITIVES[name], sample_of(name)
    for result in evaluate(primitive, [operand], params):
        found = np.asarray(result)
        sizes = operand.dims.get(params["dim"]).size
        chosen = found.dtype == np.int32 and (found >= 0).all() and (found < sizes).all()
        assert chosen or np.isin(found, np.asarray(operand)).all()


def test_marks_and_inlined_operations_vanish_and_the_graphs_of_results_are_theirs():
    def model(x: md.Tensor) -> Any:
        x = md.check_finite(md.name(x, "called"))
        x = md.checkpoint(lambda x: md.sin(x) * x)(x)
        x = straight(x)
        x = md.cond(md.sum(x) > 0, lambda x: x + 1, lambda x: 2 * x, x)
        x = md.while_loop(lambda x: md.sum(x) < 9, lambda x: x + 1, x)
        return md.scan(lambda total, row: (total + row, row), md.zeros([b], x.dtype), x, "a")

    @md.custom_gradient
    def straight(x: md.Tensor) -> Any:
        return md.round(x), lambda g: (g,)

    graph = md.jit(model).trace(X)
    left = {op.name for op in simplify(graph).operations}
    seen = {op.primitive for op in graph.operations}
    gone = {p.name for p in seen if p.mark or p.inlined}
    assert gone == {"name", "check_finite", "checkpoint", "custom_gradient"}
    assert not left & gone
    bodies = [op for op in graph.operations if op.bodies]
    assert {op.primitive for op in bodies} == {p for p in seen if p.result_graphs}
    assert {p.name for p in PRIMITIVES.values() if p.result_graphs} == {op.name for op in bodies}
    for op in bodies:
        for name in op.primitive.result_graphs:
            returned = op.params[name].outputs[: len(op.outputs)]
            dtypes = [t.dtype for t in returned]
            assert isinstance(op.params[name], Graph)
            assert dtypes == [t.dtype for t in op.outputs]


def test_results_for_a_gradient_alone_are_read_by_nothing_else():
    assert {name for name, p in PRIMITIVES.items() if p.for_gradient} == {"attention"}
    batch, kv = md.dims(length=4, kv=2)
    x = md.spec([batch, kv], "float64")
    y = md.spec([md.Dimension("memory_length", 4), kv], "float64")
    graph = md.jit(lambda x, y: md.attention(x, y, y)).trace(x, y)
    (op,) = (op for op in graph.operations if op.name == "attention")
    hidden = {op.outputs[i] for i in op.primitive.for_gradient}
    assert len(op.outputs) == 2
    assert not hidden & {t for other in graph.operations for t in other.inputs}
    assert not hidden & set(graph.outputs)


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"form": Form.ELEMENTWISE}, "elementwise, but not positionwise"),
        ({"form": Form.SAME, "positionwise": True}, "same, so not called positionwise"),
        ({"mark": True}, "a mark, but other"),
        ({"inlined": True}, "inlined, but names no result_graphs"),
        ({"additive": True, "linear": (0,)}, "additive, but not linear in two operands"),
        ({"flat": True, "linear": (0,)}, "flat, but linear"),
        ({"combines": "max", "linear": (0,)}, "linear, but combines by max"),
        ({"combines": "sum"}, "combining by sum, but linear in no operand"),
        (
            {"form": Form.SAME, "mark": True, "inlined": True, "result_graphs": ("body",)},
            "a mark, but inlined",
        ),
    ],
)
def test_facts_that_contradict_each_other_are_refused(facts, problem):
    with pytest.raises(ValueError) as caught:
        Primitive("odd", lambda inputs, params: [], **facts)
    assert str(caught.value) == f"primitive `odd` is {problem}"


def test_nothing_is_said_of_a_primitive_by_default():
    plain = Primitive("plain", lambda inputs, params: [])
    assert plain.form is Form.OTHER and not plain.form.moves
    assert not (plain.positionwise or plain.combines or plain.linear or plain.chooses)
    assert not (plain.mark or plain.inlined or plain.effect)
    assert plain.work is Work.CONTRACTION
