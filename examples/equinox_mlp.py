"""A model of Equinox and an optimizer of optax as they are, trained on a mesh.

    python examples/equinox_mlp.py --mesh_shape=data:2,model:4 --layout='batch:data;hidden:model' \
        --host_devices=8

A model of Equinox holds functions beside its arrays; `md.from_equinox` takes it as it is. It names
the dims of the arrays: those of the images and of one weight are said, the others follow. The
losses are those of `equinox.filter_jit` of the same step. The model is an argument `params`, so the
state of the optimizer lies like it.
"""

import argparse
import itertools

import equinox as eqx
import jax
import optax
from sklearn.datasets import load_digits

import meshdsl as md

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
NAMES = {"image": "batch pixel", "params/layers/0/weight": "hidden _"}


def loss_of(model, image, label):
    logits = jax.vmap(model)(image)
    return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()


def train_step(params, state, image, label):
    value, grads = eqx.filter_value_and_grad(loss_of)(params, image, label)
    updates, state = OPTIMIZER.update(grads, state, eqx.filter(params, eqx.is_array))
    return eqx.apply_updates(params, updates), state, value


def digits():
    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype("float32"), labels.astype("int32")


def batches(steps, size=64):
    """Yields images of digits with their labels; the last hundreds of images are held out."""
    images, labels = digits()
    starts = itertools.cycle(range(0, 1500 - size, size))
    for start in itertools.islice(starts, steps):
        yield images[start : start + size], labels[start : start + size]


def train(step, model, steps):
    """Returns the model and the loss of each step."""
    state, losses = OPTIMIZER.init(eqx.filter(model, eqx.is_array)), []
    for image, label in batches(steps):
        model, state, loss = step(model, state, image, label)
        losses.append(float(loss))
    return model, losses


def main():
    parser = argparse.ArgumentParser(description="Train a model of Equinox on a mesh.")
    parser.add_argument("--mesh_shape", help="mesh axes and their sizes: data:2,model:4")
    parser.add_argument("--layout", help="dims split over mesh axes: batch:data;hidden:model")
    parser.add_argument("--host_devices", type=int, help="make this many virtual CPU devices")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    if given.host_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", given.host_devices)
    model = eqx.nn.MLP(64, 10, width_size=128, depth=1, key=jax.random.key(0))
    program = md.from_equinox(train_step, NAMES)
    step = md.jit(program, given.mesh_shape, given.layout, donate="state")
    trained, losses = train(step, model, given.steps)
    print("a weight:", trained.layers[0].weight.dims)
    images, labels = digits()  # the last are held out
    right = jax.vmap(md.unnamed(trained))(images[1500:]).argmax(-1) == labels[1500:]
    _, expected = train(eqx.filter_jit(train_step), model, given.steps)
    print(f"loss: {losses[0]:.4f} to {losses[-1]:.4f}; of plain JAX: to {expected[-1]:.4f}")
    print(f"accuracy on held-out digits: {right.mean():.3f}")


if __name__ == "__main__":
    main()
