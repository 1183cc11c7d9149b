"""What a user reads when a layout does not fit a program."""

import pytest

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.validate import (
    LayoutError,
    check,
    check_scopes,
    idle_rules,
    misspelt_scopes,
    problems,
)
from meshdsl.tensors.dims import Shape, dims
from meshdsl.tracing.source import UNKNOWN, Source

MESH = Mesh.parse("data:2 model:4")


@pytest.fixture
def attention(tmp_path):
    """A line of a model: `models/transformer.py:18`."""
    file = tmp_path / "models" / "transformer.py"
    file.parent.mkdir()
    file.write_text("\n" * 17 + '    q = md.einsum(x, self.query, over="embed")\n')
    return Source(str(file), 18)


def tensor(label, path="", source=UNKNOWN, **sizes):
    return label, Shape(dims(**sizes)), path, source


def found(layout, *tensors, mesh=MESH, allow_unknown_dims=False, known_dims=None):
    if known_dims is None:
        known_dims = {name for _, shape, _, _ in tensors for name in shape.names}
    return problems(
        Layout.parse(layout),
        mesh,
        tensors,
        known_dims=known_dims,
        allow_unknown_dims=allow_unknown_dims,
    )


def test_the_message_has_every_problem_with_its_line_its_fix_the_mesh_and_the_layout(attention):
    q = tensor("q", source=attention, batch=16, length=128, heads=8, kv=32)
    x = tensor("x", batch=16, length=128, embed=256)
    layout = Layout.parse("batch:data; heads:model; length:model; emebd:data")
    with pytest.raises(LayoutError) as error:
        known = {"batch", "length", "heads", "kv", "embed"}
        check(layout, MESH, [x, q], known_dims=known)
    assert str(error.value) == (
        "layout does not fit this program (2 problems)\n"
        "\n"
        "  1. `heads:model` and `length:model` both claim mesh axis `model` in\n"
        "       q: [batch=16, length=128, heads=8, kv=32]      models/transformer.py:18  "
        'q = md.einsum(x, self.query, over="embed")\n'
        "     A tensor can use an axis once. Write `length:model?` to let `length` take it only "
        "where `heads` is absent.\n"
        "  2. `emebd:data` names a dim that this program does not have. Did you mean `embed`?\n"
        "\n"
        "  mesh    data:2 model:4\n"
        "  layout  batch:data; heads:model; length:model; emebd:data"
    )


def test_one_problem_is_counted_in_the_singular():
    with pytest.raises(LayoutError) as error:
        check(Layout.parse("batch:data"), Mesh(), [tensor("x", batch=8)], known_dims=["batch"])
    assert str(error.value) == (
        "layout does not fit this program (1 problem)\n"
        "\n"
        "  1. `batch:data` names mesh axis `data`, but the mesh has no axes.\n"
        "\n"
        "  mesh    no axes\n"
        "  layout  batch:data"
    )


def test_a_layout_that_fits_has_no_problems():
    layout = Layout.parse("batch:data; heads:model; length:model?; params/embed:data")
    tensors = [
        tensor("x", batch=4, length=8, embed=6),
        tensor("q", batch=4, length=7, heads=8),
        tensor("w", "state/params/w", embed=6, heads=4),
    ]
    known = ["batch", "length", "heads", "embed"]
    assert problems(layout, MESH, tensors, known_dims=known) == []
    assert check(layout, MESH, iter(tensors), known_dims=known) is None


# Two dims on one axis


def test_a_conflict_is_reported_once_with_the_number_of_other_tensors():
    clash = dict(length=8, heads=4)
    layout = "heads:model; length:model"
    assert found(layout, tensor("q", **clash), tensor("k", **clash)) == [
        "`heads:model` and `length:model` both claim mesh axis `model` in\n"
        "  q: [length=8, heads=4]\n"
        "  and 1 more tensor\n"
        "A tensor can use an axis once. Write `length:model?` to let `length` take it only where "
        "`heads` is absent."
    ]
    (problem,) = found(layout, *[tensor(f"t{i}", **clash) for i in range(4)])
    assert "  t0: [length=8, heads=4]\n  and 3 more tensors\n" in problem


def test_a_conflict_in_a_derived_operation_says_so(attention):
    clash = tensor("dq", source=attention.as_backward(), length=8, heads=4)
    (problem,) = found("heads:model; length:model", clash)
    assert "models/transformer.py:18 (backward)  q = md.einsum(" in problem


def test_each_pair_of_rules_and_each_axis_is_a_conflict_of_its_own():
    reported = found(
        "heads:data+model; d_ff:model; length:data+model; params/embed:data",
        tensor("q", length=8, heads=8),
        tensor("h", length=8, d_ff=8),
        tensor("w", "params/w", embed=8, heads=8),
        tensor("w", "optimizer/w", embed=8, heads=8),
    )
    assert [problem.partition(" in\n")[0] for problem in reported] == [
        "`heads:data+model` and `length:data+model` both claim mesh axis `data`",
        "`heads:data+model` and `length:data+model` both claim mesh axis `model`",
        "`d_ff:model` and `length:data+model` both claim mesh axis `model`",
        "`heads:data+model` and `params/embed:data` both claim mesh axis `data`",
    ]


def test_the_fix_is_the_rule_whose_yielding_settles_most_conflicts():
    reported = found(
        "length:model; heads:model; d_ff:model",
        tensor("q", length=8, heads=8),
        tensor("h", length=8, d_ff=8),
        tensor("w", "params/wq", heads=8),
        tensor("w", "params/w", d_ff=8),
        tensor("x", length=8),
    )
    assert len(reported) == 2
    assert all("Write `length:model?` to let `length` take it" in text for text in reported)


def test_the_fix_is_not_a_rule_that_would_never_split_anything_again():
    reported = found("heads:model; kv:model", tensor("q", heads=8, kv=4), tensor("gate", heads=8))
    assert reported[0].endswith(
        "Write `heads:model?` to let `heads` take it only where `kv` is absent."
    )


# Unknown names


def test_an_unknown_axis_is_reported_with_the_axes_there_are():
    assert found("batch:dta; heads:rows", tensor("q", batch=8, heads=8)) == [
        "`batch:dta` names mesh axis `dta`, but the mesh has `data`, `model`. Did you mean `data`?",
        "`heads:rows` names mesh axis `rows`, but the mesh has `data`, `model`.",
    ]


def test_a_name_that_several_rules_misspell_is_one_problem():
    layout = "batch:modle; heads:modle; params/embed:data+modle"
    q = tensor("q", batch=8)
    assert found(layout, q, known_dims={"batch", "heads", "embed"}) == [
        "`batch:modle`, `heads:modle` and `params/embed:data+modle` name mesh axis `modle`, but "
        "the mesh has `data`, `model`. Did you mean `model`?"
    ]
    assert found("emebd:data; params/emebd:model", q, known_dims=["embed"]) == [
        "`emebd:data` and `params/emebd:model` name a dim that this program does not have. "
        "Did you mean `embed`?"
    ]


def test_an_unknown_dim_like_no_other_is_reported_with_the_dims_there_are():
    assert found("experts:data", tensor("x", batch=8, vocab=8)) == [
        "`experts:data` names a dim that this program does not have. Its dims: `batch`, `vocab`."
    ]
    assert found("experts:data") == [
        "`experts:data` names a dim that this program does not have. Its dims: none."
    ]


def test_a_model_without_a_stack_of_layers_is_told_how_to_get_one():
    assert found("layers:data", tensor("x", batch=8)) == [
        "`layers:data` names a dim that this program does not have. Its dims: `batch`. A loop over "
        'its layers, md.scan(..., dim="layers"), gives it this dim.'
    ]


def test_a_layout_for_several_programs_may_name_dims_that_this_one_lacks():
    x = tensor("x", batch=8, heads=8)
    assert found("batch:data; experts:model; height:model", x, allow_unknown_dims=True) == []


def test_even_there_a_probable_misspelling_is_reported():
    x = tensor("x", batch=8, heads=8)
    assert found("batch:data; haeds:model", x, allow_unknown_dims=True) == [
        "`haeds:model` names a dim that this program does not have. Did you mean `heads`?"
    ]


def test_a_dim_with_a_rule_of_its_own_is_not_taken_for_what_another_was_meant_to_be():
    x = tensor("x", d_ff=8)
    assert found("d_ff:model; d_ff2:model", x, allow_unknown_dims=True) == []


def test_any_size_can_be_split():
    assert found("batch:data+model", tensor("x", batch=7)) == []


def test_all_kinds_of_problems_come_in_one_list():
    reported = found(
        "heads:model; length:model; batch:data+dta; emebd:data",
        tensor("q", batch=3, length=8, heads=8),
        tensor("x", embed=8),
    )
    assert [text.split(" ", 1)[0] for text in reported] == [
        "`heads:model`",
        "`batch:data+dta`",
        "`emebd:data`",
    ]


def test_a_scope_that_fits_no_path_is_told_with_the_nearest_name():
    paths = ["state/step", "state/params/blocks/query", "state/optimizer/mean/params/blocks/query"]
    mesh = Mesh.parse("data:2")
    check_scopes(Layout.parse("params/embed:data; blocks/**/embed:data; batch:data"), mesh, paths)
    layout = Layout.parse("param/embed:data; decoder/**/query/heads:-")
    with pytest.raises(LayoutError) as error:
        check_scopes(layout, mesh, paths)
    assert str(error.value) == (
        "layout does not fit this program (2 problems)\n"
        "\n"
        "  1. `param/embed:data` fits no path of this program. Did you mean `params/embed:data`? "
        "The nearest paths: `state/params/blocks/query` and "
        "`state/optimizer/mean/params/blocks/query`\n"
        "  2. `decoder/**/query/heads:-` fits no path of this program. The nearest paths: "
        "`state/params/blocks/query` and `state/optimizer/mean/params/blocks/query`\n"
        "\n"
        "  mesh    data:2\n"
        "  layout  param/embed:data; decoder/**/query/heads:-"
    )


PATHS = [
    "state/step",
    "state/params/embedding",
    "state/params/blocks/attention/query",
    "state/params/blocks/mlp/w_in",
    "state/optimizer/mean/params/blocks/attention/query",
    "state/optimizer/mean_square/params/blocks/mlp/w_in",
    "gradients/params/blocks/attention/query",
    "batch/tokens",
]


@pytest.mark.parametrize(
    ("rule", "meant", "near"),
    [
        ("params/blocks/atention/embed:data", "params/blocks/attention/embed:data", PATHS[2]),
        ("gradient/embed:data", "gradients/embed:data", PATHS[6]),
        ("optimiser/mean/embed:data", "optimizer/mean/embed:data", PATHS[4]),
        ("optimiser/mean_sqare/embed:data", "optimizer/mean_square/embed:data", PATHS[5]),
        ("param/**/w_im/d_ff:-", "params/**/w_in/d_ff:-", PATHS[3]),
    ],
)
def test_a_misspelt_scope_is_told_with_what_was_meant_and_a_path_like_it(rule, meant, near):
    with pytest.raises(LayoutError) as error:
        check_scopes(Layout.parse(rule), MESH, PATHS)
    text = f"`{rule}` fits no path of this program. Did you mean `{meant}`? The nearest paths: `"
    assert text in str(error.value)
    assert near in str(error.value).partition("nearest paths: ")[2].partition("\n")[0]


def test_scopes_whose_parts_are_known_but_not_in_that_order_are_told_with_paths_like_them():
    layout = Layout.parse("attention/params/embed:data; moments/embed:data")
    with pytest.raises(LayoutError) as error:
        check_scopes(layout, MESH, PATHS)
    first, second = str(error.value).splitlines()[2:4]
    assert first.startswith("  1. `attention/params/embed:data` fits no path of this program. The")
    assert second.startswith("  2. `moments/embed:data` fits no path of this program. The nearest")


def test_scopes_of_a_layout_for_several_programs_are_judged_by_their_spelling():
    layout = Layout.parse("param/embed:data; optimizer/embed:data; decoder_2/embed:data; x:data")
    paths = ["params/encoder_1/w", "batch/tokens"]
    assert list(misspelt_scopes(layout, paths).values()) == [
        "`param/embed:data` fits no path of this program. Did you mean `params/embed:data`?"
    ]
    assert misspelt_scopes(Layout.parse("encoder/x:data; decoder/x:data"), ["encoder/w"]) == {}
    assert misspelt_scopes(layout, []) == {}


# Scoped rules


def test_scoped_rules_that_put_two_dims_of_one_tensor_on_one_axis_are_told():
    query = tensor("params/query", "params/query", embed=8, heads=4)
    bias = tensor("params/bias", "params/bias", heads=4)
    assert found("params/embed:data; params/heads:data", query, bias) == [
        "`params/embed:data` and `params/heads:data` both claim mesh axis `data` in\n"
        "  params/query: [embed=8, heads=4]\n"
        "A tensor can use an axis once. Write `params/heads:data?` to let `heads` take it only "
        "where `embed` is absent."
    ]


def test_a_rule_for_the_parameters_that_meets_a_mirror_of_them_is_explained():
    weight = tensor("params/v", "params/v", embed=8, d_ff=4)
    mirror = tensor("momentum/v", "momentum/params/v", embed=8, d_ff=4)
    (text,) = found("params/embed:data; momentum/d_ff:data", weight, mirror)
    assert text.endswith(
        "`momentum` has the structure of `params`, so `params` is put into its paths and rules for "
        "`params` apply\nto it too. Write `momentum/params/embed:-` to keep `params/embed:data` "
        "off it."
    )
    mended = "params/embed:data; momentum/params/embed:-; momentum/d_ff:data"
    assert found(mended, weight, mirror) == []


def test_scopes_that_are_equally_long_and_disagree_are_told():
    path = "state/params/blocks/query"
    tensors = [tensor("w", path, embed=8), tensor("v", f"{path}_norm", embed=8)]
    assert found("params/embed:data; blocks/embed:model", *tensors) == [
        "`params/embed:data` and `blocks/embed:model` contradict each other: both scopes describe\n"
        "  state/params/blocks/query and 1 more\n"
        "and neither is longer. Lengthen the one that is to decide, as in "
        "`params/blocks/embed:model`."
    ]
    (told,) = found("params/embed:data; query/embed:-", tensors[0])  # whatever their letters
    assert told.startswith("`params/embed:data` and `query/embed:-` contradict each other")
    (told,) = found("state/p*/embed:data; state/?a*/embed:-", tensors[0])
    assert told.endswith("and neither is longer. Lengthen the one that is to decide.")


def test_scopes_that_are_equally_long_and_agree_or_never_meet_are_fine():
    one, other = (tensor("w", path, embed=8) for path in ("params/blocks/w", "optimizer/blocks/w"))
    assert found("params/embed:data; blocks/embed:data", one) == []
    assert found("params/embed:data; params/blocks/embed:model", one, other) == []
    assert found("params/embed:data; optimi*/embed:model; embed:-", one, other) == []


# Rules without effect


def test_an_optional_rule_that_never_takes_an_axis_is_told_with_what_holds_it():
    layout = Layout.parse("heads:model; d_ff:model; length:model?; batch:data; memory:data?")
    q = tensor("q", batch=4, length=8, heads=4)
    h = tensor("h", length=8, d_ff=4)
    m = tensor("m", memory=8, batch=4)
    assert idle_rules(layout, [q, h, m]) == [
        "`length:model?` takes no axis anywhere: wherever it would, `heads:model` or `d_ff:model` "
        "has it already. Leave the rule out, or give `length` an axis that is free",
        "`memory:data?` takes no axis anywhere: wherever it would, `batch:data` has it already. "
        "Leave the rule out, or give `memory` an axis that is free",
    ]
    assert idle_rules(layout, [q, h, m, tensor("x", length=8), tensor("y", memory=8)]) == []


def test_an_optional_rule_may_lose_to_another_optional_rule():
    layout = Layout.parse("length:model?; params/embed:model+data?; params/heads:data?")
    told = idle_rules(layout, [tensor("w", "params/w", embed=8, heads=4), tensor("x", length=8)])
    assert [text.partition(" has")[0] for text in told] == [
        "`params/heads:data?` takes no axis anywhere: wherever it would, `params/embed:model+data?`"
    ]


def test_an_optional_rule_for_what_a_program_lacks_is_not_told():
    layout = Layout.parse("length:model?; params/length:data?; heads:model")
    assert idle_rules(layout, [tensor("w", "w", heads=4)]) == []
    assert idle_rules(Layout.parse("heads:model"), [tensor("w", "w", heads=4)]) == []


def test_a_context_layout_on_a_model_without_a_memory_length_says_what_attention_needs():
    assert found("length:data; memory_length:data", tensor("x", batch=8, length=8)) == [
        "`memory_length:data` names a dim that this program does not have: attention, if it has "
        "any, has to name the keys' and values' `length` apart from the queries', as in "
        'md.attention(q, k.rename(length="memory_length"), v.rename(length="memory_length"), '
        'over="memory_length"). Its dims: `batch`, `length`.'
    ]
    assert found("memory_length:data", tensor("x", batch=8)) == [
        "`memory_length:data` names a dim that this program does not have. Its dims: `batch`."
    ]
