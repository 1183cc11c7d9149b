"""Weights that both passes gather are gathered once, unless that would take memory."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering import lower
from meshdsl.lowering.options import Options
from meshdsl.lowering.placement.keeping import SHARE, keep_gathered
from meshdsl.reports.explain import explain
from tests.lowering.plans import lowered

FSDP = "batch:data; params/embed:data"
RNG = np.random.default_rng(0)
vocab, embed, batch, length = md.dims(vocab=48, embed=8, batch=4, length=6)
TABLE = 48 * 8 * 8  # bytes


def array(*dims):
    return md.named(RNG.normal(size=[d.size for d in dims]) / 4, list(dims))


def layer(x, w):
    return x + md.einsum(md.tanh(x), w, over="embed").rename(out="embed")


def model(params, tokens):
    """A look-up, a loop over layers, and logits of the same table or of another."""
    x = md.take(params["table"], tokens, "vocab")
    x, _ = md.scan(lambda x, w: (layer(x, w), None), x, params["layers"], dim="layers")
    logits = md.einsum(x, params.get("head", params["table"]), over="embed")
    return md.mean(md.square(md.tanh(logits)))


def step(params, tokens):
    return {"params": md.grad(model)(params, tokens)}


def arguments(tied):
    layers, out = md.dims(layers=3, out=8)
    params = {"table": array(vocab, embed), "layers": array(layers, embed, out)}
    if not tied:
        params["head"] = array(vocab, embed)
    tokens = md.named(RNG.integers(0, 48, (4, 6)).astype("i4"), [batch, length])
    return params, tokens


def gathers(program):
    """Returns how often tables are gathered."""
    parts = [part for one in program.collectives for part in one.parts or (one,)]
    return sum(p.count for p in parts if p.kind == "all_gather" and "vocab" in p.dims.names)


@pytest.mark.parametrize(("tied", "usual", "again"), [(True, 1, 2), (False, 1, 2)])
def test_a_table_is_gathered_once_for_both_passes(tied, usual, again):
    """Untied, the look-up takes its table where it is stored; that of the logits is gathered."""
    params, tokens = arguments(tied)
    program = lowered(step, params, tokens, layout=FSDP, mesh="data:4")
    freed = md.jit(step, "data:4", FSDP, options=Options(weights="again")).lower(params, tokens)
    assert (gathers(program), gathers(freed)) == (usual, again)
    assert program.peak_bytes <= freed.peak_bytes * (1 + SHARE)
    assert program.wire_bytes == freed.wire_bytes - TABLE * 3 / 4


def test_passes_run_once_whether_weights_are_kept_or_not(monkeypatch):
    runs = []
    run = lower.run_passes
    monkeypatch.setattr(lower, "run_passes", lambda *given: runs.append(1) or run(*given))
    for tied in (True, False):
        params, tokens = arguments(tied)
        assert md.jit(step, "data:4", FSDP).lower(params, tokens).kept
    assert len(runs) == 2


def test_the_loop_over_layers_gathers_again():
    params, tokens = arguments(True)
    program = lowered(step, params, tokens, layout=FSDP, mesh="data:4")
    found = [c.count for c in program.collectives if "out" in c.dims.names]
    assert found == [3, 3, 3]  # forwards, backwards, and the gradient


def test_explain_lists_what_is_kept():
    params, tokens = arguments(False)
    report = explain(md.jit(step, "data:4", FSDP).lower(params, tokens))
    assert [(one.path, one.bytes, one.wire_bytes) for one in report.kept] == [
        ("params/head", TABLE, TABLE * 3 / 4)
    ]
    assert "gathered once for both passes: params/head (3.0 KiB)" in str(report)
    freed = md.jit(step, "data:4", FSDP, options=Options(weights="again")).lower(params, tokens)
    assert explain(freed).kept == ()
    assert "for both passes" not in str(explain(freed))


def test_nothing_is_kept_that_would_raise_the_peak():
    """The weights of the first layers, which are not needed for long, while much else is kept."""
    out = md.Dimension("out", 8)

    def loss(params, x):
        for w in params:
            x = layer(x, w)
        return md.sum(md.square(x))

    def function(params, x):
        return {"params": md.grad(loss)(params, x)}

    weights = [array(embed, out) for _ in range(12)]
    for rows in (4, 64):
        x = array(md.Dimension("batch", rows), embed)
        program = lowered(function, weights, x, layout=FSDP, mesh="data:4")
        options = Options(weights="again")
        freed = md.jit(function, "data:4", FSDP, options=options).lower(weights, x)
        assert program.peak_bytes <= freed.peak_bytes * (1 + SHARE)
        assert program.wire_bytes <= freed.wire_bytes


def test_a_limit_decides_how_much_is_kept():
    params, tokens = arguments(True)
    freed = md.jit(step, "data:4", FSDP, options=Options(weights="again")).lower(params, tokens)
    assert keep_gathered(freed, TABLE) is freed
    assert gathers(keep_gathered(freed, 2 * freed.peak_bytes)) == 1
    for memory, count in [(4 * freed.peak_bytes, 1), (freed.peak_bytes, 1)]:
        options = Options(memory=memory)
        assert gathers(md.jit(step, "data:4", FSDP, options=options).lower(params, tokens)) == count
