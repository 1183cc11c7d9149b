"""Functions with products in another precision: which products change, and what they compute."""

import re

import numpy as np
import pytest

import meshdsl as md
from meshdsl.models import load
from meshdsl.optim import AdamW
from meshdsl.training.state import create
from meshdsl.training.step import make_train_step

batch, embed, d_ff, layers = md.dims(batch=8, embed=16, d_ff=32, layers=3)


def numbers(dims, seed=0, dtype="float32"):
    data = np.random.default_rng(seed).standard_normal([dim.size for dim in dims])
    return md.named(data.astype(dtype), dims)


X = numbers([batch, embed])
PARAMS = {
    "mlp": {"w_in": numbers([embed, d_ff], 1), "w_out": numbers([d_ff, embed], 2)},
    "head": numbers([embed, d_ff], 3),
}


def mlp(params, x):
    h = md.relu(md.einsum(x, params["mlp"]["w_in"] * 0.5, over="embed"))
    y = md.einsum(h, params["mlp"]["w_out"], over="d_ff")
    return md.einsum(y, md.cast(params["head"], "float32"), over="embed")


def dtypes_of_products(function, *args):
    """Returns the dtypes of the first operands of einsums, in loops and branches too, in order."""
    dtypes = []

    def visit(block):
        for op in block.operations:
            if op.name == "einsum":
                dtypes.append(op.inputs[0].dtype.name)
            for body in op.bodies:
                visit(body)

    visit(md.jit(function).trace(*args))
    return dtypes


@pytest.mark.parametrize(
    ("precision", "dtypes"),
    [
        ("int8", ["int8", "int8", "int8"]),
        ("mlp:fp8", ["float8_e4m3fn", "float8_e4m3fn", "float32"]),
        ("mlp:fp8,w_out:bf16,head:int8", ["float8_e4m3fn", "bfloat16", "int8"]),
        ("einsum:bf16,params/head:-", ["bfloat16", "bfloat16", "float32"]),
        ("mlp/*:int8", ["int8", "int8", "float32"]),
        (None, ["float32", "float32", "float32"]),
    ],
)
def test_rules_choose_products_by_path_and_operation(precision, dtypes):
    precision = precision and precision.replace("w_out:", "mlp/w_out:")
    assert dtypes_of_products(md.with_precision(mlp, precision), PARAMS, X) == dtypes


STACK = numbers([layers, embed, d_ff], 4)


def scanned(params, x):
    def layer(x, w):
        return x + md.einsum(md.einsum(x, w, over="embed"), w, over="d_ff"), None

    return md.scan(layer, x, params, dim="layers")[0]


def kept(params, x):
    return md.checkpoint(lambda w, x: scanned(w, x))(params, x)


def branching(params, x):
    yes = md.sum(x) > 0
    return md.cond(yes, lambda w: scanned(w, x), lambda w: x, params)


def looping(params, x):
    w = params["layers", 0]

    def again(state):
        x, count = state
        return md.einsum(md.einsum(x, w, over="embed"), w, over="d_ff"), count + 1

    start = (x, md.full([], 0, "int32"))
    return md.while_loop(lambda state: state[1] < 2, again, start)[0]


@pytest.mark.parametrize("function", [scanned, kept, branching])
def test_paths_reach_into_loops_branches_and_checkpoints(function):
    changed = md.with_precision(function, "params/einsum:int8")
    assert dtypes_of_products(changed, STACK, X) == ["int8", "int8"]
    exact, found = (np.asarray(md.jit(f)(STACK, X)) for f in (function, changed))
    assert 0 < np.abs(found - exact).max() < 0.05 * np.abs(exact).max()


def test_products_without_a_parameter_are_chosen_by_their_operation():
    assert dtypes_of_products(md.with_precision(looping, "einsum:int8"), STACK, X) == ["int8"] * 2


def test_gradients_go_through_loops():
    def total(function):
        return lambda w, x: md.sum(md.square(function(w, x)))

    exact, found = (
        np.asarray(md.jit(md.grad(total(f)))(STACK, X))
        for f in (scanned, md.with_precision(scanned, "int8"))
    )
    assert 0 < np.abs(found - exact).max() < 0.05 * np.abs(exact).max()


def test_a_dtype_rounds_operands_and_keeps_the_dtype_of_the_result():
    def product(x, w):
        return md.einsum(x, w, over="embed")

    x, w = X, PARAMS["head"]
    found = md.jit(md.with_precision(product, "bf16"), backend="numpy")(x, w)
    bf16 = [md.cast(each, "bfloat16") for each in (x, w)]
    expected = md.jit(product, backend="numpy")(*bf16)
    assert found.dtype == np.float32
    assert np.array_equal(np.asarray(found), np.asarray(expected).astype(np.float32))


def test_attention_is_computed_in_a_dtype_and_not_in_8_bits():
    heads, length, kv = md.dims(heads=2, length=4, kv=8)
    q = numbers([heads, length, kv])
    memory = q.rename(length="memory_length")

    def attend(q, k, v):
        return md.attention(q, k, v)

    exact = np.asarray(md.jit(attend)(q, memory, memory))
    half = md.jit(md.with_precision(attend, "attention:bf16"))(q, memory, memory)
    assert half.dtype == np.float32
    assert 0 < np.abs(np.asarray(half) - exact).max() < 0.05
    eight = md.jit(md.with_precision(attend, "attention:fp8"))(q, memory, memory)
    assert np.array_equal(np.asarray(eight), exact)


def test_a_gradient_of_ones_own_stays_as_it_is():
    @md.custom_gradient
    def product(x, w):
        y = md.einsum(x, w, over="embed")
        return y, lambda g: (md.einsum(g, w, over="d_ff"), md.einsum(x, g, over="batch"))

    changed = md.with_precision(lambda w, x: product(x, w) + mlp(PARAMS, x), "int8")
    assert dtypes_of_products(changed, PARAMS["head"], X) == ["float32"] * 3 + ["int8"] * 3


@pytest.mark.parametrize(
    ("precision", "problem"),
    [
        ("mpl:fp8", "`mpl:fp8` applies to no product. Did you mean `mlp`"),
        ("mlp:fp8,convs:int8", "`convs:int8` applies to no product. The products are params/mlp/w"),
        (
            "mlp:fp8,w_in:int8",
            "`mlp:fp8` and `w_in:int8` both apply to the product params/",
        ),
    ],
)
def test_rules_that_fit_nothing_are_told(precision, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        md.jit(md.with_precision(mlp, precision)).trace(PARAMS, X)


def test_reports_say_which_products_a_rule_changes():
    notes = md.jit(md.with_precision(mlp, "mlp:fp8")).trace(PARAMS, X).notes
    assert notes == ("precision `mlp:fp8`: params/mlp/w_in/einsum, params/mlp/w_out/einsum",)


def test_a_training_step_gathers_the_named_weights_in_8_bits():
    """Weights that are stored split are gathered in one byte, for both passes; others in two."""
    model = load("gpt_mini", "layers=2,policy.compute=bfloat16")
    optimizer = AdamW(1e-3)
    step = make_train_step(model.loss, optimizer, precision="mlp:fp8,attention:bf16")
    f = md.jit(step, mesh="data:8", layout="batch:data; params/embed:data")
    start = md.jit(create(model.init, optimizer), mesh="data:8", layout="params/embed:data")
    program = f.lower(start(md.random.key(0)), model.batch_spec(16, 128))
    gathers = [c for c in program.collectives if c.kind == "all_gather"]
    parts = [part for c in gathers for part in (c.parts or (c,))]
    sizes = [
        part.payload_bytes // np.prod([dim.size for dim in part.dims])
        for part in parts
        if "d_ff" in [dim.name for dim in part.dims] and len(part.dims) == 2
    ]
    assert sizes == [1] * 4  # w_in and w_out, forward and backward
    heads = [part for part in parts if "heads" in [dim.name for dim in part.dims]]
    assert all(p.payload_bytes == 2 * np.prod([d.size for d in p.dims]) for p in heads)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "fp8", "mlp:fp8,attention:bf16", "int8+tensor"])
def test_a_training_step_takes_the_same_steps_on_every_layout(precision):
    model = load("gpt_mini", "layers=2,embed=32,heads=4,d_ff=64,vocab=64")
    optimizer = AdamW(1e-2)
    step = make_train_step(model.loss, optimizer, precision=precision)
    tokens = np.random.default_rng(0).integers(0, 64, (8, 17))
    spec = model.batch_spec(8, 16)
    data = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    arrays = {name: md.named(data[name].astype(np.int32), spec[name].dims) for name in spec}

    def losses(**where):
        state = md.jit(create(model.init, optimizer), **where)(md.random.key(0))
        run = md.jit(step, **where)
        found = []
        for _ in range(4):
            state, metrics = run(state, arrays)
            found.append(float(np.asarray(metrics["loss"])))
        return found

    alone = losses()
    assert alone[-1] < alone[0]
    for mesh, layout in (
        ("data:8", "batch:data; params/embed:data"),
        ("data:2,model:4", "batch:data; heads:model; d_ff:model; vocab:model; length:model?"),
    ):
        np.testing.assert_allclose(losses(mesh=mesh, layout=layout), alone, rtol=5e-3)
