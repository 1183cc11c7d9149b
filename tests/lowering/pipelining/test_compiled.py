"""What the TPU compiler makes of pipelines, on a machine without a TPU."""

from importlib.util import find_spec

import jax
import pytest

from meshdsl.layouts.topologies import Topology
from meshdsl.lowering.backends.compiler_flags import RECOMMENDED
from meshdsl.lowering.backends.jax.ahead import compile_ahead
from meshdsl.lowering.compiled import planned
from tests.lowering.pipelining.steps import lower

MODEL = "embed=256,heads=2,d_ff=512,vocab=256"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.parametrize(
    ("schedule", "rounds", "runs"),
    [
        # Ticks of forward passes alone, of both, and of backward passes alone.
        ("circular", 1, [3, 8, 8, 3]),
        ("circular", 2, [7, 12, 12, 7]),
        ("zbv", 2, [7, 7, 15, 15, 15, 15, 7, 7]),  # each pass sends to both sides
    ],
)
def test_products_stand_in_the_windows_of_all_sends_of_the_steady_state(schedule, rounds, runs):
    model = "gpt_mini", f"layers={4 * rounds},{MODEL}"
    layout = "layers:pipe; vocab:pipe"
    options = {"pipeline": schedule, "pipeline_rounds": rounds}
    program = lower(model, 8, "pipe:4", layout, batch=64, **options)
    with jax.enable_x64(False):  # counters of loops, as the command line has them
        compiled = compile_ahead(program, Topology.parse("v5p:2x2x1"), RECOMMENDED["v5p"])
    assert compiled.sent["all_reduce"] == planned(program)["all_reduce"]
    sends = compiled.schedule.sends_of_loops(["pipe"])
    assert [times for _, times in sends] == runs
    assert all(event.asynchronous for event, _ in sends)
    stage = program.pipeline.dims.stage  # XLA sends stages their layers rounded for products
    sent = sum(c.wire_bytes * c.count for c in program.collectives if stage in c.dims.names
               and c.kind == "permute")  # fmt: skip
    assert sum(event.wire_bytes * times for event, times in sends) == sent
    steady = [event for event, times in sends if times == max(runs)]
    assert all(event.spans_product and not event.exposed for event in steady)
