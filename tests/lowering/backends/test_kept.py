"""Each process keeps its compiled programs, and loads only what was compiled for the same case."""

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import pytest

import meshdsl as md
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends.jax import kept
from meshdsl.lowering.backends.jax.executable import device_mesh
from tests.lowering.backends.tf.hosts.test_cluster import free_ports

NEW = ("first", "in a context", "cut short", "no program", "other versions", "other CPU")
BY_NAME = ("by name", "out of it")


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    """Returns what the two processes of a job told in each of two starts."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **cache}
    found = []
    for _ in range(2):
        (port,) = free_ports(1)
        line = [sys.executable, "-m", "tests.lowering.backends.kept_job", f"localhost:{port}"]
        pipe = subprocess.PIPE
        processes = [
            subprocess.Popen([*line, number], env=environment, stdout=pipe, stderr=pipe, text=True)
            for number in "01"
        ]
        try:
            output = [process.communicate(timeout=300) for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert not any(process.returncode for process in processes), output
        (zero,), (one,) = ([x for x in out.splitlines() if x[:1] == "{"] for out, _ in output)
        found.append((json.loads(zero), json.loads(one)))
    return found


@pytest.mark.long
def test_no_process_compiles_again_when_it_starts_again(starts):
    first, second = starts
    assert [one["first"]["compiled"] for one in first] == [1, 1]
    assert [one["first"]["compiled"] for one in second] == [0, 0]
    for one, again in zip(first, second, strict=True):
        names = [file for file in one["files"] if file.endswith(".name")]
        assert len(names) == 2 and len(one["files"]) == 2 + 4
        assert again["files"] == one["files"]  # each with its name, and nothing unfinished


@pytest.mark.long
def test_only_a_whole_file_of_the_same_case_is_loaded(starts):
    """Nor what JAX has read from its own cache, which would lack functions."""
    for number, told in enumerate(starts[0]):
        times = {name: one for name, one in told.items() if name != "files"}
        assert [name for name, one in times.items() if one["compiled"]] == [*NEW]
        warned = {name: one["warnings"] for name, one in times.items() if one["warnings"]}
        assert [*warned] == ["cut short", "no program"]
        assert all("deleted, and compiled again" in each for (each,) in warned.values())
        (damaged,) = warned["cut short"]
        assert f"process.{number}/" in damaged and "it is damaged" in damaged


@pytest.mark.long
def test_a_program_whose_text_is_known_by_its_name_is_not_lowered(starts):
    """Neither by another version of the code, nor with settings of this thread alone."""
    for number, start in enumerate(starts):
        again = ["named", "other code"] * number
        for process in start:
            told = {name: one for name, one in process.items() if name != "files"}
            assert {name for name, one in told.items() if not one["lowered"]} == {*BY_NAME, *again}


@pytest.mark.long
def test_a_loaded_program_is_the_compiled_one(starts):
    """Results to the bit, donated buffers, memory and shardings."""
    told_how = dict.fromkeys(("compiled", "lowered", "warnings"))
    for start in starts:
        for process in start:
            told = [one for name, one in process.items() if name != "files"]
            one, *others = [{**each, **told_how} for each in told]
            assert one["reused"] and all(other == one for other in others)
            assert one["shards"] == starts[0][start.index(process)]["again"]["shards"]


def double(x):
    return x + x


def triple(x):
    return x + x + x


def lowered(function=double, mesh="data:2", **options):
    return md.jit(function, mesh, "row:data", **options).lower(md.spec([md.Dimension("row", 8)]))


def in_case(patch, **changed):
    """Has `kept` and JAX say what is given."""
    state = {"code": "code 1", "process": 1, "processes": 2} | changed
    patch.setattr(kept, "late", lambda name: lambda: state["code"])
    patch.setattr(jax, "process_index", lambda: state["process"])
    patch.setattr(jax, "process_count", lambda: state["processes"])
    for name in {"_versions", "_abilities", "_emitting"} & {*changed}:
        patch.setattr(kept, name, partial(changed.get, name))
    if "XLA_FLAGS" in changed:
        patch.setenv("XLA_FLAGS", changed["XLA_FLAGS"])


def name(monkeypatch, program=None, options=(), config=(), **changed):
    """Returns the file that has the name of a program's file, in a case."""
    made = lowered() if program is None else program
    before = {each: getattr(jax.config, each) for each, _ in config}
    with monkeypatch.context() as patch:
        in_case(patch, **changed)
        try:
            for each, value in config:
                jax.config.update(each, value)
            found = kept._case(device_mesh(made.mesh), dict(options))
            return kept._file_of_name(
                Path(), found, made, changed.get("emitted", ("kind", None, 0))
            )
        finally:
            for each, value in before.items():
                jax.config.update(each, value)


def test_a_change_of_anything_that_a_program_depends_on_gives_another_name(monkeypatch):
    """Else an old program would be run in place of the new one."""
    cases = [
        *({}, {"program": lowered(triple)}, {"program": lowered(mesh="data:4")}),
        *({"program": lowered(donate="x")}, {"program": lowered(backend="jax_auto")}),
        *({"emitted": ("another kind", None, 0)}, {"emitted": ("kind", "tpu", 0)}),
        *({"emitted": ("kind", None, 1)}, {"code": "code 2"}, {"process": 0}, {"processes": 3}),
        *({"_versions": ["0.0"]}, {"_abilities": ("no AVX",)}, {"_emitting": ["Python 4"]}),
        *({"options": [("xla_cpu_enable_fast_math", value)]} for value in (True, False)),
        *({"config": [("jax_default_matmul_precision", each)]} for each in ("high", "highest")),
        *(
            {"config": [("jax_numpy_dtype_promotion", "strict")]},
            {"XLA_FLAGS": "--xla_cpu_use_fusion=false"},
        ),
    ]
    names = [name(monkeypatch, **case) for case in cases]
    assert [case for case, one in zip(cases, names, strict=True) if one is None] == []
    twice = [case for case, one in zip(cases, names, strict=True) if names.count(one) > 1]
    assert twice == []
    assert [name(monkeypatch, **case) for case in cases] == names


@pytest.mark.parametrize(
    "context",
    [
        lambda: jax.default_matmul_precision("highest"),
        lambda: jax.default_device(jax.devices()[1]),
        lambda: jax.set_mesh(device_mesh(Mesh.parse("data:2"))),
        lambda: jax.numpy_dtype_promotion("strict"),
    ],
)
def test_with_settings_of_this_thread_alone_no_program_has_a_name(context, monkeypatch):
    assert name(monkeypatch) is not None
    with context():
        assert name(monkeypatch) is None


def test_without_the_version_of_its_code_no_program_has_a_name(monkeypatch):
    assert name(monkeypatch, code=None) is None


@pytest.mark.parametrize(
    ("flags", "there"), [("flags.txt", True), (" --xla_a=1", False), ("", False)]
)
def test_flags_in_a_file_are_known_as_such(flags, there, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert kept._flags_are_in_a_file() is there


def test_what_was_not_used_for_a_month_is_deleted(tmp_path, monkeypatch):
    """Also of processes that the job has no more: each process has its share of them."""
    month, digest = 31 * 24 * 3600, "0f" * 32
    old = [f"process.{n}/{name}" for n in (1, 3, 5) for name in (digest, f"{digest}.name")]
    others = ["process.1/notes.txt", f"process.1/{digest[:-1]}", f"jit_step-{digest}-cache"]
    others += [f"process.{n}/{digest}" for n in (0, 2, 4)]  # which other processes see to
    used = "process.1/" + digest.replace("0", "1")
    for file in (*old, *others, used):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
        os.utime(tmp_path / file, (time.time() - month,) * 2)
    kept._mark_used(tmp_path / used)
    in_case(monkeypatch)
    kept._clean(tmp_path / "process.1")
    left = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
    assert left == {*others, used}


def test_what_another_job_is_writing_is_not_deleted(tmp_path, monkeypatch):
    """Only what nobody can be writing any more: its process was killed."""
    folder, digest = tmp_path / "process.1", "0f" * 32
    folder.mkdir()
    writing, left = folder / f".{digest}.x7", folder / f".{digest}.x8"
    for file in (writing, left):
        file.touch()
    os.utime(left, (time.time() - 2 * 3600,) * 2)
    in_case(monkeypatch)
    kept._keep(folder / digest, lambda: b"content")
    kept._clean(folder)
    assert {*folder.iterdir()} == {writing, folder / digest}


class Lowered:
    """What `jax.jit(...).lower` returns, in a process whose code changes meanwhile or does not."""

    def __init__(self, meanwhile):
        self.meanwhile = meanwhile

    def as_text(self):
        self.meanwhile()
        return "text"


@pytest.mark.parametrize("code", ["code 1", "code 2", None])
def test_no_name_is_kept_for_a_text_that_was_lowered_while_the_code_changed(
    code, tmp_path, monkeypatch
):
    """It may be of the code before, or after."""
    program, state = lowered(), {"code": "code 1"}
    in_case(monkeypatch)
    monkeypatch.setattr(kept, "late", lambda name: lambda: state["code"])
    monkeypatch.setattr(kept, "_folder", lambda mesh: tmp_path)
    monkeypatch.setattr(kept, "_loaded", lambda *_: "made")
    monkeypatch.setattr(os.path, "exists", lambda file: True)
    lower = partial(Lowered, lambda: state.update(code=code))
    assert kept.compiled(lower, program, (), device_mesh(program.mesh), {}) == "made"
    assert len([*tmp_path.glob("*.name")]) == (code == "code 1")
