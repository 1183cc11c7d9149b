"""Random numbers are drawn where they are needed; nothing moves."""

import pytest

import meshdsl as md
from tests.lowering.plans import collectives

a, b = md.dims(a=8, b=16)


@pytest.mark.parametrize("layout", ["", "a:data; b:model", "b:model+data", "a:data+model; b:-"])
def test_every_device_draws_its_own_shard(layout):
    for draw in (md.random.uniform, md.random.normal, md.random.bits):
        found = collectives(lambda k: draw(k, [a, b]), md.random.key(3), layout=layout)  # noqa: B023
        assert found == []
