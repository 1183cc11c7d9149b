"""A program printed: one line per source line, in its names; collectives with bytes and place."""

import os
import re
from pathlib import Path

import jax

import meshdsl as md

layers, batch, embed, d_ff = md.dims(layers=3, batch=8, embed=16, d_ff=64)
X = md.spec([batch, embed])
PARAMS = {"w_in": md.spec([layers, embed, d_ff]), "w_out": md.spec([layers, d_ff, embed])}
GOLDEN = Path(__file__).parent / "golden" / "train_step.txt"


def layer(x, block):
    h = md.relu(md.einsum(x, block["w_in"], over="embed"))
    return x + md.einsum(h, block["w_out"], over="d_ff"), None


def loss(params, data):
    x, _ = md.scan(layer, data["x"], params, dim="layers")
    error = x - data["y"]
    return md.mean(md.square(error))


def train_step(state, data):
    value, grads = md.value_and_grad(loss)(state["params"], data)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {"state": {"params": params}, "loss": value}


def show(function, *args, mesh="data:2 model:4", layout="batch:data; d_ff:model"):
    text = str(md.jit(function, mesh, layout).lower(*args))
    return re.sub(r"\S*test_printing\.py", "test_printing.py", text)


def formulas(function, *args):
    """Returns the instructions as printed for one device, without types and places."""
    lines = show(function, *args, mesh=None, layout=None).split("\n\n")[-1].split("\n")
    return [re.match(r"\W*.*?(?=  |$)", line).group().strip() for line in lines]


def test_a_training_step_prints_as_the_golden_file_shows():
    """To accept a change, run with UPDATE_GOLDEN=1 and read the difference."""
    text = show(train_step, {"params": PARAMS}, {"x": X, "y": X}) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_printing_twice_gives_the_same_text():
    program = md.jit(train_step).lower({"params": PARAMS}, {"x": X, "y": X})
    assert str(program) == str(program)
    again = md.jit(train_step).lower({"params": PARAMS}, {"x": X, "y": X})
    assert str(program) == str(again)


def test_one_device_has_no_mesh_no_layout_and_no_legend():
    text = show(lambda x: x + 1, X, mesh=None, layout=None)
    assert text.startswith("program <lambda>, 1 device\nper device: ")
    assert "wire\n" not in text and "*" not in text


def test_instructions_of_one_line_are_one_formula():
    def f(x):
        y = md.exp(-x) * 0.5 + 1
        return y

    assert formulas(f, X) == ["y = exp(-x) * 0.5 + 1"]


def test_formulas_keep_the_grouping_of_the_source():
    def f(x):
        a = x - (x - (x + 1))
        b = (x + 3) * -(x * 2)
        c = (x * x) / (x / x)
        d = (x - 1) - 2
        return a, b, c, d

    assert formulas(f, X) == [
        "a = x - (x - (x + 1))",
        "b = (x + 3) * -(x * 2)",
        "c = x * x / (x / x)",
        "d = x - 1 - 2",
    ]


def test_comparisons_and_logic_are_written_with_pythons_operators():
    def f(x):
        keep = (x > 0) & ~(x >= 1) | (x == 2)
        return md.where(keep, x, 0)

    assert formulas(f, X) == ["keep = (x > 0) & ~(x >= 1) | (x == 2)", "f = where(keep, x, 0)"]


def test_whole_numbers_have_pythons_operators_too():
    def f(x):
        y = (x // 2 << 1) % 3
        z = ~(x & 1 ^ x >> 2)
        return y, z

    assert formulas(f, md.spec([batch], "int32")) == [
        "y = (x // 2 << 1) % 3",
        "z = ~(x & 1 ^ x >> 2)",
    ]


def test_a_value_read_twice_has_its_own_line_named_after_its_operation():
    def f(x):
        y = md.exp(x) / md.sum(md.exp(x), "embed")
        return y

    assert formulas(f, X) == ["y.exp = exp(x)", "y = y.exp / sum(y.exp, embed)"]


def test_long_formulas_are_broken_into_parts():
    def f(x):
        y = md.exp(md.sin(md.cos(md.tanh(md.sqrt(md.abs(md.log1p(md.square(md.floor(x))))))))) + 1
        return md.exp(md.sin(md.cos(md.tanh(md.sqrt(md.abs(md.log1p(md.square(md.floor(y)))))))))

    lines = formulas(f, X)
    assert len(lines) > 2
    assert all(len(line) < 90 for line in lines)
    assert "".join(lines).count("(") == 18


def test_einsum_names_the_dims_it_sums_over():
    w = md.spec([embed, d_ff])

    def f(x, w):
        outer = md.einsum(x, w, out=[batch, embed, d_ff])
        return md.einsum(x, outer, out=[d_ff]), outer

    assert formulas(f, X, w) == [
        "outer = einsum(x, w)",
        "f = einsum(x, outer, over=batch+embed)",
    ]


def test_collectives_are_marked_and_tell_dim_axis_wire_bytes_and_place():
    def f(x, w):
        y = md.einsum(x, w, over="embed")
        return md.max(y, "d_ff"), md.einsum(y, w, over="d_ff")

    text = show(f, X, md.spec([embed, d_ff]), layout="batch:data; d_ff:model; embed:model?")
    marked = [re.sub("  +", "  ", line) for line in text.split("\n") if line.startswith("* ")]
    place = f"test_printing.py:{f.__code__.co_firstlineno + 1}"
    after = f"test_printing.py:{f.__code__.co_firstlineno + 2}"
    assert marked[1:] == [
        f"* x' = all_gather(x, embed, model)  192 B wire  → {place}",
        f"* f.max' = all_reduce(f.max, max, model)  24 B wire  ← {after}",
        f"* f' = reduce_scatter(f, embed, model)  192 B wire  ← {after}",
    ]
    assert "[batch=4/8] partial max over model" in text


def test_collectives_in_a_loop_tell_how_often():
    text = show(train_step, {"params": PARAMS}, {"x": X, "y": X})
    assert re.search(r"all_reduce\(x_grad.einsum, model\) +384 B wire ×3 ", text)


def test_an_output_that_replaces_an_input_is_called_after_it():
    text = show(train_step, {"params": PARAMS}, {"x": X, "y": X})
    assert "new_w_in = w_in - 0.1 * w_in_grad[layers]'" in text
    assert "and 2 that replace inputs, where these were" in text


def test_stacked_values_keep_their_names_from_loop_to_loop():
    text = show(train_step, {"params": PARAMS}, {"x": X, "y": X})
    assert "stack x, h.less_equal, h (1.7 KiB)" in text
    assert "over  x, w_in, w_out, h.less_equal, h\n" in text


def test_no_line_is_empty_of_meaning_where_the_source_cannot_be_read():
    scope = {"md": md}
    exec("def f(x):\n    return md.exp(x) + 1", scope)  # a file that is not there
    assert formulas(scope["f"], X)[0].endswith("= exp(x) + 1")
