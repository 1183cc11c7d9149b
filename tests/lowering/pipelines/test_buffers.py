"""Buffers: which chunk inputs are live, and which values share a buffer."""

import random

from meshdsl.lowering.pipelines.buffers import assign, live
from meshdsl.lowering.pipelines.csv_files import parse


def test_an_input_is_live_until_its_weight_gradients_are_computed():
    row = parse("0F0,0F1,,0I0,0W0,0B1,0SEND_F1").rows[0]
    assert live(row) == [1, 2, 2, 2, 2, 1, 0]
    assert live(parse("(0F1;0B0)OVERLAP_F_B,0F2").rows[0]) == [1, 1]


def test_intervals_get_as_few_buffers_as_possible():
    draw = random.Random(0)
    for _ in range(100):
        used = {n: (a := draw.randrange(20), a + draw.randrange(6)) for n in range(15)}
        buffers = assign(used)
        most = max(sum(a <= t <= b for a, b in used.values()) for t in range(30))
        assert set(buffers.values()) == set(range(most))
        for t in range(30):
            busy = [buffers[n] for n, (a, b) in used.items() if a <= t <= b]
            assert len(busy) == len(set(busy))
