"""Reports of a part of the model: its rows, with the totals of the whole step."""

from dataclasses import replace

import pytest

import meshdsl as md
from meshdsl.lowering.costs.units import show_bytes
from meshdsl.reports.explain.explanation import Explanation, explain
from meshdsl.reports.explain.html.page import page
from meshdsl.reports.explain.values import as_values

batch, embed, heads, kv, d_ff = md.dims(batch=16, embed=32, heads=4, kv=8, d_ff=64)
PARAMS = {
    "blocks": {
        "attention": {
            "query": md.spec([embed, heads, kv]),
            "out": md.spec([heads, kv, embed]),
        },
        "mlp": {"w_in": md.spec([embed, d_ff]), "w_out": md.spec([d_ff, embed])},
    }
}


def attention(params, x):
    mixed = md.einsum(x, params["query"], over="embed")
    return x + md.einsum(mixed, params["out"], over=["heads", "kv"])


def mlp(params, x):
    hidden = md.einsum(x, params["w_in"], over="embed")
    return x + md.einsum(md.gelu(hidden), params["w_out"], over="d_ff")


def step(params, x):
    def loss(params):
        blocks = params["blocks"]
        return md.mean(md.square(mlp(blocks["mlp"], attention(blocks["attention"], x))))

    value, grads = md.value_and_grad(loss)(params)
    return value, grads


@pytest.fixture(scope="module")
def whole() -> Explanation:
    rules = "batch:data; heads:model; d_ff:model; params/embed:data"
    return explain(md.jit(step, "data:2,model:2", rules).lower(PARAMS, md.spec([batch, embed])))


LISTS = ("sent", "inputs", "held", "intervals")


def of(whole, part):
    report = replace(whole, only=part)
    report.shown.check()
    return report


def test_the_rows_of_a_part_are_those_of_its_paths_and_of_its_function(whole):
    values, whole = as_values(of(whole, "mlp")), as_values(whole)
    assert values["only"] == "mlp" and "only" not in whole
    for name in LISTS:
        assert 0 < len(values[name]) < len(whole[name])
        assert all(entry in whole[name] for entry in values[name])
    assert all("/mlp/" in entry["path"] for entry in values["inputs"])
    assert {e["path"] for e in values["inputs"]} == {
        e["path"] for e in whole["inputs"] if "/mlp/" in e["path"]
    }
    dims = {name for entry in values["sent"] for name in entry["dims"]}
    assert "d_ff" in dims and "heads" not in dims


def test_totals_are_those_of_the_whole_step(whole):
    values, whole = as_values(of(whole, "mlp")), as_values(whole)
    rest = {key: value for key, value in values.items() if key not in (*LISTS, "only")}
    assert rest == {key: value for key, value in whole.items() if key not in LISTS}


def test_the_text_says_what_it_lists(whole):
    report, text, whole = whole, str(of(whole, "mlp")), str(whole)
    assert "shown: only the rows of `mlp` are listed; every sum and total is that of" in text
    assert "query" in whole and "query" not in text and "w_in" in text
    sent = [entry["wire_bytes"] for entry in as_values(of(report, "mlp"))["sent"]]
    (listed,) = (line for line in text.splitlines() if line.startswith("  listed "))
    assert listed.split(maxsplit=1)[1] == show_bytes(sum(sent)) and "  listed " not in whole
    row = next(line for line in whole.splitlines() if line.startswith("  total "))
    assert row.split() in [line.split() for line in text.splitlines()]


def test_the_page_lists_what_the_text_does(whole):
    text, whole = page(of(whole, "mlp")), page(whole)
    assert "Tables list only its rows" in text and "Tables list only its rows" not in whole
    tables, all_tables = (shown.partition("On the wire")[2] for shown in (text, whole))
    assert "w_in_grad" in tables
    assert "query_grad" not in tables and "query_grad" in all_tables


@pytest.mark.parametrize("part", ["blocks/*/query", "Attent*", "params/blocks/attention"])
def test_parts_are_scopes_and_globs_in_any_case(whole, part):
    paths = {entry["path"] for entry in as_values(of(whole, part))["inputs"]}
    assert "params/blocks/attention/query" in paths and "params/blocks/mlp/w_in" not in paths


def test_a_part_that_is_not_there_is_refused_with_the_nearest_name(whole):
    with pytest.raises(ValueError, match=r"--only=atention: no path, .* Did you mean `attention`"):
        of(whole, "atention")
    with pytest.raises(ValueError, match=r"--only=atention: no path, .* Did you mean `attention`"):
        of(whole, "mlp,atention")
    with pytest.raises(ValueError, match=r"--only=,: no path"):
        of(whole, ",")


def test_commas_separate_several_parts(whole):
    def paths(part):
        return {entry["path"] for entry in as_values(of(whole, part))["inputs"]}

    both = paths("w_in") | paths("blocks/*/query")
    assert paths("w_in, blocks/*/query") == both
    assert paths("w_in") < both < {path for path, _ in whole.inputs}


def test_parameters_of_many_layers_have_one_row():
    def last(params):
        return md.mean(sum(md.sum(layer["w"]) for layer in params["layers"]) * params["scale"])

    layer = {"w": md.spec([embed, d_ff])}
    params = {"layers": [layer] * 4 + [{"w": md.spec([embed, heads])}], "scale": md.spec([heads])}
    report = explain(md.jit(last, "model:2", "params/layers/*/w/d_ff:model").lower(params))
    rows = {one.path: (one.count, one.bytes) for one in report.shown.parameters}
    assert rows == {
        "params/layers/*/w": (4, 4 * 32 * 32 * 4),
        "params/layers/4/w": (1, 32 * 4 * 4),
        "params/scale": (1, 16),
    }
    assert "layers/*/w  f32[embed=32, d_ff=32/64] × 4" in str(report)
    written = page(report).replace("<wbr>", "")
    assert "layers/*/w" in written and "f32[embed=32, d_ff=32/64] × 4" in written
    one = [parameter.path for parameter in of(report, "layers/2").shown.parameters]
    assert one == ["params/layers/2/w"]
    assert len(as_values(report)["inputs"]) == 6
