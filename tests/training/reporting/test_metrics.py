"""What a run leaves on disk, however it ends, and what it shows meanwhile."""

import contextlib
import io
import json
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from meshdsl.training.reporting.metrics import MetricsWriter, Progress
from meshdsl.training.step_metrics import KEYS

FULL = {
    "loss": 2.345,
    "eval_loss": 2.4,
    "learning_rate": 3e-4,
    "grad_norm": 0.84,
    "skipped_steps": 0.0,
    "step_seconds": 0.1,
    "tokens_per_second": 12345.0,
    "test_loss": 2.5,
    "tflops_per_device": 81.5,
    "mfu": 0.4143,
    "memory_bytes": 15_000_000_000,
    "host_memory_bytes": 3_000_000_000,
    "steps_share": 0.9,
    "compiling_share": 0.05,
    "data_share": 0.01,
    "saving_share": 0.02,
    "evaluating_share": 0.02,
    "goodput": 0.6,
    "recovering_share": 0.05,
    "repeating_share": 0.01,
}


def lines(workdir: Path, name: str = "metrics.jsonl") -> list[dict]:
    text = (workdir / name).read_text()
    assert text == "" or text.endswith("\n")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def events(folder: Path) -> list[Event]:
    """Reads TensorBoard's record format: length, its checksum, the event, its checksum."""
    (file,) = folder.iterdir()
    data, found = file.read_bytes(), []
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        found.append(Event.FromString(data[12 : 12 + size]))
        data = data[12 + size + 4 :]
    return found


def shown(*reports: tuple[int, dict], steps: int = 200, terminal: bool = False) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, force_interactive=terminal, width=80)
    with Progress(steps, console) as progress:
        for step, metrics in reports:
            progress.log(step, metrics)
    return file.getvalue()


def test_a_line_has_the_keys_in_their_fixed_order_then_the_runs_own(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(10, {"temperature": 0.5, **dict(reversed(FULL.items()))})
    (line,) = lines(tmp_path)
    assert tuple(line) == (*KEYS, "temperature")
    assert line == {"step": 10, **FULL, "temperature": 0.5}


def test_an_absent_value_is_null(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss": 2.0, "eval_loss": None})
    (line,) = lines(tmp_path)
    assert line == dict.fromkeys(KEYS) | {"step": 1, "loss": 2.0}


def test_numbers_that_are_not_finite_stay_valid_json_and_read_back(tmp_path):
    odd = {"loss": float("nan"), "grad_norm": float("inf"), "eval_loss": np.float32("-inf")}
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, odd)
    (line,) = lines(tmp_path)
    assert (line["loss"], line["grad_norm"], line["eval_loss"]) == ("NaN", "Infinity", "-Infinity")
    np.testing.assert_equal({name: float(line[name]) for name in odd}, odd)


def test_array_scalars_are_written_as_numbers_with_every_digit(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss": np.float32(0.1), "grad_norm": np.array(0.25), "examples": 2**60})
    (line,) = lines(tmp_path)
    assert np.float32(line["loss"]) == np.float32(0.1)
    assert line["grad_norm"] == 0.25
    assert line["examples"] == 2**60


def test_every_line_and_event_is_on_disk_before_the_next_step(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(3):
            writer.write(step, FULL)
            assert len(lines(tmp_path)) == step + 1
            assert events(tmp_path / "tensorboard")[-1].step == step


def test_tensorboard_has_a_point_for_each_value_that_is_present(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(7, {"loss": 2.5, "eval_loss": None, "temperature": 0.5})
    header, event = events(tmp_path / "tensorboard")
    assert header.file_version == "brain.Event:2"
    assert event.step == 7
    assert {v.tag: v.simple_value for v in event.summary.value} == {"loss": 2.5, "temperature": 0.5}


def test_an_interrupt_leaves_complete_metrics_and_is_not_swallowed(tmp_path):
    with pytest.raises(KeyboardInterrupt), MetricsWriter(tmp_path) as writer:
        for step in range(3):
            writer.write(step, FULL)
        raise KeyboardInterrupt
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2]
    assert len(events(tmp_path / "tensorboard")) == 4


@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_at_any_moment_leaves_whole_lines(tmp_path, blow):
    code = (
        "import itertools, signal, sys\n"
        "from meshdsl.training.reporting.metrics import MetricsWriter\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # shells may have it ignored\n"
        "with MetricsWriter(sys.argv[1]) as writer:\n"
        "    for step in itertools.count():\n"
        "        writer.write(step, {'loss': 1.0})\n"
        "        print(step, flush=True)\n"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        for _ in range(20):
            run.stdout.readline()
        run.send_signal(blow)
        _, stderr = run.communicate(timeout=300)
    assert run.returncode == -blow
    assert blow == signal.SIGKILL or b"KeyboardInterrupt" in stderr
    steps = [line["step"] for line in lines(tmp_path)]
    assert len(steps) >= 20
    assert steps == list(range(len(steps)))


def test_a_second_run_sets_the_metrics_of_the_first_aside(tmp_path):
    for run in range(3):
        with MetricsWriter(tmp_path) as writer:
            writer.write(run, FULL)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "metrics.1.jsonl",
        "metrics.2.jsonl",
        "metrics.jsonl",
        "tensorboard",
        "tensorboard.1",
        "tensorboard.2",
    ]
    for run, end in enumerate([".1", ".2", ""]):
        assert lines(tmp_path, f"metrics{end}.jsonl")[0]["step"] == run
        assert events(tmp_path / f"tensorboard{end}")[-1].step == run


@contextlib.contextmanager
def room(size):
    """Keeps files below a size, as on a full disk: one write is cut short, the next fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def full(file):
    return re.escape(f"cannot write metrics to {file}: File too large. Those before are complete")


def test_a_full_disk_is_told_and_leaves_whole_lines(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss": 2.0})
        for more in (100, 0):  # cut short, and nothing at all
            with room(file.stat().st_size + more), pytest.raises(ValueError, match=full(file)):
                writer.write(2, {"loss": 1.0})
        assert [line["step"] for line in lines(tmp_path)] == [1]
        writer.write(3, {"loss": 1.0})
    assert [line["step"] for line in lines(tmp_path)] == [1, 3]


def test_a_disk_that_is_too_full_for_tensorboard_is_told_once(tmp_path):
    folder = tmp_path / "tensorboard"
    fails = pytest.raises(ValueError, match=full(folder))
    with fails, room(2000), MetricsWriter(tmp_path) as writer:
        for step in range(100):
            os.truncate(tmp_path / "metrics.jsonl", 0)
            writer.write(step, FULL)
    with room(10), fails:
        MetricsWriter(tmp_path).close()


def test_writing_metrics_starts_no_thread(tmp_path):
    before = threading.active_count()
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, FULL)
        assert threading.active_count() == before


def test_the_workdir_is_made_with_its_parents(tmp_path):
    with MetricsWriter(tmp_path / "runs" / "first") as writer:
        writer.write(1, FULL)
    assert lines(tmp_path / "runs" / "first")


def test_a_workdir_that_cannot_be_written_to_is_one_clear_error(tmp_path):
    (tmp_path / "taken").write_text("")
    message = (
        f"cannot write metrics to {tmp_path}/taken/run: Not a directory. Choose another workdir"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        MetricsWriter(tmp_path / "taken" / "run")


def test_without_a_terminal_each_report_is_one_plain_line():
    assert shown((100, FULL)) == (
        "step 100/200  loss 2.345  eval 2.400  lr 3.0e-04  grad_norm  0.84     12,345 tokens/s"
        "  mfu 41.4%  test 2.500\n"
    )


def test_columns_stay_aligned_where_values_are_missing_or_not_finite():
    short = {**FULL, "eval_loss": None, "grad_norm": float("nan")}
    first, second = shown((5, FULL), (100, short)).splitlines()
    assert second == (
        "step 100/200  loss 2.345              lr 3.0e-04  grad_norm   nan     12,345 tokens/s"
        "  mfu 41.4%  test 2.500"
    )
    assert len(first) == len(second)
    assert first.startswith("step   5/200  loss 2.345")


def test_a_runs_own_metrics_follow_by_name():
    assert shown((1, {"loss": 1.0, "accuracy": np.float32(0.5)})).endswith("  accuracy 0.5\n")
    assert shown((1, {"loss": 1.0, "accuracy": None})) == "step   1/200  loss 1.000\n"


def test_long_lines_and_markup_are_printed_as_they_are():
    names = {f"[red]{'x' * 50}{number}": 1.0 for number in range(3)}
    assert len(shown((1, names)).splitlines()) == 1
    assert "[red]" in shown((1, names))


def test_on_a_terminal_there_is_a_bar_with_the_latest_metrics():
    threads = threading.active_count()
    text = shown((100, FULL), (150, {"loss": 2.222}), terminal=True)
    assert "━" in text
    last = text.rsplit("step ", 1)[1]
    assert last.startswith("150/200")
    assert "loss 2.222  eval 2.400" in last  # the evaluation before last is still the latest
    assert threading.active_count() == threads


def test_on_a_terminal_the_evaluations_stay_as_lines():
    text = shown((100, FULL), (150, {"loss": 2.222}), terminal=True)
    history = [line for line in text.splitlines() if "lr 3.0e-04" in line]
    assert len(history) == 1
    assert "step 100/200  loss 2.345  eval 2.400" in history[0]


def test_an_interrupt_stops_the_bar_and_is_not_swallowed():
    threads = threading.active_count()
    console = Console(file=io.StringIO(), force_terminal=True, force_interactive=True)
    with pytest.raises(KeyboardInterrupt), Progress(10, console):
        raise KeyboardInterrupt
    assert threading.active_count() == threads


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setitem(os.environ, "TERM", "dumb")
    file = io.StringIO()
    with Progress(10, Console(file=file, force_terminal=True)) as progress:
        progress.log(5, {"loss": 1.0})
    assert file.getvalue() == "step  5/10  loss 1.000\n"


@pytest.mark.long
def test_a_run_goes_on_where_its_reader_has_gone():
    code = (
        "import sys\n"
        "from meshdsl.training.reporting.metrics import Progress\n"
        "from meshdsl.training.reporting.output import tell\n"
        "with Progress(100) as progress:\n"
        "    progress.log(1, {'loss': 1.0})\n"
        "    sys.stdin.readline()\n"
        "    for step in range(2, 100):\n"
        "        progress.log(step, {'loss': 1.0, 'eval_loss': 1.0})\n"
        "tell('the last line')\n"
        "print('ended', file=sys.stderr)\n"
        "sys.exit(3)\n"
    )
    for environment in ({}, {"FORCE_COLOR": "1", "TTY_INTERACTIVE": "1", "TERM": "xterm"}):
        with subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
        ) as run:
            shown = b""
            while b"1/100" not in shown:
                shown += run.stdout.read1() or pytest.fail("it has ended")
            run.stdout.close()
            _, told = run.communicate(b"\n", timeout=300)
        assert (run.returncode, told) == (3, b"ended\n")


def test_a_terminal_that_is_gone_is_quiet_from_then_on():
    ours, theirs = os.openpty()
    with open(theirs, "w") as terminal:
        console = Console(file=terminal, force_terminal=True, force_interactive=True)
        with Progress(10, console) as progress:
            progress.log(1, FULL)
            os.close(ours)
            for step in range(2, 10):
                progress.log(step, FULL)
            assert console.quiet
        os.dup2(os.open(os.devnull, os.O_WRONLY), theirs)  # where Python flushes to at the end


def test_an_end_that_has_other_reasons_is_not_swallowed():
    class Ends(io.StringIO):
        def write(self, text):
            raise SystemExit(143)

    with pytest.raises(SystemExit, match="143"), Progress(10, Console(file=Ends())) as progress:
        progress.log(1, FULL)
