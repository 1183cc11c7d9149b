"""A first supervisor counts the copies of all hosts that are there, as these say of them."""

import json
import signal

import pytest

from meshdsl.training.launching.events import NAME
from tests.training.launching.test_hosts import ELASTIC, flags, job, kill_host, process, wait_for

__all__ = ["job"]  # a fixture


@pytest.mark.long
def test_copies_count_while_the_hosts_that_have_them_are_there(job, tmp_path):
    for number in range(3):
        for step in (7, 8):
            folder = tmp_path / f"copies.{number}" / f"process.{number}" / str(step)
            folder.mkdir(parents=True)
            about = {"start": [1, "a"], "needs": [[0], [1], [2]]}
            (folder / "about.json").write_text(json.dumps(about))
    given = {"program": "import json\n" + ELASTIC, "elastic": True, "beside": 3}
    first, second, third = (job(n, **given) for n in range(3))
    wait_for(lambda: all((tmp_path / f"ready.1.{n}").exists() for n in range(3)))
    kill_host(tmp_path, third, process(tmp_path, 1, 2))
    assert flags(tmp_path, 2, 1)[1:2] == ["--num_processes=2"]
    third = job(2, **given)
    wait_for(lambda: all((tmp_path / f"ready.3.{n}").exists() for n in range(3)))
    for one in (first, second, third):
        one.send_signal(signal.SIGTERM)
    assert [one.wait(90) for one in (first, second, third)] == [143] * 3
    events = [json.loads(line) for line in (tmp_path / NAME).read_text().splitlines()]
    assert [one["step"] for one in events if one["event"] == "started"] == [8, None, 8]
    assert [one["step"] for one in events if one["event"] == "failed"] == [None]
    told = "copies in memory of step 8 lack what process 2 had"
    assert told in first.stderr.read()
