"""`meshdsl compile`: the real TPU compiler's word on a training step, and all that goes wrong."""

import itertools
import re
from importlib.util import find_spec

import jax
import pytest

from meshdsl.cli.main import run
from meshdsl.lowering.backends.jax import ahead

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu")
SMALL = ("--model_args=layers=2,embed=64,heads=4", "--batch_size=8", "--length=64")
MESH = "--mesh_shape=data:2,model:4"
LAYOUT = "--layout=batch:data; heads:model; d_ff:model; vocab:model"


@pytest.fixture(autouse=True)
def numbers_of_32_bits():
    """As the command line has them; the tests' own 64 bits change kernels and loops."""
    with jax.enable_x64(False):
        yield


def answer(capsys, *arguments):
    code = run(["compile", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys, *arguments):
    code, out, err = answer(capsys, *arguments)
    assert (code, out) == (2, "")
    return err.removeprefix("meshdsl compile: ")


def section(report, title):
    """Returns the lines under a title, without their indentation."""
    (found,) = (part for part in report.split("\n\n") if part.startswith(title))
    return [line.strip() for line in found.splitlines()[1:]]


def row(lines, name):
    """Returns what stands behind a name, in MiB, with what follows."""
    (line,) = (line for line in lines if line.startswith(name))
    words = line.removeprefix(name).split()
    units = {"B": 2**-20, "KiB": 2**-10, "MiB": 1, "GiB": 2**10, "TiB": 2**20}
    found = [float(n) * units[u] for n, u in itertools.pairwise(words) if u in units]
    return found, words[-1]


# Machines without a compiler at hand.


def test_gpus_have_the_plan_alone_and_the_report_says_so(capsys):
    code, report, err = answer(capsys, *SMALL, MESH, LAYOUT, "--topology=h100:8x1")
    assert (code, err) == (0, "")
    assert "\nh100:8x1: planned only; GPU programs are compiled where the GPUs are" in report
    assert "fits: a device has 80.0 GiB" in report
    assert "by the compiler" not in report
    assert row(section(report, "on the wire"), "total")[0][0] > 0
    flags = section(report, "compiler flags, where it is compiled")
    assert flags == ["xla_gpu_enable_latency_hiding_scheduler=true"]


def test_the_page_has_the_simulated_step_where_there_is_no_compiler(capsys, tmp_path):
    name = tmp_path / "page.html"
    code, report, _ = answer(capsys, *SMALL, MESH, LAYOUT, "--topology=h100:8x1", f"--html={name}")
    assert code == 0 and f"{name} is written" in report
    page = name.read_text()
    assert "The step by its schedule" in page and "<b>simulated</b>" in page
    (tmp_path / "file").write_text("")
    wrong = f"--html={tmp_path}/file/page.html"
    code, _, err = answer(capsys, *SMALL, MESH, LAYOUT, "--topology=h100:8x1", wrong)
    assert code == 2 and "--html: cannot write" in err


def test_what_does_not_fit_by_the_plan_fails_and_shows_what_is_largest(capsys):
    code, report, err = answer(
        capsys, "--model=gpt3_175b", "--mesh_shape=data:16,model:8", LAYOUT, "--topology=h100:8x16"
    )
    assert (code, err) == (1, "")
    assert "does not fit: a device has 80.0 GiB" in report
    assert "the largest values then:" in report and " state/params/blocks/mlp/w_in" in report
    assert "to use less:" in report


# The TPU compiler.


@needs_libtpu
def test_a_step_compiled_for_tpus_is_reported_beside_its_plan(capsys):
    code, report, err = answer(
        capsys, *SMALL, MESH, LAYOUT, "--topology=v5e:2x4", "--compiler_flags=none"
    )
    assert (code, err) == (0, "")
    assert "\nv5e:2x4: compiled in " in report and " of processor time" in report
    memory, wire = section(report, "fits: a device has 16.0 GiB"), section(report, "on the wire")
    ((plan,), _), ((compiler,), share) = row(memory, "by the plan"), row(memory, "by the compiler")
    assert 0 < plan < 2 * compiler and share == "much"
    # Two sums of the stream in each direction and layer: batch 4 x length 64 x embed 64 floats.
    (planned, compiled), ratio = row(wire, "all_reduce")
    sums = 2 * 2 * 2 * (4 * 64 * 64 * 4) * 2 * 3 / 4 / 2**20
    assert planned >= sums and compiled >= sums
    assert float(ratio) == pytest.approx(1, abs=0.02)
    assert "compiler flags: none" in report


def times_of(report):
    """Returns work, exposed and step of each program of the report, in microseconds."""
    units = {"ns": 1e-3, "µs": 1, "ms": 1e3, "s": 1e6}
    lines = section(report, "time of a step on one device, by the compiler's cycles and schedule")
    times = {}
    for line in itertools.takewhile(lambda line: not line.startswith("this program"), lines[1:]):
        name, *cells = re.split(r"  +", line)
        pairs = [cell.split() for cell in cells[:3]]
        times[name] = [float(number) * units[unit] for number, unit in pairs]
    return times, lines


PLAIN = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

def program(mesh):
    def step(w, x):
        return jnp.tanh(x @ w).sum()
    def spec(sizes, *axes):
        sharding = NamedSharding(mesh, P(*axes))
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=sharding)
    return jax.jit(step), spec((256, 512), "data", "model"), spec((128, 256), "data")
"""


@needs_libtpu
def test_the_time_of_a_step_stands_beside_the_plans_and_that_of_other_programs(capsys, tmp_path):
    small = (*SMALL, MESH, LAYOUT, "--topology=v5e:2x4")
    _, report, _ = answer(capsys, *small, "--against=jax_auto")
    times, lines = times_of(report)
    assert list(times) == ["plan, at the peaks", "simulated", "compiler", "jax_auto"]
    for work, exposed, step in times.values():
        assert 0 < work < step and exposed > 0
        assert step == pytest.approx(work + exposed, rel=0.1)
    assert any(re.match(r"this program takes \d\.\d\d × jax_auto's time", line) for line in lines)
    assert re.search(r"\n  model +[\d.]+ .s ", report)  # by axes
    assert re.search(r"\n  (block|mlp|attention|optim\w*|transformer)\.py:\d+ ", report)  # by lines
    (tmp_path / "plain.py").write_text(PLAIN)
    name = f"{tmp_path}/page.html"
    plain = f"--against={tmp_path}/plain.py:program"
    _, report, _ = answer(capsys, *small, plain, f"--html={name}")
    assert report.endswith(f"{name} is written: open it in a browser\n")
    page = (tmp_path / "page.html").read_text()
    assert "The step by its schedule" in page and "<b>plain.py:program</b>" in page
    assert list(times_of(report)[0])[-1] == "plain.py:program"


@needs_libtpu
def test_what_does_not_fit_the_tpu_fails_with_both_accounts(capsys):
    large = ("--model_args=layers=1,embed=64,heads=4", "--batch_size=262144", "--length=512")
    code, report, err = answer(capsys, *large, MESH, LAYOUT, "--topology=v5e:2x4")
    assert (code, err) == (1, "")
    memory = section(report, "does not fit: a device has 15.8 GiB")  # the rest is the system's
    assert row(memory, "by the compiler")[0][0] > 15.75 * 1024
    assert any("the compiler gave up" in line for line in memory)
    assert "the largest values then:" in memory
    wire = section(report, "on the wire")
    assert wire[-1] == "by the compiler: not known; libtpu writes no program that does not fit"
    time = section(report, "time of a step on one device, by the compiler's cycles and schedule")
    assert time == ["not known; libtpu writes no program that does not fit"]
    assert "xla_tpu_enable_latency_hiding_scheduler=true" in section(report, "compiler flags:")


@needs_libtpu
def test_a_flag_that_the_compiler_does_not_know(capsys):
    small = (*SMALL, MESH, LAYOUT, "--topology=v5e:2x4")
    flag = "--compiler_flags=xla_tpu_overlap_compute_colective_tc=true"
    assert refused(capsys, *small, flag) == (
        "the compiler knows no flag 'xla_tpu_overlap_compute_colective_tc'. Did you mean "
        "`xla_tpu_overlap_compute_collective_tc`?\n"
    )
    assert refused(capsys, *small, "--compiler_flags=xla_enable_async_all_gather=maybe") == (
        "compiler flag xla_enable_async_all_gather cannot be 'maybe'\n"
    )


def test_without_the_compiler_it_is_named(capsys, monkeypatch):
    monkeypatch.setattr(ahead, "find_spec", {}.get)
    assert refused(capsys, *SMALL, MESH, LAYOUT, "--topology=v5e:2x4") == (
        "--topology: compiling for TPUs needs their compiler, libtpu, which is not installed: pip "
        "install 'meshdsl[tpu]'. The plan alone needs nothing: meshdsl explain\n"
    )
    told = refused(capsys, *SMALL, "--mesh_shape=data:3", "--topology=v5e:2x4")
    assert "mesh data:3 has 3 devices" in told and "which is not installed" in told


# Mistakes.


def test_without_a_topology_there_is_nothing_to_compile_for(capsys):
    assert refused(capsys) == ("--topology says what to compile for, as in --topology=v5p:8x8x8\n")


def test_what_to_compare_with_must_be_there(capsys, tmp_path):
    small = (*SMALL, MESH, LAYOUT)
    assert (
        "--against: needs jax_auto, or a function that makes a plain JAX program, as in "
        "my_step.py:program, got 'jax_outo'. Did you mean `jax_auto`?\n"
    ) in refused(capsys, *small, "--topology=v5e:2x4", "--against=jax_outo")
    gpus = refused(capsys, *small, "--topology=h100:8x1", "--against=jax_auto")
    assert gpus == "--against: nothing is compiled for h100:8x1; leave it out\n"
    (tmp_path / "plain.py").write_text("def programme(mesh): ...")
    missing = f"--against={tmp_path}/plain.py:program"
    assert "has no 'program'. Did you mean `programme`?" in refused(
        capsys, *small, "--topology=v5e:2x4", missing
    )


def test_what_is_no_function_is_refused(capsys, tmp_path):
    (tmp_path / "plain.py").write_text("program = 3")
    told = refused(
        capsys, *SMALL, MESH, LAYOUT, "--topology=v5e:2x4", f"--against={tmp_path}/plain.py:program"
    )
    assert "plain.py:program is of type int, not a function that makes a plain JAX program" in told


@needs_libtpu
@pytest.mark.parametrize(
    ("returned", "made"),
    [
        ("jax.jit(lambda x: x)", "PjitFunction"),
        ("None", "NoneType"),
        ("(lambda x: x), 3", "tuple of function, int"),
        ("()", "tuple"),
    ],
)
def test_what_makes_no_program_is_refused_before_anything_is_compiled(
    capsys, tmp_path, monkeypatch, returned, made
):
    (tmp_path / "plain.py").write_text(f"import jax\ndef program(mesh):\n    return {returned}\n")
    monkeypatch.delattr(ahead, "_compile")
    against = f"--against={tmp_path}/plain.py:program"
    assert refused(capsys, *SMALL, MESH, LAYOUT, "--topology=v5e:2x4", against) == (
        f"program returns a {made}; it must return what jax.jit returned, and the arguments: "
        "return jax.jit(step), state, batch\n"
    )


def test_all_mistakes_are_reported_at_once(capsys):
    message = refused(
        capsys, "--topology=h100:8x2", MESH, "--slices=0", "--compiler_flags=x", "--backend=tf"
    )
    assert message.startswith("3 problems")
    assert "--slices: needs a whole number of at least 1, got '0'" in message
    assert "--compiler_flags: needs name=value pairs, as in xla_tpu_enable" in message
    assert "--backend: tf is not compiled ahead of time; leave it out" in message


def test_a_machine_that_there_is_not_is_reported_with_the_nearest(capsys):
    assert refused(capsys, "--topology=v5q:8x8x8").startswith(
        "--topology: unknown topology 'v5q'; choose one of v3, v4, v5e, v5p, v6e, a100, h100, "
        "h200, b200. Did you mean `v5p` or `v5e`?"
    )
    assert "Nearest: v5p:8x8x8, " in refused(capsys, "--topology=v5p:8x8x9")


def test_the_mesh_has_to_cover_the_machine(capsys):
    assert refused(capsys, *SMALL, MESH, LAYOUT, "--topology=h100:8x2") == (
        "--mesh_shape: mesh data:2 model:4 has 8 devices, but h100:8x2 has 16: a mesh has one "
        "device for each\n"
    )
    assert refused(capsys, "--topology=h100:8") == (
        "--mesh_shape: h100:8 has 8 devices, but there is no mesh: a mesh has one device for each, "
        'as in --mesh_shape="data:8"\n'
    )


# Figure 1 of issue E.

FIGURE = (
    "--model=gpt3_175b",
    "--policy=params=float32,compute=bfloat16",
    "--remat=full",
    f"{LAYOUT}; length:model?; params/embed:data",
)


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
    ("arguments", "devices"),
    [
        ((*FIGURE, "--topology=v5p:8x8x8", "--mesh_shape=data:64,model:8"), 512),
        (
            (
                "--model=llama_7b",
                "--batch_size=512",
                "--policy=params=float32,compute=bfloat16",
                "--remat=full",
                f"{LAYOUT.replace('batch:data', 'batch:slice+data')}; length:model?; "
                "params/embed:data",
                "--topology=v5e:16x16",
                "--slices=2",
                "--mesh_shape=slice@dcn:2,data:32,model:8",
            ),
            512,
        ),
    ],
    ids=["gpt3_175b on v5p:8x8x8", "llama_7b on two slices of v5e:16x16"],
)
def test_whole_models_fit_pods_as_planned(capsys, arguments, devices):
    code, report, err = answer(capsys, *arguments)
    assert (code, err) == (0, "")
    assert f": {devices} devices" in report
    memory, wire = section(report, "fits: "), section(report, "on the wire")
    ((plan,), _), ((compiler,), _) = row(memory, "by the plan"), row(memory, "by the compiler")
    assert plan / compiler == pytest.approx(1, abs=0.15)
    (total, _), ratio = row(wire, "total")
    assert float(ratio) == pytest.approx(1, abs=0.001)
    kinds = [line.split()[0] for line in wire[1:]]
    assert {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"} <= {*kinds}
    for kind in kinds:  # vectors of a few KiB are added up whole where a part was planned
        (planned, compiled), _ = row(wire, kind)
        assert compiled == pytest.approx(planned, rel=0.005, abs=1e-4 * total), kind
