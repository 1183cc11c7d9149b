"""A recommender: users and items as vectors in two tables, which the devices share out.

    python examples/recommender.py --mesh_shape=data:2,model:4 \
        --layout='batch:data;users:model;items:model' --host_devices=8

Tables of recommenders are what does not fit on one device: `users:model;items:model` splits their
rows. The ratings are made up, of four hidden tastes and some noise, so it is known how well they
can be guessed: with an error of 0.2.
"""

import argparse

import numpy as np

import meshdsl as md
from meshdsl import optim
from meshdsl.training import Data, Evaluation, Recipe, Reporting, train
from meshdsl.training.data import Arrays, ordered_batches, shuffled_batches

NOISE, TASTES = 0.2, 4
users, items, factor = md.dims(users=240, items=160, factor=8)


class Recommender(md.Module):
    """Guesses a rating as the product of the vectors of a user and an item, and their biases."""

    user: md.Tensor  # users, factor
    item: md.Tensor  # items, factor
    user_bias: md.Tensor  # users
    item_bias: md.Tensor  # items

    @staticmethod
    def init(key):
        key_user, key_item = md.random.split(key, 2)
        return Recommender(
            user=md.random.normal(key_user, [users, factor]) * factor.size**-0.5,
            item=md.random.normal(key_item, [items, factor]) * factor.size**-0.5,
            user_bias=md.zeros([users]),
            item_bias=md.zeros([items]),
        )

    def __call__(self, user, item):  # batch; batch
        liking = md.take(self.user, user, "users") * md.take(self.item, item, "items")
        biases = md.take(self.user_bias, user, "users") + md.take(self.item_bias, item, "items")
        return md.sum(liking, "factor") + biases  # batch


def loss(recommender, batch):
    """Returns the mean square error."""
    guess = recommender(batch["user"], batch["item"])
    return md.mean(md.square(guess - batch["rating"]))


def ratings(seed=0):
    """Returns the ratings to train on, of half of all pairs, and 4,000 that are held out."""
    draw = np.random.default_rng(seed)
    likes = draw.standard_normal((users.size, TASTES))
    offers = draw.standard_normal((items.size, TASTES)) * TASTES**-0.5
    every = likes @ offers.T + NOISE * draw.standard_normal((users.size, items.size))
    pairs = draw.permutation(every.size)
    half = every.size // 2
    for chosen in (pairs[:half], pairs[half : half + 4000]):
        user, item = np.divmod(chosen, items.size)
        yield Arrays(
            {
                "user": user.astype("int32"),
                "item": item.astype("int32"),
                "rating": every[user, item].astype("float32"),
            }
        )


def main():
    parser = argparse.ArgumentParser(description="Train a recommender on made-up ratings.")
    parser.add_argument("--mesh_shape", help="mesh axes and their sizes: data:2,model:4")
    parser.add_argument("--layout", help="dims split over mesh axes: users:model;items:model")
    parser.add_argument("--host_devices", type=int, help="make this many virtual CPU devices")
    parser.add_argument("--batch_size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workdir", help="folder for metrics.jsonl and TensorBoard")
    given = parser.parse_args()
    if given.host_devices:
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", given.host_devices)
    known, held_out = ratings()
    rate = optim.schedules.warmup_cosine(5e-2, min(20, given.steps // 2), given.steps)
    dims = {name: ["batch"] for name in ("user", "item", "rating")}
    result = train(
        Recipe(Recommender.init, loss, optim.AdamW(rate, weight_decay=0.01), seed=given.seed),
        Data(shuffled_batches(known, given.batch_size, given.seed), dims),
        steps=given.steps,
        mesh=given.mesh_shape,
        layout=given.layout,
        workdir=given.workdir,
        evaluation=Evaluation(ordered_batches(held_out, given.batch_size), eval_every=given.steps),
        reporting=Reporting(log_every=100),
    )
    error = result.history[-1]["eval_loss"] ** 0.5
    print(f"error on held-out ratings: {error:.3f}; it is at least {NOISE}, the noise")


if __name__ == "__main__":
    main()
