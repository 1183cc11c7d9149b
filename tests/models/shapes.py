"""Pictures and volumes of simple shapes, made from random numbers: data for image models."""

import numpy as np

import meshdsl as md

KINDS = ("disc", "square", "cross", "ring")


def inside(kind, size, *offsets):
    """Returns where a shape of some size is, given the distances from its middle along each dim."""
    far = np.sqrt(sum(offset**2.0 for offset in offsets))
    widest = np.maximum.reduce([np.abs(offset) for offset in offsets])
    if kind == "disc":
        return far < size
    if kind == "square":
        return widest < 0.8 * size
    if kind == "ring":
        return (far < size) & (far > 0.6 * size)
    thinnest = np.minimum.reduce([np.abs(offset) for offset in offsets])
    return (widest < size) & (thinnest < 0.25 * size)


def placed(rng, side, dims, low, high):
    """Returns a size, and the distances of every place from a middle that keeps it inside."""
    size = rng.uniform(low, high) * side
    grid = np.meshgrid(*[np.arange(side)] * dims, indexing="ij")
    return size, [axis - rng.uniform(size, side - 1 - size) for axis in grid]


def pictures(batch=32, side=32, seed=0):
    """Yields pictures of one noisy shape each, [batch, height, width, colors], and its kind."""
    rng = np.random.default_rng(seed)
    while True:
        label = rng.integers(0, len(KINDS), batch).astype("int32")
        image = rng.normal(0, 0.3, (batch, side, side, 3))
        for number, kind in enumerate(label):
            size, offsets = placed(rng, side, 2, 0.2, 0.4)
            image[number, inside(KINDS[kind], size, *offsets)] += rng.uniform(0.5, 1.5, 3)
        yield {
            "image": md.named(image.astype("float32"), ["batch", "height", "width", "colors"]),
            "label": md.named(label, ["batch"]),
        }


def volumes(batch=4, side=16, seed=0):
    """Yields noisy volumes of a ball and a box, and of each voxel: 0 nothing, 1 ball, 2 box."""
    rng = np.random.default_rng(seed)
    while True:
        label = np.zeros((batch, side, side, side), "int32")
        for number in range(batch):
            for value, kind in ((1, "disc"), (2, "square")):
                size, offsets = placed(rng, side, 3, 0.2, 0.3)
                label[number, inside(kind, size, *offsets)] = value
        volume = (label > 0) + rng.normal(0, 0.2, label.shape)
        space = ["batch", "depth", "height", "width"]
        yield {
            "volume": md.named(volume[..., None].astype("float32"), [*space, "modalities"]),
            "label": md.named(label, space),
        }
