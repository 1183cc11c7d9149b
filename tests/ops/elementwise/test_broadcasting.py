"""How elementwise operations are made: one statement, one exported name, one line per backend."""

import inspect
import math
import sys
import textwrap
import types

import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering import partition
from meshdsl.lowering.backends.common.elementwise import elementwise, functions
from meshdsl.lowering.backends.jax.emitters import EMITTERS as JAX
from meshdsl.lowering.backends.numpy.emitters import EMITTERS as NUMPY
from meshdsl.lowering.instructions import KINDS, of_elementwise
from meshdsl.lowering.partition.elementwise import elementwise as partitioned
from meshdsl.ops.elementwise.broadcasting import ELEMENTWISE, unary
from meshdsl.ops.elementwise.examples import _SHOWN, EXAMPLES
from meshdsl.tracing.graph import Primitive, Work
from tests.ops.agreement import assert_agree, assert_close, message, random, run

a, b = md.dims(a=8, b=3)


@pytest.fixture
def cube(monkeypatch):
    """What the lines of a file and the tables would say; all facts are in the one statement."""
    primitives = dict(ELEMENTWISE)
    cube = unary("cube", lambda g, y, x: g * (3 * x * x), "f", "x ** 3.", work=Work.DIVISION)
    monkeypatch.setitem(KINDS, "cube", of_elementwise(ELEMENTWISE["cube"]))  # as when it is read
    monkeypatch.setitem(NUMPY, "cube", elementwise(lambda x: x**3))
    monkeypatch.setitem(JAX, "cube", elementwise(lambda x: x**3))
    monkeypatch.setitem(partition.RULES, "cube", partitioned)  # which lists what was there before
    yield cube
    ELEMENTWISE.clear()
    ELEMENTWISE.update(primitives)


def test_an_operation_is_one_statement_and_a_line_per_backend(cube):
    x = random([a, b])
    assert_agree(cube, lambda x: x**3, x, order=2)
    for backend in ("numpy", "jax"):
        found = run(cube, x, mesh="data:2,model:2", layout="a:data; b:model", backend=backend)
        assert_close(found, x.data**3)


def test_it_needs_no_line_where_the_framework_has_a_function_of_its_name(monkeypatch):
    monkeypatch.setitem(KINDS, "sinc", of_elementwise(ELEMENTWISE["sin"]))
    assert functions({}, [math, np])["sinc"] is np.sinc
    assert functions({}, [math, np])["sqrt"] is math.sqrt  # the first that has one gives it
    found = functions({"sinc": np.sin}, [np], wrap=lambda function: (function,))
    assert (found["sinc"], found["sqrt"]) == (np.sin, (np.sqrt,))
    assert "cbrt" not in functions({}, [jnp.linalg])


def test_a_second_operation_of_a_name_is_refused_with_both_files(cube):
    first = "meshdsl/ops/elementwise/special.py"
    second = "tests/ops/elementwise/test_broadcasting.py"
    for name, file in (("erf", first), ("cast", first.replace("special", "arithmetic"))):
        before = ELEMENTWISE[name]
        with pytest.raises(ValueError) as caught:
            unary(name, None, "f", "Something else.")
        assert f"`{name}` is defined twice, in {file} and in {second}: " in str(caught.value)
        assert ELEMENTWISE[name] is before
    with pytest.raises(ValueError, match="`cube` is defined twice"):
        unary("cube", None, "f", "x ** 3, again.")


def test_a_file_whose_import_failed_may_define_its_operations_again(monkeypatch, cube):
    monkeypatch.setitem(sys.modules, __name__, types.ModuleType(__name__))
    assert unary("cube", None, "f", "x ** 3.")


def test_reports_know_it(cube):
    program = md.jit(lambda x: cube(x) + 1, "data:2", "a:data").lower(md.spec([a, b]))
    assert program.flops == 2 * 4 * 3
    assert "cube(x) + 1" in str(program)


def test_every_one_has_its_facts():
    for name, primitive in ELEMENTWISE.items():
        assert isinstance(primitive, Primitive)
        assert primitive.work <= Work.FUNCTION, name
        assert partition.RULES[name] is partitioned
        assert name in NUMPY or name == "stop_gradient"
    linear = {name: p.linear for name, p in ELEMENTWISE.items() if p.linear}
    assert linear["subtract"] == linear["multiply"] == (0, 1)
    assert linear["divide"] == linear["negative"] == linear["conj"] == (0,)
    assert {n for n, p in ELEMENTWISE.items() if p.additive} == {
        *("add", "subtract", "select", "complex")
    }


def test_what_is_said_to_be_linear_is():
    rng = np.random.default_rng(0)
    numbers = [md.named(rng.normal(size=8) + 1j * rng.normal(size=8), [a]) for _ in range(3)]
    for name, primitive in ELEMENTWISE.items():
        if not primitive.linear or name in ("select", "stop_gradient", "complex", "cast"):
            continue
        function = getattr(md, name)

        def model(x, y, z, function=function, primitive=primitive):
            if len(primitive.linear) == 2 and primitive.additive:
                return function(x + y, z + z), function(x, z) + function(y, z)
            rest = () if function in (md.negative, md.conj, md.real, md.imag) else (z,)
            return function(x + y, *rest), function(x, *rest) + function(y, *rest)

        together, apart = run(model, *numbers)
        assert np.abs(np.asarray(together) - np.asarray(apart)).max() < 1e-12, name


BATCH, FEATURE, FEATRUE, HEADS = md.dims(batch=2, feature=3, featrue=3, heads=4)
REFUSED = {
    "a bias": lambda x, typo, mask: x + typo,
    "a number first, then": lambda x, typo, mask: (2 * typo) / x,
    "a comparison": lambda x, typo, mask: x < typo,
    "a function": lambda x, typo, mask: md.maximum(x, typo),
    "limits": lambda x, typo, mask: md.clip(x, 0.0, typo),
    "bits": lambda x, typo, mask: (x > 0) & mask,
    "whole numbers": lambda x, typo, mask: md.bit_and(x.cast("int32"), typo.cast("int32")),
    "a complex number": lambda x, typo, mask: md.complex(x, typo),
    "a condition": lambda x, typo, mask: md.where(mask, x, 0),
    "a choice": lambda x, typo, mask: md.where(x > 0, x, typo),
    "two choices and a number": lambda x, typo, mask: md.where(mask, 0, x),
    "what scan runs": lambda x, typo, mask: md.scan(lambda c, r: (c, r + typo), (), x, "batch")[1],
    "what is differentiated": lambda x, typo, mask: md.grad(lambda x: md.sum(x * typo))(x),
}


def operands():
    mask = md.named(np.arange(4) > 1, [HEADS])
    return random([BATCH, FEATURE]), random([FEATRUE], 0.5, 1.0), mask


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("at_once", [False, True], ids=["traced", "at once"])
def test_operands_that_each_lack_a_dim_of_the_other_are_refused(name, at_once):
    x, typo, mask = (md.named(np.asarray(a).astype(np.float32), a.dims) for a in operands())
    mask = md.named(np.asarray(mask) > 0, mask.dims)
    function = REFUSED[name] if at_once else md.jit(REFUSED[name])
    with pytest.raises(ValueError, match="one operand must have the dims of all"):
        function(x, typo, mask)


def test_the_message_shows_both_operands_the_near_name_and_how_to_mean_it():
    def model(x, bias):
        return x + bias

    text = message(model, *operands()[:2])
    line = model.__code__.co_firstlineno
    assert (
        "add: one operand must have the dims of all: f64[batch=2, feature=3] lacks `featrue`; "
        "f64[featrue=3] lacks `batch`, `feature`. Did you mean `feature` instead of `featrue`? "
        "If an outer product is meant, say so: md.outer(md.add, x, y)" in text
    )
    assert (
        f"operand 2: f64[featrue=3]  made at tests/ops/elementwise/test_broadcasting.py:{line}"
        in text
    )
    assert text.endswith(f"tests/ops/elementwise/test_broadcasting.py:{line + 1}  return x + bias")


def test_where_says_which_of_three_lacks_what():
    text = message(lambda x, typo, mask: md.where(mask, x, 0), *operands())
    assert "bool[heads=4] lacks `batch`, `feature`; f64[batch=2, feature=3] lacks `heads`." in text
    assert "say so: md.outer(md.where, condition, x, y)" in text


def test_one_of_three_operands_with_all_dims_is_enough():
    x = random([BATCH, FEATURE])
    rows, columns = random([BATCH]), random([FEATURE])
    found = run(lambda x, r, c: md.where(r > 0, x, c), x, rows, columns)
    assert_close(found, np.where(rows.data[:, None] > 0, x.data, columns.data))


@pytest.mark.long
def test_what_outer_spells_is_an_outer_product_with_its_gradients():
    x, y, _ = operands()
    assert_agree(
        lambda x, y: md.outer(md.hypot, x, y),
        lambda x, y: jnp.hypot(x[..., None], y),
        x,
        y,
        order=2,
    )
    assert_agree(
        lambda x, y: md.outer(lambda x, y: md.where(x > y, x * y, 0.5 * y), x, y),
        lambda x, y: jnp.where(x[..., None] > y, x[..., None] * y, 0.5 * y),
        x,
        y,
        order=2,
    )


def test_outer_allows_it_for_one_call_only():
    def fails(x, y):
        raise ValueError("no such")

    x = md.named(np.float32([1, 2]), [BATCH])
    y = md.named(np.float32([1, 2, 3]), [FEATURE])
    assert np.array_equal(md.outer(md.less, x, y), np.less.outer([1, 2], [1, 2, 3]))
    with pytest.raises(ValueError, match="one operand must have the dims of all"):
        md.less(x, y)
    with pytest.raises(ValueError, match="no such"):
        md.outer(fails, x, y)
    with pytest.raises(ValueError, match="one operand must have the dims of all"):
        md.less(x, y)


def test_outer_makes_combinations_of_its_own_operands_only():
    x, y, z = (md.named(np.ones(2, np.float32), [name]) for name in ("a", "b", "c"))
    for call in (lambda f: f(z), lambda f: md.jit(f)(z)):
        with pytest.raises(ValueError) as error:
            call(lambda z: md.outer(lambda a, b: a + b + z, x, y))
        assert (
            "add: md.outer makes combinations of its own operands, of which none has `c`: "
            in str(error.value)
        )
        assert "Give what has it to md.outer as one more operand" in str(error.value)
        found = call(lambda z: md.outer(lambda a: md.outer(lambda b, c: a + b + c, y, z), x))
        assert found.dims.names == ("a", "b", "c")
    scaled = md.outer(lambda a, b: a * x + b, x, y)  # the captured one has a dim of an operand
    assert scaled.dims.names == ("a", "b")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (np.add, "outer: np.add pairs elements by position; give md's function, as in md.outer("),
        ("add", "outer: the first argument is a function, as in md.outer(md.add, x, y), not 'add'"),
    ],
)
def test_outer_takes_a_function_of_meshdsl(function, text):
    x, y = md.named(np.ones(2, np.float32), ["a"]), md.named(np.ones(2, np.float32), ["b"])
    for call in (md.outer, lambda f, x, y: md.jit(lambda x, y: md.outer(f, x, y))(x, y)):
        with pytest.raises(ValueError) as error:
            call(function, x, y)
        assert text in str(error.value)
        assert "  at tests/ops/elementwise/test_broadcasting.py:" in str(error.value)


def test_every_example_is_of_an_operation_and_in_its_docstring():
    assert len(EXAMPLES) == _SHOWN.count("\n\n") + 1
    for name, example in EXAMPLES.items():
        assert textwrap.indent(example, "    ") in inspect.getdoc(getattr(md, name))
