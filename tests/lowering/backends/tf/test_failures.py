"""What is told when something fails on host devices: of collectives, and of everything else."""

import io
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

import meshdsl as md
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends import DeviceError
from meshdsl.lowering.backends.tf.failures import explain_failure
from meshdsl.lowering.backends.tf.hosts import devices as host_devices
from meshdsl.lowering.backends.tf.hosts import tokens, watchdog
from meshdsl.lowering.backends.tf.hosts.executable import Executable
from meshdsl.lowering.backends.tf.hosts.watchdog import Call, watched


def _small(x):
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(x < 0.5), ["my own check"])]):
        return tf.identity(x)


small = md.primitive(
    "small",
    shape=lambda x: x.shape,
    emitters={"jax": lambda x: x, "tf": _small},
    partition=md.Partition(whole=()),
)
X = md.named(np.array([0, 0, 1, 1], np.float32), ["a"])


def total(x):
    return {"out": md.sum(x + 1, "a")}


def checked(x):
    return {"out": md.sum(small(x) * 3, "a")}


def printed(x):
    md.print("x {}", md.sum(x, "a"))
    return total(x)


def looped(x):
    def body(c, _):
        return c * md.sum(small(c), "a"), None

    return {"out": md.scan(body, x, md.arange(md.Dimension("n", 3)), "n")[0]}


def still_runs():
    return float(np.asarray(md.jit(total, "x:2", "a:x", "tf")(X)["out"])) == 6


@pytest.fixture(autouse=True, scope="module")
def _groups():
    """TensorFlow gives up groups of devices that were waiting for each other for the first time."""
    for mesh in ("x:2", "x:4"):
        md.jit(total, mesh, "a:x", "tf")(X)


@pytest.mark.parametrize(
    "function, mesh", [(checked, "x:1"), (checked, "x:2"), (checked, "x:4"), (looped, "x:2")]
)
def test_an_operation_of_the_user_that_fails_is_reported_with_its_line(function, mesh):
    """On x:2 and x:4 some devices fail, and the others wait for them in a collective."""
    with pytest.raises(tf.errors.InvalidArgumentError, match="my own check") as error:
        md.jit(function, mesh, "a:x", "tf")(X)
    note = error.value.__notes__[0]
    assert note.startswith("in local at ") and "test_failures.py" in note and "small(" in note
    assert error.value.__notes__[1:] in (
        [],
        [
            "devices waited for it in collectives; if others over the same devices fail from here "
            "on, start all processes again"
        ],
    )
    assert still_runs()


def test_a_print_that_fails_is_reported_with_its_line(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError("stdout is closed")

    run = md.jit(printed, "x:2", "a:x", "tf")
    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(tf.errors.OpError, match="BrokenPipeError: stdout is closed") as error:
        run(X)
    note = error.value.__notes__[0]
    assert note.startswith("in print at ") and "test_failures.py" in note
    monkeypatch.undo()
    assert still_runs()


def test_tokens_tell_of_no_collective_after_a_call_and_after_one_that_failed():
    held = tokens.tokens(host_devices.host_devices(Mesh.parse("x:4")).names)
    assert still_runs()
    assert {tokens.instruction(one) for one in tokens.read(held)} == {None}
    with pytest.raises(tf.errors.InvalidArgumentError):
        md.jit(checked, "x:4", "a:x", "tf")(X)
    assert tokens.read(held) == [0] * 4


def test_a_collective_that_fails_is_reported_with_where_each_device_was():
    program = md.jit(total, "x:4", "a:x", "tf").lower(X)
    executable = Executable(program)
    (number,) = [n for n, one in enumerate(executable.instructions) if one.is_collective]
    error = tf.errors.UnavailableError(None, None, "Detected at node x\nCollective ops is aborted")
    held = [number + 1, number + 1, 7 * 2**32, 0]
    with pytest.raises(DeviceError) as found:
        explain_failure(
            error, program.mesh, executable.instructions, held, executable.devices, False
        )
    assert found.value.__cause__ is error
    lines = str(found.value).split("\n  ")
    assert lines[0] == "a collective has failed, and TensorFlow runs no other in this process"
    assert lines[1].startswith("devices 0, 1 had reached all_reduce over x at ")
    assert lines[2:] == [
        "devices 2, 3 were in no collective",
        "devices 2, 3 had not reached it; every process answers",
        "TensorFlow says: Collective ops is aborted",
        "start all processes of the job again",
    ]


def test_what_does_not_fit_is_reported_as_such():
    error = tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")
    devices = host_devices.host_devices(Mesh.parse("data:1"))
    with pytest.raises(RuntimeError) as found:
        explain_failure(error, Mesh.parse("data:1"), [], [0], devices, False)
    assert str(found.value).startswith("RESOURCE_EXHAUSTED")  # which the command line knows
    assert not isinstance(found.value, DeviceError)


# The watchdog.


class Clock:
    """The watchdog's clock, which stands still unless a test lets time pass."""

    def __init__(self):
        self.now = time.monotonic()
        self.asked = 0

    def monotonic(self):
        self.asked += 1
        return self.now

    def passes(self, seconds):
        """Lets time pass, and waits until the watchdog has looked at the clock."""
        self.now += seconds
        asked, end = self.asked, time.monotonic() + 60
        while self.asked < asked + 6:  # twice or three times in a look
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(watchdog, "time", made)
    return made


def test_computing_for_longer_than_the_timeout_is_not_being_stuck(clock, monkeypatch):
    monkeypatch.setenv(host_devices.TIMEOUT, "0.2")
    all_compute = threading.Barrier(2, timeout=60)

    def hour(x):
        all_compute.wait()
        clock.passes(3600)
        all_compute.wait()
        return x

    def wait(x):
        return tf.ensure_shape(tf.numpy_function(hour, [x], x.dtype), x.shape)

    slow = md.primitive(
        "slow",
        shape=lambda x: x.shape,
        emitters={"jax": lambda x: x, "tf": wait},
        partition=md.Partition(whole=()),
    )
    run = md.jit(lambda x: {"out": md.sum(slow(x), "a")}, "x:2", "a:x", "tf")
    assert float(np.asarray(run(X)["out"])) == 2
    assert still_runs()


def test_a_device_that_stays_in_a_collective_is_stuck(clock):
    (token,) = tokens.tokens(host_devices.host_devices(Mesh.parse("x:1")).names)
    call = Call([token], 0.1)
    assert not call.is_stuck()
    clock.now += 0.2
    assert not call.is_stuck()  # it is in no collective
    tokens.begin(token.handle, 3)
    assert not call.is_stuck()
    clock.now += 0.2
    assert call.is_stuck()
    tokens.end(token.handle, 3)
    tokens.begin(token.handle, 3)
    assert not call.is_stuck()  # it is there once more
    tokens.reset([token])


@pytest.mark.parametrize("timeout", [float("inf"), 1e300])
def test_one_may_wait_for_ever(timeout):
    with watched([], timeout) as call:
        time.sleep(0.05)
    assert not call.timed_out
    assert still_runs()


def test_threads_take_turns():
    run = md.jit(
        lambda x: {"out": md.sum(x + 0 * md.shift(x, "a", 1, wrap=True), "a")}, "x:4", "a:x", "tf"
    )
    inputs = [md.named(np.full((8, 1000), k, np.float32), ["a", "b"]) for k in (1.0, 2.0)]
    found = {0: [], 1: []}

    def call(which):
        for _ in range(30):
            found[which].append(np.asarray(run(inputs[which])["out"]))

    threads = [threading.Thread(target=call, args=(k,), daemon=True) for k in found]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    for which, results in found.items():
        assert len(results) == 30
        np.testing.assert_array_equal(results, 8 * (which + 1))
