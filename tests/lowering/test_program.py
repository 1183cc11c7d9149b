"""SpmdProgram: a program can be pickled, printed and run elsewhere."""

import pickle

import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering import backends
from meshdsl.lowering.lower import lower

a, b = md.dims(a=4, b=3)


class Params(md.Module):
    w: md.Tensor
    scale: float = md.static(default=2.0)


def model(params, x):
    def body(carry, row):
        return carry + md.sin(row), carry

    last, kept = md.scan(body, md.sum(x, "a"), x, "a")
    y = md.einsum(params.w, x, over="b") * params.scale
    return Params(md.sum(y) + md.sum(last * kept))


def doubled(x):
    return x * 2


def test_a_program_with_a_function_that_no_module_has_is_not_pickled():
    x = md.named(np.ones((4, 3), np.float32), [a, b])

    def program(function):
        return md.jit(
            lambda x: md.local(function, x, out=x.dims, split="a"), "d:2", "a:d", "numpy"
        ).lower(x)

    pickle.dumps(program(doubled))
    reason = r"`<lambda>` cannot be pickled: operation .* at tests/lowering/test_program.py:\d+\. "
    with pytest.raises(ValueError, match=f"{reason}Functions are pickled by name: define it with"):
        pickle.dumps(program(lambda x: x * 2))


def test_a_pickled_program_prints_the_same_and_runs():
    def step(params, x):
        return md.value_and_grad(lambda p: model(p, x).w)(params)

    x = md.named(np.arange(12, dtype=np.float32).reshape(4, 3), [a, b])
    w = md.named(np.arange(3, dtype=np.float32), [b])
    jitted = md.jit(step, "data:2", "a:data", "numpy", check_finite=True)
    program = jitted.lower(Params(w), x)
    program.memory  # noqa: B018 what is computed once is not pickled
    other = pickle.loads(pickle.dumps(program))
    assert str(other) == str(program)
    assert [c.source for c in other.collectives] == [c.source for c in program.collectives]
    assert (other.peak_bytes, other.flops) == (program.peak_bytes, program.flops)
    found = backends.load("numpy").Executable(other).call_flat([np.asarray(w), np.asarray(x)])
    value, gradient = jitted(Params(w), x)
    np.testing.assert_array_equal(found[0], value)
    np.testing.assert_array_equal(found[1], gradient.w)
    with pytest.raises(ValueError, match="program `step` has no function to compile for: it was"):
        other.compile()
    program.compile()


def test_the_time_of_a_program_is_near_the_peak_of_its_hardware_for_one_large_product():
    x = md.spec(md.dims(batch=8192, embed=4096), "bfloat16")
    w = md.spec(md.dims(embed=4096, d_ff=16384), "bfloat16")
    jitted = md.jit(lambda x, w: md.einsum(x, w, over="embed"), "data:4", "batch:data")
    program = jitted.lower(x, w)
    for name, peak in {"v5p": 459e12, "v5e": 197e12, "h100": 989e12}.items():  # of data sheets
        least = program.flops / peak
        assert least < program.seconds(name) < 1.5 * least
    with pytest.raises(ValueError, match=r"unknown hardware 'v5q'; choose one of .*`v5p`"):
        program.seconds("v5q")


def test_a_program_lowered_from_a_graph_says_how_to_compile_and_how_to_run_it():
    x = md.named(np.ones(4, np.float32), ["a"])
    program = lower(md.jit(md.exp).trace(x), md.Mesh(), md.Layout())
    with pytest.raises(ValueError, match=r"lowered from a graph, or unpickled\. Write md\.jit\("):
        program.compile()
    (found,) = backends.load("jax").Executable(program).call_flat([x.data])
    np.testing.assert_allclose(found, np.exp(x.data), rtol=1e-6)
