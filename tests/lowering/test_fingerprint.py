"""Fingerprints: equal for what is lowered alike, and another one for each change of a program."""

import os
import subprocess
import sys
import tracemalloc
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.fingerprint import fingerprint
from meshdsl.lowering.program import SpmdProgram

ROW, COLUMN = md.dims(row=8, column=4)
SIZES = md.spec([ROW, COLUMN])


def step(x, w, factor=2.0):
    def body(carry, row):
        return carry + factor * md.sin(row), md.sum(row * row, "column")

    total, sums = md.scan(body, md.zeros([COLUMN]), md.einsum(x, w, out=[ROW, COLUMN]), dim="row")
    table = md.named(np.arange(4, dtype="float32"), [COLUMN])
    return md.cond(md.sum(total) > 0, lambda: total + table, lambda: table), sums


def lowered(function=step, mesh="data:2", layout="column:data", **options):
    weight = md.spec([COLUMN])
    return md.jit(function, mesh, layout, **options).lower(SIZES, weight)


def shown():
    print(fingerprint(lowered()))


@pytest.mark.long
def test_every_process_has_the_same_one():
    """Whatever the order of its sets is."""
    found = {fingerprint(lowered())}
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        line = [sys.executable, "-c", "from tests.lowering.test_fingerprint import shown; shown()"]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, check=True)
        found.add(done.stdout.strip())
    assert len(found) == 1 and len(*found) == 64


def test_another_function_mesh_layout_or_donation_has_another_one():
    def nearly(x, w):
        return step(x, w, np.nextafter(np.float32(2.0), np.float32(3.0)).item())

    def exactly(x, w):
        return step(x, w, 2.0)

    programs = [
        *(lowered(), lowered(nearly), lowered(exactly)),
        *(lowered(mesh="data:4"), lowered(layout="row:data"), lowered(mesh="other:2,data:2")),
        *(lowered(donate="x"), lowered(backend="jax_auto")),
        lowered(options=md.Options(compiler_flags=(("xla_cpu_enable_fast_math", True),))),
    ]
    assert len({*map(fingerprint, programs)}) == len(programs)


def records(thing, found=None):
    """Returns one record of each kind in a program, with each of its fields and parameters."""
    found = {} if found is None else found
    kind = type(thing)
    if is_dataclass(kind):
        names = [one.name for one in fields(kind) if one.init and one.name != "origin"]
        for name in names:
            found.setdefault((kind.__name__, name), thing)
            records(getattr(thing, name), found)
    elif isinstance(thing, tuple | list):
        for item in thing:
            records(item, found)
    elif isinstance(thing, dict):
        for value in thing.values():
            records(value, found)
    return found


def test_each_field_of_each_record_is_part_of_it():
    program = lowered()
    found, before = records(program), fingerprint(program)
    kinds = {kind for kind, _ in found}
    assert kinds >= {"SpmdProgram", "Block", "Instruction", "Value", "TensorLayout", "Source"}
    assert kinds >= {"Mesh", "Dimension"}
    for (kind, name), record in found.items():
        value = getattr(record, name)
        try:
            object.__setattr__(record, name, ("another", value))
            assert fingerprint(program) != before, (kind, name)
        finally:
            object.__setattr__(record, name, value)
    assert fingerprint(program) == before


def with_parameter(program, value):
    """Returns a program whose first instruction has one more parameter."""
    first, *others = program.block.instructions
    first = type(first)(first.op, first.inputs, first.outputs, {"more": value}, first.source)
    return replace(program, block=replace(program.block, instructions=(first, *others)))


def test_numbers_and_arrays_that_only_look_alike_have_different_ones():
    wide = np.zeros((2, 3), "float32")
    alike = [
        *(0, 0.0, -0.0, False, None, "0", b"0", (), [], {}, frozenset(), (0,), [0], ((), 0), 0j),
        *(("ab", "c"), ("a", "bc"), ("abc",), {"a": "b"}, {"ab": ""}, float("nan"), (0, ())),
        *(np.float32(0), np.float64(0), np.int32(0), wide, wide.T, wide.astype("int32")),
        *(wide.reshape(6), np.dtype("float32"), np.dtype(">f4"), np.dtype("V2")),
        *(md.zeros([COLUMN]).dtype.name, np.dtype(md.spec([COLUMN], "bfloat16").dtype)),
    ]
    program = lowered()
    found = [fingerprint(with_parameter(program, value)) for value in alike]
    assert None not in found and len({*found}) == len(alike)


def test_a_large_array_is_not_copied():
    large = with_parameter(lowered(), np.zeros(2**22, "float32"))
    tracemalloc.start()
    try:
        assert fingerprint(large) is not None
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


class Own(tuple):
    """A user's kind of tuple."""


@pytest.mark.parametrize(
    "value", [step, np.array([step]), Own(), object(), [Own()], {"a": print}, SpmdProgram]
)
def test_what_processes_cannot_compare_gives_none(value):
    assert fingerprint(with_parameter(lowered(), value)) is None


def test_values_are_told_apart_by_where_they_occur():
    """Two tensors of one shape are not one."""

    def one(x, y):
        return x + x

    def both(x, y):
        return x + y

    def other(x, y):
        return y + y

    programs = [md.jit(f, "data:2", "row:data").lower(SIZES, SIZES) for f in (one, both, other)]
    blocks = [replace(program, block=plain(program.block)) for program in programs]
    assert len({fingerprint(replace(one, name="f", scopes=())) for one in blocks}) == 3


def plain(block):
    """Returns a block without the lines of its instructions."""
    return replace(
        block,
        instructions=tuple(
            type(one)(one.op, one.inputs, one.outputs, one.params) for one in block.instructions
        ),
    )


def test_what_has_no_order_or_a_mask_has_no_fingerprint():
    program = lowered()
    assert fingerprint(replace(program, notes=frozenset([1, 2]))) is not None
    values = frozenset(replace(value) for value in program.block.outputs)
    masked = np.ma.masked_array([1, 2], [True, False])
    for thing in (values, masked):
        assert fingerprint(replace(program, notes=thing)) is None
