"""Training steps of a small transformer, for tests of reports."""

import jax

import meshdsl as md
from meshdsl.reports.explain.explanation import explain

SMALL = {"layers": 4, "batch": 16, "length": 32, "embed": 64, "heads": 4, "d_ff": 256, "vocab": 128}
LARGE = {
    "layers": 96,
    "batch": 1536,
    "length": 2048,
    "embed": 12288,
    "heads": 96,
    "d_ff": 49152,
    "vocab": 51200,
}
MEGATRON = "batch:data; heads:model; d_ff:model; vocab:model"


def layer(x, block):
    q = md.einsum(x, block["query"], over="embed")
    k = md.einsum(x, block["key"], over="embed").rename(length="memory_length")
    weights = md.softmax(md.einsum(q, k, over="kv"), "memory_length")
    x = x + md.einsum(
        md.einsum(weights, k, over="memory_length"), block["out"], over=["heads", "kv"]
    )
    h = md.gelu(md.einsum(x, block["w_in"], over="embed"))
    return x + md.einsum(h, block["w_out"], over="d_ff")


def make_step(wrap=lambda layer: layer):
    def loss(params, batch):
        x = md.take(params["embedding"], batch["tokens"], "vocab")
        apply = wrap(layer)
        x, _ = md.scan(lambda x, b: (apply(x, b), None), x, params["blocks"], dim="layers")
        return md.mean(md.logsumexp(md.einsum(x, params["embedding"], over="embed"), "vocab"))

    def train_step(state, batch):
        value, grads = md.value_and_grad(loss)(state["params"], batch)
        mean = jax.tree.map(lambda m, g: 0.9 * m + g, state["optimizer"], grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], mean)
        return {"state": {"params": params, "optimizer": mean}, "loss": value}

    return train_step


def arguments(layers, batch, length, embed, heads, d_ff, vocab):
    layers, batch, length, embed, heads, d_ff, vocab, kv = md.dims(
        layers=layers,
        batch=batch,
        length=length,
        embed=embed,
        heads=heads,
        d_ff=d_ff,
        vocab=vocab,
        kv=embed // heads,
    )
    params = {
        "embedding": md.spec([vocab, embed]),
        "blocks": {
            "query": md.spec([layers, embed, heads, kv]),
            "key": md.spec([layers, embed, heads, kv]),
            "out": md.spec([layers, heads, kv, embed]),
            "w_in": md.spec([layers, embed, d_ff]),
            "w_out": md.spec([layers, d_ff, embed]),
        },
    }
    tokens = {"tokens": md.spec([batch, length], "int32")}
    return {"params": params, "optimizer": params}, tokens


def explained(mesh="data:2 model:4", layout=MEGATRON, wrap=lambda layer: layer, **sizes):
    step = md.jit(make_step(wrap), mesh, layout, donate="state")
    program = step.lower(*arguments(**{**SMALL, **sizes}))
    return program, explain(program)
