"""A model for commands that is lowered in no time: two products, without text."""

import meshdsl as md
from meshdsl import nn
from meshdsl.models.model import Model


def init(key):
    first, second = md.random.split(key, 2)
    embed, d_ff = md.dims(embed=256, d_ff=1024)
    make = nn.initializers.normal(0.02)
    return {"w_in": make(first, [embed, d_ff]), "w_out": make(second, [d_ff, embed])}


def loss(params, batch):
    hidden = md.gelu(md.einsum(batch["x"], params["w_in"], over="embed"))
    return md.mean(md.square(md.einsum(hidden, params["w_out"], over="d_ff")))


def batch_spec(batch_size, length):
    dims = md.dims(batch=batch_size, length=length, embed=256)
    return {"x": md.spec(dims, "float32")}


mlp = Model("mlp", init, loss, 16, 128, batch_spec)
