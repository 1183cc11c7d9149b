"""The table of verdicts, from a file that is filled bit by bit."""

from dataclasses import asdict, replace

from tests.benchmarks import verdicts
from tests.benchmarks.verdicts import FLAGS, KINDS, Job, Verdict, best, judge_all, read, table

FIRST = Verdict(100 * 2**20, 0.05, 0.01, 0.02, 0.06, 0, 3 * 2**30, 88.4)
OURS = Job("vision", "jax", "recommended")
BY_HAND = Job("vision", "by_hand", "recommended")


def test_what_is_compiled_once_is_in_the_file_and_failures_are_tried_again(tmp_path, monkeypatch):
    def compiled(job):
        if job == OURS:
            return {"verdict": asdict(FIRST)}
        return {"error": "ValueError: needs 96.0 GiB"}

    monkeypatch.setattr(verdicts, "_in_a_process", compiled)
    file = tmp_path / "verdicts.jsonl"
    judge_all([OURS, BY_HAND], file, 2)
    assert len(file.read_text().splitlines()) == 2
    assert read(file) == {OURS: FIRST}
    assert read(tmp_path / "none.jsonl") == {}


def test_every_kind_is_compiled_with_every_set_of_flags_but_ours_with_those_recommended():
    flags = ["recommended", "without_offload"]
    found = list(verdicts.jobs(["vision", "decoder_data"], KINDS, flags, False))
    assert found.count(OURS) == 1
    assert len(found) == (1 + 2 + 2) + (1 + 2)  # nobody wrote decoder_data by hand
    assert {job.flags for job in found} <= FLAGS.keys()


def test_the_others_have_the_flags_that_are_best_for_them():
    slow, fast = replace(FIRST, step=0.2), replace(FIRST, step=0.1, exposed=0.05)
    known = {OURS: FIRST, BY_HAND: slow, replace(BY_HAND, flags="without_offload"): fast}
    assert best(known, "vision", "by_hand", False) == ("without_offload", fast)
    assert best(known, "vision", "jax_auto", False) is None
    lines = table(known, ["vision"]).splitlines()
    assert lines[1].split() == [
        *("vision", "ours", "100", "50.00", "10.00", "20.00", "60.00", "3.00", "88"),
        "recommended",
    ]
    assert lines[2].split()[-1] == "without_offload"
    assert lines[3].split(": ")[1] == "step 0.60, exposed 0.20, wire_bytes 1.00"
    assert lines[4] == "step: geometric mean 0.600 of 1 pairs, largest 0.600"


def test_work_without_cycles_is_said():
    row = table({OURS: replace(FIRST, unknown=8)}, ["vision"]).splitlines()[1]
    assert row.endswith("recommended, 8 operations without cycles")


def test_a_process_that_fails_says_why():
    result = verdicts._in_a_process(Job("no_such_pair", "jax", "recommended"))
    assert result == {"error": "KeyError: 'no_such_pair'"}
