"""Functions with products in another precision: which products change, and what they compute."""

import re

import numpy as np
import pytest

import meshdsl as md
from meshdsl.models import load
from meshdsl.optim import AdamW
from meshdsl.training.state import create
from meshdsl.training.step import make_train_step

pytestmark = pytest.mark.optimized  # it is about rounding

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


heads, length, kv = md.dims(heads=2, length=4, kv=8)
Q = numbers([heads, length, kv])
MEMORY = Q.rename(length="memory_length")


def attend(q, memory):
    return md.attention(q, memory, memory)


def test_attention_is_computed_in_a_dtype():
    exact = np.asarray(md.jit(attend)(Q, MEMORY))
    half = md.jit(md.with_precision(attend, "attention:bf16"))(Q, MEMORY)
    assert half.dtype == np.float32
    assert 0 < np.abs(np.asarray(half) - exact).max() < 0.05


def test_a_rule_of_8_bits_that_can_change_nothing_is_refused():
    problem = "`attention:fp8` changes nothing: only einsums are computed in 8 bits, and it applies"
    with pytest.raises(ValueError, match=re.escape(problem)) as error:
        md.jit(md.with_precision(attend, "attention:fp8")).trace(Q, MEMORY)
    assert "to q/attention. Did you mean `attention:bf16`?" in str(error.value)


def test_reports_say_what_a_rule_of_8_bits_does_not_change():
    def both(q, memory, w):
        return md.einsum(attend(q, memory), w, over="kv")

    w = numbers([kv, embed])
    trace = md.jit(md.with_precision(both, "fp8")).trace(Q, MEMORY, w)
    assert trace.notes == ("precision `fp8`: w/einsum; not in 8 bits: q/attention",)


experts, rows = md.dims(experts=3, rows=8)
GROUP = md.named(np.array([0, 2, 2, 1, 0, -1, 2, 2], np.int32), [rows])
STACKED = numbers([experts, embed, d_ff], 5)
ROWS = numbers([rows, embed], 6)


@pytest.mark.long
@pytest.mark.parametrize(
    "product",
    [
        lambda w, x, g: md.grouped_einsum(x, w, g, "experts", over="embed"),
        lambda w, x, g: md.einsum(x, md.take(w, g, "experts"), over="embed"),
    ],
)
@pytest.mark.parametrize("form", ["int8", "fp8", "bf16"])
def test_grouped_products_follow_the_rules_of_einsums(product, form):
    changed = md.with_precision(product, f"w/einsum:{form}")
    exact, rounded = (np.asarray(md.jit(f)(STACKED, ROWS, GROUP)) for f in (product, changed))
    assert 0 < np.abs(rounded - exact).max() < 0.1 * np.abs(exact).max()
    graph = md.jit(changed).trace(STACKED, ROWS, GROUP)
    (grouped,) = [op for op in graph.operations if op.name == "grouped_einsum"]
    names = {"int8": "int8", "fp8": "float8_e4m3fn", "bf16": "bfloat16"}
    assert {t.dtype.name for t in grouped.inputs[:2]} == {names[form]}


def test_one_tensor_may_be_two_arguments():
    def tied(params, x):
        return md.einsum(x, params["first"], over="embed")

    def twice(w, x):
        return md.with_precision(tied, "first:int8")({"first": w, "second": w}, x)

    assert dtypes_of_products(twice, PARAMS["head"], X) == ["int8"]


def test_names_of_arguments_may_be_given():
    changed = md.with_precision(mlp, "weights/mlp:int8", names=["weights", "batch"])
    assert dtypes_of_products(changed, PARAMS, X) == ["int8", "int8", "float32"]
    fewer = md.with_precision(mlp, "weights/mlp:int8", names=["weights"])
    problem = "names=['weights'] are 1, but the call has 2 positional arguments"
    with pytest.raises(ValueError, match=re.escape(problem)):
        md.jit(fewer).trace(PARAMS, X)


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
        ("mpl:fp8", "`mpl:fp8` applies to no product. Did you mean `mlp`? The products are"),
        ("mlp:fp8,convs:int8", "`convs:int8` applies to no product. The products are params/mlp/w"),
        (
            "mlp:fp8,w_in:int8",
            "`mlp:fp8` and `w_in:int8` both apply to the product params/",
        ),
    ],
)
def test_rules_that_fit_nothing_are_reported_with_the_line_of_the_user(precision, problem):
    with pytest.raises(ValueError, match=re.escape(problem)) as error:
        md.jit(md.with_precision(mlp, precision)).trace(PARAMS, X)
    assert "  at tests/precision/test_rewriting.py:" in str(error.value)


def test_a_training_step_reports_rules_with_the_line_of_the_loss():
    model = load("gpt_mini", "layers=1,embed=16,heads=2,d_ff=16,vocab=32")
    step = make_train_step(model.loss, AdamW(1e-3), precision="mpl:fp8")
    state = md.jit(create(model.init, AdamW(1e-3)))(md.random.key(0))
    with pytest.raises(ValueError, match=r"`mpl:fp8` applies to no product") as error:
        md.jit(step).trace(state, model.batch_spec(2, 8))
    assert re.search(r"  at models/transformer\.py:\d+  def loss\(", str(error.value))


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
