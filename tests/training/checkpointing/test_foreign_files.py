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
    with pytest.raises(ValueError, match=r"folder of Hugging Face, it lacks its config\.json"):
        load_weights(folder, like)
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


def test_reading_on_devices_takes_one_tensor_beside_the_parameters(tmp_path):
    """Parameters in bfloat16 become float32 on the way; nothing else is held beside them."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 4001}
    folder = write_folder(tmp_path / "in", CONFIGS["llama 2"] | sizes | {"num_attention_heads": 8})
    files = ForeignFiles(folder)
    largest = max(array.nbytes for array in tensors_of(folder).values())
    like = spec_of(models.load(str(folder)).init)
    read = 0
    tracemalloc.start()
    for path, leaf in by_path(like).items():
        full = [(0, size) for size in leaf.dims.sizes]
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        block = files.read(path, full, np.dtype("float32"))
        _, peak = tracemalloc.get_traced_memory()
        assert peak - before - block.nbytes <= 1.2 * largest
        read += block.nbytes
        del block
    tracemalloc.stop()
    assert read == sum(array.nbytes for array in tensors_of(folder).values())


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
