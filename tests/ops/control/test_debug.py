"""Printing while a program runs: once, in order, the global values, on every layout."""

import jax
import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import message, random

a, b, steps = md.dims(a=7, b=4, steps=3)
LAYOUTS = [(None, ""), ("x:2,y:2", "a:x; b:y"), ("x:2,y:4", "b:y+x")]
BACKENDS = ["numpy", "jax", "tf"]


def printed(capsys, function, *inputs, **kwargs):
    capsys.readouterr()
    md.jit(function, **kwargs)(*inputs)
    return capsys.readouterr().out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS)
def test_everything_is_printed_once_and_in_order(capsys, mesh, layout, backend):
    def program(x):
        md.print("x", x["a", 0])

        def body(total, n):
            total = total + md.sum(x)
            md.print("step {}: {}", n, total)
            md.cond(n > 1, lambda: md.print("late"), lambda: None)
            return total, None

        total, _ = md.scan(body, md.zeros([], "float64"), md.arange(steps), "steps")
        md.while_loop(lambda n: n < 2, lambda n: (md.print("while", n), n + 1)[1], _integer(0))
        md.scan(lambda c, n: (md.print("only", n), (c, None))[1], (), md.arange(steps), "steps")
        md.print("end")
        return total

    x = md.named(np.arange(28.0).reshape(7, 4), [a, b])
    assert printed(capsys, program, x, mesh=mesh, layout=layout, backend=backend) == (
        "x f64[b=4] [0. 1. 2. 3.]\n"
        "step 0: 378\nstep 1: 756\nstep 2: 1134\nlate\n"
        "while 0\nwhile 1\nonly 0\nonly 1\nonly 2\nend\n"
    )


def _integer(value):
    return md.full([], value, "int32")


def test_numbers_of_every_dtype_can_be_read(capsys):
    values = [_integer(3), md.full([], 0.5, "bfloat16"), md.full([], True, "bool")]
    md.print(*values, md.full([], 1 + 2j, "complex64"), "text", 7)
    assert capsys.readouterr().out == "3 0.5 True (1+2j) text 7\n"
    md.print(md.named(np.array([[1, 2], [3, 4]], np.int32), ["p", "q"]))
    assert capsys.readouterr().out == "s32[p=2, q=2]\n[[1 2]\n [3 4]]\n"


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_much_data_figures_are_printed(capsys, backend):
    data = np.arange(2000.0)
    big = md.named(data, ["n"])
    found = printed(capsys, lambda n: md.print(n), big, mesh="x:3", layout="n:x", backend=backend)
    assert found == f"f64[n=2000] mean 999.5, deviation {data.std():.6g}, min 0, max 1999\n"
    whole = md.named(data.astype(np.int32), ["n"])
    assert "mean 999.5" in printed(capsys, lambda n: md.print(n), whole, backend=backend)


def test_nothing_is_printed_twice_for_the_gradient(capsys):
    def loss(x):
        md.print("loss")
        return md.sum(md.sin(x))

    x = random([a])
    for function in (loss, md.checkpoint(loss)):
        assert printed(capsys, md.value_and_grad(function), x) == "loss\n"

    def stacked(x):
        def body(c, v):
            md.print("step")
            return c + md.sin(v), None

        return md.scan(body, md.zeros([], "float64"), x, "a")[0]

    assert printed(capsys, md.grad(stacked), x) == "step\n" * a.size


def test_equal_prints_are_both_done(capsys):
    def program(x):
        md.print(md.sum(x))
        md.print(md.sum(x))
        return x

    assert printed(capsys, program, random([a])).count("\n") == 2


def test_outside_of_a_trace_it_prints_at_once(capsys):
    x = md.named(np.arange(3.0), ["n"])
    md.print("n = {}!", x)
    assert capsys.readouterr().out == "n = f64[n=3] [0. 1. 2.]!\n"


def test_a_text_asks_for_its_values():
    text = message(lambda x: md.print("{} and {}", x), random([a]))
    assert text.startswith("print: the text has 2 `{}`, but 1 values follow it")


def test_programs_that_print_can_be_read():
    program = md.jit(lambda x: md.print("x", x), "x:2", "b:x").lower(random([b]))
    assert [c.kind for c in program.collectives] == ["all_gather"]
    assert "print(x')" in str(program)


def test_as_jax_prints_too(capsys):
    function = md.jit(lambda x: (md.print(md.sum(x)), x)[1]).as_jax(random([b]))
    jax.block_until_ready(jax.jit(function)(np.ones(4)))
    jax.effects_barrier()
    assert capsys.readouterr().out == "4\n"
