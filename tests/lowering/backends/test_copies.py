"""What keeps XLA from holding copies of whole stacks and inputs, and changes no number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.backends.jax import EMITTERS, executable
from meshdsl.lowering.backends.jax.machine import Machine

layers, embed, other = md.dims(layers=3, embed=8, other=8)
W = md.named(
    np.random.default_rng(0).normal(size=(3, 8, 8)).astype(np.float32), [layers, embed, other]
)
X = md.named(np.random.default_rng(1).normal(size=8).astype(np.float32), [embed])


def through_layers(x, w, read):
    def layer(x, w):
        return md.einsum(x, read(w), over="embed").rename(other="embed"), None

    return md.scan(layer, x, w, dim="layers")[0]


def narrow(w):
    return md.cast(md.cast(w, "bfloat16"), "float32")


def rounds(read):
    f = md.jit(lambda x, w: through_layers(x, w, read))
    text = jax.jit(f.as_jax(X, W)).lower(X.data, W.data).as_text()
    return text.count("reduce_precision")


def test_stacked_weights_of_which_the_bfloat16_part_is_read_are_rounded_in_the_loop():
    assert rounds(narrow) == 1
    assert rounds(lambda w: w) == 0
    assert rounds(lambda w: narrow(w) + w) == 0


def test_rounding_in_the_loop_changes_nothing():
    found = md.jit(lambda x, w: through_layers(x, w, narrow))(X, W)
    x = np.asarray(X)
    for w in np.asarray(W):
        x = np.asarray(jnp.asarray(w).astype(jnp.bfloat16).astype(jnp.float32)).T @ x
    np.testing.assert_allclose(np.asarray(found), x, rtol=1e-6)


def test_gathered_outputs_are_written_once_more_to_the_place_of_an_input():
    f = md.jit(
        lambda state, update: {"state": md.sin(update), "more": update + 1},
        mesh="data:4",
        layout="update/batch:data; more/batch:data",
        donate="state",
    )
    spec = md.spec([md.Dimension("batch", 8)])
    block = f.lower(spec, spec).block
    odd = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-37, 1 / 3, -3e38]
    state, more = jnp.asarray(odd, jnp.float32), jnp.ones(2)
    results = [state if v.local.volume == 8 else more for v in block.outputs]
    text = str(jax.make_jaxpr(lambda *arrays: executable._detached(block, arrays))(*results))
    assert text.count("reduce_precision") == 1
    same = executable._detached(block, results)
    for one, two in zip(same, results, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


@pytest.mark.long
def test_gradients_before_a_loop_of_the_backward_pass_do_not_wait_for_its_end():
    def loss(both):
        w, v = both
        x = through_layers(md.full([embed], 0.5), w, lambda w: w)
        return md.sum(md.square(md.einsum(x, v, over="embed")))

    v = md.named(np.ones((8, 8), np.float32), [embed, other])
    f = md.jit(md.grad(loss))
    block = f.lower((W, v)).block
    arrays = [jnp.asarray(np.asarray(leaf)) for leaf in (W, v)]

    def emitted(torus):
        return lambda *arrays: Machine(md.Mesh(), EMITTERS, torus=torus).run(block, arrays)

    scans, early = _scans_and_barriers(jax.make_jaxpr(emitted(True))(*arrays))
    assert (scans, early) == (2, [[(8,), (8, 8)]])  # the carry, and the gradient of v
    assert _scans_and_barriers(jax.make_jaxpr(emitted(False))(*arrays)) == (2, [])
    for one, other_one in zip(emitted(True)(*arrays), emitted(False)(*arrays), strict=True):
        np.testing.assert_array_equal(one, other_one)


def _scans_and_barriers(jaxpr):
    """Returns how many loops there are, and the shapes that each barrier ties."""
    equations = jaxpr.jaxpr.eqns
    barriers = [e for e in equations if e.primitive.name == "optimization_barrier"]
    shapes = [[variable.aval.shape for variable in e.invars] for e in barriers]
    return sum(e.primitive.name == "scan" for e in equations), shapes
