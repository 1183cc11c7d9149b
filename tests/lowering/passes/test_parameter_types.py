"""The parameters of instructions are those of their kinds' records, and what is wrong is named."""

from dataclasses import replace
from typing import Any, get_type_hints

import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering import parameters as records
from meshdsl.lowering.collectives import COLLECTIVES
from meshdsl.lowering.instructions import KINDS
from meshdsl.lowering.passes.parameter_types import parameter_problems
from meshdsl.lowering.passes.verify import verify
from meshdsl.lowering.program import Block, Instruction, Pairs
from meshdsl.tensors.dims import Dimension
from meshdsl.tensors.slide import Slide
from meshdsl.tracing.source import Source

WINDOW = {"dim": "rows", "start": 1, "stride": 2, "dilation": 1, "fill": 0.0}


def problems(op: str, **params: Any) -> list[str]:
    return list(parameter_problems(Instruction(op, (), (), params)))


def test_parameters_as_the_record_has_them_are_right():
    assert problems("window", **WINDOW) == []
    assert problems("window", **WINDOW | {"fill": True}) == []
    assert problems("full", value=1j) == problems("full", value=False) == []
    assert problems("einsum") == problems("cast") == problems("barrier", stored=True) == []
    assert problems("qr", rows="a", columns="b", inner=Dimension("c", 2)) == []
    assert problems("convolve", slides=(Slide("x", "w", "y"),)) == []
    assert problems("literal", data=np.zeros(3)) == []
    assert problems("cast", dtype=np.dtype("float32")) == []


def test_a_missing_parameter_is_named_with_its_type():
    (problem,) = problems("concat")
    assert problem == (
        "lacks parameter `dim`, expected str (`AlongDim` in lowering/parameters/data.py)"
    )


def test_an_unknown_parameter_is_named_with_those_there_are():
    (problem,) = problems("window", **WINDOW, steps=2)
    assert "an unknown parameter `steps`, expected dim, start, stride, dilation, fill" in problem
    (problem,) = problems("einsum", over=("rows",))
    assert "an unknown parameter `over`, expected none (`NoParameters`" in problem


@pytest.mark.parametrize(
    ("op", "params", "problem"),
    [
        ("window", WINDOW | {"start": 1.0}, "`start` of type float, expected int"),
        ("window", WINDOW | {"start": True}, "`start` of type bool, expected int"),
        ("window", WINDOW | {"start": np.int64(1)}, "`start` of type int64, expected int"),
        ("window", WINDOW | {"fill": "0"}, "`fill` of type str, expected complex"),
        ("sum", {"over": ["rows"]}, "`over` of type list, expected tuple[str, ...]"),
        ("sum", {"over": ("rows", 1)}, "`over` of type tuple[str | int], expected tuple[str, ...]"),
        ("rename", {"names": (("a",),)}, "of type tuple[tuple[str]], expected tuple[tuple[str, s"),
        ("all_reduce", {"axes": ("x",), "kind": "mean"}, "expected 'sum' or 'max' or 'min'"),
        ("cast", {"dtype": "float32"}, "`dtype` of type str, expected dtype"),
    ],
)
def test_a_parameter_of_another_type_is_named_with_both_types(op, params, problem):
    (found,) = problems(op, **params)
    assert problem in found


def test_optional_types_take_what_they_list():
    params = {
        "length": "rows",
        "memory": "columns",
        "features": "kv",
        "scale": 1,
        "soft_cap": None,
        "causal": True,
        "window": 3,
        "offset": 0,
        "given": (),
    }
    assert problems("attention", **params) == []
    assert problems("attention", **params, blocks=(2, 3)) == []
    (problem,) = problems("attention", **params | {"window": 0.5})
    assert "`window` of type float, expected int | None" in problem
    (problem,) = problems("attention", **params, blocks=(2, 3, 4))
    assert "`blocks` of type tuple[int], expected tuple[int, int]" in problem


def test_a_joined_collective_lists_what_is_of_one_tensor_alone():
    sources = (Source("f.py", 1), Source("f.py", 2))
    assert problems("all_gather", axes=("x",), dims=("a", "b"), sources=sources) == []
    assert problems("permute", axes=("x",), pairs=Pairs(), mesh_axes=("x",), sources=sources) == []
    missing, unknown = problems("all_gather", axes=("x",), dim="a", sources=sources)
    assert "lacks parameter `dims`, expected tuple[str, ...] (`JoinedSplitDim`" in missing
    assert "unknown parameter `dim`" in unknown


def test_verify_names_the_instruction_and_its_line():
    rows = md.Dimension("rows", 8)
    program = md.jit(lambda x: x.sum("rows"), "data:2", "rows:data", "numpy").lower(md.spec([rows]))

    def changed(op: str, **params: Any) -> Any:
        return replace(
            program,
            block=replace(
                program.block,
                instructions=tuple(
                    replace(one, params=params) if one.op == op else one
                    for one in program.block.instructions
                ),
            ),
        )

    with pytest.raises(AssertionError) as caught:
        verify(changed("sum", over="rows"))
    assert "sum at " in str(caught.value)
    assert "test_parameter_types.py" in str(caught.value)
    assert "has parameter `over` of type str, expected tuple[str, ...]" in str(caught.value)
    with pytest.raises(AssertionError, match=r"all_reduce at .* lacks parameter `axes`"):
        verify(changed("all_reduce", kind="sum"))


def test_the_program_of_whole_tensors_has_typed_parameters_too():
    batch, length, memory, kv = md.dims(batch=4, length=8, memory_length=8, kv=4)
    q, k = md.spec([batch, length, kv]), md.spec([batch, memory, kv])

    def attend(q: md.Tensor, k: md.Tensor) -> md.Tensor:
        return md.attention(q, k, k, causal=True)

    program = md.jit(attend, "x:2", "batch:x", "jax_auto").lower(q, k)
    assert not [p for one, _ in program.block.walk() for p in parameter_problems(one)]


def test_every_record_says_what_each_of_its_parameters_is():
    kinds = [kind.parameters for kind in KINDS.values()]
    kinds += [kind.joined for kind in COLLECTIVES.values()]
    for record in dict.fromkeys(kinds):
        bases = [base for base in vars(records).values() if _extends(record, base)]
        text = "\n".join(base.__doc__ for base in bases)
        for name in get_type_hints(record, None, {"Block": Block}):
            assert f"{name}:" in text or f"{name}," in text, f"{record.__name__}: {name}"


def _extends(record: Any, base: Any) -> bool:
    """Whether a record has all keys of another one; at run time these have no base classes."""
    own = getattr(base, "__annotations__", None)
    return isinstance(base, type) and bool(own) and record.__annotations__.items() >= own.items()
