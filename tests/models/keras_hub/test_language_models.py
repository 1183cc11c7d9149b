"""Language models return what KerasHub's do on its JAX backend, and have the same gradients.

All in float32 with random weights, to 1e-4 of each array's scale.
"""

import numpy as np
import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.models import bert, t5, transformer
from tests.models.keras_hub.compare import check, single, stacked

SIZES = "layers=2,embed=16,heads=4,d_ff=32,vocab=50,max_length=8"
TENSOR = {"mesh": "data:2,model:2", "layout": "batch:data; heads:model; d_ff:model; vocab:model"}
STATES = {"states": ["batch", "length", "embed"]}


def attention(layer, ours="attention", biased=True):
    found = {}
    for name in ("query", "key", "value", "out"):
        theirs = f"{layer}/{'attention_output' if name == 'out' else name}"
        found[f"{ours}/{name}"] = stacked(f"{theirs}/kernel")
        if biased:
            found[f"{ours}/{name}_bias"] = stacked(f"{theirs}/bias")
    return found


def layer_norm(ours, theirs):
    return {f"{ours}/scale": stacked(f"{theirs}/gamma"), f"{ours}/bias": stacked(f"{theirs}/beta")}


def blocks_with_biases(layer, self_attention):
    found = attention(f"{layer}/{self_attention}")
    found |= layer_norm("attention_norm", f"{layer}/self_attention_layer_norm")
    found |= layer_norm("mlp_norm", f"{layer}/feedforward_layer_norm")
    for ours, theirs in (("in", "intermediate"), ("out", "output")):
        found[f"mlp/w_{ours}"] = stacked(f"{layer}/feedforward_{theirs}_dense/kernel")
        found[f"mlp/bias_{ours}"] = stacked(f"{layer}/feedforward_{theirs}_dense/bias")
    return {f"blocks/{path}": take for path, take in found.items()}


def text(inputs):
    return {"tokens": md.named(inputs["token_ids"], ["batch", "length"])}


def decoder_states(model):
    return lambda params, given: {
        "states": transformer.states(model.config, params, given["tokens"])[0]
    }


@pytest.mark.long
def test_gpt2():
    model = models.load("gpt2_small", SIZES)
    mapping = {
        "embedding": single("token_embedding/embeddings"),
        "positions": single("position_embedding/embeddings"),
        "final_norm/scale": single("layer_norm/gamma"),
        "final_norm/bias": single("layer_norm/beta"),
        **blocks_with_biases("transformer_layer_{}", "self_attention"),
    }
    check("gpt2", model.init, decoder_states(model), mapping, text, STATES, **TENSOR)


def rotary_decoder():
    layer = "transformer_layer_{}"
    return {
        "embedding": single("token_embedding/embeddings"),
        "unembedding": None,  # the backbone ends with the states
        "final_norm/scale": single("sequence_output_layernorm/scale"),
        "blocks/attention_norm/scale": stacked(f"{layer}/self_attention_layernorm/scale"),
        "blocks/mlp_norm/scale": stacked(f"{layer}/feedforward_layernorm/scale"),
        **attention(f"{layer}/self_attention", "blocks/attention", biased=False),
    }


@pytest.mark.long
def test_llama():
    model = models.load("llama3_8b", f"{SIZES},kv_heads=2,rotary_base=10000")
    dense = "transformer_layer_{}/feedforward_{}_dense/kernel"
    mapping = {
        **rotary_decoder(),
        "blocks/mlp/w_in": stacked(dense.format("{}", "intermediate")),
        "blocks/mlp/w_gate": stacked(dense.format("{}", "gate")),
        "blocks/mlp/w_out": stacked(dense.format("{}", "output")),
    }
    check("llama", model.init, decoder_states(model), mapping, text, STATES, **TENSOR)


@pytest.mark.slow
def test_mixtral():
    overrides = f"{SIZES},kv_heads=2,experts=4,capacity=none,rotary_base=10000,window=5"
    model = models.load("mixtral_8x7b", overrides)

    def sparse(name):
        """Keras numbers these layers, and calls the first by no number."""

        def take(weights):
            blocks = ["mixtral_sparse_moe_block", "mixtral_sparse_moe_block_1"]
            layers = [f"transformer_layer_{i}/{block}/{name}" for i, block in enumerate(blocks)]
            return np.stack([weights[layer] for layer in layers])

        return take

    def expert(name):
        return sparse(f"experts/expert_feedforward_{name}_dense")

    mapping = {
        **rotary_decoder(),
        "blocks/mlp/router": sparse("sparse_feedforward_gate_dense/kernel"),
        "blocks/mlp/experts/w_in": expert("intermediate"),
        "blocks/mlp/experts/w_gate": expert("gate"),
        "blocks/mlp/experts/w_out": expert("output"),
    }
    where = {"mesh": "expert:2,model:2", "layout": "batch:expert?; experts:expert; heads:model"}
    check("mixtral", model.init, decoder_states(model), mapping, text, STATES, **where)


@pytest.mark.slow
def test_bert():
    model = models.load("bert_base", f"{SIZES},mask_token=3")
    mapping = {
        "embedding": single("token_embedding/embeddings"),
        "positions": single("position_embedding/embeddings"),
        "segments": single("segment_embedding/embeddings"),
        "embedding_norm/scale": single("embeddings_layer_norm/gamma"),
        "embedding_norm/bias": single("embeddings_layer_norm/beta"),
        "pooler/weight": single("pooled_dense/kernel"),
        "pooler/bias": single("pooled_dense/bias"),
        "head/weight": None,
        "head/bias": None,
        "head/norm/scale": None,
        "head/norm/bias": None,
        "head/out_bias": None,
        **blocks_with_biases("transformer_layer_{}", "self_attention_layer"),
    }

    def given(inputs):
        return text(inputs) | {"segments": md.named(inputs["segment_ids"], ["batch", "length"])}

    def states(params, given):
        x, _ = bert.states(model.config, params, given["tokens"], given["segments"])
        return {"sequence_output": x, "pooled_output": params.pooler(x)}

    outputs = {
        "sequence_output": ["batch", "length", "embed"],
        "pooled_output": ["batch", "pooled"],
    }
    check("bert", model.init, states, mapping, given, outputs, **TENSOR)


def t5_stack(ours, theirs, first_norm, embeddings):
    layer = f"transformer_{theirs}_layer_{{}}"
    norms = ["attention_norm", "cross_norm", "mlp_norm"]
    if ours == "encoder":
        norms.remove("cross_norm")
    found = {
        "distances": single(f"self_attention/embeddings{embeddings}"),
        "final_norm/scale": single(f"{theirs}_output_layer_norm/weight"),
        "blocks/mlp/w_in": stacked(f"{layer}/input_projector/kernel"),
        "blocks/mlp/w_out": stacked(f"{layer}/output_projector/kernel"),
    }

    def norm(place):
        def take(weights):
            # Keras numbers these layers through the whole model, and calls the first by no number.
            numbers = [first_norm + place + i * len(norms) for i in range(2)]
            names = [f"t5_layer_norm_{n}" if n else "t5_layer_norm" for n in numbers]
            return np.stack([weights[f"{layer.format(i)}/{n}/weight"] for i, n in enumerate(names)])

        return take

    for place, name in enumerate(norms):
        found[f"blocks/{name}/scale"] = norm(place)
    kinds = {"attention": "self_attention", "cross": "cross_attention"}
    for kind in list(kinds)[: len(norms) - 1]:
        for name in ("query", "key", "value", "out"):
            projector = f"{'output' if name == 'out' else name}_projector"
            found[f"blocks/{kind}/{name}"] = stacked(f"{layer}/{kinds[kind]}/{projector}/kernel")
    return {f"{ours}/{path}": take for path, take in found.items()}


@pytest.mark.long
def test_t5():
    model = models.load("t5_small", f"{SIZES},kv=6")
    mapping = {
        "embedding": single("token_embedding/embeddings"),
        **t5_stack("encoder", "encoder", 0, ""),
        **t5_stack("decoder", "decoder", 4, "#1"),
    }

    def given(inputs):
        return {
            "source": md.named(inputs["encoder_token_ids"], ["batch", "length"]),
            "tokens": md.named(inputs["decoder_token_ids"], ["batch", "length"]),
        }

    def states(params, given):
        encoded, decoded, _ = t5.states(model.config, params, given["source"], given["tokens"])
        return {"encoder_sequence_output": encoded, "decoder_sequence_output": decoded}

    outputs = {
        "encoder_sequence_output": ["batch", "length", "embed"],
        "decoder_sequence_output": ["batch", "length", "embed"],
    }
    check("t5", model.init, states, mapping, given, outputs, **TENSOR)
