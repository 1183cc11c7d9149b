"""Muon, against optax.contrib's."""

import numpy as np
import optax
import optax.contrib
import pytest

import meshdsl as md
from meshdsl.optim import AdamW, Muon
from meshdsl.optim.muon import is_hidden_matrix, orthogonalised, rows_and_columns
from tests.optim import trees

WIDE = {"w_in": ["embed", "d_ff"], "w_out": ["d_ff", "embed"], "bias": ["d_ff"]}
SIZES = {"embed": 8, "d_ff": 16, "layers": 3, "heads": 2, "kv": 4, "vocab": 12}


def tree(seed, dims=WIDE):
    rng = np.random.default_rng(seed)
    return {
        name: md.named(rng.standard_normal([SIZES[d] for d in one]).astype("f4"), one)
        for name, one in dims.items()
    }


def run(optimizer, dims=WIDE, steps=4, mesh=None, layout=None):
    step = md.jit(optimizer.update, mesh, layout)
    params = tree(0, dims)
    state = md.jit(optimizer.init, mesh, layout)(params)
    for number in range(steps):
        params, state = step(tree(1 + number, dims), state, params, number)
    return params, state


def run_optax(transformation, params, grads):
    state = transformation.init(params)
    for grad in grads:
        updates, state = transformation.update(grad, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{}, {"consistent_rms": 0.2, "weight_decay": 0.1}, {"nesterov": False, "momentum": 0.9}],
)
def test_matrices_are_updated_as_by_optax(options):
    found, _ = run(Muon(0.02, **options))
    theirs = {"beta" if name == "momentum" else name: value for name, value in options.items()}
    grads = [trees.arrays(tree(1 + number)) for number in range(4)]
    expected = run_optax(optax.contrib.muon(0.02, **theirs), trees.arrays(tree(0)), grads)
    for name in ("w_in", "w_out"):
        np.testing.assert_allclose(np.asarray(found[name]), expected[name], rtol=1e-5, atol=1e-5)


def test_the_rest_is_updated_by_adamw():
    dims = {"bias": ["d_ff"], "embedding": ["vocab", "embed"]}
    options = {"b1": 0.8, "b2": 0.9, "eps": 1e-6, "weight_decay": 0.1}
    found, state = run(Muon(0.02, adam_learning_rate=0.01, **options), dims)
    expected, _ = run(AdamW(0.01, **options), dims)
    trees.assert_close(found, expected, 1e-7)
    assert state.momentum.params == {"bias": None, "embedding": None}


@pytest.mark.long
def test_stacked_layers_are_matrices_by_themselves():
    dims = {"w": ["layers", "embed", "heads", "kv"]}
    found, _ = run(Muon(0.02), dims)
    theirs = optax.contrib.muon(0.02)
    for layer in range(3):
        flat = [np.asarray(tree(n, dims)["w"])[layer].reshape(8, 8) for n in range(5)]
        expected = run_optax(theirs, flat[0], flat[1:])
        ours = np.asarray(found["w"])[layer].reshape(8, 8)
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dims", [["embed", "d_ff"], ["d_ff", "embed"], ["heads", "kv", "d_ff"]])
def test_what_is_orthogonalised_has_singular_values_near_one(dims):
    x = tree(3, {"w": dims})["w"]
    rows, _ = rows_and_columns(x.dims)
    found = md.jit(lambda x: orthogonalised(x, rows, 5, 1e-8))(x)
    flat = np.asarray(found).reshape(md.Shape(rows).volume, -1)
    values = np.linalg.svd(flat, compute_uv=False)
    assert values.min() > 0.6 and values.max() < 1.25


def test_rows_and_columns_are_as_near_to_square_as_they_can_be():
    def divided(**sizes):
        rows, columns = rows_and_columns(md.Shape(md.dims(**sizes)))
        return [d.name for d in rows], [d.name for d in columns]

    assert divided(layers=3, embed=64, heads=4, kv=16) == (["embed"], ["heads", "kv"])
    assert divided(heads=4, kv=16, embed=64) == (["heads", "kv"], ["embed"])
    assert divided(experts=8, embed=64, d_ff=256) == (["embed"], ["d_ff"])


def test_embeddings_biases_and_scales_are_no_hidden_matrices():
    embed, vocab, heads, kv = md.dims(embed=8, vocab=12, heads=2, kv=4)
    assert is_hidden_matrix("blocks/query", md.Shape([embed, heads, kv]))
    assert not is_hidden_matrix("embedding", md.Shape([vocab, embed]))
    assert not is_hidden_matrix("unembedding", md.Shape([embed, vocab]))
    assert not is_hidden_matrix("position_embedding", md.Shape([kv, embed]))
    assert not is_hidden_matrix("blocks/query_bias", md.Shape([heads, kv]))


@pytest.mark.parametrize("layout", ["embed:data; d_ff:model", "d_ff:data+model", "embed:data"])
def test_sharded_values_are_the_unsharded_ones(layout):
    found, state = run(Muon(0.02, weight_decay=0.1), WIDE, 3, "data:2,model:4", layout)
    expected, expected_state = run(Muon(0.02, weight_decay=0.1), WIDE, 3)
    trees.assert_close(found, expected, 1e-5)
    trees.assert_close(state, expected_state, 1e-5)


def test_numbers_out_of_range_are_reported_together():
    with pytest.raises(ValueError) as error:
        Muon(-1, momentum=1, steps=0, consistent_rms=0, adam_learning_rate=-2, matrices=None)
    assert str(error.value) == (
        "Muon: momentum must be in (0, 1), got 1; consistent_rms must be in (0, inf), got 0; "
        "learning_rate must be a number in [0, inf) or a schedule, got -1; "
        "adam_learning_rate must be a number in [0, inf) or a schedule, got -2; "
        "matrices must be a function of path and shape, got None; "
        "steps must be a whole number of at least 1, got 0"
    )


def test_all_chosen_parameters_that_are_no_matrices_are_listed():
    dims = {"w": ["embed", "d_ff"], "bias": ["d_ff"], "scales": ["layers", "embed"]}
    optimizer = Muon(0.02, matrices=lambda path, shape: True)
    with pytest.raises(ValueError) as error:
        md.jit(optimizer.init)(tree(0, dims))
    assert (
        "Muon: matrices chooses bias [d_ff=16], scales [layers=3, embed=8], but a matrix has two "
        "dims or more besides layers and experts"
    ) in str(error.value)
