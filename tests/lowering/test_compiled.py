"""What is planned to be sent, by kind: it adds up to what the program sends."""

import pytest

import meshdsl as md
from meshdsl.lowering.compiled import planned

batch, embed, d_ff, layers = md.dims(batch=8, embed=16, d_ff=32, layers=3)


def through(x, w):
    def layer(x, w):
        h = md.einsum(x, w, over="embed")
        return md.einsum(h, w, over="d_ff"), None

    return md.scan(layer, x, w, dim="layers")[0]


def test_collectives_in_loops_count_as_often_as_they_run():
    f = md.jit(through, "data:2,model:4", "batch:data; d_ff:model; w/embed:data")
    program = f.lower(md.spec([batch, embed]), md.spec([layers, embed, d_ff]))
    found = planned(program)
    # Weights of 16 x 32 / 4 floats are gathered over 2, results of 4 x 16 floats summed over 4.
    assert found == {
        "all_gather": 3 * 16 * 8 * 4 * 1 / 2,
        "all_reduce": 3 * 2 * 3 / 4 * (4 * 16 * 4),
    }
    assert sum(found.values()) == pytest.approx(program.wire_bytes)


def test_one_device_sends_nothing():
    assert (
        planned(md.jit(through).lower(md.spec([batch, embed]), md.spec([layers, embed, d_ff])))
        == {}
    )
