"""A small model with dropout, in the ways in which models give keys to their layers."""

import numpy as np

import meshdsl as md
from meshdsl.optim import Sgd
from meshdsl.training.state import create
from meshdsl.training.step import make_train_step

batch, length, embed, d_ff = md.dims(batch=10, length=4, embed=8, d_ff=12)
vocab, layers = md.dims(vocab=16, layers=8)


def init(key):
    first, second, third = md.random.split(key, 3)
    return {
        "embedding": md.random.normal(first, [vocab, embed]),
        "w_in": 0.3 * md.random.normal(second, [layers, embed, d_ff]),
        "w_out": 0.3 * md.random.normal(third, [layers, d_ff, embed]),
    }


def _layer(x, w_in, w_out, key):
    h = md.tanh(md.einsum(x, w_in, over="embed"))
    return x + md.einsum(md.random.dropout(key, h, 0.25), w_out, over="d_ff")


def split_keys(x, params, key):
    """Each layer slices a key of its own."""

    def body(x, held):
        return _layer(x, *held), None

    keys = md.random.split(key, layers)
    return md.scan(body, x, (params["w_in"], params["w_out"], keys), "layers")[0]


def carried_key(x, params, key):
    """Each layer splits the key that the one before it leaves."""

    def body(carry, held):
        x, key = carry
        key, own = md.random.split(key, 2)
        return (_layer(x, *held, own), key), None

    return md.scan(body, (x, key), (params["w_in"], params["w_out"]), "layers")[0][0]


def computed_again(x, params, key):
    """As `split_keys`; the backward pass draws the same numbers again."""

    @md.checkpoint
    def body(x, held):
        return _layer(x, *held), None

    keys = md.random.split(key, layers)
    return md.scan(body, x, (params["w_in"], params["w_out"], keys), "layers")[0]


def step(run):
    """Returns the training step of a model whose layers `run` computes."""

    def loss(params, batch):
        first, rest = md.random.split(batch["key"], 2)
        x = md.random.dropout(first, md.take(params["embedding"], batch["tokens"], "vocab"), 0.1)
        x = run(x, params, rest)
        scores = md.log_softmax(md.einsum(x, params["embedding"], over="embed"), "vocab")
        hits = md.one_hot(batch["tokens"], vocab, scores.dtype)
        kept = md.mean(md.cast(md.not_equal(x, 0.0), "float32"))
        return -md.mean(md.sum(scores * hits, "vocab")), {"kept": kept}

    return make_train_step(loss, Sgd(0.1), microbatches=5)


def arguments():
    """Returns a state and a batch with a key."""
    state = md.jit(create(init, Sgd(0.1)), backend="numpy")(md.random.key(0))
    tokens = np.arange(40, dtype="int32").reshape(10, 4) % 16
    return state, {"tokens": md.named(tokens, [batch, length]), "key": md.random.key(7)}
