"""KerasHub's models with random weights: what they return, and the gradients of it.

Run as a program, `python reference.py gpt2 found.npz`, so that Keras and its settings stay in a
process of their own. The file holds, under names that begin with `input/`, `weight/`, `output/`,
`cotangent/` and `gradient/`, everything that another implementation needs to compare itself.
"""

import os
import sys

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # each program runs once
# Its text tokenizers would load TensorFlow, which the models on the JAX backend do without.
sys.modules["tensorflow"] = None
sys.modules["tensorflow_text"] = None

import jax  # noqa: E402
import keras_hub  # noqa: E402
import numpy as np  # noqa: E402

BATCH, LENGTH, VOCAB = 2, 8, 50
RNG = np.random.default_rng(0)


def tokens(length=LENGTH):
    return RNG.integers(0, VOCAB, (BATCH, length)).astype("int32")


def visible(length=LENGTH):
    return np.ones((BATCH, length), "int32")


def gpt2():
    model = keras_hub.models.GPT2Backbone(
        vocabulary_size=VOCAB,
        num_layers=2,
        num_heads=4,
        hidden_dim=16,
        intermediate_dim=32,
        max_sequence_length=LENGTH,
    )
    return model, {"token_ids": tokens(), "padding_mask": visible()}


def llama():
    model = keras_hub.models.LlamaBackbone(
        vocabulary_size=VOCAB,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
    )
    return model, {"token_ids": tokens(), "padding_mask": visible()}


def mixtral():
    model = keras_hub.models.MixtralBackbone(
        vocabulary_size=VOCAB,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        num_experts=4,
        sliding_window=5,
    )
    return model, {"token_ids": tokens(), "padding_mask": visible()}


def bert():
    model = keras_hub.models.BertBackbone(
        vocabulary_size=VOCAB,
        num_layers=2,
        num_heads=4,
        hidden_dim=16,
        intermediate_dim=32,
        max_sequence_length=LENGTH,
    )
    segments = RNG.integers(0, 2, (BATCH, LENGTH)).astype("int32")
    given = {"token_ids": tokens(), "segment_ids": segments, "padding_mask": visible()}
    return model, given


def t5():
    model = keras_hub.models.T5Backbone(
        vocabulary_size=VOCAB,
        num_layers=2,
        num_heads=4,
        hidden_dim=16,
        intermediate_dim=32,
        key_value_dim=6,
        activation="relu",
        use_gated_activation=False,
    )
    return model, {
        "encoder_token_ids": tokens(40),
        "encoder_padding_mask": visible(40),
        "decoder_token_ids": tokens(),
        "decoder_padding_mask": visible(),
    }


def resnet(block_type):
    model = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[7],
        stackwise_num_filters=[64, 8],
        stackwise_num_blocks=[1, 2],
        stackwise_num_strides=[1, 2],
        block_type=block_type,
        image_shape=(None, None, 3),
    )
    return model, {"image": RNG.normal(size=(BATCH, 22, 32, 3)).astype("float32")}


MODELS = {
    "gpt2": gpt2,
    "llama": llama,
    "mixtral": mixtral,
    "bert": bert,
    "t5": t5,
    "resnet": lambda: resnet("bottleneck_block"),
    "resnet_basic": lambda: resnet("basic_block"),
}


def random_weight(path, shape):
    """Returns numbers at which no term of the model is lost among others."""
    drawn = RNG.normal(size=shape)
    if path.endswith("moving_variance"):
        return 0.5 + drawn**2
    if path.endswith(("gamma", "scale", "weight")):
        return 1 + 0.2 * drawn
    fan_in = np.prod(shape[:-1]) if "conv" in path else shape[-2 if len(shape) == 3 else 0]
    return drawn / np.sqrt(fan_in) if len(shape) > 1 else 0.2 * drawn


def named(model, variables):
    """Returns the names of variables; where Keras has a name twice, `#1` makes the second."""
    seen = {}
    for variable in model.weights:
        count = sum(path.split("#")[0] == variable.path for path in seen.values())
        seen[id(variable)] = variable.path + (f"#{count}" if count else "")
    return [seen[id(variable)] for variable in variables]


def run(name):
    model, inputs = MODELS[name]()
    names = named(model, model.weights)
    weights = {n: random_weight(n, w.shape) for n, w in zip(names, model.weights, strict=True)}
    model.set_weights([weights[n] for n in names])
    given = inputs.get("image", inputs)
    trainable = [v.value for v in model.trainable_variables]
    fixed = [v.value for v in model.non_trainable_variables]

    def outputs(trainable):
        found, _ = model.stateless_call(trainable, fixed, given, training=False)
        return found if isinstance(found, dict) else {"states": found}

    cotangents = {
        key: RNG.normal(size=value.shape).astype("float32")
        for key, value in jax.eval_shape(outputs, trainable).items()
    }

    def total(trainable):
        found = outputs(trainable)
        return sum((found[key] * cotangents[key]).sum() for key in found), found

    (_, found), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(trainable)
    by_name = dict(zip(named(model, model.trainable_variables), gradients, strict=True))
    groups = {
        "input": inputs,
        "weight": weights,
        "output": found,
        "cotangent": cotangents,
        "gradient": by_name,
    }
    return {f"{group}/{key}": x for group, pairs in groups.items() for key, x in pairs.items()}


if __name__ == "__main__":
    np.savez(sys.argv[2], **{name: np.asarray(value) for name, value in run(sys.argv[1]).items()})
