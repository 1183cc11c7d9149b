"""All passes, over random programs: well formed before and after, and the same numbers.

The programs are those of `tests.property`, with the same options on the command line.
"""

from dataclasses import replace

import jax
import pytest

import meshdsl as md
from meshdsl.lowering.options import DEFAULT
from meshdsl.lowering.passes import PASSES
from meshdsl.lowering.passes.bucket import bucket
from meshdsl.lowering.passes.overlap import rings
from meshdsl.lowering.passes.prefetch import prefetch
from meshdsl.lowering.passes.tidy import tidy
from tests.lowering.passes.running import assert_same
from tests.property.pads import poisoned
from tests.property.programs import make_case


def every_ring(program, options):
    return rings(program, smallest=0, intensity=0)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")  # of rules and options that change nothing
def test_passes_keep_the_numbers(case_number):
    case = make_case(case_number)
    apart = replace(case.options[0], bucket_bytes=0, overlap=False)
    jitted = md.jit(case.function, case.mesh, case.layout, "numpy", options=apart)
    before = jitted.lower(case.inputs)
    after = before
    for one in (tidy, every_ring, bucket):
        after = one(after, DEFAULT)
    after = prefetch(after)
    leaves = jax.tree.leaves(case.inputs, is_leaf=lambda x: isinstance(x, md.NamedArray))
    with poisoned():
        assert_same(before, after, leaves)
    ahead = any("ahead" in one.params for one, _ in after.block.walk())
    assert ahead or after.wire_bytes == pytest.approx(before.wire_bytes)
    for one in PASSES:
        after = one(after, DEFAULT)
        assert one(after, DEFAULT) is after, f"{one.__name__} is not done when it is done"
