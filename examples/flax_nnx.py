"""A model and an optimizer of Flax's nnx as they are, trained on a mesh.

    python examples/flax_nnx.py --mesh_shape=data:2,model:4 --layout='batch:data;hidden:model' \
        --host_devices=8

`train_step` changes the model in place, as nnx does, and returns what it changed: a program keeps
nothing else. `md.from_jax` names the dims of its arrays: those of the images and of one weight are
said, the others follow. The losses are those of `nnx.jit(train_step)`.
"""

import argparse
import itertools

import jax
import optax
from flax import nnx
from sklearn.datasets import load_digits

import meshdsl as md


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.w_in = nnx.Linear(64, 128, rngs=rngs)
        self.w_out = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, image):
        return self.w_out(nnx.gelu(self.w_in(image)))


NAMES = {"image": "batch pixel", "model/w_in/kernel": "_ hidden"}


def train_step(model, optimizer, image, label):
    def loss(model):
        logits = model(image)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return model, optimizer, value


def digits():
    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype("float32"), labels.astype("int32")


def batches(steps, size=64):
    """Yields images of digits with their labels; the last hundreds of images are held out."""
    images, labels = digits()
    starts = itertools.cycle(range(0, 1500 - size, size))
    for start in itertools.islice(starts, steps):
        yield images[start : start + size], labels[start : start + size]


def train(step, steps):
    """Returns the model and the loss of each step."""
    model, losses = Classifier(nnx.Rngs(0)), []
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    for image, label in batches(steps):
        model, optimizer, loss = step(model, optimizer, image, label)
        losses.append(float(loss))
    return model, losses


def main():
    parser = argparse.ArgumentParser(description="Train a model of nnx on a mesh.")
    parser.add_argument("--mesh_shape", help="mesh axes and their sizes: data:2,model:4")
    parser.add_argument("--layout", help="dims split over mesh axes: batch:data;hidden:model")
    parser.add_argument("--host_devices", type=int, help="make this many virtual CPU devices")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    if given.host_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", given.host_devices)
    program = md.from_jax(train_step, NAMES)
    step = md.jit(program, given.mesh_shape, given.layout, donate=("model", "optimizer"))
    model, losses = train(step, given.steps)
    print("a weight:", model.w_in.kernel.get_value().dims)
    images, labels = digits()  # the last are held out
    right = md.unnamed(model)(images[1500:]).argmax(-1) == labels[1500:]
    _, expected = train(nnx.jit(train_step), given.steps)
    print(f"loss: {losses[0]:.4f} to {losses[-1]:.4f}; of nnx.jit: to {expected[-1]:.4f}")
    print(f"accuracy on held-out digits: {right.mean():.3f}")


if __name__ == "__main__":
    main()
