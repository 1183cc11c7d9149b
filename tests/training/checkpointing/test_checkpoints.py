"""Checkpoints: bit for bit, onto any mesh; damaged ones are told, set aside and passed over."""

import json
import resource
import signal
import subprocess
import sys
import time
import warnings

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.tensors import dtypes
from meshdsl.training.checkpointing.checkpoints import Checkpoints, CheckpointWarning
from meshdsl.training.state import TrainState

embed, hidden, layers = md.dims(embed=12, hidden=20, layers=3)


def made(seed=0):
    """Returns a state of several dtypes, with a dim that most meshes do not divide."""
    rng = np.random.default_rng(seed)
    weight = md.named(rng.standard_normal((3, 12, 20)).astype(np.float32), [layers, embed, hidden])
    half = md.named(rng.standard_normal((12, 20)).astype(dtypes.BFLOAT16), [embed, hidden])
    bits = md.named(rng.integers(0, 2**32, (20,), np.uint32), [hidden])
    moments = {"mean": {"w": weight}, "bits": bits}
    step = md.named(np.array(seed, np.int32), [])
    return TrainState(step, {"w": weight, "layers": [half]}, moments)


def placed(state, mesh, layout):
    """Returns a state as a program of a mesh leaves it, pads and all."""
    return md.jit(lambda state: state, mesh, layout)(state)


def places_on(mesh, layout, state):
    return [
        x.even
        for x in md.jit(lambda state: state, mesh, layout).lower(state).compile().executable.inputs
    ]


def assert_same(found, state):
    structures = [jax.tree.structure(tree, is_leaf=is_array) for tree in (found, state)]
    assert structures[0] == structures[1]
    for one, other in zip(
        jax.tree.leaves(found, is_leaf=is_array),
        jax.tree.leaves(state, is_leaf=is_array),
        strict=True,
    ):
        assert one.dims == other.dims and one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def is_array(value):
    return isinstance(value, md.NamedArray)


LAYOUTS = [
    (None, None),
    ("data:8", "embed:data"),
    ("data:2,model:4", "embed:data; hidden:model"),
    ("model:8", "hidden:model"),
    ("a:3,b:2", "hidden:a; layers:b"),
]


@pytest.mark.long
def test_state_goes_from_any_mesh_to_any_other(tmp_path):
    state = made()
    for number, (mesh, layout) in enumerate(LAYOUTS):
        with Checkpoints(tmp_path / str(number)) as checkpoints:
            checkpoints.save(7, placed(state, mesh, layout), {"at": 5})
        for other, rules in LAYOUTS:
            with Checkpoints(tmp_path / str(number)) as checkpoints:
                found = checkpoints.restore(state, places_on(other, rules, state))
            assert (found.step, found.position) == (7, {"at": 5})
            assert_same(placed(found.state, other, rules), state)
            if other:
                want = md.jit(lambda state: state, other, rules).lower(state).compile()
                for array, stored in zip(
                    jax.tree.leaves(found.state), want.executable.inputs, strict=True
                ):
                    assert array.sharding == stored.even


def test_without_places_numpy_arrays_are_restored(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, made())
        found = checkpoints.restore(made(1))
    assert_same(found.state, made())
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(found.state))


def test_nothing_is_restored_where_nothing_is(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(made()) is None


def test_the_latest_are_kept_and_the_best(tmp_path):
    with Checkpoints(tmp_path, keep=2, keep_best=1) as checkpoints:
        for step, loss in enumerate([3.0, 1.0, 2.0, 2.5, 2.6], 1):
            checkpoints.save(step, made(step), eval_loss=loss)
    assert steps_in(tmp_path) == [2, 4, 5]


def test_the_best_is_kept_after_a_run_has_been_resumed(tmp_path, caplog):
    for first, losses in ((1, [3.0, 1.0, 2.0]), (4, [2.5, None, 2.6])):
        with Checkpoints(tmp_path, keep=1, keep_best=1) as checkpoints:
            for step, loss in enumerate(losses, first):
                checkpoints.save(step, made(step), eval_loss=loss)
    assert steps_in(tmp_path) == [2, 6]
    assert "metric" not in caplog.text  # that a step was not evaluated is no warning


def test_a_local_one_is_taken_where_it_is_the_latest(tmp_path):
    with Checkpoints(tmp_path / "kept", local=tmp_path / "local") as checkpoints:
        checkpoints.save(2, made(2))
        for step in (3, 4):
            checkpoints.save(step, made(step), local=True)
    assert steps_in(tmp_path / "kept") == [2] and steps_in(tmp_path / "local" / "process.0") == [4]
    with Checkpoints(tmp_path / "kept", local=tmp_path / "local") as checkpoints:
        found = checkpoints.restore(made())
        assert found.step == 4
        assert_same(found.state, made(4))
    with Checkpoints(tmp_path / "kept") as checkpoints:
        assert checkpoints.restore(made()).step == 2


def steps_in(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def largest(checkpoint):
    return max(
        (f for f in (checkpoint / "state").rglob("*") if f.is_file()),
        key=lambda f: f.stat().st_size,
    )


DAMAGE = {
    "a changed bit": lambda c: flip(largest(c)),
    "a file that is cut off": lambda c: cut(largest(c)),
    "a file that is gone": lambda c: largest(c).unlink(),
    "an empty description": lambda c: (c / "about" / "metadata").write_text(""),
    "no description": lambda c: (c / "about" / "metadata").unlink(),
    "a seal that is cut off": lambda c: cut(c / "seal.0.json"),
    "a file cut off, and no seal": lambda c: (cut(largest(c)), (c / "seal.0.json").unlink()),
}


# Storage reads ahead, and leaves what it could not read to no one.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_one_is_told_and_the_one_before_it_is_taken(how, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, made(1))
        checkpoints.save(2, made(2))
    DAMAGE[how](tmp_path / "2")
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.warns(CheckpointWarning, match=r"2 is damaged: .*; kept as .*damaged\.2"):
            found = checkpoints.restore(made())
        assert found.step == 1
        assert_same(found.state, made(1))
        checkpoints.save(2, made(2))
    assert (tmp_path / "damaged.2").is_dir() and steps_in(tmp_path) == [1, 2]
    with Checkpoints(tmp_path) as checkpoints, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(checkpoints.restore(made()).state, made(2))


def test_if_all_are_damaged_nothing_is_lost_and_each_is_told(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, made(1))
        checkpoints.save(2, made(2))
    flip(largest(tmp_path / "1"))
    cut(largest(tmp_path / "2"))
    with Checkpoints(tmp_path) as checkpoints, warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        with pytest.raises(ValueError, match="every checkpoint is damaged") as error:
            checkpoints.restore(made())
    assert "damaged.1" in str(error.value) and "damaged.2" in str(error.value)
    assert (tmp_path / "damaged.1").is_dir() and (tmp_path / "damaged.2").is_dir()
    for _ in range(2):  # no run starts anew beside them
        with (
            Checkpoints(tmp_path) as checkpoints,
            pytest.raises(ValueError, match=r"another workdir, .* or move these away") as error,
        ):
            checkpoints.restore(made())
        assert "damaged.1" in str(error.value) and "damaged.2" in str(error.value)
    for number in (1, 2):
        (tmp_path / f"damaged.{number}").rename(tmp_path / f"away.{number}")
    gone = pytest.warns(CheckpointWarning, match="2 is gone; the run starts anew")
    with Checkpoints(tmp_path) as checkpoints, gone:
        assert checkpoints.restore(made()) is None


def test_if_the_only_local_one_is_damaged_no_run_starts_anew(tmp_path):
    folders = {"folder": tmp_path / "kept", "local": tmp_path / "local"}
    with Checkpoints(**folders) as checkpoints:
        checkpoints.save(3, made(3), local=True)
    flip(tmp_path / "local" / "process.0" / "3" / "state.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        for _ in range(2):
            with (
                Checkpoints(**folders) as checkpoints,
                pytest.raises(ValueError, match=r"is damaged(.|\n)*damaged\.3"),
            ):
                checkpoints.restore(made())


def unreadable(file):
    """Makes a file one that is there and cannot be opened, as by a hiccup of a network disk."""
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.name)


UNREADABLE = {
    "the numbers": lambda c: unreadable(largest(c)),
    "the numbers, and no seal": lambda c: (unreadable(largest(c)), (c / "seal.0.json").unlink()),
    "the description": lambda c: unreadable(c / "about" / "metadata"),
    "the seal": lambda c: unreadable(c / "seal.0.json"),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("what", UNREADABLE)
def test_one_that_cannot_be_read_at_the_moment_is_an_error_and_stays(what, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, made(1))
        checkpoints.save(2, made(2))
    UNREADABLE[what](tmp_path / "2")
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(ValueError, match=r"cannot read checkpoint .*2: .*symbolic links") as error,
    ):
        checkpoints.restore(made())
    assert "Nothing has been changed" in str(error.value)
    assert steps_in(tmp_path) == [1, 2] and not list(tmp_path.glob("damaged.*"))


@pytest.mark.parametrize("local", [None, "local"])
def test_too_many_open_files_set_no_checkpoint_aside(local, tmp_path):
    with Checkpoints(tmp_path / "kept", local=local and tmp_path / local) as checkpoints:
        checkpoints.save(1, made(1), local=local is not None)
        checkpoints.wait()
        before = sorted(tmp_path.rglob("*"))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            # Files 0, 1 and 2 stay open. Others may be closed by threads of other tests meanwhile.
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            with pytest.raises(
                ValueError, match=r"cannot read (the )?checkpoints? .*Too many open"
            ):
                checkpoints.restore(made())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert sorted(tmp_path.rglob("*")) == before
        assert_same(checkpoints.restore(made()).state, made(1))


def test_one_of_another_model_is_an_error_with_every_difference(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, made())
        other = TrainState(
            md.spec([], "int32"),
            {"w": md.spec([layers, embed]), "new": md.spec([embed])},
            {
                "mean": {"w": md.spec([layers, embed, hidden], "bfloat16")},
                "bits": made().optimizer["bits"],
            },
        )
        with pytest.raises(ValueError, match="is of another model") as error:
            checkpoints.restore(other)
    weight = "f32[layers=3, embed=12, hidden=20]"
    assert sorted(str(error.value).splitlines()[1:]) == [
        f"  optimizer/mean/w: {weight} in the checkpoint, bf16[layers=3, embed=12, hidden=20] here",
        "  params/layers/0: only in the checkpoint",
        "  params/new: not in the checkpoint",
        f"  params/w: {weight} in the checkpoint, f32[layers=3, embed=12] here",
    ]
    assert steps_in(tmp_path) == [1]


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot keep checkpoints in .*Not a directory"):
        Checkpoints(tmp_path / "file" / "inside")


def test_the_seal_names_every_file(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, made())
    sealed = set(json.loads((tmp_path / "1" / "seal.0.json").read_text()))
    files = {str(f.relative_to(tmp_path / "1")) for f in (tmp_path / "1").rglob("*") if f.is_file()}
    assert sealed == files - {"seal.0.json"}


def test_what_a_killed_run_has_begun_to_save_is_deleted_and_the_rest_stays(tmp_path):
    code = (
        "import os, signal, sys\n"
        "import numpy as np\n"
        "import meshdsl as md\n"
        "from meshdsl.training.checkpointing.checkpoints import Checkpoints\n"
        "array = md.named(np.zeros(2**10, np.float32), md.dims(embed=2**10))\n"
        "checkpoints = Checkpoints(sys.argv[1])\n"
        "checkpoints.save(1, {'w': array})\n"
        "checkpoints.wait()\n"
        "os.rename = os.replace = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
        "checkpoints.save(2, {'w': array})\n"
        "checkpoints.wait()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.run(command, timeout=300, check=False).returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob("2.*tmp*"))) == 1
    before = {path.name for path in tmp_path.iterdir() if "tmp" not in path.name}
    with Checkpoints(tmp_path):
        end = time.monotonic() + 120  # it is deleted behind the steps
        while list(tmp_path.glob("*tmp*")):
            assert time.monotonic() < end
            time.sleep(0.01)
    assert {path.name for path in tmp_path.iterdir()} == before
    assert "1" in before
