"""A tiny classifier to train, and the same training written in plain numpy."""

import itertools

import numpy as np

import meshdsl as md
from meshdsl.optim import AdamW
from meshdsl.training.data import Arrays
from tests.training.flat import train

batch, pixel, hidden, label = md.dims(batch=16, pixel=12, hidden=8, label=4)
LAYOUT = "batch:data; hidden:model"
LAYOUTS = [
    (None, None),
    ("data:8", "batch:data"),
    ("data:2,model:4", LAYOUT),
    ("data:2,model:4", f"{LAYOUT}; params/pixel:data; optimizer/pixel:data"),
]
BATCH_DIMS = {"image": ["batch", "pixel"], "answer": ["batch"]}
BATCH = {"image": md.spec([batch, pixel]), "answer": md.spec([batch], "int32")}


class Classifier(md.Module):
    w_in: md.Tensor
    bias: md.Tensor
    w_out: md.Tensor


def init(key):
    first, second = md.random.split(key, 2)
    return Classifier(
        w_in=md.random.normal(first, [pixel, hidden]) * 0.3,
        bias=md.zeros([hidden]),
        w_out=md.random.normal(second, [hidden, label]) * 0.3,
    )


def loss(params, batch):
    h = md.tanh(md.einsum(batch["image"], params.w_in, over="pixel") + params.bias)
    scores = md.log_softmax(md.einsum(h, params.w_out, over="hidden"), "label")
    return -md.mean(md.sum(scores * md.one_hot(batch["answer"], label, scores.dtype), "label"))


def loss_and_size(params, batch):
    return loss(params, batch), {"size": md.mean(md.square(params.w_in))}


def batches(count, seed=0):
    """Images whose answer is where the largest of their first pixels is."""
    rng = np.random.default_rng(seed)
    images = rng.standard_normal((count, batch.size, pixel.size)).astype("f4")
    return [{"image": x, "answer": x[:, : label.size].argmax(1).astype("i4")} for x in images]


def examples(count=6, seed=0):
    """The examples of some batches, to be picked by number."""
    parts = batches(count, seed)
    return Arrays({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def endless(seed=0):
    return itertools.chain.from_iterable(batches(10, seed + n) for n in itertools.count())


def named(batch):
    return {name: md.named(array, BATCH_DIMS[name]) for name, array in batch.items()}


def numpy_loss_and_grads(w_in, bias, w_out, batch):
    """Returns the loss and its gradients, in float64."""
    x, answer = batch["image"].astype("f8"), batch["answer"]
    h = np.tanh(x @ w_in + bias)
    scores = h @ w_out
    scores -= np.log(np.exp(scores).sum(1, keepdims=True))
    value = -scores[np.arange(len(x)), answer].mean()
    d_scores = (np.exp(scores) - np.eye(w_out.shape[1])[answer]) / len(x)
    d_h = d_scores @ w_out.T * (1 - h**2)
    return value, (x.T @ d_h, d_h.sum(0), h.T @ d_scores)


def run(workdir=None, given=None, **options):
    """Trains on the numpy backend, which compiles nothing, and quietly, unless told otherwise."""
    defaults = {"batch_dims": BATCH_DIMS, "quiet": True, "backend": "numpy"}
    data = endless() if given is None else given
    return train(init, loss, AdamW(0.05), data, workdir=workdir, **defaults | options)
