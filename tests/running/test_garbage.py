"""The collector is paused while programs are built, and left as it was."""

import gc

import pytest

import meshdsl as md
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
