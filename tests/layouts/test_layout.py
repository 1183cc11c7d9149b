"""Layout: the one line that says where everything goes, and the pure function it stands for."""

import pickle
import re
from fnmatch import fnmatchcase

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshdsl as md
from meshdsl.layouts.layout import Layout, LayoutConflict, Rule, _read, matches
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.tensors.dims import Dimension, Shape

DIMS = ("batch", "length", "heads", "embed", "vocab")
AXES = ("pod", "data", "model")
COMPONENTS = ("state", "params", "mlp", "w_in", "optimizer")


def shape(*names: str) -> Shape:
    return Shape(Dimension(name, 8) for name in names)


def placed(layout: str, dims: str, path: str = "") -> str:
    """Where `layout` puts a tensor with these dims, printed."""
    return str(Layout.parse(layout).assign(shape(*dims.split()), path))


scopes = st.lists(st.sampled_from([*COMPONENTS, "*", "**", "w_*", "?lp", "[mp]*"]), max_size=4).map(
    "/".join
)
paths = st.lists(st.sampled_from(COMPONENTS), max_size=5).map("/".join)
names = st.permutations(DIMS).flatmap(lambda dims: st.integers(0, 5).map(lambda n: dims[:n]))
rules = st.builds(
    Rule,
    scopes,
    st.sampled_from(DIMS),
    st.lists(st.sampled_from(AXES), unique=True, max_size=3).map(tuple),
    st.booleans(),
)
layouts = st.lists(rules, max_size=8, unique_by=lambda rule: rule.target).map(
    lambda rules: Layout(tuple(rules))
)


# Reading and printing


def test_a_layout_may_be_given_by_dim():
    by_dim = {"batch": ["slice", "data"], "length": "model?", "params/heads": None, "embed": "-"}
    text = "batch:slice+data; length:model?; params/heads:-; embed:-"
    assert Layout.of(by_dim) == Layout.of(text) == Layout.of(Layout.parse(text))
    assert Layout.of(None) == Layout.of({}) == Layout.of("") == Layout()


@pytest.mark.parametrize("other", [3, ["batch:data"], jax.sharding.PartitionSpec("data")])
def test_what_is_no_layout_is_refused(other):
    with pytest.raises(ValueError, match=r'a layout is given as "batch:data; d_ff:model", as \{"'):
        Layout.of(other)
    with pytest.raises(ValueError, match=r"or as a md\.Layout, not as"):
        md.jit(lambda x: x, "data:1", other)


def test_a_malformed_layout_by_dim_is_shown_as_its_text():
    with pytest.raises(ValueError, match=r"`batch:3` is not of the form"):
        Layout.of({"batch": [3]})


def test_a_layout_is_read_rule_by_rule():
    text = "batch:slice+data; length:model?; decoder/*/mlp/embed:data; params/heads:-"
    assert Layout.parse(text).rules == (
        Rule("", "batch", ("slice", "data"), False),
        Rule("", "length", ("model",), True),
        Rule("decoder/*/mlp", "embed", ("data",), False),
        Rule("params", "heads", (), False),
    )
    assert str(Layout.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["a:x;b:y", "a:x,b:y", "a:x b:y", "a:x ; b:y", " a:x,\n\tb:y;", ";;a:x,, b:y"],
)
def test_semicolons_commas_and_space_all_separate_and_semicolons_are_printed(text):
    assert str(Layout.parse(text)) == "a:x; b:y"


@pytest.mark.parametrize("text", ["", "  ", ";", " ,\n"])
def test_empty_text_is_the_layout_without_rules(text):
    assert Layout.parse(text) == Layout()
    assert str(Layout()) == ""


@given(layouts)
def test_a_printed_layout_reads_back_as_itself(layout):
    assert Layout.parse(str(layout)) == layout
    assert hash(Layout.parse(str(layout))) == hash(layout)


@given(layouts, st.lists(st.sampled_from([";", ",", " ", "\n", " ; "]), min_size=9, max_size=9))
def test_separators_do_not_matter(layout, separators):
    text = "".join(f"{rule}{gap}" for rule, gap in zip(layout.rules, separators, strict=False))
    assert Layout.parse(text) == layout


@pytest.mark.parametrize(
    "text",
    [
        "heads",
        "heads:",
        ":model",
        "heads=model",
        "heads:model:4",
        "heads:4",
        "he-ads:model",
        "heads:data+",
        "heads:data++model",
        "heads:-+data",
        "heads:model??",
        "?heads:model",
        "/heads:model",
        "params//heads:model",
        "params/:model",
        "params/*:model",
        "h\u00e9ads:model",
    ],
)
def test_what_is_not_a_rule_is_shown_with_carets(text):
    with pytest.raises(ValueError) as error:
        Layout.parse(f"batch:data; {text}; vocab:model")
    assert str(error.value) == (
        "malformed layout\n"
        f"  batch:data; {text}; vocab:model\n"
        f"              {'^' * len(text)}\n"
        f"  `{text}` is not of the form `dim:axis`, `dim:axis+axis?`, `dim:-` or `scope/dim:axis`"
    )


def test_everything_that_is_wrong_is_reported_at_once():
    with pytest.raises(ValueError) as error:
        Layout.parse("batch=data; embed:x+y+x,\nheads:model heads:data?; vocab")
    form = "is not of the form `dim:axis`, `dim:axis+axis?`, `dim:-` or `scope/dim:axis`"
    assert str(error.value) == (
        "malformed layout\n"
        "  batch=data; embed:x+y+x, heads:model heads:data?; vocab\n"
        "  ^^^^^^^^^^  ^^^^^^^^^^^  ^^^^^^^^^^^ ^^^^^^^^^^^  ^^^^^\n"
        f"  `batch=data` {form}\n"
        "  `embed:x+y+x` names axis `x` twice\n"
        "  `heads` is given twice: `heads:model` and `heads:data?`\n"
        f"  `vocab` {form}"
    )


def test_a_dim_is_given_once_per_scope():
    with pytest.raises(ValueError, match="`params/embed` is given twice: `params/embed:x` and"):
        Layout.parse("params/embed:x; params/embed:x")
    assert len(Layout.parse("embed:x; params/embed:x; optimizer/embed:x").rules) == 3


def test_rules_made_in_code_are_held_to_the_same_grammar():
    with pytest.raises(ValueError, match=re.escape("`a/b:x` is not of the form")):
        Rule("", "a/b", ("x",))
    with pytest.raises(ValueError, match=re.escape("`a:x+y` is not of the form")):
        Rule("", "a", ("x+y",))
    with pytest.raises(ValueError, match=r"`a:x[+]x` names axis `x` twice"):
        Rule("", "a", ("x", "x"))
    with pytest.raises(ValueError, match="`a` is given twice: `a:x` and `a:y`"):
        Layout((Rule("", "a", ("x",)), Rule("", "a", ("y",))))
    with pytest.raises(ValueError, match="`a` is given twice: `a:-` and `a:-`"):
        Layout((Rule("", "a", ()),) * 2)


# Scopes


@pytest.mark.parametrize(
    ("scope", "path", "applies"),
    [
        ("params", "state/params/mlp/w_in", True),
        ("params", "params", True),
        ("params", "state/my_params/w", False),
        ("params", "", False),
        ("params/mlp", "state/params/mlp/w_in", True),
        ("params/mlp", "params/attention/mlp", False),
        ("params/*/w_in", "state/params/mlp/w_in", True),
        ("params/*/w_in", "params/w_in", False),
        ("params/*/w_in", "params/layers/mlp/w_in", False),
        ("params/**/w_in", "params/w_in", True),
        ("params/**/w_in", "state/params/layers/mlp/w_in", True),
        ("params/**/w_in", "w_in/params", False),
        ("layer_[01]", "params/layer_1/w", True),
        ("layer_[01]", "params/layer_2/w", False),
        ("w_?", "params/w_q", True),
        ("*", "x", True),
        ("*", "", False),
        ("**", "", True),
    ],
)
def test_a_scope_applies_where_its_components_occur_in_a_row(scope, path, applies):
    assert Rule(scope, "embed", ("data",)).applies_to(path) is applies


@given(scopes.filter(bool), paths)
def test_scopes_match_as_the_regular_expression_they_stand_for(scope, path):
    translated = {"*": "[^/]*", "?": "[^/]"}
    pattern = ""
    for component in scope.split("/"):
        if component == "**":
            pattern += "(?:[^/]+/)*"
        elif component == "*":
            pattern += "[^/]+/"
        else:
            pattern += "".join(translated.get(c, c) for c in component) + "/"
    expected = re.search(f"(?:^|/){pattern}", path + "/" if path else "") is not None
    assert Rule(scope, "embed", ()).applies_to(path) is expected


def test_a_scoped_rule_overrides_the_unscoped_one_where_it_applies():
    layout = "embed:model; params/embed:data"
    assert placed(layout, "embed vocab") == "embed:model"
    assert placed(layout, "embed vocab", "state/params/w") == "embed:data"
    assert placed(layout, "embed vocab", "state/optimizer/w") == "embed:model"


def test_a_scoped_dash_leaves_a_dim_unsplit():
    layout = "heads:context; length:context?; params/heads:-"
    assert placed(layout, "length heads") == "heads:context"
    assert placed(layout, "embed heads", "params/query") == "replicated"


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("shorter", "longer"),
    [
        ("optimizer", "params/mlp"),  # components count first,
        ("params", "optimizer"),  # then what is no parameter, though it has its path;
        ("params/mlp", "optimizer/state"),
        ("params/*", "params/mlp"),  # then those without wildcards;
        ("params/**", "params/mlp"),  # `**` is no component,
        ("**", "*"),
        ("state/[op]arams", "params/mlp"),
    ],
)
def test_the_longest_scope_decides_whatever_the_order_of_the_rules(shorter, longer, order):
    rules = [f"{shorter}/embed:data", f"{longer}/embed:model"][::order]
    path = "optimizer/state/params/mlp/w"
    assert placed("; ".join(rules), "embed", path) == "embed:model"


@pytest.mark.parametrize("other", ["layers", "w", "a_long_name"])
def test_of_equally_long_scopes_the_first_decides_whatever_their_letters(other):
    path = "params/layers/a_long_name/w"
    assert placed(f"params/embed:data; {other}/embed:model", "embed", path) == "embed:data"


@given(layouts, paths)
def test_any_scope_that_applies_beats_none(layout, path):
    for dim in DIMS:
        rule = layout.rule_for(dim, path)
        applying = [r for r in layout.rules if r.dim == dim and r.applies_to(path)]
        assert (rule is None) is (not applying)
        if rule is not None and not rule.scope:
            assert applying == [rule]


# Assignment


def test_a_dim_is_split_as_its_rule_says_and_others_are_not():
    layout = "batch:pod+data; heads:model"
    assert placed(layout, "batch length heads") == "batch:pod+data; heads:model"
    assert placed(layout, "length embed") == "replicated"
    assert placed("", "batch") == "replicated"


def test_optional_rule_takes_the_axis_only_where_it_is_free():
    layout = "length:model?; heads:model"
    assert placed(layout, "length embed") == "length:model"
    assert placed(layout, "length heads") == "heads:model"


def test_optional_rule_takes_those_of_its_axes_that_are_free_in_their_order():
    layout = "length:model+data+pod?; heads:data"
    assert placed(layout, "length heads") == "heads:data; length:model+pod"


def test_optional_rules_choose_in_the_order_they_are_written():
    assert placed("length:model?; embed:model?", "embed length") == "length:model"
    assert placed("embed:model?; length:model?", "embed length") == "embed:model"


def test_two_dims_on_one_axis_are_a_conflict():
    with pytest.raises(LayoutConflict) as error:
        placed("heads:model; batch:data; length:pod+model", "length batch heads")
    assert error.value.axis == "model"
    assert list(map(str, error.value.rules)) == ["heads:model", "length:pod+model"]
    assert str(error.value) == (
        "`heads:model` and `length:pod+model` both claim mesh axis `model`. A tensor can use an "
        "axis once: end one of them with `?` to let it take the axis only where it is free"
    )


def test_a_conflict_raises_every_time_it_is_asked_about():
    layout = Layout.parse("heads:model; length:model")
    for _ in range(2):
        with pytest.raises(LayoutConflict, match="both claim mesh axis `model`"):
            layout.assign(shape("heads", "length"))


def test_a_conflict_survives_pickling():
    conflict = LayoutConflict("x", (Rule("", "a", ("x",)), Rule("", "b", ("x",))))
    copy = pickle.loads(pickle.dumps(conflict))
    assert (copy.axis, copy.rules, str(copy)) == (conflict.axis, conflict.rules, str(conflict))


def test_resolve_gives_every_conflict_and_leaves_the_axis_with_the_rule_written_first():
    layout = Layout.parse("heads:model; batch:pod+data; length:model; embed:data")
    found, conflicts = layout.resolve(shape("embed", "length", "heads", "batch"))
    assert str(found) == "batch:pod+data; heads:model"
    assert [(c.axis, *map(str, c.rules)) for c in conflicts] == [
        ("model", "heads:model", "length:model"),
        ("data", "batch:pod+data", "embed:data"),
    ]


def test_thousands_of_paths_with_the_same_rules_share_one_layout():
    layout = Layout.parse("params/embed:data; params/layer_7/embed:model; heads:model?")
    shape = Shape(md.dims(embed=8, heads=4))
    layouts = [layout.assign(shape, f"params/layer_{number}/w") for number in range(10)]
    assert len({id(each) for each in layouts}) == 2
    assert str(layouts[7]) == "embed:model"
    assert str(layouts[0]) == str(layouts[8]) == "embed:data; heads:model"


def test_a_value_inside_a_program_leaves_a_contested_axis_with_the_rule_written_first():
    layout = Layout.parse("b:model; a:model; inputs/a:data")
    both = Shape([Dimension("a", 2), Dimension("b", 4)])
    assert str(layout.inside(both)) == "b:model"
    assert str(layout.assign(both, "inputs/x")) == "a:data; b:model"


def test_a_mesh_without_the_axis_is_an_error():
    layout = Layout.parse("batch:dta; heads:model")
    mesh = Mesh.parse("data:2 model:1")
    assert str(layout.assign(shape("heads"), mesh=mesh)) == "heads:model"
    with pytest.raises(ValueError) as error:
        layout.assign(shape("batch"), mesh=mesh)
    assert str(error.value) == "no axis `dta` in mesh `data:2 model:1`. Did you mean `data`?"


@given(layouts, names, paths, st.data())
def test_neither_the_order_nor_a_size_above_1_nor_what_was_asked_before_matters(
    layout, dims, path, data
):
    fresh = Layout(layout.rules)
    for other in data.draw(st.lists(names, max_size=3)):
        fresh.resolve(shape(*other), path)
    shuffled = data.draw(st.permutations(dims))
    sizes = st.integers(2, 100)
    resized = Shape(Dimension(name, data.draw(sizes)) for name in shuffled)
    first, second = layout.resolve(shape(*dims), path), fresh.resolve(resized, path)
    assert first[0] == second[0]
    assert [c.args for c in first[1]] == [c.args for c in second[1]]


@given(layouts, names, paths)
def test_a_dim_gets_all_its_axes_unless_it_is_optional_and_another_dim_has_them(layout, dims, path):
    try:
        found = layout.assign(shape(*dims), path)
    except LayoutConflict:
        return
    assert found == TensorLayout.of({dim: found.axes(dim) for dim in dims})
    for dim in dims:
        rule = layout.rule_for(dim, path)
        wanted = rule.axes if rule else ()
        missing = [axis for axis in wanted if axis not in found.axes(dim)]
        assert found.axes(dim) == tuple(axis for axis in wanted if axis not in missing)
        assert not missing or rule.optional
        for axis in missing:
            taker = layout.rule_for(found.dim_of(axis), path)
            assert not taker.optional or layout.rules.index(taker) < layout.rules.index(rule)


@given(layouts, names, paths)
def test_there_is_a_conflict_exactly_where_two_rules_that_do_not_yield_want_one_axis(
    layout, dims, path
):
    deciding = [rule for dim in dims if (rule := layout.rule_for(dim, path)) is not None]
    claims = [axis for rule in deciding if not rule.optional for axis in rule.axes]
    contested = {axis for axis in claims if claims.count(axis) > 1}
    assert {conflict.axis for conflict in layout.resolve(shape(*dims), path)[1]} == contested


# Work


@pytest.fixture
def compared(monkeypatch):
    """Counts the comparisons of a component of a path with one of a glob."""
    calls = []

    def compare(component, pattern):
        calls.append((component, pattern))
        return fnmatchcase(component, pattern)

    monkeypatch.setattr("meshdsl.layouts.layout.fnmatchcase", compare)
    return calls


@pytest.mark.parametrize("glob", ["/".join(["**"] * 14), "/".join(["**", "*"] * 14)])
def test_a_glob_compares_each_component_of_a_path_at_most_once_with_each_of_its_own(glob, compared):
    path = "/".join("abcdefghijklmnopqrstuvwxyz" * 2)
    assert not matches(f"{glob}/nowhere", path)
    assert len(compared) <= 52 * 15


def test_a_path_is_compared_with_the_few_of_20_000_scopes_that_share_a_component(compared):
    layout = Layout.parse("; ".join(f"params/layer_{i}/w/embed:data" for i in range(20_000)))
    for number in (0, 7, 19_999):
        path = f"state/params/layer_{number}/w"
        assert layout.assign(shape("embed"), path).axes("embed") == ("data",)
        assert layout.applying([path]) == {layout.rules[number]}
    assert layout.assign(shape("embed"), "state/params/layer_20000/w").axes("embed") == ()
    assert len(compared) <= 100


@given(layouts, paths, names)
def test_the_most_specific_of_the_rules_that_apply_decides(layout, path, dims):
    for dim in dims:
        applying = [r for r in layout.rules if r.dim == dim and r.applies_to(path)]
        assert layout.rule_for(dim, path) == max(
            applying, key=lambda r: r.specificity, default=None
        )
    assert layout.applying([path]) == {rule for rule in layout.rules if rule.applies_to(path)}


def test_a_layout_of_20_000_rules_reads_each_rule_twice(monkeypatch):
    reads = []
    monkeypatch.setattr(
        "meshdsl.layouts.layout._read", lambda text: reads.append(text) or _read(text)
    )
    Layout.parse("; ".join(f"dim_{i}:data" for i in range(20_000)))
    assert len(reads) == 2 * 20_000
