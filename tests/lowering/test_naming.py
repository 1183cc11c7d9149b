"""Values are called as the source calls them, and no two values of a block alike."""

import re

import jax
import pytest

import meshdsl as md
from meshdsl.lowering.naming import Names, path_names
from meshdsl.models.registry import load
from meshdsl.training.microbatches import accumulated
from meshdsl.training.state import spec_of

layers, batch, embed, d_ff = md.dims(layers=3, batch=8, embed=16, d_ff=64)
X = md.spec([batch, embed])


class Twice(md.Module):
    def __call__(self, x):
        return md.exp(md.exp(x))


def names_of(function, *args, layout="batch:data"):
    """Returns the names of all values but the inputs, in order."""
    program = md.jit(function, "data:2", layout).lower(*args)
    names = Names(program)
    return [name for value, name in names.items() if value not in program.block.inputs]


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["x", "state/params/mlp/w"], ["x", "w"]),
        (["params/a/w", "params/b/w"], ["a.w", "b.w"]),
        (["s/params/w", "s/mean/w", "s/square/w"], ["w", "mean.w", "square.w"]),
        (
            ["s/params/a/w", "s/params/b/w", "s/mean/a/w", "s/mean/b/w"],
            ["a.w", "b.w", "mean.a.w", "mean.b.w"],
        ),
        (["s/params/a/w", "s/optimizer/mean/params/a/w"], ["w", "mean.w"]),
        (["b/0", "b/1"], ["0", "1"]),
        ([""], [""]),
    ],
)
def test_inputs_have_the_shortest_name_that_tells_them_apart(paths, expected):
    assert path_names(paths) == expected


def test_a_value_is_named_after_what_its_line_assigns_to():
    def f(x):
        first = x + 1
        second: object = first * first
        second += x
        third, *_ = (second * 2, None)
        return third

    assert names_of(f, X) == ["first", "second", "second.2", "third"]


def test_several_values_of_one_line_take_its_names_in_order():
    def f(x):
        a, b = md.exp(x), md.sin(x)
        return a * a + b * b

    assert names_of(f, X) == ["a", "b", "f"]


def test_a_returned_value_is_named_after_its_function_or_module():
    def double(x):
        return x + x

    def f(x):
        y = double(x)
        return Twice()(y)

    assert names_of(f, X) == ["double", "twice"]


def test_a_statement_over_several_lines_names_its_value():
    def f(x):
        long = md.exp(
            x * 2
        ) + md.sin(
            x * 3
        )  # fmt: skip
        return long * long

    assert names_of(f, X) == ["long", "f"]


def test_a_moved_value_has_a_prime():
    def f(x):
        y = md.exp(x)
        total = md.sum(y, "batch")
        return total + 1

    assert names_of(f, X) == ["y", "total", "total'", "f"]


def test_a_gradient_is_named_after_what_has_its_dims_where_it_was_read():
    def loss(params, x):
        h = md.einsum(x, params["w"], over="embed")
        y = md.einsum(md.square(h), params["v"], over="d_ff")
        return md.mean(md.square(y - x))

    def f(params, x):
        return md.grad(loss)(params, x)

    params = {"w": md.spec([embed, d_ff]), "v": md.spec([d_ff, embed])}
    names = names_of(f, params, X)
    assert {"h_grad", "w_grad", "v_grad", "w_grad'", "v_grad'"} <= set(names)


def test_a_statement_that_ran_twice_has_the_gradients_of_the_right_run():
    def scaled(x, by):
        return md.exp(x) * by

    def loss(params, x):
        y = scaled(x, params["first"])
        z = md.sin(y)
        return md.mean(scaled(z, params["second"]))

    def f(params, x):
        value, grads = md.value_and_grad(loss)(params, x)
        return {"params": jax.tree.map(lambda p, g: p - g, params, grads)}, value

    params = {"first": md.spec([embed]), "second": md.spec([embed])}
    program = md.jit(f, "data:2", "batch:data").lower(params, X)
    text = str(program)
    assert "new_second = second - second_grad'" in text
    assert "new_first = first - first_grad'" in text


def test_names_are_unique_in_every_block():
    def layer(x, w):
        x = md.exp(x)
        x = md.einsum(x, w, over="embed").rename(d_ff="embed") + x
        return x, x

    def loss(params, x):
        x, kept = md.scan(layer, x, params, dim="layers")
        return md.mean(x) + md.mean(kept)

    square = md.spec([layers, embed, md.Dimension("d_ff", embed.size)])
    program = md.jit(md.grad(loss), "data:2", "batch:data").lower(square, X)
    names = Names(program)

    def check(block):
        lines = [i for i in block.instructions if i.outputs[0] in names]
        found = [names[v] for i in lines for v in i.outputs]
        found += [names[v] for v in block.inputs]
        assert len(set(found)) == len(found)
        for instruction in block.instructions:
            if instruction.body is not None:
                check(instruction.body)

    check(program.block)


def test_what_nothing_tells_apart_is_named_after_its_statement():
    def loss(params, x):
        y = x * (params["a"] + params["b"])
        return md.mean(md.square(y))

    params = {name: md.spec([batch, embed]) for name in "ab"}
    names = names_of(md.grad(loss), params, X)
    assert "y_grad" in names and not {"a_grad", "b_grad"} & set(names)


def test_what_is_added_up_to_a_gradient_has_its_operation():
    def loss(x):
        y = md.exp(x) * md.sin(x)
        return md.mean(md.square(y))

    found = [name for name in names_of(md.grad(loss), X) if name.startswith("x_grad")]
    assert found[-1] == "x_grad" and all("." in name for name in found[:-1])


def plain(name):
    """Returns a name without its number, its primes and the dim that it is stacked over."""
    return re.sub(r"'|\[\w+\]|\.\d+$", "", name.replace("'", ""))


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gpt_mini", "layers=2"),
        ("t5_mini", "layers=2"),
        ("deepseek_mini", ""),
        ("gpt3_175b", "layers=2,embed=32,heads=4,d_ff=64,vocab=64,max_length=16"),
        ("llama_7b", "layers=2,embed=32,heads=4,d_ff=64,vocab=64"),
        ("mixtral_8x7b", "layers=2,embed=32,heads=4,kv_heads=2,d_ff=64,vocab=64"),
    ],
)
def test_the_gradient_of_every_parameter_has_its_name(name, sizes, parts, remat):
    """The results tell whose gradients they are; names are found without them."""
    model = load(name, f"{sizes},remat={remat}".lstrip(","))
    params = spec_of(model.init)
    step = md.value_and_grad(model.loss)
    if parts > 1:
        step = accumulated(lambda params, batch: (model.loss(params, batch), {}), parts)

    def f(params, batch):
        return {"gradients": step(params, batch)[1]}

    mesh, layout = "data:2 model:2", "batch:data; heads:model; d_ff:model; params/embed:data"
    program = md.jit(f, mesh, layout).lower(params, model.batch_spec(8, 16))
    names = Names(program)
    makers = {v: i for i in program.block.instructions for v in i.outputs}
    paths = [path.removeprefix("gradients/") for path in program.output_paths]
    for value, path in zip(program.block.outputs, path_names(paths), strict=True):
        while "finished" in names.get(value, "finished"):  # their sum becomes their mean
            value = makers[value].inputs[0]
        assert plain(names[value]) == f"{path}_grad"
