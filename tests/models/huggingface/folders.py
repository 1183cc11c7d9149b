"""Small folders of Hugging Face with random weights, written without torch."""

import json

import numpy as np
from safetensors.numpy import load_file, save_file

from meshdsl.models import bert, t5, transformer
from meshdsl.models.bert import BertConfig
from meshdsl.models.huggingface import Folder
from meshdsl.models.t5 import T5Config
from meshdsl.training.checkpointing.weights import write_hugging_face
from meshdsl.training.state import by_path, spec_of

SIZES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 67,  # no layout divides it
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
ENCODER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 32,
    "vocab_size": 67,
}
T5_SIZES = {
    "d_model": 24,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 3,
    "num_heads": 6,
    "vocab_size": 67,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
}
SOURCE = slice(2, None)
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 3.0, 9.0, 27.0],
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
}
DEEPSEEK = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 64,
    "vocab_size": 67,
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
CONFIGS = {
    "gpt2": {
        "model_type": "gpt2",
        "n_layer": 3,
        "n_embd": 24,
        "n_head": 6,
        "n_positions": 32,
        "vocab_size": 67,
    },
    "llama 2": {"model_type": "llama", **SIZES, "rms_norm_eps": 1e-5},
    "llama 3.1": {
        "model_type": "llama",
        **SIZES,
        "head_dim": 8,
        "rope_theta": 100.0,
        "rope_scaling": LLAMA3,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
    "llama, yarn": {
        "model_type": "llama",
        **SIZES,
        "head_dim": 16,
        "rope_theta": 100.0,
        "rope_scaling": YARN,
    },
    "llama, dynamic": {
        "model_type": "llama",
        **SIZES,
        "max_position_embeddings": 12,
        "rope_scaling": {"rope_type": "dynamic", "factor": 3.0},
    },
    "llama, longrope": {
        "model_type": "llama",
        **SIZES,
        "head_dim": 8,
        "rope_scaling": LONG,
    },
    "phi3, 128k": {
        "model_type": "phi3",
        **SIZES,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "original_max_position_embeddings": 16,
        "rope_scaling": {
            "type": "su",
            "short_factor": LONG["short_factor"],
            "long_factor": LONG["long_factor"],
        },
    },
    "mistral": {"model_type": "mistral", **SIZES, "sliding_window": 5},
    "qwen2": {
        "model_type": "qwen2",
        **SIZES,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
    "mixtral": {
        "model_type": "mixtral",
        **SIZES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gemma": {"model_type": "gemma", **SIZES, "head_dim": 8},
    "gemma2": {
        "model_type": "gemma2",
        **SIZES,
        "head_dim": 8,
        "sliding_window": 5,
        "query_pre_attn_scalar": 5,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **SIZES,
        "head_dim": 8,
        "sliding_window": 4,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 5,
        "rope_theta": 1000.0,
        "rope_local_base_freq": 10.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "phi3": {"model_type": "phi3", **SIZES},
    "deepseek_v2": {"model_type": "deepseek_v2", **DEEPSEEK, "q_lora_rank": None},
    "deepseek_v2, groups": {
        "model_type": "deepseek_v2",
        **DEEPSEEK,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 3.0,
        "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **DEEPSEEK,
        "first_k_dense_replace": 2,
        "routed_scaling_factor": 2.5,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "t5": {"model_type": "t5", **T5_SIZES},
    "t5 v1.1": {
        "model_type": "t5",
        **T5_SIZES,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
    "bert": {"model_type": "bert", **ENCODER},
    "bert, pooler": {
        "model_type": "bert",
        **ENCODER,
        "architectures": ["BertForPreTraining"],
        "hidden_act": "relu",
    },
    "roberta": {"model_type": "roberta", **ENCODER, "pad_token_id": 1, "type_vocab_size": 1},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 8},
}


def table_of(folder):
    """Returns the table of the folder's model."""
    read = Folder.read(folder)
    return read.family.table(read.model.config, by_path(spec_of(read.model.init)))


def scores_of(model):
    """Returns the function params, tokens -> scores of a model."""
    if isinstance(model.config, T5Config):  # the encoder reads some of the tokens
        return lambda params, tokens: t5.logits(
            model.config, params, tokens["length", SOURCE], tokens
        )
    family = bert if isinstance(model.config, BertConfig) else transformer
    return lambda params, tokens: family.logits(model.config, params, tokens)


def write_folder(folder, config, files=1, dtype="float32", seed=0):
    """Writes a folder with random weights of a config.json; returns it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, shape in table_of(folder).shapes().items():
        numbers = 0.3 * rng.normal(size=shape) + name.endswith("norm.weight")
        # Biases of routers are float32 in all folders.
        arrays[name] = numbers.astype("float32" if "correction_bias" in name else dtype)
    names = sorted(arrays)
    weight_map = {
        name: f"model-{1 + number % files}.safetensors" for number, name in enumerate(names)
    }
    if files > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in {*weight_map.values()}:
        save_file({n: arrays[n] for n in names if weight_map[n] == file}, folder / file)
    return folder


def tensors_of(folder):
    """Returns all tensors of a folder by name."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: array for file in files for name, array in load_file(file).items()}


def write_back(out, model, params, origin=None, most=5 * 10**9):
    """Writes parameters as a folder; returns it."""
    arrays = by_path(params)

    def fetch(names):
        return {name: np.asarray(arrays[name]) for name in names}

    write_hugging_face(out, model, by_path(spec_of(model.init)), fetch, None, most, origin)
    return out
