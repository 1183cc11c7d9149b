"""Fewer processes: a shorter axis, the same batch, no more rows on a device than before."""

import math

import pytest

from meshdsl.layouts.mesh import Mesh
from meshdsl.training.launching.elastic import Elastic


def test_the_axis_becomes_shorter_and_the_others_stay():
    elastic = Elastic(Mesh.parse("slice@dcn:2,data:4,model:4"), "data", 8, 64)
    assert elastic.counts() == [8, 6, 4, 2]  # a process has 4 devices, and a row of the mesh 8
    assert str(elastic.mesh_of(6)) == "slice@dcn:2 data:3 model:4"
    assert elastic.flags(8) == []
    assert elastic.flags(4) == ["--mesh_shape=slice@dcn:2 data:2 model:4", "--microbatches=2"]


@pytest.mark.parametrize("batch", [7, 12, 64, 96])
@pytest.mark.parametrize("before", [1, 2, 4])
def test_no_device_holds_more_rows_of_a_microbatch(batch, before):
    elastic = Elastic(Mesh.parse("data:8"), "data", 8, batch, before)
    most = math.ceil(batch / before / 8)
    for count in elastic.counts():
        parts = elastic.microbatches_of(count)
        assert (batch % parts == 0 and parts >= before) or parts == batch
        assert math.ceil(batch / parts / count) <= most


@pytest.mark.parametrize(
    ("axis", "processes", "message"),
    [("dat", 2, "has no axis 'dat'. Did you mean `data`"), ("data", 3, "do not divide evenly")],
)
def test_a_job_that_cannot_be_elastic_is_refused(axis, processes, message):
    with pytest.raises(ValueError, match=message):
        Elastic(Mesh.parse("data:8"), axis, processes, 8)
