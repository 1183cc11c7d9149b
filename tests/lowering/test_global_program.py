"""Lowering to one program of global tensors."""

import warnings

import pytest

import meshdsl as md
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.global_program import lower_global
from meshdsl.lowering.lower import lower
from meshdsl.lowering.options import Options
from meshdsl.lowering.unused import OptionWarning

batch, heads, length, kv = md.dims(batch=8, heads=8, length=4096, kv=16)
DIMS = [batch, heads, length, kv]


def attend(q, k, v):
    k, v = k.rename(length="memory_length"), v.rename(length="memory_length")
    return md.attention(q, k, v, causal=True)


def blocks(mesh, layout):
    """Returns the rows and columns of scores that are computed at once."""
    graph = md.jit(attend).trace(*[md.spec(DIMS)] * 3)
    program = lower_global(graph, Mesh.parse(mesh), Layout.parse(layout))
    (found,) = [i for i, _ in program.block.walk() if i.op == "attention"]
    return found.params["blocks"]


def test_values_have_the_layouts_of_the_rules_inside_of_loops_too():
    def f(params, x):
        return md.scan(lambda x, w: (x * w, md.sum(x, "batch")), x, params, dim="layers")

    layers, embed = md.dims(layers=3, embed=4)
    graph = md.jit(f).trace(md.spec([layers, embed]), md.spec([batch, embed]))
    layout = Layout.parse("batch:data; params/embed:model")
    program = lower_global(graph, Mesh.parse("data:2,model:2"), layout)
    assert [str(value.layout) for value in program.block.inputs] == ["embed:model", "batch:data"]
    (scan,) = [i for i in program.block.instructions if i.op == "scan"]
    carried = [str(v.layout) for v in scan.body.outputs if v.shape.find("batch")]
    assert carried == ["batch:data"]
    assert all(value.local == value.shape for i, _ in program.block.walk() for value in i.outputs)


def test_inputs_and_outputs_that_do_not_divide_are_not_split():
    graph = md.jit(lambda x: x + 1.0).trace(md.spec(md.dims(row=6, column=5)))
    program = lower_global(graph, Mesh.parse("a:2,b:2"), Layout.parse("row:a; column:b"))
    assert [str(value.layout) for value in program.block.outputs] == ["row:a"]


def test_one_value_at_two_ends_has_two_layouts():
    def f(x):
        return {"params": x, "optimizer": x}

    graph = md.jit(f).trace(md.spec([batch]))
    layout = Layout.parse("params/batch:a; optimizer/batch:b; batch:-")
    program = lower_global(graph, Mesh.parse("a:2,b:2"), layout)
    ends = dict(zip(program.output_paths, program.block.outputs, strict=True))
    assert {path: str(v.layout) for path, v in ends.items()} == {
        "params": "batch:a",
        "optimizer": "batch:b",
    }


def test_scores_are_computed_in_the_blocks_of_one_device():
    graph = md.jit(attend).trace(*[md.spec(DIMS)] * 3)
    mesh, layout = Mesh.parse("data:8,model:8"), Layout.parse("batch:data; heads:model")
    (local,) = [i for i, _ in lower(graph, mesh, layout).block.walk() if i.op == "attention"]
    from meshdsl.lowering.attention_sizes import AttentionSizes

    found = blocks("data:8,model:8", "batch:data; heads:model")
    assert found == AttentionSizes.of(local).blocks
    assert found > blocks("data:1,model:1", "batch:data; heads:model")


def test_a_split_length_is_not_cut_into_blocks():
    rows, columns = blocks("data:8,context:8", "batch:data; length:context")
    assert rows == length.size and columns < length.size
    rows, columns = blocks("data:8,context:8", "batch:data; memory_length:context")
    assert rows < length.size and columns == length.size


def test_options_that_xla_decides_are_reported_and_limits_of_one_device_are_not_those_of_all():
    graph = md.jit(attend).trace(*[md.spec(DIMS)] * 3)
    ring = Mesh.parse("context:8"), Layout.parse("length:context; memory_length:context")
    with pytest.warns(OptionWarning) as told:
        lower_global(graph, *ring, Options(context="ring", zigzag=True))
    assert [str(one.message).split(":")[0] for one in told] == [
        "context=ring changes nothing",
        "zigzag changes nothing",
    ]
    assert all("XLA decides" in str(one.message) for one in told)
    share = lower(graph, *ring).peak_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lower_global(graph, *ring, Options(memory=share))


def test_its_text_promises_nothing_about_what_is_sent():
    program = md.jit(attend, "data:2", "batch:data", "jax_auto").lower(*[md.spec(DIMS)] * 3)
    assert "what is sent is XLA's choice" in str(program)
    assert "on the wire" not in str(program)
