"""Each process keeps its compiled programs, and loads only what was compiled for the same case."""

import json
import os
import subprocess
import sys

import pytest

from tests.lowering.backends.tf.hosts.test_cluster import free_ports

NEW = ("first", "cut short", "no program", "other versions", "other CPU")


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    """Returns what the two processes of a job told in each of two starts."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **cache}
    found = []
    for _ in range(2):
        (port,) = free_ports(1)
        line = [sys.executable, "-m", "tests.lowering.backends.kept_job", f"localhost:{port}"]
        pipe = subprocess.PIPE
        processes = [
            subprocess.Popen([*line, number], env=environment, stdout=pipe, stderr=pipe, text=True)
            for number in "01"
        ]
        try:
            output = [process.communicate(timeout=300) for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert not any(process.returncode for process in processes), output
        (zero,), (one,) = ([x for x in out.splitlines() if x[:1] == "{"] for out, _ in output)
        found.append((json.loads(zero), json.loads(one)))
    return found


@pytest.mark.long
def test_no_process_compiles_again_when_it_starts_again(starts):
    """The first process finds its programs in JAX's own cache."""
    first, second = starts
    assert [one["first"]["compiled"] for one in first] == [1, 1]
    assert [one["first"]["compiled"] for one in second] == [0, 0]
    assert first[0]["files"] == [] and len(first[1]["files"]) == 3
    assert second[1]["files"] == first[1]["files"]  # each with its name, and nothing unfinished


@pytest.mark.long
def test_only_a_whole_file_of_the_same_case_is_loaded(starts):
    told = {name: one for name, one in starts[0][1].items() if name != "files"}
    assert [name for name, one in told.items() if one["compiled"]] == [*NEW]
    warned = {name: one["warnings"] for name, one in told.items() if one["warnings"]}
    assert [*warned] == ["cut short", "no program"]
    assert all("compiled again, and replaced" in each for (each,) in warned.values())
    assert "process.1/" in warned["cut short"][0] and "it is damaged" in warned["cut short"][0]


@pytest.mark.long
def test_a_loaded_program_is_the_compiled_one(starts):
    """Results to the bit, donated buffers, memory and shardings."""
    for start in starts:
        for process in start:
            told = [one for name, one in process.items() if name != "files"]
            one, *others = [{**each, "compiled": None, "warnings": None} for each in told]
            assert one["reused"] and all(other == one for other in others)
            assert one["shards"] == starts[0][start.index(process)]["again"]["shards"]
