"""TensorFlow's optimizer, which must not rename the loops that collectives are in."""

import threading

import numpy as np
import pytest
import tensorflow as tf

import meshdsl as md
from meshdsl.lowering.backends.tf.host_optimizer import collects_in_bodies, unoptimized
from meshdsl.lowering.backends.tf.hosts.executable import Executable

batch, rows = md.dims(batch=8, rows=3)
X = md.named(np.random.default_rng(0).normal(size=(8, 3)), [batch, rows])
COPIES = 3


def branching(x):
    """Sends in a scan in two branches in a scan.

    `exp` and `sin` are used in a branch each, which the optimizer moves them into.
    """

    def once(carry, row):
        return carry + md.max(md.tanh(row * carry), "batch"), None

    def scanned(x, z):
        return md.scan(once, md.max(x), x + z, "rows")[0]

    def inner(x, y):
        z = md.sin(y)
        return x + md.cond(md.max(y) < 99, scanned, lambda x, z: md.max(x), x, z)

    def body(x, row):
        return md.cond(md.max(row) > -9, inner, lambda x, y: x * 2.0, x, md.exp(row)), None

    return md.scan(body, x, x, "rows")[0]


@pytest.mark.long
def test_devices_find_each_other_in_loops_in_branches_every_time(monkeypatch):
    """They waited for ever in the first copy, in five of five processes."""
    monkeypatch.setenv("MESHDSL_COLLECTIVE_TIMEOUT", "60")
    expected = np.asarray(md.jit(branching, "x:4", "batch:x", "numpy")(X))
    for _ in range(COPIES):
        found = md.jit(branching, "x:4", "batch:x", "tf")(X)
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-12)


def disabled():
    return tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer", False)


@pytest.mark.parametrize(
    "function, expected",
    [
        (branching, True),
        (lambda x: md.sum(x, "batch"), False),
        (lambda x: md.scan(lambda c, row: (c + md.tanh(row), None), x, x, "rows")[0], False),
    ],
)
def test_only_programs_that_send_in_loops_are_run_unoptimized(function, expected, monkeypatch):
    program = md.jit(function, "x:4", "batch:x", "tf").lower(X)
    assert collects_in_bodies(program.block) == expected
    executable, seen = Executable(program), []
    step = executable._step
    monkeypatch.setattr(executable, "_step", lambda *args: seen.append(disabled()) or step(*args))
    executable.call_flat([X])
    assert seen == [expected]
    assert not disabled()


def test_the_option_is_as_before_once_all_threads_are_done():
    entered, left = threading.Event(), threading.Event()

    def other():
        with unoptimized():
            entered.set()
            left.wait(120)

    thread = threading.Thread(target=other)
    with unoptimized():
        thread.start()
        assert entered.wait(120)
    assert disabled()
    left.set()
    thread.join()
    assert not disabled()


def test_an_option_of_the_users_stays():
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        with unoptimized():
            pass
        assert disabled()
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
