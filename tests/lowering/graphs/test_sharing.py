"""What the forward loop has moved or reduced, the backward loop reads; nothing else is shared."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.options import Options
from tests.lowering.plans import lowered

LAYERS, BATCH, LENGTH, EMBED, D_FF = 3, 4, 8, 6, 8
RNG = np.random.default_rng(0)
SEQUENCE = "d_ff:model; length:model?"
STREAM = {"batch", "length", "embed"}


def array(**dims):
    return md.named(RNG.normal(size=tuple(dims.values())) / 4, list(md.dims(**dims)))


PARAMS = {
    "w_in": array(layers=LAYERS, embed=EMBED, d_ff=D_FF),
    "w_out": array(layers=LAYERS, d_ff=D_FF, embed=EMBED),
}
X = array(batch=BATCH, length=LENGTH, embed=EMBED)


def layer(x, w):
    h = md.tanh(md.einsum(x, w["w_in"], over="embed"))
    return x + md.einsum(h, w["w_out"], over="d_ff")


def gradients(run):
    def step(params, x):
        def loss(params):
            return md.mean(
                md.square(md.scan(lambda x, w: (run(x, w), None), x, params, "layers")[0])
            )

        return md.value_and_grad(loss)(params)

    return step


def moves(program, kind="all_gather"):
    """Returns how often the stream is moved in a step."""
    parts = [part for one in program.collectives for part in one.parts or (one,)]
    return sum(p.count for p in parts if p.kind == kind and set(p.dims.names) == STREAM)


def test_what_both_passes_gather_is_gathered_once():
    program = lowered(gradients(layer), PARAMS, X, layout=SEQUENCE, mesh="model:4")
    assert moves(program) == 2 * LAYERS  # the stream forwards, its gradient backwards


def test_a_checkpoint_gathers_and_reduces_again_unless_it_keeps_collectives():
    found = {}
    for kept in (False, True):
        step = gradients(md.checkpoint(layer, (), kept))
        program = lowered(step, PARAMS, X, layout=SEQUENCE, mesh="model:4")
        found[kept] = moves(program), moves(program, "reduce_scatter")
    assert found[False] == (3 * LAYERS, 2 * LAYERS)  # the last sum of a layer is not needed again
    assert found[True] == (2 * LAYERS, 2 * LAYERS)


@pytest.mark.filterwarnings("ignore:memory=1 B is less")
def test_nothing_more_is_kept_where_memory_is_short():
    usual, tight = (
        md.jit(gradients(layer), "model:4", SEQUENCE, options=options).lower(PARAMS, X)
        for options in (Options(), Options(memory=1))
    )
    assert tight.peak_bytes < usual.peak_bytes
    assert moves(tight) == moves(usual) + LAYERS


@pytest.mark.parametrize("other", ["flipped", "another", "carried", "reversed"])
def test_a_later_loop_shares_only_what_is_of_the_same_slices(other):
    """A loop over what another one stacked, which gathers the like of what that one gathered."""

    def function(x, w, v):
        def first(carry, w):
            return carry, md.einsum(x * w, md.rename(x * w, length="other"), over="embed")

        _, stacked = md.scan(first, x, w, dim="layers")
        given = {"flipped": md.flip(w, "layers"), "another": v}.get(other, w)

        def second(carry, slices):
            stacked, w = slices
            base = carry if other == "carried" else x
            again = md.einsum(base * w, md.rename(base * w, length="other"), over="embed")
            return carry + 0.1 * md.sum(again * stacked, "other"), md.mean(again - stacked)

        return md.scan(second, x, (stacked, given), dim="layers", reverse=other == "reversed")

    w, v = array(layers=LAYERS, embed=EMBED), array(layers=LAYERS, embed=EMBED)
    program = lowered(function, X, w, v, layout="length:model", mesh="model:4")
    gathers = [one.count for one in program.collectives if one.kind == "all_gather"]
    same = other == "reversed"  # slices meet whatever the direction
    assert sum(gathers) == (1 if same else 2) * LAYERS
