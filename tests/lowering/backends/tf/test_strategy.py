"""How a TPU job is run, with TensorFlow's strategy for host devices in the place of TPUStrategy.

Both run one program in every replica, on values and variables that each has of its own.
"""

import numpy as np
import pytest
import tensorflow as tf

import meshdsl as md
from meshdsl.lowering import backends
from meshdsl.lowering.backends.tf.hosts import executable as host
from meshdsl.lowering.backends.tf.tpus.executable import Executable, VariableShards, _Variable

batch, embed = md.dims(batch=8, embed=6)
LAYOUTS = [("x:4", "batch:x; state/embed:x"), ("x:2,y:2", "batch:y; state/embed:x+y")]


def step(state, x):
    def loss(w):
        return md.mean(md.square(md.einsum(x, w, over="embed") - 1))

    value, gradient = md.value_and_grad(loss)(state["w"])
    return {"loss": value, "state": {"w": state["w"] - 0.1 * gradient}}


def numbers(*sizes, seed=0):
    return np.random.default_rng(seed).normal(size=sizes)


STATE = {"w": md.named(numbers(embed.size), [embed])}
XS = [md.named(numbers(batch.size, embed.size, seed=n), [batch, embed]) for n in range(4)]


def on_strategy(program):
    """Returns a program on replicas that are this machine's logical CPUs."""
    on_hosts = host.Executable(program)
    strategy = tf.distribute.MirroredStrategy(list(on_hosts.devices.names))

    def replica(device, *shards):
        context = tf.distribute.get_replica_context()
        place = int(tf.get_static_value(context.replica_id_in_sync_group))
        agrees = tf.debugging.Assert(device == place, ["the device", device, "is replica", place])
        with tf.control_dependencies([agrees]):
            device = tf.identity(device)
        return on_hosts.replica(device, on_hosts.tokens[place].handle, *shards)

    return Executable(program, program.donated, strategy, replica)


@pytest.fixture(autouse=True)
def on_replicas(monkeypatch):
    def executable(name, program, *given, **known):
        return on_strategy(program)

    monkeypatch.setattr(backends, "executable", executable)


def jitted(mesh, layout, **options):
    """Returns a function that is run so."""
    return md.jit(step, mesh, layout, "tf", donate="state", **options)


@pytest.mark.parametrize("mesh, layout", LAYOUTS)
def test_a_state_that_stays_in_variables_is_what_it_would_be(mesh, layout):
    run, state = jitted(mesh, layout), STATE
    expected_run, expected = md.jit(step, backend="numpy"), STATE
    for x in XS:
        found, wanted = run(state, x), expected_run(expected, x)
        state, expected = found["state"], wanted["state"]
        np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-12)
        np.testing.assert_allclose(state["w"], expected["w"], rtol=1e-12)


def test_calls_trace_once_and_move_no_state():
    run, state = jitted(*LAYOUTS[0]), STATE
    for x in XS:
        state = run(state, x)["state"]
    (compiled,) = run._compiled.values()
    executable = compiled.executable
    assert executable.traces == {"step": 1, "assign": 1}
    run(STATE, XS[0])  # a state from elsewhere is put there
    assert executable.traces == {"step": 1, "assign": 1}


def test_several_steps_are_one_call():
    run = jitted(*LAYOUTS[0], steps_per_call=len(XS))
    together = md.named(np.stack([np.asarray(x) for x in XS]), ["steps", batch, embed])
    found = run(STATE, together)
    state, losses = STATE, []
    for x in XS:
        result = md.jit(step, backend="numpy")(state, x)
        state = result["state"]
        losses.append(float(result["loss"]))
    np.testing.assert_allclose(found["loss"], losses, rtol=1e-12)
    np.testing.assert_allclose(found["state"]["w"], state["w"], rtol=1e-12)


def test_what_was_given_up_cannot_be_read():
    run = jitted(*LAYOUTS[0])
    first = run(STATE, XS[0])["state"]
    run(first, XS[1])
    with pytest.raises(ValueError, match="was donated to a call, which has put its own result"):
        np.asarray(first["w"])


OTHER = {"w": md.named(numbers(embed.size, seed=9), [embed])}


def reference(state, x):
    return np.asarray(md.jit(step, backend="numpy")(state, x)["state"]["w"])


def test_a_result_that_was_not_given_up_stays_what_it_is():
    run = jitted(*LAYOUTS[0])
    first = run(STATE, XS[0])["state"]
    second = run(OTHER, XS[1])["state"]  # no call was given `first`
    np.testing.assert_allclose(first["w"], reference(STATE, XS[0]), rtol=1e-12)
    np.testing.assert_allclose(second["w"], reference(OTHER, XS[1]), rtol=1e-12)
    third = run(first, XS[2])["state"]  # nor `second`
    np.testing.assert_allclose(second["w"], reference(OTHER, XS[1]), rtol=1e-12)
    np.testing.assert_allclose(third["w"], reference(first, XS[2]), rtol=1e-12)


def test_a_result_that_nothing_refers_to_is_not_copied(monkeypatch):
    run = jitted(*LAYOUTS[0])
    copied = []
    monkeypatch.setattr(VariableShards, "copy_out", copied.append)
    state = run(STATE, XS[0])["state"]
    state = run(state, XS[1])["state"]
    del state
    run(OTHER, XS[1])
    assert not copied


@pytest.mark.parametrize("at", ["_assign", "_step"])
def test_results_outlive_a_call_that_fails(at, monkeypatch):
    run = jitted(*LAYOUTS[0])
    first = run(STATE, XS[0])["state"]
    (compiled,) = run._compiled.values()

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(compiled.executable, at, interrupted)
        run(OTHER, XS[0])
    np.testing.assert_allclose(first["w"], reference(STATE, XS[0]), rtol=1e-12)
    again = run(first, XS[1])["state"]
    np.testing.assert_allclose(again["w"], reference(first, XS[1]), rtol=1e-12)


def test_an_array_is_read_once_from_each_replica(monkeypatch):
    state = jitted(*LAYOUTS[0])(STATE, XS[0])["state"]
    reads, parts = [], _Variable.parts

    class Counted:
        def __init__(self, variable):
            self.variable = variable

        def read_value(self):
            reads.append(self.variable)
            return self.variable.read_value()

    monkeypatch.setattr(_Variable, "parts", lambda self: [Counted(one) for one in parts(self)])
    np.testing.assert_allclose(state["w"], reference(STATE, XS[0]), rtol=1e-12)
    assert len(reads) == 4


def test_replicas_that_hold_the_same_share_one_copy():
    run = jitted("x:2,y:2", "batch:y; state/embed:x+y")
    run(STATE, XS[0])
    (compiled,) = run._compiled.values()
    stored = compiled.executable.inputs[1]  # x, of which two replicas each have the same half
    shards = stored.shards(XS[0], range(4))
    found = compiled.executable._distributed(shards)
    tensors = compiled.executable.strategy.experimental_local_results(found)
    assert len({id(one) for one in tensors}) == 2
    for one, shard in zip(tensors, shards, strict=True):
        np.testing.assert_array_equal(one, shard)


def test_results_go_into_other_programs():
    mesh, layout = LAYOUTS[0]
    state = jitted(mesh, layout)(STATE, XS[0])["state"]
    total = md.jit(lambda state: md.sum(state["w"]), mesh, "state/embed:x", "tf")(state)
    np.testing.assert_allclose(total, np.asarray(state["w"]).sum(), rtol=1e-12)


def test_sizes_that_do_not_divide_are_stored_with_pads():
    run, state = jitted("x:5", "batch:x; state/embed:x"), STATE
    expected = STATE
    for x in XS[:2]:
        state = run(state, x)["state"]
        expected = md.jit(step, backend="numpy")(expected, x)["state"]
    assert state["w"].data.shape == (10,)
    np.testing.assert_allclose(state["w"], expected["w"], rtol=1e-12)
