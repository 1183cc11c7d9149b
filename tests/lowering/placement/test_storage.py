"""Where parameters, gradients and optimizer state live, and what is gathered on which side."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.options import Options

LAYERS, BATCH, EMBED, D_FF = 3, 8, 16, 32
layers, batch, embed, d_ff = md.dims(layers=LAYERS, batch=BATCH, embed=EMBED, d_ff=D_FF)
FSDP = "batch:data; params/embed:data"


def lowered(function, layout, *args, mesh="data:4", **options):
    return md.jit(function, mesh, layout, options=Options(**options)).lower(*args)


def moves(program):
    return [(one.kind, one.payload_bytes, one.count) for one in program.collectives]


def stack(dtype="float32"):
    return {"w": md.spec([layers, embed, d_ff], dtype)}


def through(params, x, cast=None):
    def layer(x, w):
        w = w["w"] if cast is None else md.cast(w["w"], cast)
        h = md.relu(md.einsum(x, w, over="embed"))
        return md.einsum(h, w, over="d_ff"), None

    return md.scan(layer, x, params, dim="layers")[0]


def test_slices_of_a_stored_stack_are_gathered_in_the_loop():
    def forward(params, x):
        return through(params, x)

    program = lowered(forward, FSDP, stack(), md.spec([batch, embed]))
    assert moves(program) == [("all_gather", EMBED * D_FF * 4, LAYERS)]


def test_a_gather_stands_on_the_cheaper_side_of_a_cast():
    def narrowed(params, x):
        return through(params, x, "bfloat16")

    program = lowered(narrowed, FSDP, stack(), md.spec([batch, embed], "bfloat16"))
    assert moves(program) == [("all_gather", EMBED * D_FF * 2, LAYERS)]

    def widened(params, x):
        return through(params, x, "float32")

    program = lowered(widened, FSDP, stack("bfloat16"), md.spec([batch, embed]))
    assert moves(program) == [("all_gather", EMBED * D_FF * 2, LAYERS)]


def step(params, mean, x):
    def loss(params, x):
        return md.sum(md.square(through(params, x)))

    grads = md.grad(loss)(params, x)
    mean = {"w": 0.9 * mean["w"] + 0.1 * grads["w"]}
    return {"params": {"w": params["w"] - 0.1 * mean["w"]}, "mean": mean}


def test_updates_are_computed_where_the_state_is_stored():
    program = lowered(step, f"{FSDP}; mean/embed:data", stack(), stack(), md.spec([batch, embed]))
    size = EMBED * D_FF * 4
    assert sorted(moves(program)) == [
        ("all_gather", size, LAYERS),
        ("all_gather", size, LAYERS),
        ("reduce_scatter", size, LAYERS),
    ]
    assert all(value.layout.axes("embed") == ("data",) for value in program.block.outputs)


def test_a_whole_parameter_is_updated_in_shards_and_gathered_once():
    layout = "batch:data; mean/embed:data"
    program = lowered(step, layout, stack(), stack(), md.spec([batch, embed]))
    size = EMBED * D_FF * 4
    assert sum(p * n for kind, p, n in moves(program) if kind == "reduce_scatter") == LAYERS * size
    assert sum(p * n for kind, p, n in moves(program) if kind == "all_gather") == LAYERS * size
    assert {kind for kind, _, _ in moves(program)} == {"reduce_scatter", "all_gather"}


def test_kept_weights_are_gathered_before_the_loop_for_both_passes():
    program = lowered(
        step, f"{FSDP}; mean/embed:data", stack(), stack(), md.spec([batch, embed]), weights="keep"
    )
    size = LAYERS * EMBED * D_FF * 4
    assert sum(p * n for kind, p, n in moves(program) if kind == "all_gather") == size


@pytest.mark.parametrize("order", [md.transpose, md.broadcast])
def test_updates_in_another_order_of_dims_are_computed_in_storage(order):
    """A broadcast that adds no dim only orders dims, as a transpose does."""

    def step(params, x):
        def loss(params):
            return md.sum(md.square(md.tanh(md.einsum(x, params["w"], over="embed"))))

        turned = ["d_ff", "embed"]
        w, grad = (order(tree["w"], turned) for tree in (params, md.grad(loss)(params)))
        return {"params": {"w": order(w - 0.1 * md.tanh(grad), ["embed", "d_ff"])}}

    args = {"w": md.spec([embed, d_ff])}, md.spec([batch, embed])
    size = EMBED * D_FF * 4
    for layout in (FSDP, "batch:data; params/d_ff:data"):
        program = lowered(step, layout, *args)
        assert moves(program) == [("all_gather", size, 1), ("reduce_scatter", size, 1)]


@pytest.mark.parametrize("order", [md.transpose, md.broadcast])
def test_a_gather_stands_behind_an_order_of_dims_and_a_cast(order):
    def forward(params, x):
        return md.einsum(x, md.cast(order(params["w"], ["d_ff", "embed"]), x.dtype), over="embed")

    args = {"w": md.spec([embed, d_ff])}, md.spec([batch, embed], "bfloat16")
    assert moves(lowered(forward, FSDP, *args)) == [("all_gather", EMBED * D_FF * 2, 1)]


def test_gradients_have_paths_of_their_own():
    def gradients(params, x):
        return md.grad(lambda params, x: md.sum(md.square(through(params, x))))(params, x)

    layout = "batch:data; gradients/params/embed:data"
    program = lowered(gradients, layout, stack(), md.spec([batch, embed]))
    kinds = [kind for kind, _, _ in moves(program)]
    assert kinds == ["reduce_scatter"]  # stored split, and returned so


def test_a_named_value_goes_where_its_scope_says():
    def forward(w, x):
        h = md.name(md.einsum(x, w, over="embed"), "hidden")
        return md.relu(h)

    args = md.spec([embed, d_ff]), md.spec([batch, embed])
    whole, split = lowered(forward, "", *args), lowered(forward, "hidden/batch:data", *args)
    assert moves(whole) == []
    assert moves(split) == [("all_gather", BATCH * D_FF * 4, 1)]
    assert split.flops < whole.flops / 3


def test_a_split_stack_is_gathered_before_the_loop():
    def forward(params, x):
        return through(params, x)

    layers_split = "batch:data; params/layers:data"
    program = lowered(forward, layers_split, stack(), md.spec([batch, embed]))
    assert [(kind, count) for kind, _, count in moves(program)] == [("all_gather", 1)]


@pytest.mark.filterwarnings("ignore:memory=1 B is less")
@pytest.mark.parametrize("options", [{}, {"weights": "keep"}, {"memory": 1}, {"memory": 2**40}])
@pytest.mark.parametrize(
    "layout",
    [
        f"{FSDP}; mean/embed:data",
        "batch:data; mean/embed:data",
        "batch:data; params/layers:data; mean/params/layers:-; mean/d_ff:data",
        "d_ff:data; batch:data?; params/embed:data; params/d_ff:-",
        "batch:data; gradients/embed:-; params/d_ff:data",
    ],
)
def test_numbers_do_not_depend_on_storage(layout, options):
    rng = np.random.default_rng(0)
    w, mean = ({"w": md.named(rng.normal(size=(LAYERS, EMBED, D_FF)), [layers, embed, d_ff])}
               for _ in range(2))  # fmt: skip
    x = md.named(rng.normal(size=(BATCH, EMBED)), [batch, embed])
    expected = md.jit(step, backend="numpy")(w, mean, x)
    found = md.jit(step, "data:4", layout, "numpy", options=Options(**options))(w, mean, x)
    for part in ("params", "mean"):
        np.testing.assert_allclose(found[part]["w"], expected[part]["w"], rtol=1e-10)


ULYSSES = "heads:data; length:data?; params/heads:-"


def test_weights_that_are_whole_where_their_dims_are_split_move_nothing_for_their_gradients():
    """All-to-all attention: sums of gradients need no layout of their own, and wait for the end."""
    parts, length, heads = md.dims(parts=2, length=8, heads=4)
    params = {"w": md.spec([layers, embed, heads]), "v": md.spec([layers, heads, embed])}

    def loss(params, x):
        def layer(x, w):
            h = md.einsum(x, w["w"], over="embed")
            h = h + md.cumsum(h, "length")
            return md.einsum(h, w["v"], over="heads"), None

        return md.sum(md.square(md.scan(layer, x, params, dim="layers")[0]))

    def step(params, x):
        return {"params": md.grad(loss)(params, x)}

    def in_parts(params, x):
        def add(total, x):
            found = md.value_and_grad(loss, named=False)(params, x)[1]
            return {name: total[name] + found[name] for name in total}, None

        zeros = {name: md.zeros(t.dims) for name, t in params.items()}
        return {"params": md.scan(add, zeros, x, dim="parts")[0]}

    once = lowered(step, ULYSSES, params, md.spec([batch, length, embed]))
    twice = lowered(in_parts, ULYSSES, params, md.spec([parts, batch, length, embed]))
    for program, times in ((once, 1), (twice, 2)):
        counts = {one.kind: 0 for one in program.collectives}
        for one in program.collectives:
            counts[one.kind] += one.count
        assert counts == {"all_to_all": 4 * LAYERS * times, "all_reduce": 1}


def test_products_take_whole_weights_as_they_are_if_that_moves_less():
    """Half precision: casting a slice of a weight is less work, but then the stream is gathered."""
    length, heads, kv = md.dims(length=64, heads=4, kv=4)
    params = {"w": md.spec([layers, embed, heads, kv])}

    def forward(params, x):
        def layer(x, w):
            h = md.einsum(x, md.cast(w["w"], "bfloat16"), over="embed")
            return x + md.cast(md.sum(md.cumsum(h, "length"), ["heads", "kv"]), "bfloat16"), None

        return md.scan(layer, x, params, dim="layers")[0]

    x = md.spec([batch, length, embed], "bfloat16")
    program = lowered(forward, ULYSSES, params, x)
    kinds = [one.kind for one in program.collectives]
    assert "all_to_all" in kinds and "all_gather" not in kinds
