"""A fixed training problem with known losses: four pre-norm decoder layers, plain SGD.

batch 16, length 128, embed 256, heads 8, kv 32, d_ff 1024, float32, no biases; layer norm with
scale only (eps 1e-5), causal attention, tanh-GELU; loss = mean((stack(x) - y)**2), rate 0.1.
numpy RandomState(0): x, y ~ N(0, 1); then per layer query, key, value, out, w_in, w_out * 0.02.
"""

import numpy as np

import meshdsl as md

LOSSES = (2.048986, 2.047140, 2.045299, 2.043462, 2.041630)
LOSS_AT_STEP_12 = 2.028929

batch, length, embed, heads, kv, d_ff, layers = md.dims(
    batch=16, length=128, embed=256, heads=8, kv=32, d_ff=1024, layers=4
)
LAYOUT = "batch:data; heads:model; d_ff:model"
RATE = 0.1


class Block(md.Module):
    norm_1: md.NamedArray
    norm_2: md.NamedArray
    query: md.NamedArray
    key: md.NamedArray
    value: md.NamedArray
    out: md.NamedArray
    w_in: md.NamedArray
    w_out: md.NamedArray

    def __call__(self, x):
        h = layer_norm(x, self.norm_1)
        q = md.einsum(h, self.query, over="embed")
        k = md.einsum(h, self.key, over="embed").rename(length="memory_length")
        v = md.einsum(h, self.value, over="embed").rename(length="memory_length")
        scores = md.einsum(q, k, over="kv") * kv.size**-0.5
        memory = md.Dimension("memory_length", length.size)
        visible = md.outer(md.greater_equal, md.arange(length), md.arange(memory))
        weights = md.softmax(md.where(visible, scores, -1e9), "memory_length")
        mixed = md.einsum(weights, v, over="memory_length")
        x = x + md.einsum(mixed, self.out, over=["heads", "kv"])
        h = md.gelu(md.einsum(layer_norm(x, self.norm_2), self.w_in, over="embed"))
        return x + md.einsum(h, self.w_out, over="d_ff")


def layer_norm(x, scale):
    centred = x - md.mean(x, "embed")
    return centred * md.rsqrt(md.mean(md.square(centred), "embed") + 1e-5) * scale


def problem():
    """Returns blocks, x and y."""
    rng = np.random.RandomState(0)
    x, y = (rng.randn(16, 128, 256).astype(np.float32) for _ in range(2))
    shapes = {
        "query": (embed, heads, kv),
        "key": (embed, heads, kv),
        "value": (embed, heads, kv),
        "out": (heads, kv, embed),
        "w_in": (embed, d_ff),
        "w_out": (d_ff, embed),
    }
    made = [
        {n: (0.02 * rng.randn(*(d.size for d in s))).astype(np.float32) for n, s in shapes.items()}
        for _ in range(layers.size)
    ]
    weights = {n: md.named(np.stack([w[n] for w in made]), [layers, *s]) for n, s in shapes.items()}
    scale = np.ones((layers.size, embed.size), np.float32)
    blocks = Block(
        norm_1=md.named(scale, [layers, embed]),
        norm_2=md.named(scale.copy(), [layers, embed]),
        **weights,
    )
    return blocks, md.named(x, [batch, length, embed]), md.named(y, [batch, length, embed])


def train_step(blocks, x, y):
    """Returns the blocks after one step of SGD, and the loss."""

    def loss(blocks):
        out, _ = md.scan(lambda x, block: (block(x), None), x, blocks, dim="layers")
        return md.mean(md.square(out - y))

    value, gradient = md.value_and_grad(loss)(blocks)
    import jax

    updated = jax.tree.map(lambda w, g: w - RATE * g, blocks, gradient)
    return updated, value
