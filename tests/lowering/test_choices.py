"""Of several ways of lowering a program: the one that fits and sends least, and no idle tries."""

from dataclasses import dataclass, field

import pytest

import meshdsl as md
from meshdsl.layouts.layout import Layout
from meshdsl.lowering.choices import USUAL, Choice, choose
from meshdsl.lowering.graphs.simplify import simplify
from meshdsl.lowering.options import Options

layers, batch, embed = md.dims(layers=3, batch=8, embed=16)
length = md.Dimension("length", 8)
STORED = "batch:data; params/embed:data"


@dataclass
class Program:
    """What `choose` asks of a program."""

    choice: Choice
    peak_bytes: int
    wire_bytes: float = 0.0
    collectives: tuple = ()
    mesh: md.Mesh = field(default_factory=lambda: md.Mesh.parse("data:4"))

    @property
    def program(self):
        return self


def flat(params, x):
    return md.grad(lambda w: md.sum(md.square(md.einsum(x, w, over="embed"))))(params["w"])


def looped(params, x):
    def layer(x, w):
        return x * w, None

    return md.grad(lambda w: md.sum(md.scan(layer, x, w, dim="layers")[0]))(params["w"])


def adding(params, x):
    def part(total, x):
        return total + md.grad(lambda w: md.sum(md.sin(x * w)))(params["w"]), None

    return md.scan(part, params["w"], x, dim="batch")[0]


def attending(params, x):
    return md.attention(x, x.rename(length="memory_length"), x.rename(length="memory_length"))


FLAT = flat, {"w": md.spec([embed])}, md.spec([batch, embed])
LOOPED = looped, {"w": md.spec([layers, embed])}, md.spec([batch, embed])
HEADS = md.spec([batch, length, md.Dimension("kv", 4)])
ADDING = adding, {"w": md.spec([embed])}, md.spec([batch, embed])
ATTENDING = attending, {"w": md.spec([embed])}, HEADS


def tried(of, layout, options, peak=lambda choice: 100, wire=lambda choice: 0.0):
    """Returns the choices that are tried, and the program that is taken."""
    function, *arguments = of
    choices = []

    def write(choice):
        choices.append(choice)
        return Program(choice, peak(choice), wire(choice))

    graph = simplify(md.jit(function).trace(*arguments))
    return choices, choose(write, graph, Layout.parse(layout), options)[1].choice


def test_without_a_limit_nothing_else_is_tried():
    assert tried(LOOPED, STORED, Options()) == ([USUAL], USUAL)
    kept = Choice(keep=True)
    assert tried(LOOPED, STORED, Options(weights="keep")) == ([kept], kept)


def test_what_keeps_and_shares_everything_is_taken_if_it_fits():
    everything = Choice(keep=True, share=True)
    assert tried(FLAT, STORED, Options(memory=100)) == ([everything], everything)


def test_sums_are_reduced_each_time_if_that_sends_less():
    """As where a gradient is made in storage, so that to add it up elsewhere is to move it."""
    usual, each = Choice(keep=True), Choice(keep=True, reduce_each=True)
    assert tried(ADDING, STORED, Options(memory=100)) == ([usual, each], usual)
    cheaper = tried(
        ADDING, STORED, Options(memory=100), wire=lambda choice: 1.0 - choice.reduce_each
    )
    assert cheaper == ([usual, each], each)


def test_of_what_fits_the_least_bytes_are_taken_and_of_equals_the_least_memory():
    def peak(choice):
        return 50 + 60 * choice.keep + 20 * choice.share

    def wire(choice):
        return 10.0 * choice.reduce_each

    _, taken = tried(LOOPED, STORED, Options(memory=100), peak, wire)
    assert taken == Choice(share=False)


def test_if_nothing_fits_what_holds_least_is_taken():
    def peak(choice):
        return 500 + choice.keep + choice.share - choice.reduce_each

    _, taken = tried(ADDING, STORED, Options(memory=1), peak)
    assert taken == Choice(keep=False, share=False, reduce_each=True)


@pytest.mark.parametrize(
    ("of", "layout", "count"),
    [
        (FLAT, "batch:data", 2),  # products choose together or one by one
        (FLAT, STORED, 4),  # kept or gathered again
        (LOOPED, "batch:data", 2),  # shared or not
        (LOOPED, STORED, 4),
        (ADDING, STORED, 8),  # sums are reduced once or each time
        (ATTENDING, "batch:data", 2),
    ],
)
def test_only_what_may_differ_is_tried(of, layout, count):
    choices, _ = tried(of, layout, Options(memory=1))
    assert len(choices) == len(set(choices)) == count
    fewer, _ = tried(of, layout, Options(memory=1, weights="again", context="gather"))
    assert not any(choice.keep or choice.context for choice in fewer)


def test_a_memory_is_sent_around_only_if_nothing_fits_otherwise():
    def peak(choice):
        return 50 if choice.context == "ring" else 150

    choices, taken = tried(ATTENDING, "batch:data", Options(memory=100), peak)
    assert taken.context == "ring" and [choice.context for choice in choices] == ["", "ring"]
    choices, taken = tried(ATTENDING, "batch:data", Options(memory=200), peak)
    assert not taken.context and len(choices) == 1


def test_gathering_ahead_is_given_up_only_if_nothing_fits_with_it():
    options = Options(memory=100, prefetch=True)
    assert tried(LOOPED, STORED, options)[1] == Choice(keep=True, prefetch=True)
    _, taken = tried(LOOPED, STORED, options, lambda choice: 100 + choice.prefetch)
    assert taken == Choice(keep=True)
    _, taken = tried(LOOPED, STORED, options, lambda choice: 100 + choice.keep)
    assert taken == Choice(prefetch=True)
    assert tried(LOOPED, STORED, Options(prefetch=True))[1] == Choice(prefetch=True)
