"""Every operation knows the line of the user's code that it came from."""

import functools
import inspect

import numpy as np

import meshdsl as md
from meshdsl.tracing.source import UNKNOWN, Source, definition, user_definition

a = md.Dimension("a", 4)


def model(x):
    y = x * 2
    weights = md.softmax(y, "a")
    return md.mean(weights)


def lines(function, *args):
    return [(op.source.line, op.source.backward) for op in md.jit(function).trace(*args).operations]


def test_an_operation_has_the_innermost_line_outside_of_the_language():
    first = inspect.getsourcelines(model)[1]
    x = md.named(np.ones(4), [a])
    found = {line for line, _ in lines(model, x)}
    assert found == {first + 1, first + 2, first + 3}


def test_the_backward_pass_keeps_the_lines_and_says_so():
    x = md.named(np.ones(4), [a])
    forward, first = set(lines(model, x)), inspect.getsourcelines(model)[1]
    found = set(lines(md.grad(model), x))
    assert {line for line, backward in found if backward} == {first + 1, first + 2, first + 3}
    assert forward <= found | {(line, False) for line, _ in found}


def test_bodies_keep_their_lines():
    def scanned(x):
        def body(c, x):
            return c + md.sin(x), None

        return md.scan(body, x.sum(), x, "a")[0]

    first = inspect.getsourcelines(scanned)[1]
    graph = md.jit(scanned).trace(md.named(np.ones(4), [a]))
    (scan,) = [op for op in graph.operations if op.name == "scan"]
    assert {op.source.line for op in scan.params["body"].operations} == {first + 2}
    assert scan.source.line == first + 4
    assert scan.source.code == 'return md.scan(body, x.sum(), x, "a")[0]'


def test_instructions_keep_the_line():
    program = md.jit(model, mesh="x:2", layout="a:x", backend="numpy").lower(
        md.named(np.ones(4), [a])
    )
    first = inspect.getsourcelines(model)[1]
    assert {c.source.line for c in program.collectives} <= {first + 2, first + 3}
    assert all(
        c.source.place == f"tests/tracing/test_source.py:{c.source.line}"
        for c in program.collectives
    )


def test_text():
    source = Source("/somewhere/models/transformer.py", 18, "block")
    assert str(source) == "models/transformer.py:18"
    assert str(source.as_backward()) == "models/transformer.py:18 (backward)"
    assert source.as_backward().as_backward() == source.as_backward()
    assert source.code == UNKNOWN.code == ""


def test_a_function_with_some_arguments_given_is_defined_where_it_stands():
    first = inspect.getsourcelines(model)[1]
    assert definition(functools.partial(functools.partial(model), x=1)).line == first
    assert definition(model) == definition(functools.partial(model))


def test_what_is_defined_in_the_language_or_nowhere_has_the_line_of_the_caller():
    line = inspect.currentframe().f_lineno
    assert user_definition(len).line == line + 1
    assert user_definition(md.sin).line == line + 2
    assert user_definition(model) == definition(model)
