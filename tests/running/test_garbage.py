"""The collector is paused while programs are built, and left as it was."""

import gc

import pytest

import meshdsl as md
from meshdsl.running import garbage
from meshdsl.running.garbage import paused

x = md.spec(md.dims(x=4), "float32")


def test_no_garbage_is_collected_while_a_function_is_traced_and_lowered():
    on = []

    def function(x):
        on.append(gc.isenabled())
        return x + 1

    md.jit(function).lower(x)
    assert on == [False]
    assert gc.isenabled()


def test_the_collector_is_on_again_after_an_error():
    with pytest.raises(ZeroDivisionError):
        md.jit(lambda x: 1 / 0).lower(x)
    assert gc.isenabled()


def test_who_has_switched_the_collector_off_finds_it_off():
    gc.disable()
    try:
        with paused(), paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_outermost_pause_ends_last():
    with paused():
        with paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_objects_of_a_long_pause_are_old_after_it():
    gc.collect()
    with paused():
        made = [[] for _ in range(garbage._MANY)]
    try:
        assert gc.get_count()[0] < 1_000
        young = {id(x) for generation in (0, 1) for x in gc.get_objects(generation)}
        assert not any(id(x) in young for x in made)
    finally:
        del made


def test_what_is_frozen_stays_frozen():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        assert frozen > 0
        with paused():
            made = [[] for _ in range(garbage._MANY)]
        assert gc.get_freeze_count() >= frozen - 100 and len(made) == garbage._MANY
    finally:
        gc.unfreeze()


@pytest.mark.long
def test_a_lowered_program_leaves_no_garbage():
    """Objects of a long pause are old at once, and the collector seldom looks at these."""
    hidden, wide = md.dims(hidden=8, wide=8)

    def step(params, x):
        def loss(params):
            y = md.checkpoint(lambda x: md.einsum(x, params["w"], over="hidden"))(x)
            return md.mean(md.square(y))

        return md.grad(loss)(params)

    params = {"w": md.spec([hidden, wide], "float32")}
    x = md.spec([*md.dims(batch=8), hidden], "float32")
    jitted = md.jit(step, mesh="data:8", layout="batch:data; params/hidden:data")
    jitted.lower(params, x)
    gc.collect()
    gc.disable()
    try:
        jitted.lower(params, x)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kept = {type(x).__name__ for x in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert kept.isdisjoint({"Operation", "TracedTensor", "Instruction", "Strategy", "Graph"})
