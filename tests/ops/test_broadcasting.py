"""How elementwise operations are made: one statement, one exported name, one line per backend."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl.graph import Primitive, Work
from meshdsl.lowering import partition
from meshdsl.lowering.backends.jax.elementwise import elementwise as on_jax
from meshdsl.lowering.backends.jax.emitters import EMITTERS as JAX
from meshdsl.lowering.backends.numpy.elementwise import elementwise as on_numpy
from meshdsl.lowering.backends.numpy.emitters import EMITTERS as NUMPY
from meshdsl.lowering.partition.elementwise import elementwise as partitioned
from meshdsl.ops.broadcasting import ELEMENTWISE, unary
from tests.ops.agreement import assert_agree, assert_close, random, run

a, b = md.dims(a=8, b=3)


@pytest.fixture
def cube(monkeypatch):
    """What the lines of a file and the tables would say; all facts are in the one statement."""
    primitives = dict(ELEMENTWISE)
    cube = unary("cube", lambda g, y, x: g * (3 * x * x), "f", "x ** 3.", work=Work.DIVISION)
    monkeypatch.setitem(NUMPY, "cube", on_numpy(lambda x: x**3))
    monkeypatch.setitem(JAX, "cube", on_jax(lambda x: x**3))
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
        if not primitive.linear or name in ("select", "stop_gradient", "complex"):
            continue
        function = getattr(md, name)

        def model(x, y, z, function=function, primitive=primitive):
            if len(primitive.linear) == 2 and primitive.additive:
                return function(x + y, z + z), function(x, z) + function(y, z)
            rest = () if function in (md.negative, md.conj, md.real, md.imag) else (z,)
            return function(x + y, *rest), function(x, *rest) + function(y, *rest)

        together, apart = run(model, *numbers)
        assert np.abs(np.asarray(together) - np.asarray(apart)).max() < 1e-12, name
