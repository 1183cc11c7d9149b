"""Models that others have published in JAX, small, with the names that they need.

The structures are those of Flax's example lm1b, of Equinox's example BERT and of ResNet-50.
"""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from tests.imports.jax.distances import LAYOUTS

VOCAB, EMBED, HEADS, HIDDEN, LENGTH, BATCH = 48, 32, 4, 64, 16, 8


@dataclass(frozen=True)
class Published:
    """A model: a loss with further outputs, what it is of, and what is said of dims.

    Attributes:
        loss: of the parameters and the inputs; returns a number, and outputs.
    """

    loss: Any
    params: Any
    inputs: tuple[Any, ...]
    names: dict[str, Any]
    layouts: tuple[str, ...]


def tokens(seed, *sizes):
    return np.random.default_rng(seed).integers(1, VOCAB, sizes or (BATCH, LENGTH)).astype("int32")


def cross_entropy(logits, targets, weights):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
    return -jnp.sum(chosen * weights) / jnp.sum(weights)


def lm1b():
    """Flax's `examples/lm1b`: a decoder with shifted inputs, sinusoids and logits by embeddings."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            h = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(HEADS, use_bias=False, name="attention")(
                h, mask=mask
            )
            h = nn.relu(nn.Dense(HIDDEN, name="w_in")(nn.LayerNorm()(x)))
            return x + nn.Dense(EMBED, name="w_out")(h)

    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, inputs):
            shifted = jnp.pad(inputs, ((0, 0), (1, 0)))[:, :-1]
            embed = nn.Embed(VOCAB, EMBED)
            x = embed(shifted)
            angles = np.arange(LENGTH)[:, None] / 10_000 ** (np.arange(EMBED // 2) * 2 / EMBED)
            x = x + np.concatenate([np.sin(angles), np.cos(angles)], -1).astype("float32")[None]
            seen = inputs > 0
            mask = nn.combine_masks(nn.make_attention_mask(seen, seen), nn.make_causal_mask(inputs))
            for _ in range(2):
                x = Block()(x, mask)
            return embed.attend(nn.LayerNorm()(x)) / np.sqrt(EMBED).astype("float32")

    model, inputs = Decoder(), tokens(0)
    inputs[1, 11:] = 0  # pads

    def loss(params, inputs):
        logits = model.apply(params, inputs)
        return cross_entropy(logits, inputs, (inputs > 0).astype(jnp.float32)), logits

    names = {
        "inputs": "batch length",
        "params/**/embedding": "vocab embed",
        "params/**/query/kernel": "_ heads kv",
        "params/**/value/kernel": "_ _ kv",
        "params/**/w_in/kernel": "_ d_ff",
    }
    params = jax.jit(model.init)(jax.random.key(0), inputs)
    return Published(loss, jax.tree.map(np.asarray, params), (inputs,), names, LAYOUTS)


class Layer(eqx.Module):
    """A layer of `Bert`; each function is of one text, or of one token."""

    attention: eqx.nn.MultiheadAttention
    attention_norm: eqx.nn.LayerNorm
    w_in: eqx.nn.Linear
    w_out: eqx.nn.Linear
    mlp_norm: eqx.nn.LayerNorm

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(HEADS, EMBED, key=keys[0])
        self.attention_norm = eqx.nn.LayerNorm(EMBED)
        self.w_in = eqx.nn.Linear(EMBED, HIDDEN, key=keys[1])
        self.w_out = eqx.nn.Linear(HIDDEN, EMBED, key=keys[2])
        self.mlp_norm = eqx.nn.LayerNorm(EMBED)

    def __call__(self, x, seen):
        mask = seen[None, :] & seen[:, None]
        x = jax.vmap(self.attention_norm)(x + self.attention(x, x, x, mask=mask))
        h = jax.vmap(lambda token: self.w_out(jax.nn.gelu(self.w_in(token))))(x)
        return jax.vmap(self.mlp_norm)(x + h)


class Bert(eqx.Module):
    """Equinox's example BERT, of one text: `vmap` makes it one of many."""

    token: eqx.nn.Embedding
    segment: eqx.nn.Embedding
    position: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm
    layers: list[Layer]
    pooler: eqx.nn.Linear
    classes: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 7)
        self.token = eqx.nn.Embedding(VOCAB, EMBED, key=keys[0])
        self.segment = eqx.nn.Embedding(2, EMBED, key=keys[1])
        self.position = eqx.nn.Embedding(LENGTH, EMBED, key=keys[2])
        self.norm = eqx.nn.LayerNorm(EMBED)
        self.layers = [Layer(keys[3]), Layer(keys[4])]
        self.pooler = eqx.nn.Linear(EMBED, EMBED, key=keys[5])
        self.classes = eqx.nn.Linear(EMBED, 6, key=keys[6])

    def __call__(self, text, segments):
        places = jnp.arange(text.shape[-1])
        embedded = (
            jax.vmap(self.token)(text)
            + jax.vmap(self.segment)(segments)
            + jax.vmap(self.position)(places)
        )
        x = jax.vmap(self.norm)(embedded)
        for layer in self.layers:
            x = layer(x, text > 0)
        return self.classes(jnp.tanh(self.pooler(x[0])))


def equinox_bert():
    params, static = eqx.partition(Bert(jax.random.key(0)), eqx.is_inexact_array)

    def loss(params, text, segments, answers):
        model = eqx.combine(params, static)
        logits = jax.vmap(model)(text, segments)
        return cross_entropy(logits, answers, jnp.ones(answers.shape)), logits

    text = tokens(1)
    text[2, 9:] = 0  # pads
    inputs = (text, (text % 2).astype("int32"), (np.arange(BATCH) % 6).astype("int32"))
    names = {
        "text": "batch length",
        "params/token/weight": "vocab embed",
        "params/segment/weight": "segments _",
        "params/layers/*/attention/query_proj/weight": "(heads kv) _",
        "params/layers/*/attention/value_proj/weight": "(heads kv) _",
        "params/layers/*/w_in/weight": "d_ff _",
        "params/pooler/weight": "pooled _",
        "params/classes/weight": "classes _",
    }
    return Published(loss, jax.tree.map(np.asarray, params), inputs, names, LAYOUTS)


BLOCKS = (3, 4, 6, 3)  # of ResNet-50


def convolve(x, kernel, stride=1):
    kinds = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=kinds)


def normalise(x, norm):
    """Returns as a batch norm in training."""
    mean = jnp.mean(x, (0, 1, 2))
    variance = jnp.mean(jnp.square(x), (0, 1, 2)) - jnp.square(mean)
    return (x - mean) * lax.rsqrt(variance + 1e-3) * norm["scale"] + norm["bias"]


def bottleneck(x, block, stride):
    y = jax.nn.relu(normalise(convolve(x, block["reduce"]), block["reduce_norm"]))
    y = jax.nn.relu(normalise(convolve(y, block["conv"], stride), block["conv_norm"]))
    y = normalise(convolve(y, block["expand"]), block["expand_norm"])
    if "project" in block:
        x = normalise(convolve(x, block["project"], stride), block["project_norm"])
    return jax.nn.relu(x + y)


def resnet50(width=4, size=96, classes=8):
    """ResNet-50 v1.5 (He et al. 2016; Goyal et al. 2017), narrow, with batch norms in training."""
    rng = np.random.default_rng(0)

    def kernel(*sizes):
        return (rng.standard_normal(sizes) * np.sqrt(2 / np.prod(sizes[:-1]))).astype("float32")

    def norm(channels, scale=1.0):
        return {"scale": np.full(channels, scale, "f"), "bias": np.zeros(channels, "f")}

    params: dict[str, Any] = {"stem": kernel(7, 7, 3, width), "stem_norm": norm(width)}
    before = width
    for stage, count in enumerate(BLOCKS):
        inner, outer = width * 2**stage, 4 * width * 2**stage
        blocks = []
        for number in range(count):
            block = {
                "reduce": kernel(1, 1, before, inner),
                "reduce_norm": norm(inner),
                "conv": kernel(3, 3, inner, inner),
                "conv_norm": norm(inner),
                "expand": kernel(1, 1, inner, outer),
                # Usual are zeros; ones let errors of rounding grow from block to block.
                "expand_norm": norm(outer, 0.1),
            }
            if number == 0:
                block |= {"project": kernel(1, 1, before, outer), "project_norm": norm(outer)}
            blocks.append(block)
            before = outer
        params[f"stage_{stage}"] = blocks
    params["head"] = {"kernel": kernel(before, classes), "bias": np.zeros(classes, "f")}

    def loss(params, images, answers):
        x = jax.nn.relu(normalise(convolve(images, params["stem"], 2), params["stem_norm"]))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for stage in range(len(BLOCKS)):
            for number, block in enumerate(params[f"stage_{stage}"]):
                x = bottleneck(x, block, 2 if stage and not number else 1)
        logits = jnp.mean(x, (1, 2)) @ params["head"]["kernel"] + params["head"]["bias"]
        return cross_entropy(logits, answers, jnp.ones(answers.shape)), logits

    images = rng.standard_normal((BATCH, size, size, 3)).astype("float32")
    names = {
        "images": "batch height width rgb",
        "params/stem": "window_h window_w _ stem",
        "params/head/kernel": "_ classes",
        **{f"params/stage_{s}/*/reduce": f"_ _ _ inner_{s}" for s in range(len(BLOCKS))},
        **{f"params/stage_{s}/*/conv": f"rows columns _ mid_{s}" for s in range(len(BLOCKS))},
        **{f"params/stage_{s}/*/expand": f"_ _ _ outer_{s}" for s in range(len(BLOCKS))},
    }
    split = "; ".join(f"mid_{s}:model" for s in range(len(BLOCKS)))
    layouts = ("batch:data", "batch:data+model", f"batch:data; {split}", "batch:data; height:model")
    answers = (np.arange(BATCH) % classes).astype("int32")
    return Published(loss, params, (images, answers), names, layouts)


MODELS = {"lm1b": lm1b, "equinox BERT": equinox_bert, "ResNet-50": resnet50}
