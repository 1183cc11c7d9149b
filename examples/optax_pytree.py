"""A plain pytree of named tensors and an optimizer of optax, trained on a mesh.

    python examples/optax_pytree.py --mesh_shape=data:2,model:4 \
        --layout='batch:data;hidden:model;optimizer/pixel:data' --host_devices=8

Parameters are a dict, and the step is a function: no class is needed. optax's update is translated
into the program, so its state lies like the parameters, here with `pixel` split as well (ZeRO-1).
"""

import argparse
import itertools

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import meshdsl as md
from meshdsl import nn, optim

OPTIMIZER = optim.from_optax(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)))


def init():
    draw = np.random.default_rng(0)
    sizes = {"w_in": {"pixel": 64, "hidden": 128}, "w_out": {"hidden": 128, "digit": 10}}
    return {
        name: md.named((draw.standard_normal([*of.values()]) / 8).astype("float32"), [*of])
        for name, of in sizes.items()
    }


def loss(params, image, label):  # batch, pixel; batch
    hidden = md.gelu(md.einsum(image, params["w_in"], over="pixel"))
    logits = md.einsum(hidden, params["w_out"], over="hidden")
    return md.mean(nn.softmax_cross_entropy(logits, label, over="digit"))


def train_step(params, optimizer, number, image, label):
    value, grads = md.value_and_grad(loss)(params, image, label)
    params, optimizer = OPTIMIZER.update(grads, optimizer, params, number)
    return params, optimizer, value


def digits(steps, size=64):
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype("float32"), labels.astype("int32")
    starts = itertools.cycle(range(0, len(images) - size, size))
    for start in itertools.islice(starts, steps):
        rows = slice(start, start + size)
        yield md.named(images[rows], ["batch", "pixel"]), md.named(labels[rows], ["batch"])


def train(mesh, layout, steps):
    """Returns the state of the optimizer and the loss of each step."""
    step = md.jit(train_step, mesh, layout, donate=("params", "optimizer"))
    params = md.place(init(), mesh, layout)  # split as the layout says
    make = md.jit(lambda params: {"optimizer": OPTIMIZER.init(params)}, mesh, layout)
    optimizer, losses = make(params)["optimizer"], []
    for number, (image, label) in enumerate(digits(steps)):
        params, optimizer, value = step(params, optimizer, np.int32(number), image, label)
        losses.append(float(value))
    return optimizer, losses


def main():
    parser = argparse.ArgumentParser(description="Train a pytree of tensors by optax on a mesh.")
    parser.add_argument("--mesh_shape", help="mesh axes and their sizes: data:2,model:4")
    parser.add_argument("--layout", help="dims split over mesh axes: batch:data;hidden:model")
    parser.add_argument("--host_devices", type=int, help="make this many virtual CPU devices")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    if given.host_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", given.host_devices)
    optimizer, losses = train(given.mesh_shape, given.layout, given.steps)
    if given.layout:
        print("first moment of w_in:", optimizer[1][0].mu["w_in"].layout)
    print(f"loss: {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
