"""A diffusion model: a U-Net that learns to take noise out of digits, and draws new ones.

    python examples/diffusion.py --mesh_shape=data:4,rows:2 --host_devices=8 \
        --layout='batch:data;height:rows'

A digit x and noise e are mixed: z = cos(a) x + sin(a) e. The angle a goes from 0, the digit, to 90
degrees. The U-Net is given z, a and which digit it is, and guesses v = cos(a) e - sin(a) x. From z
and v follow x and e (Salimans and Ho 2022, "Progressive distillation", appendix D). Drawing starts
from noise and turns the angle back (DDIM). With `height:rows` each device has some rows of every
image; convolutions exchange one row with each neighbour.

The digits are scikit-learn's (`pip install scikit-learn`). After 400 steps the mean square error is
0.30, and of 100 drawn digits 81 are nearest to a real one of the number that was asked for.
"""

import argparse
import functools
import itertools
import math

import numpy as np

import meshdsl as md
from meshdsl import nn, optim
from meshdsl.training import Data, Evaluation, Recipe, Reporting, train
from meshdsl.training.data import Arrays, ordered_batches, shuffled_batches

IMAGE = ["batch", "height", "width"]
DIMS = {"image": IMAGE, "noise": IMAGE, "angle": ["batch"], "digit": ["batch"]}
digit, features = md.dims(digit=10, features=64)
FILTER = md.dims(filter_height=3, filter_width=3)
SLIDES = {"height": "filter_height", "width": "filter_width"}


class Block(md.Module):
    """Two convolutions; `told` adds what the angle and the digit say, `passed` what was before."""

    first: md.Tensor  # filter_height, filter_width, channels_in, channels
    second: md.Tensor  # filter_height, filter_width, channels_in, channels
    told: md.Tensor  # features, channels
    passed: md.Tensor  # channels_in, channels

    def __call__(self, x, about):  # batch, height, width, channels; batch, features
        h = convolved(self.first, x) + md.einsum(about, self.told, over="features")
        h = convolved(self.second, h)
        return h + md.einsum(x.rename(channels="channels_in"), self.passed, over="channels_in")


def convolved(filters, x):
    """Returns the convolution of x, which is normalised and goes through a nonlinearity first."""
    x = md.silu(nn.group_norm(x, ["height", "width"], "channels", 4))
    return md.conv(x, filters, SLIDES, {"channels": "channels_in"}, "channels")


class UNet(md.Module):
    """At half the size in the middle, and with what there was before on the way back."""

    digits: md.Tensor  # digit, features
    angles: md.Tensor  # frequency, features
    stem: md.Tensor  # filter_height, filter_width, channels
    down: Block
    middle: Block
    up: Block
    out: md.Tensor  # filter_height, filter_width, channels

    @staticmethod
    def init(key, width):
        keys = iter(md.random.split(key, 20))
        frequency, channels = md.dims(frequency=16, channels=width)

        def drawn(over, dims):
            return nn.initializers.fan_in(over)(next(keys), dims)

        def block(size_in, size):
            before, after = md.dims(channels_in=size_in, channels=size)
            between = md.Dimension("channels_in", size)
            return Block(
                first=drawn([*FILTER, before], [*FILTER, before, after]),
                second=drawn([*FILTER, between], [*FILTER, between, after]),
                told=drawn(features, [features, after]),
                passed=drawn(before, [before, after]),
            )

        return UNet(
            digits=md.random.normal(next(keys), [digit, features]),
            angles=drawn(frequency, [frequency, features]),
            stem=drawn(FILTER, [*FILTER, channels]),
            down=block(width, width),
            middle=block(width, 2 * width),
            up=block(3 * width, width),
            out=md.zeros([*FILTER, channels]),
        )

    def __call__(self, z, angle, number):  # batch, height, width; batch; batch
        frequency = md.arange(self.angles.shape.get("frequency"), "float32")
        waves = md.cos(md.outer(md.multiply, angle, frequency))  # batch, frequency
        about = md.einsum(waves, self.angles, over="frequency")
        about = md.silu(about + md.take(self.digits, number, "digit"))  # batch, features
        fine = self.down(md.conv(z, self.stem, SLIDES), about)
        coarse = self.middle(md.avg_pool(fine, {"height": 2, "width": 2}), about)
        coarse = md.upsample(coarse, {"height": 2, "width": 2})
        x = self.up(md.concat([fine, coarse], "channels"), about)
        return md.conv(md.silu(x), self.out, SLIDES, "channels")  # batch, height, width


def loss(unet, batch):
    """Returns the mean square error of the guesses."""
    x, e, angle = batch["image"], batch["noise"], batch["angle"]
    z = md.cos(angle) * x + md.sin(angle) * e
    v = md.cos(angle) * e - md.sin(angle) * x
    return md.mean(md.square(unet(z, angle, batch["digit"]) - v))


def noisy(batches, seed):
    """Yields batches of digits, with noise and angles."""
    draw = np.random.default_rng(seed)
    for batch in batches:
        noise = draw.standard_normal(batch["image"].shape)
        angle = draw.uniform(0, math.pi / 2, len(noise))
        yield {**batch, "noise": noise.astype("float32"), "angle": angle.astype("float32")}


def digits():
    """Returns images from -1 to 1, and their digits: to train on; every fifth, held out."""
    from sklearn.datasets import load_digits

    images, numbers = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 8 - 1).astype("float32")
    held_out = np.arange(len(images)) % 5 == 4
    return [
        Arrays({"image": images[w], "digit": numbers[w].astype("int32")})
        for w in (~held_out, held_out)
    ]


def draw_digits(unet, numbers, mesh, layout, steps=25):
    """Returns new images of the given digits: [batch, height, width]."""

    @md.jit(mesh=mesh, layout=layout)
    def turned(unet, z, number, angle, after):  # the last two in radians
        v = unet(z, md.broadcast(angle, number.dims), number)
        x, e = md.cos(angle) * z - md.sin(angle) * v, md.sin(angle) * z + md.cos(angle) * v
        return md.cos(after) * x + md.sin(after) * e

    z = np.random.default_rng(0).standard_normal((len(numbers), 8, 8)).astype("float32")
    z, number = md.named(z, IMAGE), md.named(numbers, ["batch"])
    angles = np.linspace(math.pi / 2, 0, steps + 1, dtype=np.float32)
    for angle, after in itertools.pairwise(angles):
        z = turned(unet, z, number, angle, after)
    return np.asarray(z)


def recognised(images, numbers, known):
    """Returns the share of images whose nearest real digit has their number."""
    apart = np.square(images[:, None] - known.arrays["image"][None]).sum((-1, -2))
    return np.mean(known.arrays["digit"][apart.argmin(1)] == numbers)


def main():
    parser = argparse.ArgumentParser(description="Learn to draw digits by diffusion.")
    parser.add_argument("--mesh_shape", help="mesh axes and their sizes: data:4,rows:2")
    parser.add_argument("--layout", help="dims split over mesh axes: batch:data;height:rows")
    parser.add_argument("--host_devices", type=int, help="make this many virtual CPU devices")
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workdir", help="folder for metrics.jsonl and TensorBoard")
    given = parser.parse_args()
    if given.host_devices:
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", given.host_devices)
    training, held_out = digits()
    rate = optim.schedules.warmup_cosine(5e-3, min(10, given.steps // 2), given.steps)
    init = functools.partial(UNet.init, width=given.channels)
    result = train(
        Recipe(init, loss, optim.AdamW(rate), seed=given.seed),
        Data(noisy(shuffled_batches(training, given.batch_size, given.seed), seed=1), DIMS),
        steps=given.steps,
        mesh=given.mesh_shape,
        layout=given.layout,
        workdir=given.workdir,
        evaluation=Evaluation([*noisy(ordered_batches(held_out, given.batch_size), seed=2)]),
        reporting=Reporting(log_every=100),
    )
    numbers = np.repeat(np.arange(10, dtype=np.int32), 10)
    drawn = draw_digits(result.state.params, numbers, given.mesh_shape, given.layout)
    for rows in np.hstack(drawn[::10]):  # the ten digits, side by side
        print("".join(" .:*#"[level] for level in np.int32(np.clip(rows + 1, 0, 1.9) * 2.5)))
    print(f"mean square error on held-out digits: {result.history[-1]['eval_loss']:.3f}")
    share = recognised(drawn, numbers, held_out)
    print(f"drawn digits that are recognised: {share:.2f}")


if __name__ == "__main__":
    main()
