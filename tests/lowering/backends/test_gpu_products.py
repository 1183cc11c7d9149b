"""Products on GPUs: which dims are padded, and that no number changes. No GPU is needed."""

import jax
import ml_dtypes
import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.backends.jax import executable
from meshdsl.lowering.backends.jax.operations.products import padded_einsum

RNG = np.random.default_rng(0)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def on(platform, vocab, dtype="bfloat16"):
    """Returns the StableHLO of logits and their gradients for a platform, before compiling."""
    rows, embed, words = md.dims(rows=64, embed=32, vocab=vocab)
    x, table = md.spec([rows, embed], dtype), md.spec([words, embed], dtype)

    def loss(x, table):
        return md.sum(md.square(md.cast(md.einsum(x, table, over="embed"), "float32")))

    program = md.jit(lambda *both: md.grad(loss, (0, 1))(*both)).lower(x, table)
    shapes = [jax.ShapeDtypeStruct(v.shape.sizes, v.dtype) for v in program.block.inputs]
    traced = jax.jit(executable.function(program, platform=platform)).trace(*shapes)
    return traced.lower(lowering_platforms=("cuda" if platform == "gpu" else platform,)).as_text()


def test_gpus_pad_the_sizes_that_their_matrix_units_cannot_read():
    text = on("gpu", 1030)
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 3
    assert all("1088" in line and "1030" not in line for line in products)


@pytest.mark.parametrize(
    ("platform", "vocab", "dtype"),
    [
        ("gpu", 1032, "bfloat16"),  # rows of 16 bytes
        ("gpu", 1030, "float32"),
        ("gpu", 130, "bfloat16"),  # too small to be worth a copy
        ("cpu", 1030, "bfloat16"),
        ("tpu", 1030, "bfloat16"),
    ],
)
def test_nothing_else_is_padded(platform, vocab, dtype):
    assert "stablehlo.pad" not in on(platform, vocab, dtype)


@pytest.mark.long
@pytest.mark.parametrize("equation", ["ab,cb->ac", "ab,ac->bc", "abc,dc->abd", "abc,adc->abd"])
def test_zeros_change_no_number(equation):
    sizes = dict(zip("abcd", (3, 1029, 1030, 1031), strict=True))
    terms = equation.split("->")[0].split(",")
    factors = [
        RNG.integers(-4, 5, [sizes[letter] for letter in term]).astype(BFLOAT16) for term in terms
    ]
    found = padded_einsum(equation, factors, np.dtype("float32"))
    expected = np.einsum(equation, *(x.astype(np.float64) for x in factors))
    np.testing.assert_array_equal(found, expected)  # sums of small whole numbers are exact
