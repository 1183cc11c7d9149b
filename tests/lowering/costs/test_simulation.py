"""The simulated time of programs, against closed forms and against the TPU compiler."""

import dataclasses
import random
from dataclasses import replace
from importlib.util import find_spec

import jax
import pytest

import meshdsl as md
from meshdsl.layouts.costs import Costs, costs_of
from meshdsl.layouts.hardware import hardware
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.costs import simulation
from meshdsl.lowering.costs.products import product_sizes
from meshdsl.lowering.costs.schedule import WORK
from meshdsl.lowering.costs.simulation import simulate, step_seconds
from meshdsl.lowering.costs.streams import moments
from meshdsl.lowering.options import Options
from meshdsl.lowering.parameters import axes_of
from meshdsl.reports.explain.explanation import explain
from tests.calls import calls_of
from tests.reports.explain.steps import LARGE, explained

V5P = hardware("v5p")
V3 = hardware("v3")  # whose collectives but permutes are synchronous
NEEDS_LIBTPU = pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu")


def lowered(function, *specs, mesh=None, layout=None, **options):
    known = Options(**options) if options else None
    return md.jit(function, mesh, layout, options=known).lower(*specs)


def specs(*shapes, dtype="bfloat16"):
    sizes = {"a": 1024, "b": 2048, "c": 4096}
    return [md.spec([md.Dimension(n, sizes[n]) for n in shape], dtype) for shape in shapes]


def product(x, y):
    return md.einsum(x, y, over="b")


def test_a_product_costs_what_the_table_says():
    schedule = simulate(lowered(product, *specs("ab", "bc")), V5P)
    assert schedule.seconds == pytest.approx(costs_of("v5p").product(1024, 2048, 4096), rel=1e-6)
    (event,) = schedule.events
    assert event.product and event.source.startswith("test_simulation.py:")
    assert schedule.origin == costs_of("v5p").origin


def attended(causal):
    """Returns the gradients of attention of 2 x 4 heads of 1,024 positions."""
    names = {"over": "m", "length": "l", "features": "f"}
    x = md.spec(md.dims(b=2, h=4, l=1024, f=128), "bfloat16")

    def loss(qkv):
        q, k, v = qkv[0], qkv[1].rename(l="m"), qkv[2].rename(l="m")
        return md.sum(md.cast(md.attention(q, k, v, causal=causal, **names), "float32"))

    return lowered(md.grad(loss), (x, x, x))


def test_attention_costs_what_the_table_says_of_its_kernels():
    table = costs_of("v5p")
    for causal in (False, True):
        found = {
            event.name: event.seconds
            for event, _ in simulate(attended(causal), V5P).walk()
            if event.name in ("attention", "attention_gradient")
        }
        forward = table.attention(8, 1024, 1024, 128, causal=causal)
        backward = table.attention(8, 1024, 1024, 128, causal=causal, gradient=True)
        assert found["attention"] == pytest.approx(forward, rel=1e-6)
        assert found["attention_gradient"] == pytest.approx(backward, rel=1e-6)


def test_a_gradient_computes_scores_that_no_attention_beside_it_has(monkeypatch):
    """As libtpu writes a ring: the gradients of the blocks before the last have their own."""
    monkeypatch.setattr(Costs, "attention", lambda *_, **__: None)
    names = {"over": "m", "length": "l", "features": "f"}
    x = md.spec(md.dims(h=4, l=4096, f=128), "bfloat16")

    def loss(qkv):
        q, k, v = qkv[0], qkv[1].rename(l="m"), qkv[2].rename(l="m")
        return md.sum(md.cast(md.attention(q, k, v, causal=True, **names), "float32"))

    def gradients(mesh, layout, **options):
        program = lowered(md.grad(loss), (x, x, x), mesh=mesh, layout=layout, **options)
        events = simulate(program, V5P).walk()
        return sorted({event.seconds for event, _ in events if event.name == "attention_gradient"})

    (beside,) = gradients("h:4", "h:h")
    first, *rest = gradients("context:4", "l:context; m:context", context="ring")
    scores = costs_of("v5p").product(1024, 128, 1024, 2, 4)
    assert first > 0 and beside > first, "blocks of a ring are smaller"
    assert [one - first for one in rest] == [pytest.approx(scores, rel=1e-3)]


def test_the_sizes_of_a_product_are_those_of_one_device():
    x, y = specs("abc", "bca")
    program = lowered(lambda x, y: md.einsum(x, y, over="b"), x, y, mesh="m:2", layout="a:m")
    (einsum,) = (i for i in program.block.instructions if i.op == "einsum")
    assert product_sizes(einsum) == (512 * 4096, 1, 2048, 1)


def test_a_grouped_product_is_one_product_for_each_group():
    """64 groups on each of two devices; each device has half of the 1024 rows."""
    rows, groups = md.dims(rows=1024, groups=128)
    x, w = md.spec([rows, *md.dims(b=2048)]), md.spec([groups, *md.dims(b=2048, c=4096)])
    group = md.spec([rows], "int32")

    def gradient(x, w, group):
        return md.grad(
            lambda w: md.sum(md.sin(md.grouped_einsum(x, w, group, "groups", over="b")))
        )(w)

    program = lowered(gradient, x, w, group, mesh="m:2", layout="groups:m")
    sizes = {i.op: product_sizes(i) for i in program.block.instructions if "grouped" in i.op}
    assert sizes["grouped_einsum"] == (64, 8, 2048, 4096)
    assert sizes["grouped_outer"] == (64, 2048, 8, 4096)
    assert sum(event.product for event in simulate(program, V5P).events) == 2


@pytest.mark.parametrize("hardware_of", ["v5p", "h100"])
def test_grouped_products_of_8_bits_take_as_long_as_those_of_bfloat16(hardware_of):
    """Their kernels get the numbers in bfloat16."""
    rows, groups, b, c = md.dims(rows=8192, groups=8, b=2048, c=4096)
    x, w = md.spec([rows, b], "bfloat16"), md.spec([groups, b, c], "bfloat16")

    def product(x, w, group):
        return md.grouped_einsum(x, w, group, "groups", over="b")

    def seconds(function):
        program = lowered(function, x, w, md.spec([rows], "int32"))
        events = simulate(program, hardware(hardware_of)).events
        return [event.seconds for event in events if event.product]

    assert seconds(md.with_precision(product, "int8")) == pytest.approx(seconds(product), rel=1e-3)


def test_a_synchronous_collective_makes_the_device_wait():
    program = lowered(product, *specs("ab", "bc"), mesh="m:4", layout="b:m")
    schedule = simulate(program, V3)
    mesh = Mesh.parse("m:4")
    expected = V3.seconds("all_reduce", program.wire_bytes, ["m"], mesh)
    assert schedule.times.exposed == pytest.approx(expected, rel=1e-6)
    assert schedule.times.wire_bytes == program.wire_bytes
    assert schedule.asynchronous_bytes == schedule.times.hidden == 0
    # NCCL's run beside work, but here there is no other work.
    gpu = simulate(program, hardware("h100"))
    assert gpu.asynchronous_bytes == program.wire_bytes and gpu.times.hidden == 0


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
def test_collectives_of_one_switch_cost_what_was_measured(kind):
    h100, table = hardware("h100"), costs_of("h100")

    def gather(x):
        return md.exp(x.rename(a="e"))

    function, shapes = (
        (gather, specs("ab")) if kind == "all_gather" else (product, specs("ab", "bc"))
    )
    layout = "a:m" if kind == "all_gather" else "b:m"
    for mesh, expected in (
        ("m:8", table.collective(kind, 8, 2 * 1024 * (2048 if kind == "all_gather" else 4096))),
        ("m:16", None),
    ):
        program = lowered(function, *shapes, mesh=mesh, layout=layout)
        (event,) = (e for e, _ in simulate(program, h100).collectives)
        assert event.kind == kind
        if expected is None:  # across two nodes: by the links
            expected = h100.seconds(kind, program.wire_bytes, ["m"], Mesh.parse(mesh))
        assert event.seconds == pytest.approx(expected, rel=1e-5)


def test_a_gpu_multiplies_float32_in_tensorfloat():
    program = lowered(product, *specs("ab", "bc", dtype="float32"))
    seconds = simulate(program, hardware("h100")).seconds
    assert seconds == pytest.approx(costs_of("h100").product(1024, 2048, 4096, 4), rel=1e-5)


def test_a_ring_beside_products_hides_what_it_sends():
    a, b, c = md.dims(a=65536, b=2048, c=4096)
    shapes, layout = [md.spec([a, b], "bfloat16"), md.spec([b, c], "bfloat16")], "a:m; c:m?"
    plain = simulate(lowered(product, *shapes, mesh="m:4", layout=layout), V3)
    ring = simulate(lowered(product, *shapes, mesh="m:4", layout=layout, overlap=True), V3)
    assert plain.times.hidden == 0 < ring.times.hidden
    assert ring.times.exposed < 0.5 * plain.times.exposed
    assert ring.times.wire_bytes == pytest.approx(plain.times.wire_bytes)
    assert plain.bytes_beside_products == 0
    assert ring.bytes_beside_products == ring.asynchronous_bytes == ring.times.wire_bytes


def test_what_comes_before_and_after_a_transfer_does_not_hide_it():
    def chain(x, y):
        return md.sum(product(md.exp(x), y), "c")  # nothing to do while the sums travel

    program = lowered(chain, *specs("ab", "bc"), mesh="m:4", layout="b:m")
    schedule = simulate(program, hardware("h100"))
    assert schedule.times.hidden == pytest.approx(0, abs=1e-9)


def chains(x, y, z):
    """Two chains of collectives over two axes, with views between, and work beside them."""
    s = md.einsum(x, y, over="b")
    t = md.einsum(s.rename(c="b").rename(b="c"), z, over="c")
    u = md.einsum(md.exp(x), y, over="b").rename(a="e")
    return t, md.sort(s, "a"), md.sum(u, "c"), md.sort(u, "e")


def shuffled(program, draw):
    """Returns a program with its instructions in another order in which each has its inputs."""
    made = {value for i in program.block.instructions for value in i.outputs}
    waiting, known, order = list(program.block.instructions), set(), []
    while waiting:
        ready = [i for i in waiting if all(v in known or v not in made for v in i.inputs)]
        order.append(draw.choice(ready))
        waiting.remove(order[-1])
        known.update(order[-1].outputs)
    return dataclasses.replace(
        program, block=dataclasses.replace(program.block, instructions=tuple(order))
    )


@pytest.mark.parametrize("seed", range(30))
def test_no_transfer_begins_before_its_operands_have_arrived(seed):
    a, b, c, d = (md.Dimension(name, 4096) for name in "abcd")
    shapes = [md.spec(dims, "bfloat16") for dims in ([a, b], [b, c], [c, d])]
    program = lowered(chains, *shapes, mesh="m:2,n:2", layout="b:m; a:n; e:n")
    program = shuffled(program, random.Random(seed))
    writer = simulation._Writer(program.mesh, hardware("h100"), None)
    found = {writer.known[one.step]: one for one in moments(writer.steps(program.block))}
    makers = {value: i for i in program.block.instructions for value in i.outputs}

    def there(value):
        maker = makers.get(value)
        if maker in found:
            return found[maker].start + found[maker].time
        return max(map(there, maker.inputs), default=0) if maker else 0

    assert len({axes_of(i) for i in found if i.is_collective}) == 2
    for instruction, one in found.items():
        assert one.start >= max(map(there, instruction.inputs), default=0)


def test_depth_costs_nothing_and_counts():
    size, calls = md.Dimension("n", 512), set()

    def run(x, w):
        return md.scan(
            lambda x, w: (md.tanh(md.einsum(x, w, over="n").rename(m="n")), None), x, w, dim="l"
        )[0]

    x = md.spec([md.Dimension("a", 256), size])
    for layers in (4, 96):
        w = md.spec([md.Dimension("l", layers), size, md.Dimension("m", 512)])
        program = lowered(run, x, w)
        schedule = simulate(program, V5P)
        calls.add(calls_of(lambda: simulate(program, V5P)))  # noqa: B023 - called at once
        (loop,) = (event for event in schedule.events if event.kind == "scan")
        assert loop.count == layers
        total = layers * sum(event.seconds for event in loop.inside)
        assert loop.seconds == pytest.approx(total, rel=1e-6)
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["cpu", "v3", "v5e", "v5p", "h100"])
def test_the_time_is_that_of_work_and_waits(name):
    program, _ = explained(**LARGE)
    schedule = simulate(program, hardware(name))
    times = schedule.times
    assert schedule.seconds == pytest.approx(times.work + times.exposed, rel=1e-6)
    assert times.wire_bytes == pytest.approx(program.wire_bytes)
    assert all(event.kind == WORK or event.axes for event, _ in schedule.walk())


def test_without_a_table_and_without_overlap_it_is_the_sum_at_the_peaks():
    program, _ = explained(**LARGE)
    bound = replace(V3, products="least")
    schedule, line = simulate(program, bound), explain(program, "v3").timeline
    assert not any(event.asynchronous for event, _ in schedule.walk())
    assert schedule.seconds == pytest.approx(line.seconds, rel=1e-3)
    assert schedule.origin == "the peaks of TPU v3"


@NEEDS_LIBTPU
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp_tensor", "mlp_data", "mlp_2d"])
def test_the_compiler_agrees(name):
    """Where nothing is offloaded: the compiler fills the windows of transfers with later work."""
    from meshdsl.layouts.topologies import Topology
    from meshdsl.lowering.backends.compiler_flags import RECOMMENDED
    from meshdsl.lowering.backends.jax.ahead import compile_ahead
    from tests.benchmarks.pairs import PAIRS, TOPOLOGY, jitted

    function, arguments = jitted(PAIRS[name])
    program = function.lower(*arguments)
    flags = {k: v for k, v in RECOMMENDED["v5p"].items() if "sparse_core" not in k}
    with jax.enable_x64(False):  # counters of loops, as the command line has them
        compiled = compile_ahead(program, Topology.parse(TOPOLOGY), flags)
    schedule = simulate(program, replace(V5P, asynchronous=frozenset(["permute"])))
    assert schedule.times.exposed == pytest.approx(compiled.schedule.times.exposed, rel=0.05)
    assert schedule.seconds == pytest.approx(compiled.schedule.seconds, rel=0.1)


def test_the_stacks_of_a_scans_results_are_filled_first_but_on_tpus():
    layers, size = md.dims(l=64, n=4096)

    def run(x):
        return md.scan(lambda c, x: (c, md.exp(x)), md.zeros([]), x, dim="l")[1]

    program = lowered(run, md.spec([layers, size, md.Dimension("m", 4096)]))
    first, loop = simulate(program, hardware("h100")).events
    assert (first.kind, loop.kind) == (WORK, "scan")
    stack = 64 * 4096 * 4096 * 4
    assert first.seconds >= stack / hardware("h100").memory_bandwidth * 0.999
    assert [event.kind for event in simulate(program, V5P).events] == ["scan"]


def test_products_of_a_library_leave_work_to_others():
    program, _ = explained(**LARGE)
    ways = ("within", "least", "alone")
    times = [simulate(program, replace(V3, products=way)).times.work for way in ways]
    assert times == sorted(times) and times[0] < times[2]
    assert V5P.products == "within" and hardware("h100").products == "alone"


def test_without_a_compiler_a_step_takes_longer():
    program, _ = explained(**LARGE)
    for name in ("h100", "v3"):
        compiled = simulate(program, hardware(name))
        eager = simulate(program, hardware(name), fused=False)
        assert eager.times.work > 1.05 * compiled.times.work
        assert eager.times.wire_bytes == compiled.times.wire_bytes


@pytest.mark.parametrize("name", ["v5p", "v4", "h100", "cpu"])
def test_the_seconds_alone_are_those_of_the_schedule(name):
    x = md.spec(md.dims(batch=1024, features=512), "bfloat16")
    w = md.spec(md.dims(layers=3, features=512, hidden=512), "bfloat16")

    def stack(x, w):
        def layer(x, w):
            return md.einsum(x, w, over="features").rename(hidden="features"), None

        return md.scan(layer, x, w, dim="layers")[0]

    program = md.jit(stack, "model:4", "features:model").lower(x, w)
    kind = hardware(name)
    assert step_seconds(program, kind) == simulate(program, kind).seconds > 0
