"""Policy: dtypes at rest, in computation, and of results."""

import numpy as np
import pytest

import meshdsl as md

a = md.Dimension("a", 2)


def test_it_is_read_from_text():
    policy = md.Policy.parse("params=float32,compute=bfloat16,output=float32")
    assert policy == md.Policy("float32", "bfloat16", "float32")
    assert md.Policy.parse("bfloat16") == md.Policy("bfloat16", "bfloat16", "bfloat16")
    assert md.Policy.parse("compute=bfloat16") == md.Policy(compute="bfloat16")


def test_it_casts_floating_point_leaves_only():
    policy = md.Policy(compute="bfloat16", output="float64")

    def model(tree):
        computed = policy.to_compute(tree)
        return computed, policy.to_params(computed), policy.to_output(computed)

    tree = {"w": md.named(np.ones(2, np.float32), [a]), "i": md.named(np.arange(2), [a])}
    for found, dtype in zip(
        md.jit(model, backend="numpy")(tree), ("bfloat16", "float32", "float64"), strict=True
    ):
        assert found["w"].dtype == md.spec([a], dtype).dtype
        assert found["i"].dtype == np.int64


def test_mistakes_are_told():
    with pytest.raises(ValueError, match="unknown policy key comput; the keys are params, compute"):
        md.Policy.parse("comput=bfloat16")
    with pytest.raises(ValueError, match="unknown dtype 'float31'; choose one of"):
        md.Policy.parse("float31")
    with pytest.raises(ValueError, match="policy compute=int32: needs a floating-point dtype"):
        md.Policy(compute="int32")
