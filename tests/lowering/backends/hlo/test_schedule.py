"""The time of a compiled program by its schedule, on texts whose times are known."""

import random

import pytest

from meshdsl.layouts.hardware import hardware
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends.hlo.schedule import schedule
from meshdsl.lowering.costs.schedule import WORK

V5P = hardware("v5p")
MESH = Mesh.parse("data:2,model:4")
MODEL = "replica_groups={{0,1,2,3},{4,5,6,7}}"
DATA = "replica_groups={{0,4},{1,5},{2,6},{3,7}}"
RIGHT = "source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
LEFT = "source_target_pairs={{1,0},{2,1},{3,2},{0,3},{5,4},{6,5},{7,6},{4,7}}"
MIB = 2**20
ROWS = MIB // 4


def module(*lines, rest="", head=""):
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m\n{head}\n{rest}\nENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def work(name, microseconds, scope="", callee="fused", more=""):
    cycles = round(microseconds * 1e-6 * V5P.clock)
    config = f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    return (
        f"%{name} = f32[8]{{0}} fusion(%x), kind=kLoop, calls=%{callee}, "
        f'metadata={{op_name="{scope}"{more}}}, {config}'
    )


FUSED = "%fused (p: f32[8]) -> f32[8] {\n  ROOT %n = f32[8]{0} negate(%p)\n}\n"
PRODUCT = "%product (p: f32[8]) -> f32[8] {\n  ROOT %n = f32[8]{0} convolution(%p, %p)\n}\n"
# A gather of 1 MiB over 4: three quarters of it over two links of 90 GB/s.
GATHER = f"%g = f32[{ROWS}]{{0}} all-gather(%x), {MODEL}, dimensions={{0}}"
GATHER_SECONDS = 0.75 * MIB / 180e9


def timed(*lines, rest="", head="", mesh=MESH):
    return schedule(module(*lines, rest=FUSED + PRODUCT + rest, head=head), mesh, V5P)


def test_work_takes_its_cycles():
    result = timed(work("a", 3), work("b", 4))
    assert result.seconds == pytest.approx(7e-6, rel=1e-3)
    assert result.times.work == result.seconds and result.timed


def test_a_synchronous_collective_is_exposed():
    result = timed(work("a", 3), GATHER, work("b", 4))
    assert result.times.exposed == pytest.approx(GATHER_SECONDS)
    assert result.times.hidden == 0
    assert result.seconds == pytest.approx(7e-6 + GATHER_SECONDS, rel=1e-3)
    (event,) = (event for event, _ in result.collectives)
    assert event.axes == ("model",) and not event.asynchronous
    assert event.start == pytest.approx(3e-6, rel=1e-3)


def started(name="s", groups=MODEL):
    return (
        f"%{name} = (f32[{ROWS // 4}]{{0}}, f32[{ROWS}]{{0}}) all-gather-start(%x), {groups}, "
        "dimensions={0}"
    )


def done(name="s", kind="all-gather"):
    return f"%{name}-done = f32[{ROWS}]{{0}} {kind}-done(%{name})"


def test_work_between_start_and_done_hides_a_collective():
    result = timed(started(), work("a", 3, callee="product"), done(), work("b", 4))
    assert result.times.hidden == pytest.approx(3e-6, rel=1e-3)
    assert result.times.exposed == pytest.approx(GATHER_SECONDS - 3e-6, rel=1e-3)
    assert result.asynchronous_bytes == result.bytes_beside_products == 0.75 * MIB
    longer = timed(started(), work("a", 30), done())
    assert longer.times.exposed == 0
    assert longer.times.hidden == pytest.approx(GATHER_SECONDS)
    assert longer.bytes_beside_products == 0


def test_a_collective_spans_a_product_also_after_it_has_arrived():
    after = timed(started(), work("a", 30), work("b", 4, callee="product"), done())
    (event,) = (event for event, _ in after.collectives)
    assert event.spans_product and not event.product
    outside = timed(started(), work("a", 30), done(), work("b", 4, callee="product"))
    (event,) = (event for event, _ in outside.collectives)
    assert not event.spans_product


def test_collectives_on_one_axis_follow_each_other_and_others_do_not():
    same = timed(started("s"), started("t"), done("s"), done("t"))
    assert same.seconds == pytest.approx(2 * GATHER_SECONDS)
    other = f"%t = (f32[{ROWS // 2}]{{0}}, f32[{ROWS}]{{0}}) all-gather-start(%x), {DATA}"
    beside = timed(started("s"), other, done("s"), done("t"))
    over_data = V5P.seconds("all_gather", MIB / 2, ["data"], MESH)
    assert beside.seconds == pytest.approx(max(GATHER_SECONDS, over_data))


def permuted(name, pairs):
    return (
        f"%{name} = (f32[{ROWS}]{{0}}, f32[{ROWS}]{{0}}, u32[], u32[]) "
        f"collective-permute-start(%x), {pairs}"
    )


def test_permutes_in_both_directions_travel_at_once():
    lines = done("p", "collective-permute"), done("q", "collective-permute")
    both = timed(permuted("p", RIGHT), permuted("q", LEFT), *lines)
    twice = timed(permuted("p", RIGHT), permuted("q", RIGHT), *lines)
    assert both.seconds == pytest.approx(MIB / 90e9)
    assert twice.seconds == pytest.approx(2 * MIB / 90e9)


SWAP = "source_target_pairs={{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}"


@pytest.mark.parametrize("pairs", [RIGHT, LEFT])
def test_a_permute_whose_pairs_go_both_ways_uses_both_directions(pairs):
    lines = done("p", "collective-permute"), done("q", "collective-permute")
    result = timed(permuted("p", SWAP), permuted("q", pairs), *lines)
    assert result.seconds == pytest.approx(2 * MIB / 90e9)


def test_without_work_nothing_is_hidden():
    result = timed(started("s"), started("t"), done("t"), done("s"))
    assert result.times.hidden == 0
    assert result.times.exposed == pytest.approx(2 * GATHER_SECONDS)


def test_waits_of_a_loop_hide_nothing():
    body = f"%body (b: (s32[])) -> (s32[]) {{\n  {GATHER}\n  {work('a', 1)}\n}}\n"
    other = f"%t = (f32[{ROWS * 64}]{{0}}, f32[{ROWS * 128}]{{0}}) all-gather-start(%x), {DATA}"
    result = timed(other, loop(4), done("t"), rest=LOOP + body)
    assert result.times.hidden == pytest.approx(4e-6, rel=1e-3)


def two_gathers(name):
    both = f"  {GATHER}\n  {GATHER.replace('%g ', '%h ')}\n"
    return f"%{name} (p: f32[8]) -> f32[8] {{\n{both}}}\n"


def test_several_collectives_of_one_line_make_the_device_wait_at_its_end():
    lines = (
        "%s = ((f32[8]), f32[8]) async-start(%x), calls=%two",
        work("a", 100),
        "%d = f32[8] async-done(%s)",
    )
    result = timed(*lines, rest=two_gathers("two"))
    assert result.times.exposed == 0
    assert result.times.hidden == pytest.approx(2 * GATHER_SECONDS)
    assert result.seconds == pytest.approx(100e-6, rel=1e-3)


def test_a_loop_in_an_asynchronous_computation_sends_as_often_as_it_runs():
    inside = f"%body (b: (s32[])) -> (s32[]) {{\n  {GATHER}\n}}\n"
    inside += f"%wrap (p: f32[8]) -> f32[8] {{\n  {loop(5)}\n}}\n"
    lines = "%s = ((f32[8]), f32[8]) async-start(%x), calls=%wrap", "%d = f32[8] async-done(%s)"
    result = timed(*lines, rest=LOOP + inside)
    assert result.times.wire_bytes == 5 * 0.75 * MIB
    assert result.seconds == pytest.approx(5 * GATHER_SECONDS)


@pytest.mark.parametrize("ends", [(), ("%d = f32[8] custom-call-done(%s)",)])
def test_a_start_that_gets_no_operands_is_an_error(ends):
    called = f"%called (p: f32[8]) -> f32[8] {{\n  {GATHER}\n}}\n"
    start = (
        '%s = ((), (), (s32[8]{0})) custom-call-start(), custom_call_target="TODO", '
        "called_computations={%called}"
    )
    with pytest.raises(ValueError, match="s in main starts a collective without operands"):
        timed(start, *ends, rest=called)


def test_the_end_of_a_collective_that_has_not_begun_is_an_error():
    with pytest.raises(ValueError, match="all-gather-done q-done ends a collective that has not b"):
        timed(started(), done("q"))
    gather = f"  %g = f32[{ROWS}]{{0}} all-gather(%p), channel_id=7, {MODEL}\n"
    for name, target in (("async_collective_fusion.1", "More"), ("ended", "AsyncCollectiveDone")):
        end = f'  %c = f32[8]{{0}} custom-call(%g), custom_call_target="{target}"\n'
        rest = f"%{name} (p: f32[8]) -> f32[8] {{\n{gather}{end}}}\n"
        with pytest.raises(ValueError, match=f"f calls {name} of a collective that has not begun"):
            timed(work("f", 1, callee=name), rest=rest)


def test_fusions_continue_the_collective_that_their_operands_come_from():
    gather = f"  %g = f32[{ROWS}]{{0}} all-gather(%p), channel_id=1, {MODEL}\n"
    rest = "".join(
        f"%{name} (p: f32[8]) -> f32[8] {{\n{gather}"
        f'  %c = f32[8]{{0}} custom-call(%g), custom_call_target="{target}"\n}}\n'
        for name, target in (("begun", "AsyncCollectiveStart"), ("ended", "AsyncCollectiveDone"))
    )
    lines = [
        f"%{name} = f32[8] fusion(%{of}), kind=kCustom, calls=%{callee}"
        for name, of, callee in (
            ("s", "x", "begun"),
            ("t", "x", "begun"),
            ("d", "i", "ended"),
            ("e", "t", "ended"),
        )
    ]
    lines.insert(1, "%i = f32[8] get-tuple-element(%s), index=0")
    result = timed(*lines[:4], work("a", 1), lines[4], rest=rest)
    assert result.times.exposed == pytest.approx(2 * GATHER_SECONDS - 1e-6, rel=1e-3)
    assert result.unknown == {}


def test_names_are_read_with_and_without_a_percent_sign():
    body = f"%body (b: (s32[])) -> (s32[]) {{\n  {work('a', 3)}\n  {GATHER}\n}}\n"
    lines = (started(), work("c", 1), done(), permuted("p", RIGHT), loop(5))
    lines = (*lines, done("p", "collective-permute"))
    text = module(*lines, rest=FUSED + PRODUCT + LOOP + body)
    signed = schedule(text, MESH, V5P)
    assert schedule(text.replace("%", ""), MESH, V5P) == signed
    typed = text.replace("-done(%", f"-done((f32[8]{{0:T(8,128)}}, f32[{ROWS}]{{0}}) %")
    assert schedule(typed, MESH, V5P) == signed


def test_a_call_runs_in_the_same_device():
    callee = "%callee (p: f32[8]) -> f32[8] {{\n  {}\n}}\n"
    line = "%c = f32[8] call(%x), to_apply=%callee"
    beside = timed(started(), line, done(), rest=callee.format(work("z", 3, callee="product")))
    assert beside.bytes_beside_products == 0.75 * MIB
    assert beside.times.hidden == pytest.approx(3e-6, rel=1e-3)
    same_links = timed(started(), line, done(), rest=callee.format(GATHER))
    assert same_links.seconds == pytest.approx(2 * GATHER_SECONDS)


ACROSS = Mesh.parse("slice@dcn:4,data:8")


def transferred(kind="send", members="{1:4}x{0:7}", result="f32[262144]{0}"):
    return (
        f"%{kind} = ({result}, u32[], token[]) {kind}(%x, %t), frontend_attributes={{"
        f'_xla_host_transfer_rendezvous="psum.7_0",_xla_megascale_target="{members}",'
        '_xla_megascale_transfer_type="ALL_REDUCE"}'
    )


def test_a_transfer_across_slices_ends_where_it_has_been_received():
    ends = "%sd = token[] send-done(%send)", "%rd = (f32[8], token[]) recv-done(%recv)"
    lines = (transferred("recv"), transferred(), ends[0], work("a", 3), ends[1])
    result = timed(*lines, mesh=ACROSS)
    ((event, _),) = result.collectives
    assert event.axes == ("slice",) and event.asynchronous
    expected = V5P.seconds("all_reduce", 2 * 3 / 4 * MIB, ["slice"], ACROSS)
    assert event.seconds == pytest.approx(expected)
    assert result.seconds == pytest.approx(expected)
    assert result.times.hidden == pytest.approx(3e-6, rel=1e-3)


def test_slices_and_chips_that_the_mesh_does_not_have_are_errors():
    with pytest.raises(ValueError, match=r"member \d+ is no chip of the 1 slices of 32 chips"):
        timed(transferred(), mesh=Mesh.parse("data:32"))
    with pytest.raises(ValueError, match="all-gather g sends along no axis of the mesh model:1"):
        timed(GATHER, mesh=Mesh.parse("model:1"))


LOOP = """%condition (c: (s32[])) -> pred[] {
  %c = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}
"""


def loop(trips):
    known = f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    return f"%w = (s32[]) while(%x), condition=%condition, body=%body, {known}"


def test_a_loop_takes_its_body_as_often_as_it_runs():
    body = f"%body (b: (s32[])) -> (s32[]) {{\n  {work('a', 3)}\n  {GATHER}\n}}\n"
    result = timed(loop(5), rest=LOOP + body)
    assert result.seconds == pytest.approx(5 * (3e-6 + GATHER_SECONDS), rel=1e-3)
    assert result.times.exposed == pytest.approx(5 * GATHER_SECONDS)
    assert result.times.wire_bytes == 5 * 0.75 * MIB
    (repeated,) = result.events
    assert (repeated.kind, repeated.count, len(repeated.inside)) == ("while", 5, 2)


def test_the_longest_branch_counts():
    rest = "".join(
        f"%{name} (p: f32[8]) -> f32[8] {{\n  {work('a', microseconds)}\n}}\n"
        for name, microseconds in (("short", 1), ("long", 8))
    )
    line = "%c = f32[8]{0} conditional(%x, %y, %z), branch_computations={%long, %short}"
    assert timed(line, rest=rest).seconds == pytest.approx(8e-6, rel=1e-3)


def test_an_offloaded_collective_begins_where_it_gets_its_operands():
    """As XLA:TPU gives collectives to the SparseCore: start, update, done."""
    called = (
        f"%called (p: f32[{ROWS // 4}]) -> f32[{ROWS}] {{\n"
        f"  ROOT %g = f32[{ROWS}]{{0}} all-gather(%p), {MODEL}\n}}\n"
    )
    lines = (
        '%s = ((), (), (s32[8]{0})) custom-call-start(), custom_call_target="TODO", '
        'called_computations={%called}, metadata={op_name="mlp/all_gather~mlp.py-26/all_gather"}',
        work("a", 2),
        f"%u = ((f32[8]), f32[{ROWS}]{{0}}) custom-call-update(%s, %a)",
        work("b", 3),
        f"%d = f32[{ROWS}]{{0}} custom-call-done(%u)",
    )
    result = timed(*lines, rest=called)
    assert result.times.wire_bytes == 0.75 * MIB
    assert result.times.hidden == pytest.approx(3e-6, rel=1e-3)
    assert result.seconds == pytest.approx(2e-6 + GATHER_SECONDS, rel=1e-3)
    (event,) = (event for event, _ in result.collectives)
    assert event.source == "mlp.py:26"


def test_a_gather_in_steps_beside_products_is_hidden_by_them():
    """As XLA:TPU writes it for v5e: fusions that start, continue and end it."""
    gather = f"  %g = f32[{ROWS}]{{0}} all-gather(%p), channel_id=7, {MODEL}\n"
    rest = "".join(
        f"%{name} (p: f32[8]) -> f32[8] {{\n{gather}"
        f"  ROOT %c = f32[8]{{0}} custom-call(%g){end}\n}}\n"
        for name, end in (
            ("begun", ', custom_call_target="AsyncCollectiveStart"'),
            ("async_collective_fusion.1", ', custom_call_target="More"'),
            ("ended", ', custom_call_target="AsyncCollectiveDone"'),
        )
    )
    names = ("begun", "async_collective_fusion.1", "ended")
    lines = [work(f"f{n}", 1, callee=name) for n, name in enumerate(names)]
    result = timed(*lines, rest=rest)
    assert result.times.wire_bytes == 0.75 * MIB
    assert result.times.work == pytest.approx(3e-6, rel=1e-3)
    assert result.times.hidden == pytest.approx(3e-6, rel=1e-3)


def test_a_collective_in_an_unknown_form_is_an_error():
    rest = f"%hidden (p: f32[8]) -> f32[8] {{\n  {GATHER}\n}}\n"
    line = "%n = f32[8]{0} new-form(%x), calls=%hidden"
    with pytest.raises(
        ValueError, match=r"form that is not known: all-gather g in hidden, which n"
    ):
        timed(line, rest=rest)


def test_kernels_without_cycles_are_named():
    body = (
        "%body (b: (s32[])) -> (s32[]) {\n"
        '  %k = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", '
        'metadata={op_name="attend/splash"}\n}\n'
    )
    result = timed(loop(6), rest=LOOP + body)
    assert result.unknown == {"attend/splash": 6} and not result.timed


KERNEL = '%k = f32[8]{0} custom-call(%x), custom_call_target="tpu", metadata={op_name="attend"}'


@pytest.mark.parametrize("op", ["broadcast", "add", "convert", "iota", "some-new-op"])
def test_every_line_with_cycles_takes_its_time(op):
    result = timed(work("a", 1), work("b", 5).replace(" fusion(", f" {op}("))
    assert result.seconds == result.times.work == pytest.approx(6e-6, rel=1e-3)


@pytest.mark.parametrize("op", ["fusion", "copy", "convolution", "reduce", "dynamic-update-slice"])
def test_work_without_cycles_is_named(op):
    result = timed(work("a", 1), f"%b = f32[8]{{0}} {op}(%x), calls=%product")
    assert result.unknown == {"b": 1}


def test_scalars_and_allocations_take_no_time():
    lines = (
        "%a = s32[]{:T(128)} copy(%x)",
        '%b = f32[8]{0} custom-call(), custom_call_target="AllocateBuffer"',
        "%c = s32[]{:T(128)} add(%x, %x)",
    )
    assert timed(*lines).unknown == {}


def test_the_fusion_of_a_collective_is_known():
    called = f"%all-reduce-scatter.1 (p: f32[8]) -> f32[8] {{\n  {GATHER}\n}}\n"
    line = "%f = f32[2]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1"
    result = timed(line, rest=called)
    assert result.unknown == {} and result.seconds == pytest.approx(GATHER_SECONDS)


def test_what_comes_after_a_loop_that_never_runs_counts():
    body = f"%body (b: (s32[])) -> (s32[]) {{\n  {work('a', 3)}\n}}\n"
    result = timed(loop(0), KERNEL, work("b", 2), rest=LOOP + body)
    assert result.unknown == {"attend": 1}
    assert result.seconds == result.times.work == pytest.approx(2e-6, rel=1e-3)


def test_only_the_branch_that_counts_has_unknown_work():
    rest = (
        f"%b1 (p: f32[8]) -> f32[8] {{\n  {work('a', 9)}\n}}\n"
        f"%b2 (p: f32[8]) -> f32[8] {{\n  {KERNEL}\n}}\n"
    )
    line = "%c = f32[8]{0} conditional(%x, %y, %z), branch_computations={%b1, %b2}"
    result = timed(line, rest=rest)
    assert result.unknown == {} and result.seconds == pytest.approx(9e-6, rel=1e-3)


UNCOUNTED = """%condition (c: (s32[])) -> pred[] {
  %c = (s32[]) parameter(0)
  ROOT %p = pred[] get-tuple-element(%c), index=0
}
"""


def test_how_often_a_loop_runs_matters_only_if_something_in_it_does():
    line = "%w = (s32[]) while(%x), condition=%condition, body=%body"
    body = "%body (b: (s32[])) -> (s32[]) {\n  %b = (s32[]) parameter(0)\n}\n"
    result = timed(work("q", 5), line, rest=UNCOUNTED + body)
    assert result.seconds == pytest.approx(5e-6, rel=1e-3)
    for inside in (work("a", 3), KERNEL, GATHER):
        body = f"%body (b: (s32[])) -> (s32[]) {{\n  {inside}\n}}\n"
        with pytest.raises(ValueError, match="how often w runs is not known"):
            timed(line, rest=UNCOUNTED + body)


def test_sources_are_those_of_scopes_or_of_stack_frames():
    head = (
        '\nFileNames\n1 "/lib/site-packages/jax/lax.py"\n2 "/home/me/train.py"\n'
        '\nFunctionNames\n1 "f"\n'
        "\nFileLocations\n1 {file_name_id=1 function_name_id=1 line=3 end_line=3}\n"
        "2 {file_name_id=2 function_name_id=1 line=42 end_line=42}\n"
        "\nStackFrames\n1 {file_location_id=2 parent_frame_id=1}\n"
        "2 {file_location_id=1 parent_frame_id=2}\n"
    )
    result = timed(
        work("a", 1, "jit(local)/run/scan~block.py-96/mlp/einsum~mlp.py-26/dot"),
        work("b", 1, "jit(step)/dot", more=" stack_frame_id=2"),
        work("c", 1, "jit(step)/dot"),
        head=head,
    )
    assert [event.source for event in result.events] == ["mlp.py:26", "train.py:42", ""]


def test_hardware_without_a_clock_has_no_schedule():
    with pytest.raises(ValueError, match="H100 SXM writes no cycles"):
        schedule(module(work("a", 1)), MESH, hardware("h100"))


@pytest.mark.parametrize("seed", range(50))
def test_time_is_work_and_what_is_exposed(seed):
    """A second reckoning, moment by moment, of random schedules."""
    draw = random.Random(seed)
    lines, plan, open_ = [], [], []
    for number in range(draw.randint(1, 25)):
        choice = draw.choice(["work", "start", "sync", "done"])
        if choice == "work":
            microseconds = draw.randint(1, 9)
            lines.append(work(f"w{number}", microseconds))
            plan.append(("work", microseconds * 1e-6))
        elif choice == "start":
            lines.append(started(f"s{number}"))
            plan.append(("start", f"s{number}"))
            open_.append(f"s{number}")
        elif choice == "sync":
            lines.append(GATHER.replace("%g ", f"%g{number} "))
            plan.append(("sync", f"g{number}"))
        elif open_:
            name = open_.pop(draw.randrange(len(open_)))
            lines.append(done(name))
            plan.append(("done", name))
    plan += [("done", name) for name in open_]
    result = timed(*lines)

    ends, clock, link = {}, 0.0, 0.0
    for kind, what in plan:
        if kind == "work":
            clock += what
        if kind in ("start", "sync"):
            link = max(link, clock) + GATHER_SECONDS
            ends[what] = link
        if kind in ("sync", "done"):
            clock = max(clock, ends[what])
    assert result.seconds == pytest.approx(clock, rel=1e-3)
    assert result.seconds == pytest.approx(result.times.work + result.times.exposed)
    assert result.times.work == pytest.approx(
        sum(what for kind, what in plan if kind == "work"), rel=1e-3
    )
    assert all(event.kind == WORK or event.seconds > 0 for event in result.events)
