"""Printing of traced programs: formulas with the names of the source."""

import meshdsl as md

a, b, layers = md.dims(a=8, b=4, layers=3)


def lines(function, *specs):
    """Returns the formulas of a traced function, without the dims and places beside them."""
    found = []
    for line in str(md.jit(function).trace(*specs)).splitlines()[1:]:
        indent = len(line) - len(line.lstrip())
        found.append(line[2:indent] + line[indent:].split("  ")[0])
    return found


def test_a_statement_is_a_formula_with_its_name():
    def program(x, y):
        scale = 1 / (2 + md.sqrt(md.sum(x * x, "b") - 3.5))
        z = -(x - (y - x)) * scale
        return md.cast(z, "int32")

    assert lines(program, md.spec([a, b]), md.spec([b])) == [
        "input x",
        "input y",
        "scale = 1 / (2 + sqrt(sum(x * x, b) - 3.5))",
        "z = -(x - (y - x)) * scale",
        "program = cast(z, s32)",
        "output program",
    ]


def test_what_is_read_twice_has_a_line_of_its_own():
    def program(x):
        return md.softmax(x, "b")

    assert lines(program, md.spec([a, b])) == [
        "input x",
        "program = exp(x - stop_gradient(max(x, b)))",
        "program.2 = program / sum(program, b)",
        "output program.2",
    ]


def test_dims_and_places_stand_beside():
    def program(x):
        return md.einsum(x, x.rename(a="other"), over="b")

    text = str(md.jit(program).trace(md.spec([a, b])))
    line = program.__code__.co_firstlineno + 1
    head, given, made, end = text.splitlines()
    assert head == "program: 2 operations"
    assert given.split() == ["input", "x", "f32[a=8,", "b=4]"]
    assert made == (
        "  program = einsum(x, rename(x, a -> other), over=b)  f32[a=8, other=8]  "
        f"tests/tracing/test_printing.py:{line}"
    )
    assert end.index("f32[") == made.index("f32[")


def test_inputs_have_short_names_beside_their_paths():
    spec = {"mlp": {"w": md.spec([a])}, "attention": {"w": md.spec([a])}}
    text = str(md.jit(lambda params: params["mlp"]["w"]).trace(spec))
    assert [line.split()[1] for line in text.splitlines()[1:3]] == ["attention.w", "mlp.w"]
    assert text.splitlines()[2].endswith("f32[a=8]  params/mlp/w")


def test_bodies_stand_below_their_operation():
    def program(x, w):
        def body(x, scale):
            y = x * scale
            return y + 1, md.sum(y)

        x, sums = md.scan(body, x, w, dim="layers", reverse=True)
        return md.cond(md.sum(sums) > 0, lambda: x, lambda: -x)

    assert lines(program, md.spec([a]), md.spec([layers])) == [
        "input x",
        "input w",
        "x.2, sums = scan layers=3, last first",
        "    carry x = x",
        "    over w",
        "    y = x * w",
        "    body = y + 1",
        "    body.2 = sum(y, a)",
        "    return body, body.2",
        "program = sum(sums, layers) > 0",
        "program.2 = cond if program",
        "  if true",
        "    return x.2",
        "  if false",
        "    value = -x.2",
        "    return value",
        "output program.2",
    ]


def test_while_loops_show_their_condition_and_their_carry():
    def program(n):
        return md.while_loop(lambda n: n < 9, lambda n: n * 2, n)

    assert lines(program, md.spec([], "int32")) == [
        "input n",
        "program = while_loop",
        "  condition",
        "    carry n = n",
        "    value = n < 9",
        "    return value",
        "  body",
        "    carry n = n",
        "    value = n * 2",
        "    return value",
        "output program",
    ]


def test_a_backward_pass_makes_gradients():
    def loss(x):
        y = md.sin(x)
        return md.sum(y)

    assert lines(md.grad(loss), md.spec([a])) == [
        "input x",
        "y = sin(x)",
        "loss = sum(y, a)",
        "loss_grad = broadcast(1, a)",
        "y_grad = loss_grad * cos(x)",
        "output y_grad",
    ]


def test_settings_and_effects_are_shown():
    def program(x):
        md.print("x is {}", x)
        y = md.take(x, md.arange(b), "a")
        return y["b", 2]

    assert lines(program, md.spec([a])) == [
        "input x",
        "print(x, 'x is …')",
        "y = take(x, arange(b), a)",
        "program = index(y, b, at=2)",
        "output program",
    ]


def test_a_models_step_stays_readable():
    """Lines stay within a screen, and names are unique."""
    from meshdsl import nn

    def block(x, w):
        h = md.gelu(nn.rms_norm(x, "b") * w)
        return x + h, md.mean(h)

    def loss(x, w):
        x, means = md.scan(block, x, w, dim="layers")
        return md.mean(x) + md.sum(means)

    spec = md.spec([layers, b])
    text = str(md.jit(md.value_and_grad(loss, (0, 1))).trace(md.spec([a, b]), spec))
    assert max(map(len, text.splitlines())) < 160
    top = [line for line in text.splitlines() if line.startswith("  ") and line[2] != " "]
    made = [name for line in top if " = " in line for name in line.split(" = ")[0].split(", ")]
    assert len(made) == len(set(made))
