"""The jax_auto backend: one program of whole arrays, whose layouts XLA is asked for."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshdsl as md
from meshdsl.cli.main import run
from meshdsl.layouts.validate import LayoutError
from tests.benchmarks.gspmd_time import random_batch
from tests.benchmarks.pairs import PAIRS, initial, jitted
from tests.ops.agreement import assert_close, random
from tests.property.programs import make_case
from tests.property.test_random_programs import compare

batch, length, embed, d_ff = md.dims(batch=8, length=6, embed=4, d_ff=16)
LAYOUT = "batch:data; d_ff:model"


def mlp(x, w_in, w_out):
    h = md.gelu(md.einsum(x, w_in, over="embed"))
    return md.einsum(h, w_out, over="d_ff")


def arguments():
    return random([batch, length, embed]), random([embed, d_ff]), random([d_ff, embed])


def auto(function, mesh="data:2,model:4", layout=LAYOUT, **options):
    return md.jit(function, mesh, layout, "jax_auto", **options)


def stepped(pair, backend, size="small", steps=2):
    """Returns the metrics and parameters after some steps."""
    function, (_, batch_spec) = jitted(pair, size, backend)
    state, data = initial(pair, size, backend), random_batch(batch_spec)
    for _ in range(steps):
        state, metrics = function(state, data)
    leaves = jax.tree.leaves(state.params, is_leaf=lambda a: isinstance(a, md.NamedArray))
    return [*metrics.values(), *leaves]


@pytest.mark.long
@pytest.mark.parametrize("name", ["mlp_2d", "decoder_fsdp_sequence"])
def test_training_steps_give_the_numbers_of_the_jax_backend(name):
    found, expected = stepped(PAIRS[name], "jax_auto"), stepped(PAIRS[name], "jax")
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, 2e-3)  # float32, through two updates by Adam


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PAIRS])
def test_every_pair_gives_the_numbers_of_the_jax_backend(name):
    found, expected = stepped(PAIRS[name], "jax_auto"), stepped(PAIRS[name], "jax")
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, 2e-3)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::meshdsl.layouts.validate.LayoutWarning")
@pytest.mark.parametrize("number", [0, 12, 16, 26])
def test_random_programs_give_the_numbers_of_the_reference(number):
    """These made XLA's partitioner abort or go wrong along dims with windows, or padded ones."""
    case = make_case(number)
    expected = md.jit(case.function, backend="numpy")(case.inputs)
    compare(md.jit(case.function, case.mesh, case.layout, "jax_auto")(case.inputs), expected, "")


@pytest.mark.parametrize("mesh", ["data:3,model:2", "data:5", "data:2,model:3", "data:7"])
def test_sizes_that_do_not_divide_give_the_same_numbers(mesh):
    layout = LAYOUT if "model" in mesh else "batch:data"
    found = auto(mlp, mesh, layout)(*arguments())
    assert_close(found, md.jit(mlp, backend="numpy")(*arguments()))


def test_ends_are_where_their_paths_put_them():
    def step(params, x):
        return {"params": {"w": params["w"] * md.mean(x)}}

    f = auto(step, layout="batch:data; params/embed:model; embed:-")
    found = f({"w": random([embed, d_ff])}, random([batch, length]))["params"]["w"]
    assert found.data.sharding.spec == P("model", None)
    assert f.lower({"w": md.spec([embed, d_ff])}, md.spec([batch, length])).input_paths[0] == (
        "params/w"
    )


def test_an_input_returned_to_another_place_moves():
    def swap(params, x):
        return {"optimizer": params, "params": x}

    layout = "embed:-; params/embed:model; optimizer/embed:data"
    w = random([embed, d_ff])
    found = auto(swap, layout=layout)(w, w)
    assert found["optimizer"].data.sharding.spec == P("data", None)
    assert found["params"].data.sharding.spec == P("model", None)
    assert_close(found["optimizer"], w)


def test_what_products_leave_is_asked_for_in_the_layout():
    """The hidden layer is split although neither operand is."""
    f = auto(mlp, layout="batch:data; d_ff:model; w_in/d_ff:-; w_out/d_ff:-")
    text = f.lower(*arguments()).compile().as_text()
    assert "f64[4,6,4]" in text  # batch 8/2, length 6, d_ff 16/4
    assert "f64[4,6,16]" not in text


def test_the_program_says_what_is_asked_for_and_no_collectives():
    program = auto(mlp).lower(*arguments())
    assert program.collectives == () and program.wire_bytes == 0
    assert str(program.mesh) == "data:2 model:4"
    (hidden,) = [v for i, _ in program.block.walk() if i.op == "einsum" for v in i.outputs][:1]
    assert str(hidden.layout) == "batch:data; d_ff:model"
    assert hidden.local == hidden.shape


def test_layouts_are_checked_as_for_the_other_backends():
    with pytest.raises(LayoutError, match="`length:data` both claim mesh axis `data`"):
        auto(mlp, layout="batch:data; length:data").lower(*arguments())
    with pytest.raises(LayoutError, match="emebd"):
        auto(mlp, layout="emebd:data").lower(*arguments())


def test_loops_branches_and_prints_run(capfd):
    def f(x):
        def body(carry):
            i, y = carry
            md.print("row", md.sum(y))
            return i + 1, md.cond(md.sum(y) > 0, lambda y: y * 2.0, lambda y: y - 1.0, y)

        return md.while_loop(lambda carry: carry[0] < 3, body, (md.zeros([], "int32"), x))[1]

    x = md.named(np.ones((8, 4)), [batch, embed])
    found = auto(f, layout="batch:data; embed:model")(x)
    np.testing.assert_array_equal(np.asarray(found), 8 * np.ones((8, 4)))
    rows = [line for line in capfd.readouterr().out.splitlines() if line.startswith("row")]
    assert [float(row.split()[1]) for row in rows] == [32, 64, 128]  # once each, in order


def test_what_is_not_finite_is_found():
    def f(x):
        return md.log(md.sum(x, "embed"))

    g = auto(f, layout="batch:data; embed:model", check_finite=True)
    with pytest.raises(FloatingPointError, match="log"):
        g(md.named(-np.ones((8, 4)), [batch, embed]))


def test_donated_buffers_are_given_up():
    f = auto(lambda x: x + 1.0, layout="batch:data; embed:model", donate="x")
    x = md.place(
        md.named(np.ones((8, 4)), [batch, embed]), "data:2,model:4", "batch:data;embed:model"
    )
    f(x)
    assert x.data.is_deleted()


def test_it_is_a_plain_jax_function_too():
    x, w_in, w_out = arguments()
    g = auto(mlp).as_jax(x, w_in, w_out)
    (found,) = jax.jit(g)(x.data, w_in.data, w_out.data)
    assert_close(found, md.jit(mlp, backend="numpy")(x, w_in, w_out))


def test_one_device_needs_no_mesh():
    assert_close(
        md.jit(mlp, backend="jax_auto")(*arguments()), md.jit(mlp, backend="numpy")(*arguments())
    )


def test_it_knows_every_instruction():
    from meshdsl.lowering.backends import jax as jax_backend
    from meshdsl.lowering.backends import jax_auto
    from meshdsl.lowering.backends.jax_auto.emitters import CONSTRAINED, SLIDING

    assert set(jax_auto.EMITTERS) == set(jax_backend.EMITTERS)
    assert set(jax_auto.EMITTERS) > CONSTRAINED | SLIDING and not CONSTRAINED & SLIDING


@pytest.mark.slow
def test_the_command_line_trains_with_it(capsys, tmp_path):
    (tmp_path / "text.txt").write_bytes(b"A named dimension is a dimension with a name. " * 100)
    small = ("--model_args=layers=1,embed=16,heads=2", "--batch_size=8", "--length=16")
    job = (*small, "--mesh_shape=data:2,model:2", "--layout=batch:data;heads:model")
    text = f"--data={tmp_path}/text.txt"
    losses = []
    for backend in ("jax", "jax_auto"):
        workdir = tmp_path / backend
        given = (f"--backend={backend}", f"--workdir={workdir}", "--host_devices=8")
        more = ("--steps=3", "--eval_batches=1", "--log_every=1")
        assert run(["train", *job, text, *given, *more]) == 0
        rows = (workdir / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(row)["loss"] for row in rows])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_explain_tells_that_xla_decides(capsys):
    assert run(["explain", "--backend=jax_auto"]) != 0
    told = capsys.readouterr().err
    assert "--backend: what jax_auto sends is XLA's choice, known once it is compiled" in told
