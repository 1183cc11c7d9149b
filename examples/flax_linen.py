"""A model of Flax (linen) and an optimizer of optax as they are, trained on a mesh.

    python examples/flax_linen.py --mesh_shape=data:2,model:4 --layout='batch:data;hidden:model' \
        --host_devices=8

`train_step` is a plain function of JAX. `md.from_jax` names the dims of its arrays: those of the
images and of one weight are said, the others follow. The losses are those of `jax.jit(train_step)`.
"""

import argparse
import itertools

import flax.linen as nn
import jax
import optax
from sklearn.datasets import load_digits

import meshdsl as md


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, image):
        hidden = nn.gelu(nn.Dense(128, name="w_in")(nn.LayerNorm()(image)))
        return nn.Dense(10, name="w_out")(hidden)


MODEL = Classifier()
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
NAMES = {"image": "batch pixel", "params/**/w_in/kernel": "_ hidden"}


def train_step(params, state, image, label):
    def loss(params):
        logits = MODEL.apply(params, image)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    value, grads = jax.value_and_grad(loss)(params)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


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
    """Returns the parameters and the loss of each step."""
    params = MODEL.init(jax.random.key(0), digits()[0][:1])
    state, losses = OPTIMIZER.init(params), []
    for image, label in batches(steps):
        params, state, loss = step(params, state, image, label)
        losses.append(float(loss))
    return params, losses


def main():
    parser = argparse.ArgumentParser(description="Train a model of Flax on a mesh.")
    parser.add_argument("--mesh_shape", help="mesh axes and their sizes: data:2,model:4")
    parser.add_argument("--layout", help="dims split over mesh axes: batch:data;hidden:model")
    parser.add_argument("--host_devices", type=int, help="make this many virtual CPU devices")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    if given.host_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", given.host_devices)
    program = md.from_jax(train_step, NAMES)
    step = md.jit(program, given.mesh_shape, given.layout, donate=("params", "state"))
    params, losses = train(step, given.steps)
    print("a weight:", params["params"]["w_in"]["kernel"].dims)
    images, labels = digits()  # the last are held out
    right = MODEL.apply(md.unnamed(params), images[1500:]).argmax(-1) == labels[1500:]
    _, expected = train(jax.jit(train_step), given.steps)
    print(f"loss: {losses[0]:.4f} to {losses[-1]:.4f}; of plain JAX: to {expected[-1]:.4f}")
    print(f"accuracy on held-out digits: {right.mean():.3f}")


if __name__ == "__main__":
    main()
