"""Weights go out and in as safetensors: bit for bit, on any mesh, for any reader of such files."""

import json

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import meshdsl as md
from meshdsl.optim import AdamW
from meshdsl.tensors import dtypes
from meshdsl.training.checkpointing.exporting import export
from meshdsl.training.checkpointing.saving import Saving
from meshdsl.training.checkpointing.weights import load_weights, save_weights
from meshdsl.training.stopping import Stops
from tests.training import classifier
from tests.training.checkpointing.test_checkpoints import (
    LAYOUTS,
    assert_same,
    flip,
    is_array,
    largest,
    made,
    placed,
    places_on,
)
from tests.training.flat import train
from tests.training.test_resume import run

BFLOAT16 = dtypes.BFLOAT16


@pytest.fixture
def params():
    """A tree of several dtypes, bfloat16 among them."""
    state = made()
    return {**state.params, "bits": state.optimizer["bits"], "step": state.step}


def test_weights_go_from_any_mesh_to_any_other(tmp_path, params):
    for number, (mesh, layout) in enumerate(LAYOUTS):
        file = tmp_path / f"{number}.safetensors"
        assert save_weights(file, placed(params, mesh, layout)) == [file]
        for other, rules in LAYOUTS:
            places = places_on(other, rules, params)
            found = load_weights(file, params, places)
            assert_same(found, params)
            for array, place in zip(jax.tree.leaves(found), places, strict=True):
                assert array.sharding == place


def test_the_library_of_safetensors_reads_them_on_its_own(tmp_path, params):
    save_weights(tmp_path / "a.safetensors", params, step=7)
    found = load_file(tmp_path / "a.safetensors")
    expected = {name: np.asarray(params[name]) for name in ("w", "bits", "step")}
    expected["layers/0"] = np.asarray(params["layers"][0])
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()
    with safe_open(tmp_path / "a.safetensors", framework="numpy") as file:
        told = file.metadata()
    assert told["step"] == "7" and told["meshdsl_version"] == "0.1.0"
    assert json.loads(told["dims"]) == {
        "w": ["layers", "embed", "hidden"],
        "layers/0": ["embed", "hidden"],
        "bits": ["hidden"],
        "step": [],
    }


def test_what_another_program_has_written_is_read(tmp_path, params):
    arrays = {name: np.asarray(params[name]) for name in ("w", "bits", "step")}
    save_file(arrays | {"layers/0": np.asarray(params["layers"][0])}, tmp_path / "a.safetensors")
    assert_same(load_weights(tmp_path / "a.safetensors", params), params)


def test_a_folder_has_an_index_as_hugging_face_writes_it(tmp_path, params):
    files = save_weights(tmp_path / "out", params, max_shard_size=562)
    names = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    assert [file.name for file in files] == names
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 3 * 12 * 20 * 4 + 12 * 20 * 2 + 20 * 4 + 4},
        "weight_map": {"bits": names[0], "layers/0": names[0], "step": names[1], "w": names[2]},
    }
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)
    assert_same(load_weights(tmp_path / "out", params), params)
    save_weights(tmp_path / "one", params)
    assert [file.name for file in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    assert_same(load_weights(tmp_path / "one", params), params)


def test_fewer_bits_are_rounded_to_and_taken_again(tmp_path, params):
    save_weights(tmp_path / "a.safetensors", params, dtype="bfloat16")
    found = load_file(tmp_path / "a.safetensors")
    rounded = np.asarray(params["w"]).astype(BFLOAT16)
    assert found["w"].dtype == BFLOAT16 and found["bits"].dtype == np.uint32
    assert found["w"].tobytes() == rounded.tobytes()
    again = load_weights(tmp_path / "a.safetensors", params)
    assert np.array_equal(np.asarray(again["w"]), rounded.astype(np.float32))
    wide = {"w": md.named(np.array([1e30, 1.0, np.inf], np.float32), ["x"])}
    with pytest.raises(ValueError, match="w: 1 numbers are out of the range of float16"):
        save_weights(tmp_path / "b", wide, dtype="float16")
    assert not (tmp_path / "b").exists()


def test_nothing_is_written_over_or_left_half(tmp_path, params, monkeypatch):
    (tmp_path / "a.safetensors").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    for name in ("a.safetensors", "full"):
        with pytest.raises(ValueError, match=f"{name} is there already, and is not written over"):
            save_weights(tmp_path / name, params)
    assert (tmp_path / "a.safetensors").read_text() == "mine"
    with pytest.raises(ValueError, match=r"cannot write .*inside: File exists"):
        save_weights(tmp_path / "a.safetensors" / "inside", params)
    broken = {"a": params["w"], "b": md.named(np.zeros(3, np.complex128), ["x"])}
    with pytest.raises(ValueError, match=r"cannot write .*new: .* Nothing is left of it"):
        save_weights(tmp_path / "new", broken, max_shard_size=1000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "full"]


def test_whatever_is_of_another_model_is_told_at_once(tmp_path, params):
    file = tmp_path / "a.safetensors"
    save_weights(file, params)
    x, embed, hidden, layers = md.dims(x=3, embed=12, hidden=20, layers=3)
    like = {
        "w": md.spec([layers, embed, x]),
        "layers": [md.spec([hidden, embed], "bfloat16")],
        "bits": md.spec([hidden], "int32"),
        "new": md.spec([x]),
    }
    with pytest.raises(ValueError) as error:
        load_weights(file, like)
    assert str(error.value).splitlines() == [
        f"weights {file} are of another model",
        "  new: missing",
        "  step: not of the model (in a.safetensors)",
        "  bits: u32[hidden=20] in a.safetensors, s32[hidden=20] in the model",
        "  layers/0: bf16[embed=12, hidden=20] in a.safetensors, bf16[hidden=20, embed=12] in the "
        "model",
        "  w: f32[layers=3, embed=12, hidden=20] in a.safetensors, f32[layers=3, embed=12, x=3] in "
        "the model",
    ]
    with pytest.raises(ValueError, match=r"w: f32\[x=3\] in n.safetensors, bf16\[x=3\] in the"):
        save_weights(tmp_path / "n.safetensors", {"w": md.named(np.zeros(3, np.float32), [x])})
        load_weights(tmp_path / "n.safetensors", {"w": md.spec([x], "bfloat16")})


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (
            lambda data: data[:-1],
            " is not a whole safetensors file: incomplete metadata, file not fully covered",
        ),
        (lambda data: data[:30], " is not a whole safetensors file: invalid header length"),
        (lambda data: b"", " is not a whole safetensors file: header too small"),
        (
            lambda data: data[:8] + b"}" + data[9:],
            " is not a whole safetensors file: invalid JSON in header",
        ),
        (lambda data: None, ": there is no such file"),
    ],
)
def test_a_file_that_is_not_whole_is_named(harm, told, tmp_path, params):
    save_weights(tmp_path / "out", params, max_shard_size=562)
    file = tmp_path / "out" / "model-00002-of-00003.safetensors"
    data = harm(file.read_bytes())
    file.unlink()
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(ValueError, match=r"cannot read the weights in .*out") as error:
        load_weights(tmp_path / "out", params)
    (line,) = str(error.value).splitlines()[1:]
    assert line.startswith(f"  {file}{told}")


def test_an_index_is_checked(tmp_path, params):
    save_weights(tmp_path / "out", params, max_shard_size=562)
    index = tmp_path / "out" / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": whole["weight_map"] | {"w": "../w.safetensors"}}))
    with pytest.raises(ValueError, match="names a file that is not in its folder"):
        load_weights(tmp_path / "out", params)
    index.write_text(json.dumps({"weight_map": whole["weight_map"] | {"v": files_of(whole)[0]}}))
    with pytest.raises(ValueError, match=r"v: not in .*00001-of-00003.safetensors, where model.s"):
        load_weights(tmp_path / "out", params)
    index.write_text(index.read_text()[:-9])
    with pytest.raises(ValueError, match=r"index.json is not an index of safetensors files: JSOND"):
        load_weights(tmp_path / "out", params)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no .safetensors file"):
        load_weights(tmp_path / "empty", params)


def files_of(index):
    return sorted(set(index["weight_map"].values()))


def trained(workdir, at=4, **options):
    mesh = {"mesh": "data:2,model:4", "layout": classifier.LAYOUT}
    saving = Saving(every=2) if workdir else None
    return run(workdir, saving=saving, stops=Stops(at_step=at), **mesh | options)


@pytest.mark.long
def test_a_checkpoint_is_exported_without_its_mesh(tmp_path):
    result = trained(tmp_path, backend="jax")
    done = export(tmp_path, tmp_path / "out", max_shard_size=400)
    assert (done.step, len(done.files)) == (4, 2)
    assert_same(load_weights(tmp_path / "out", result.state.params), result.state.params)
    export(tmp_path, tmp_path / "two.safetensors", step=2)
    found = load_weights(tmp_path / "two.safetensors", result.state.params)
    expected = trained(None, at=2).state.params
    for name in ("w_in", "bias", "w_out"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=2e-6)
    with pytest.raises(ValueError, match=r"has no checkpoint of step 3; it has 2, 4"):
        export(tmp_path, tmp_path / "three", step=3)
    with pytest.raises(ValueError, match=r"checkpoints has no checkpoint$"):
        export(tmp_path / "out", tmp_path / "three")


def test_of_a_damaged_checkpoint_nothing_is_exported(tmp_path):
    trained(tmp_path)
    flip(largest(tmp_path / "checkpoints" / "4"))
    with pytest.raises(ValueError, match=r"checkpoint .*4 is damaged: .* is not as it was written"):
        export(tmp_path, tmp_path / "out", step=4)
    with pytest.warns(UserWarning, match=r"checkpoint .*4 is damaged"):
        assert export(tmp_path, tmp_path / "out").step == 2
    checkpoints = [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()]
    assert sorted(checkpoints) == ["2", "4"]


@pytest.mark.parametrize(
    ("backend", "mesh", "layout"),
    [
        ("jax", "data:2,model:4", classifier.LAYOUT),
        ("jax", "data:3", "pixel:data"),
        ("numpy", None, None),
    ],
)
def test_a_run_starts_from_weights_on_any_mesh(backend, mesh, layout, tmp_path):
    first = trained(None).state.params
    save_weights(tmp_path / "out", first, max_shard_size=100)
    where = {"mesh": mesh, "layout": layout, "backend": backend}
    expected = train(
        lambda key: jax.tree.map(lambda x: md.zeros(x.dims) + x, first, is_leaf=is_array),
        classifier.loss,
        AdamW(0.05),
        classifier.endless(),
        batch_dims=classifier.BATCH_DIMS,
        backend="numpy",
        quiet=True,
        steps=3,
    )
    found = run(init_from=tmp_path / "out", steps=3, seed=5, **where)
    np.testing.assert_allclose(found.losses, expected.losses, atol=2e-6)


def test_a_checkpoint_goes_before_weights_and_says_so(tmp_path, capsys):
    whole = run()
    run(tmp_path / "run", saving=Saving(), stops=Stops(at_step=3))
    found = run(tmp_path / "run", saving=Saving(), init_from=tmp_path / "gone", quiet=False)
    assert found.losses == whole.losses[3:]
    told = capsys.readouterr().out.splitlines()[0]
    assert told.endswith(f"checkpoints/3, and not from the weights {tmp_path}/gone")


def test_weights_of_another_model_are_told_before_anything_is_compiled(tmp_path):
    save_weights(tmp_path / "a", {"weight": md.named(np.zeros(3, np.float32), ["x"])})
    with pytest.raises(ValueError, match=r"weights .*a are of another model"):
        run(init_from=tmp_path / "a")
    with pytest.raises(ValueError, match="there is no such file"):
        run(init_from=tmp_path / "none")


def test_names_that_are_nearly_those_of_the_model_are_told_with_these(tmp_path):
    (x,) = md.dims(x=3)
    arrays = {"atention": {"query": md.named(np.zeros(3, np.float32), [x])}}
    save_weights(tmp_path / "a.safetensors", arrays)
    with pytest.raises(ValueError) as error:
        load_weights(tmp_path / "a.safetensors", {"attention": {"query": md.spec([x])}})
    assert str(error.value).splitlines()[1:3] == [
        "  attention/query: missing; there is atention/query",
        "  atention/query: not of the model (in a.safetensors); it has attention/query",
    ]
