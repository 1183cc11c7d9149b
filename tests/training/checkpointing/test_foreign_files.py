"""Weights of Hugging Face folders: what is wrong with them, and how much memory reading takes."""

import tracemalloc

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import meshdsl as md
from meshdsl import models
from meshdsl.training.checkpointing.foreign_files import ForeignFiles
from meshdsl.training.checkpointing.weights import Weights, load_weights
from meshdsl.training.programs import places
from meshdsl.training.state import by_path, spec_of
from tests.models.huggingface.folders import CONFIGS, tensors_of, write_folder


def changed(folder, change):
    """Applies a change to the tensors of a folder of one file."""
    file = folder / "model-1.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder


def refused(folder):
    with pytest.raises(ValueError) as error:
        Weights(folder)
    return str(error.value)


def test_all_tensors_that_do_not_fit_are_told_with_the_nearest_names(tmp_path):
    def change(tensors):
        query = tensors.pop("model.layers.1.self_attn.q_proj.weight")
        tensors["model.layers.1.self_attn.q_projection.weight"] = query
        tensors["model.norm.weight"] = np.ones(25, "float32")
        tensors["score.weight"] = np.ones(3, "float32")
        del tensors["lm_head.weight"]

    text = refused(changed(write_folder(tmp_path / "in", CONFIGS["llama 2"]), change))
    first, *rest = text.splitlines()
    assert first.startswith(f"the tensors in {tmp_path}/in are not those of the llama model that")
    assert sorted(rest) == [
        "  lm_head.weight: missing",
        "  model.layers.1.self_attn.q_proj.weight: missing; there is "
        "model.layers.1.self_attn.q_projection.weight",
        "  model.layers.1.self_attn.q_projection.weight: not of such a model (in "
        "model-1.safetensors); it has model.layers.1.self_attn.q_proj.weight",
        "  model.norm.weight: [25], needs [24]",
        "  score.weight: not of such a model (in model-1.safetensors)",
    ]


def test_a_folder_without_config_or_with_pickled_weights_is_told(tmp_path):
    folder = write_folder(tmp_path / "in", CONFIGS["gpt2"])
    like = spec_of(models.load(str(folder)).init)
    settings = (folder / "config.json").read_text()
    (folder / "config.json").unlink()
    with pytest.raises(
        ValueError, match=r"folder of Hugging Face, it lacks its config\.json"
    ) as no:
        load_weights(folder, like)
    assert "config.json" in str(no.value).splitlines()[0]  # the names that differ come after it
    (folder / "config.json").write_text(settings)
    (folder / "model-1.safetensors").rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin can run code when it is read" in refused(folder)


def test_names_without_the_head_and_copies_of_the_embedding_are_read(tmp_path):
    """As the folder `gpt2` of the hub has them, with the masks of old versions beside."""
    folder = write_folder(tmp_path / "in", CONFIGS["gpt2"])
    like = spec_of(models.load(str(folder)).init)
    expected = by_path(load_weights(folder, like))

    def change(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["lm_head.weight"] = tensors["wte.weight"].copy()
        tensors["h.0.attn.bias"] = np.ones((1, 1, 32, 32), "float32")

    for path, leaf in by_path(load_weights(changed(folder, change), like)).items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected[path]))


def traced(call):
    """Returns what a call returns, and how many bytes more than before it held at most."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        result = call()
        return result, tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("case", ["llama 2", "phi3"])  # phi3: several parameters in one tensor
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("split", ["", "layers", "heads", "kv", "embed"])
def test_reading_a_block_takes_one_tensor_beside_it(case, stored, split, tmp_path):
    """So it does where a dim inside of a merged axis is split, and where numbers become float32."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 4001}
    settings = CONFIGS[case] | sizes | {"num_attention_heads": 8, "num_key_value_heads": 4}
    files = ForeignFiles(write_folder(tmp_path / "in", settings, dtype=stored))
    tensors = tensors_of(tmp_path / "in")
    largest, read = max(array.nbytes for array in tensors.values()), 0
    for path, leaf in by_path(spec_of(files.folder.model.init)).items():
        dims = [(d.size // 2 if d.name == split else 0, d.size) for d in leaf.dims]
        block, most = traced(lambda p=path, d=dims: files.read(p, d, np.dtype("float32")))
        assert most - block.nbytes <= 1.2 * largest, path
        read += block.size
    every = sum(array.size for array in tensors.values())
    assert read == every if not split else read < every


def test_reading_all_takes_one_tensor_beside_the_parameters(tmp_path):
    """Parameters of many layers, each of several tensors, are not copied when they are there."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
    settings = CONFIGS["llama 2"] | sizes | {"num_attention_heads": 8}
    folder = write_folder(tmp_path / "in", settings, dtype="bfloat16")
    largest = max(array.nbytes for array in tensors_of(folder).values())
    weights, like = Weights(folder), spec_of(models.load(str(folder)).init)
    params, most = traced(lambda: weights.load(like))
    own = sum(np.asarray(leaf).nbytes for leaf in by_path(params).values())
    assert most - own <= 1.2 * largest


def test_each_device_reads_its_own_slices(tmp_path):
    folder = write_folder(tmp_path / "in", CONFIGS["llama 2"])
    model = models.load(str(folder))
    expected = by_path(load_weights(folder, spec_of(model.init)))
    compiled = (
        md.jit(lambda params: params, mesh="data:2,model:2", layout="heads:model; embed:data")
        .lower(spec_of(model.init))
        .compile()
    )
    weights, asked = Weights(folder), []
    inner = weights.files._files.read

    def counted(name, index, dtype):
        block = inner(name, index, dtype)
        asked.append((name, block.size))
        return block

    weights.files._files.read = counted
    like = spec_of(model.init)
    loaded = by_path(weights.load(like, places(compiled, like)))
    for path, leaf in loaded.items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected[path]), err_msg=path)
    query = [size for name, size in asked if name.endswith("layers.0.self_attn.q_proj.weight")]
    assert query == [24 * 24 // 4] * 4
