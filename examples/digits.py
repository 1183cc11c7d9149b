"""A model of one's own, trained on scikit-learn's handwritten digits.

    python examples/digits.py --mesh_shape=data:4,model:2 --layout='batch:data;hidden:model' \
        --host_devices=8

Any init function, loss function and data can be trained like this; nothing here knows how many
devices there are.
"""

import argparse

import numpy as np

import meshdsl as md
from meshdsl import optim
from meshdsl.training import Data, Evaluation, Recipe, Reporting, train
from meshdsl.training.data import Arrays, ordered_batches, shuffled_batches

pixel, hidden, digit = md.dims(pixel=64, hidden=128, digit=10)


class Mlp(md.Module):
    """A classifier with one hidden layer."""

    w_in: md.Tensor  # pixel, hidden
    bias: md.Tensor  # hidden
    w_out: md.Tensor  # hidden, digit

    @staticmethod
    def init(key):
        key_in, key_out = md.random.split(key, 2)
        return Mlp(
            w_in=md.random.normal(key_in, [pixel, hidden]) * pixel.size**-0.5,
            bias=md.zeros([hidden]),
            w_out=md.random.normal(key_out, [hidden, digit]) * hidden.size**-0.5,
        )

    def __call__(self, image):  # batch, pixel
        h = md.relu(md.einsum(image, self.w_in, over="pixel") + self.bias)
        return md.einsum(h, self.w_out, over="hidden")  # batch, digit


def loss(mlp, batch):
    """Returns the mean cross-entropy, and how many digits are recognised."""
    logits = mlp(batch["image"])
    chosen = md.sum(logits * md.one_hot(batch["label"], digit), "digit")
    accuracy = md.mean(md.cast(chosen >= md.max(logits, "digit"), "float32"))
    return md.mean(md.logsumexp(logits, "digit") - chosen), {"accuracy": accuracy}


def digits():
    """Returns the images and labels to train on, and those held out, every fifth."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    examples = {"image": (images / 16).astype("float32"), "label": labels.astype("int32")}
    held_out = np.arange(len(labels)) % 5 == 4
    return [
        Arrays({name: a[rows] for name, a in examples.items()}) for rows in (~held_out, held_out)
    ]


def main():
    parser = argparse.ArgumentParser(description="Train an MLP on handwritten digits.")
    parser.add_argument("--mesh_shape", help="mesh axes and their sizes: data:4,model:2")
    parser.add_argument("--layout", help="dims split over mesh axes: batch:data;hidden:model")
    parser.add_argument("--host_devices", type=int, help="make this many virtual CPU devices")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workdir", help="folder for metrics.jsonl and TensorBoard")
    given = parser.parse_args()
    if given.host_devices:
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", given.host_devices)
    training, held_out = digits()
    rate = optim.schedules.warmup_cosine(1e-2, min(20, given.steps // 2), given.steps)
    batches = shuffled_batches(training, given.batch_size, given.seed)
    result = train(
        Recipe(Mlp.init, loss, optim.AdamW(rate, weight_decay=0.1), seed=given.seed),
        Data(batches, {"image": ["batch", "pixel"], "label": ["batch"]}),
        steps=given.steps,
        mesh=given.mesh_shape,
        layout=given.layout,
        workdir=given.workdir,
        evaluation=Evaluation(ordered_batches(held_out, given.batch_size), eval_every=250),
        reporting=Reporting(log_every=100),
    )
    print(f"accuracy on held-out digits: {result.history[-1]['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()
