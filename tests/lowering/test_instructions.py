"""Declarations of instructions: every backend's are declared, and no other name is accepted."""

from dataclasses import fields, replace
from typing import is_typeddict

import numpy as np
import pytest

import meshdsl as md
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering import parameters as records
from meshdsl.lowering.backends.numpy import EMITTERS
from meshdsl.lowering.collectives import COLLECTIVES, CollectiveKind
from meshdsl.lowering.costs import arithmetic
from meshdsl.lowering.instructions import KINDS, Fusion, Kind, _declare, kind_of, kinds_with
from meshdsl.lowering.passes.verify import verify
from meshdsl.lowering.writing.builder import BlockBuilder


def test_what_backends_emit_is_declared_and_the_reverse():
    assert set(EMITTERS) == set(KINDS) - {"stop_gradient"}  # which lowering drops


def test_a_name_that_is_not_declared_is_refused_with_the_file_to_declare_it_in():
    with pytest.raises(ValueError, match=r"`no_such` is not declared: .*instructions\.py"):
        kind_of("no_such")


def test_what_is_not_declared_is_not_written():
    builder = BlockBuilder(Mesh.parse("m:2"))
    with pytest.raises(ValueError, match=r"`no_such` is not declared: .*collectives\.py"):
        builder.add("no_such", (), [])


def test_verify_names_an_instruction_that_is_not_declared():
    x = md.named(np.ones(4, np.float32), ["a"])
    program = md.jit(lambda x: md.exp(x)).lower(x)
    (one,) = program.block.instructions
    block = replace(program.block, instructions=(replace(one, op="exq"),))
    with pytest.raises(AssertionError, match=r"exq at .* is not declared"):
        verify(replace(program, block=block))


def test_a_kind_is_declared_with_the_record_of_its_parameters():
    assert all(is_typeddict(kind.parameters) for kind in KINDS.values())
    assert all(is_typeddict(kind.joined) for kind in COLLECTIVES.values())
    with pytest.raises(TypeError, match=r"missing .* 'parameters' and 'flops'"):
        Kind("unstated")
    with pytest.raises(ValueError, match=r"`untyped` is declared without .*lowering/parameters"):
        Kind("untyped", dict, lambda one: 0)


def test_a_declaration_without_its_record_or_its_arithmetic_names_the_instruction():
    with pytest.raises(ValueError, match=r"`log_sums` is declared without .*lowering/parameters"):
        _declare("log_sums", arithmetic.per_operand)
    with pytest.raises(ValueError, match=r"`log_sums` is declared .*lowering/costs/arithmetic\.py"):
        _declare("log_sums", records.Cumulative)
    assert "log_sums" not in KINDS


def test_a_record_that_no_file_has_is_named_with_the_folder_to_write_it_in(monkeypatch, tmp_path):
    with pytest.raises(ImportError, match=r"'LogSums': write .* file of lowering/parameters"):
        from meshdsl.lowering.parameters import LogSums
    (tmp_path / "logs.py").write_text("class LogSums(TypedDict):\n    dim: str\n")
    monkeypatch.setattr(records, "__file__", str(tmp_path / "__init__.py"))
    imported = r"though lowering/parameters/logs\.py has it: import .*parameters/__init__\.py"
    with pytest.raises(ImportError, match=imported):
        from meshdsl.lowering.parameters import LogSums  # noqa: F401


def test_a_collective_is_declared_with_the_records_of_its_parameters():
    gather = COLLECTIVES["all_gather"]
    facts = {field.name: getattr(gather, field.name) for field in fields(gather)}
    del facts["joined"]
    without = r"`spread` is declared without a record as joined: .*parameters/collectives\.py"
    with pytest.raises(ValueError, match=without):
        CollectiveKind(**{**facts, "name": "spread"})
    with pytest.raises(ValueError, match=r"`spread` .* a record as parameters and joined"):
        replace(gather, name="spread", parameters=dict, joined=dict)


def test_every_kind_says_how_it_is_fused_and_nothing_is_declared_in_contradiction():
    views = kinds_with(lambda kind: kind.fusion is Fusion.VIEW)
    assert views == {"rename", "reshape", "barrier"}
    assert not views & kinds_with(lambda kind: kind.long or kind.in_place or kind.effect)
    assert not kinds_with(lambda kind: kind.cheap and kind.long)
    assert kinds_with(lambda kind: kind.effect) == {"print"}
