"""Rules of precision: how they read, and which of them decides."""

import re

import pytest

import meshdsl as md
from meshdsl.precision.rules import Rule


def test_rules_print_as_they_are_read():
    text = "mlp:fp8,blocks/attention:bf16,**/w_out:int8+tensor+unrounded,router:-,int8"
    assert str(md.Precision.parse(text)) == text
    assert md.Precision.parse(text.replace(",", "; ")) == md.Precision.parse(text)
    assert md.Precision.parse(text.replace(":", " : ")) == md.Precision.parse(text)
    assert md.Precision.of(None).rules == ()
    assert md.Precision.of("fp8").rules == (Rule("", "fp8"),)


@pytest.mark.parametrize(
    ("text", "forward", "gradient", "per_tensor", "rounded"),
    [
        ("fp8", "float8_e4m3fn", "float8_e5m2", False, True),
        ("int8", "int8", "int8", False, True),
        ("fp8+tensor", "float8_e4m3fn", "float8_e5m2", True, True),
        ("int8+unrounded+tensor", "int8", "int8", True, False),
    ],
)
def test_forms_of_8_bits(text, forward, gradient, per_tensor, rounded):
    how = Rule("", text).eight_bits
    assert (how.forward.name, how.gradient.name) == (forward, gradient)
    assert (how.per_tensor, how.rounded) == (per_tensor, rounded)
    assert Rule("", text).dtype is None


@pytest.mark.parametrize(("text", "name"), [("bf16", "bfloat16"), ("float32", "float32")])
def test_a_dtype_is_no_form_of_8_bits(text, name):
    assert Rule("", text).dtype.name == name
    assert Rule("", text).eight_bits is None


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("params/blocks/mlp/w_in/einsum", "fp8"),
        ("params/blocks/mlp/w_out/einsum", "int8"),
        ("params/blocks/attention/query/einsum", "bf16"),
        ("attention", "bf16"),
        ("params/embedding/einsum", "f32"),
    ],
)
def test_the_longest_scope_decides(path, form):
    rules = md.Precision.parse("f32, mlp:fp8, mlp/w_out:int8, attention:bf16")
    assert rules.rule_for([path]).form == form


def test_no_rule_decides_where_none_applies():
    assert md.Precision.parse("mlp:fp8").rule_for(["params/embedding/einsum"]) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("mlp:fp9", "`mlp:fp9`: `fp9` is none of fp8, int8, bf16, f16, f32, f64, -. Did you mean"),
        (
            "mlp:FP8",
            "`mlp:FP8`: `FP8` is none of fp8, int8, bf16, f16, f32, f64, -. Did you mean `fp8",
        ),
        (
            "mlp",
            "`mlp` is none of fp8, int8, bf16, f16, f32, f64, -; with a scope, a rule is written",
        ),
        ("int8+tensr", "`+tensr` is none of +tensor, +unrounded. Did you mean `tensor`?"),
        ("bf16+tensor", "`bf16+tensor`: only fp8 and int8 take `+tensor`"),
        ("mlp:fp8,mlp:int8", "two rules of precision have one scope: `mlp:fp8` and `mlp:int8`"),
        ("a:x,b:y", "`a:x`: `x` is none of fp8, int8, bf16, f16, f32, f64, -; `b:y`: `y` is none"),
    ],
)
def test_malformed_rules_are_all_reported(text, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        md.Precision.parse(text)


def test_rules_that_disagree_are_reported():
    rules = md.Precision.parse("mlp:fp8,w_in:int8")
    problem = "`mlp:fp8` and `w_in:int8` both apply to the product params/mlp/w_in/einsum; add a"
    with pytest.raises(ValueError, match=re.escape(problem)):
        rules.rule_for(["params/mlp/w_in/einsum"])


def test_another_type_is_refused():
    with pytest.raises(ValueError, match=r'given as "mlp:fp8,attention:bf16" or as a md\.Precisi'):
        md.Precision.of(8)
