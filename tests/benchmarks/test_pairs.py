"""The pairs on which meshdsl is measured."""

import pytest

from meshdsl.layouts.mesh import Mesh
from tests.benchmarks.pairs import MODELS, MORE_PAIRS, OPTIMIZERS, PAIRS, jitted

ALL = {**PAIRS, **MORE_PAIRS}


def test_there_are_many_and_they_use_every_model_and_optimizer():
    assert len(PAIRS) >= 20
    assert {pair.model for pair in ALL.values()} == {*MODELS}
    assert {pair.optimizer for pair in PAIRS.values()} == {*OPTIMIZERS}
    for pair in ALL.values():
        assert [Mesh.parse(pair.mesh(size)).size for size in ("tpu", "small")] == [64, 8]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", [*ALL])
def test_every_pair_lowers_without_a_warning_and_sends_something(name):
    function, arguments = jitted(ALL[name], "small")
    assert function.lower(*arguments).wire_bytes > 0
