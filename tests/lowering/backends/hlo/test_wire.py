"""The counter of collectives, on programs whose bytes are known and on the habits of XLA:TPU."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from meshdsl.lowering.backends.hlo.wire import sent, wire_bytes

GROUPS = "replica_groups={{0,1,2,3}}"


def module(*lines, rest=""):
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m\n\n{rest}\nENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}\n"


@pytest.mark.parametrize(
    ("line", "kind", "wire"),
    [
        (f"%a = f32[8]{{0}} all-reduce(%x), {GROUPS}, to_apply=%add", "all_reduce", 48),
        (f"%a = (f32[8]{{0}}, bf16[8]{{0}}) all-reduce(%x, %y), {GROUPS}", "all_reduce", 72),
        (f"%a = f32[32]{{0:T(1024)}} all-gather(%x), {GROUPS}", "all_gather", 96),
        (f"%a = (f32[8]{{0}}, f32[32]{{0}}) all-gather-start(%x), {GROUPS}", "all_gather", 96),
        (f"%a = f32[2]{{0}} reduce-scatter(%x), {GROUPS}", "reduce_scatter", 24),
        (f"%a = (f32[2]{{0}}, f32[2]{{0}}) all-to-all(%x, %y), {GROUPS}", "all_to_all", 12),
        (
            "%a = (f32[8]{0}, f32[8]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x),"
            " source_target_pairs={{0,1},{1,0}}",
            "permute",
            32,
        ),
        (
            "%a = (f32[8]{0}, f32[8]{0}) collective-permute(%x, %y),"
            " source_target_pairs={{0,1},{1,0}}",
            "permute",
            64,
        ),
        (
            "%a = ((f32[8]{0}, f32[8]{0}), (f32[8]{0}, f32[8]{0})) collective-permute-start(%x, %y)"
            ", source_target_pairs={{0,1},{1,0}}",
            "permute",
            64,
        ),
        (
            f"%a = ((f32[8]{{0}}), f32[2]{{0}}) reduce-scatter-start(%x), {GROUPS}",
            "reduce_scatter",
            24,
        ),
        (f"%a = ((f32[8]{{0}}), f32[8]{{0}}) all-to-all-start(%x), {GROUPS}", "all_to_all", 24),
        (
            f"%a = (f32[8]{{0}}, f32[32]{{0}}, u32[], u32[]) all-gather-start(%x), {GROUPS}",
            "all_gather",
            96,
        ),
        (
            f"%a = ((f32[8], f32[4]), (f32[32], f32[16])) all-gather-start(%x, %y), {GROUPS}",
            "all_gather",
            144,
        ),
        (
            f"%a = (f32[8], f32[4], f32[32], f32[16]) all-gather-start(%x, %y), {GROUPS}",
            "all_gather",
            144,
        ),
        (f"%a = (f32[8]{{0}}, bf16[8]{{0}}) all-reduce-start(%x, %y), {GROUPS}", "all_reduce", 72),
        (f"%a = f32[<=8]{{0}} all-reduce(%x), {GROUPS}", "all_reduce", 48),
        (f"%a = f32[2,<=4]{{1,0}} all-reduce(%x), {GROUPS}", "all_reduce", 48),
        ("%a = f32[8]{0} all-gather(%x), replica_groups={}", "all_gather", 28),
        ("%a = f32[8]{0} all-gather(%x), replica_groups=[2,4]<=[8]", "all_gather", 24),
        ("%a = f32[8]{0} all-gather(%x), replica_groups=[4,2]<=[2,4]T(1,0)", "all_gather", 16),
        (
            "%a = f32[8]{0} all-gather(%x), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}",
            "all_gather",
            24,
        ),
    ],
)
def test_every_kind_sends_what_the_formula_says(line, kind, wire):
    (one,) = sent(module(line, "%b = f32[8]{0} all-gather-done(%a)"), 8)
    assert (one.kind, one.wire_bytes) == (kind, wire)


def test_groups_are_the_same_in_whatever_form_they_are_written():
    forms = (
        "{{0,4},{1,5},{2,6},{3,7}}",
        "[4,2]<=[2,4]T(1,0)",
        "mesh['axis_0'=2,'axis_1'=4] {'axis_0'}",
    )
    found = {
        sent(module(f"%a = f32[8]{{0}} all-reduce(%x), replica_groups={form}"), 8)[0].groups
        for form in forms
    }
    assert found == {frozenset([(0, 4), (1, 5), (2, 6), (3, 7)])}


def test_a_permute_to_itself_sends_nothing():
    line = "%a = f32[8]{0} collective-permute(%x), source_target_pairs={{0,0},{1,1}}"
    assert wire_bytes(module(line), 2) == 0


def test_a_fused_all_reduce_scatter_is_a_reduce_scatter():
    rest = (
        "%all-reduce-scatter.1 (p: f32[8]) -> f32[2] {\n"
        f"  %r = f32[8]{{0}} all-reduce(%p), {GROUPS}, to_apply=%add\n"
        "  ROOT %s = f32[2]{0} dynamic-slice(%r, %i), dynamic_slice_sizes={2}\n}\n"
    )
    line = "%a = f32[2]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1"
    (one,) = sent(module(line, rest=rest), 4)
    assert (one.kind, one.wire_bytes) == ("reduce_scatter", 24)


LOOP = """%condition (c: (s32[], s32[])) -> pred[] {
  %n = s32[]{:T(128)} constant(7)
  %c = (s32[]{:T(128)}, s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%c), index=1
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}

%body (b: (s32[], s32[])) -> (s32[], s32[]) {
  %b = (s32[]{:T(128)}, s32[]{:T(128)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%b), index=1
  %two = s32[]{:T(128)} constant(2)
  %k = s32[]{:T(128)} add(%j, %two)
  %g = f32[8]{0} all-gather(%j), replica_groups={{0,1}}
  ROOT %t = (s32[]{:T(128)}, s32[]{:T(128)}) tuple(%j, %k)
}
"""


def test_how_often_a_loop_runs_is_read_off_its_counter():
    """XLA:TPU says it nowhere else: from 1 by 2 while below 7."""
    lines = (
        "%one = s32[]{:T(128)} constant(1)",
        "%copy = s32[]{:T(128)} copy(%one)",
        "%start = (s32[]{:T(128)}, s32[]{:T(128)}) tuple(%one, %copy)",
        "%w = (s32[]{:T(128)}, s32[]{:T(128)}) while(%start), condition=%condition, body=%body",
    )
    (one,) = sent(module(*lines, rest=LOOP), 2)
    assert one.count == 3
    known = lines[3] + ', backend_config={"known_trip_count":{"n":"5"}}'
    assert sent(module(*lines[:3], known, rest=LOOP), 2)[0].count == 5


def test_a_loop_of_unknown_length_that_sends_is_reported():
    lines = (
        "%start = (s32[]{:T(128)}, s32[]{:T(128)}) tuple(%x, %x)",
        "%w = (s32[]{:T(128)}, s32[]{:T(128)}) while(%start), condition=%condition, body=%body",
    )
    with pytest.raises(ValueError, match="how often w runs is not known"):
        sent(module(*lines, rest=LOOP), 2)


def test_unknown_kinds_and_groups_are_reported():
    with pytest.raises(ValueError, match="a collective of unknown kind: ragged-all-to-all"):
        sent(module("%a = f32[8]{0} ragged-all-to-all(%x)"), 2)
    for among in ("replica_groups={{0,1}}", "source_target_pairs={{0,1}}"):  # of a later compiler
        with pytest.raises(ValueError, match="a collective of unknown kind: all-shuffle"):
            sent(module(f"%a = f32[8]{{0}} all-shuffle(%x), {among}"), 2)
    with pytest.raises(ValueError, match="groups of unknown form: <0,1>"):
        sent(module("%a = f32[8]{0} all-reduce(%x), replica_groups=<0,1>"), 2)


@pytest.mark.parametrize("array", ["f32[?]", "f32[8,<=?]", "f32[-1]", "opaque[]"])
def test_arrays_that_cannot_be_read_are_reported(array):
    with pytest.raises(ValueError, match="an array of unknown form: "):
        sent(module(f"%a = {array} all-reduce(%x), {GROUPS}"), 4)


@pytest.mark.parametrize("result", ["f32[8]", "(f32[8])", "(f32[8], f32[8], u32[], u32[])"])
def test_starts_whose_results_cannot_be_told_are_reported(result):
    start = (
        f"%a = {result} collective-permute-start(%x, %y, %i, %j), source_target_pairs={{{{0,1}}}}"
    )
    with pytest.raises(ValueError, match="a collective whose results are not known: collective-p"):
        sent(module(start), 4)


def test_of_a_conditional_the_branch_counts_that_sends_most():
    rest = (
        "%little (p: f32[8]) -> f32[8] {\n"
        "  ROOT %a = f32[2]{0} all-gather(%p), replica_groups={{0,1}}\n}\n\n"
        "%much (p: f32[8]) -> f32[8] {\n"
        "  ROOT %a = f32[8]{0} all-gather(%p), replica_groups={{0,1}}\n}\n"
    )
    line = "%c = f32[8]{0} conditional(%x, %y, %z), branch_computations={%little, %much}"
    assert wire_bytes(module(line, rest=rest), 2) == 16


def test_a_compiled_loop_sends_what_was_written():
    """XLA:CPU's own text: six gathers of 32 floats over 4 devices, and one sum of 8 over 2."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def local(x):
        def step(y, _):
            return lax.all_gather(y, "b", tiled=True)[:8] * 2, None

        return lax.psum(lax.scan(step, x, length=6)[0], "a")

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("b"), out_specs=P(), check_vma=False))
    text = run.lower(jnp.ones(32, jnp.float32)).compile().as_text()
    assert wire_bytes(text, 8) == 6 * 3 / 4 * 128 + 32


def test_a_gather_that_runs_in_steps_beside_products_counts_once():
    gather = "  %g = f32[32]{0} all-gather(%p), replica_groups={{0,1,2,3}}\n"
    rest = "".join(
        f"%{name} (p: f32[8]) -> f32[32] {{\n{gather}"
        f"  ROOT %c = f32[32]{{0}} custom-call(%g){end}\n}}\n"
        for name, end in (
            ("begun", ', custom_call_target="AsyncCollectiveStart"'),
            ("async_collective_fusion.1", ', custom_call_target="More"'),
            ("ended", ', custom_call_target="AsyncCollectiveDone"'),
        )
    )
    names = ("begun", "async_collective_fusion.1", "ended")
    lines = [
        f"%f{n} = f32[32]{{0}} fusion(%x), kind=kCustom, calls=%{m}" for n, m in enumerate(names)
    ]
    assert wire_bytes(module(*lines, rest=rest), 4) == 96
