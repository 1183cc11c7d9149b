"""A 3-D U-Net, trained to tell balls from boxes in noisy volumes that are split over devices.

    python examples/segmentation.py --mesh_shape=data:2,x:2,y:2 \
        --layout='batch:data;depth:x;height:y' --host_devices=8

Each device holds a part of every volume and exchanges one layer of voxels with its neighbours for
each convolution. The model is that of `meshdsl.models`; `--model_args` changes it.
"""

import argparse

import numpy as np

from meshdsl import models, optim
from meshdsl.training import Data, Evaluation, Recipe, train

SPACE = ["depth", "height", "width"]
DIMS = {"volume": ["batch", *SPACE, "modalities"], "label": ["batch", *SPACE]}


def shape(rng, side, is_box):
    """Returns which voxels lie in a ball or box of random size and place."""
    size = rng.uniform(0.2, 0.3) * side
    grid = np.meshgrid(*[np.arange(side)] * 3, indexing="ij")
    offsets = [axis - rng.uniform(size, side - 1 - size) for axis in grid]
    if is_box:
        return np.maximum.reduce(np.abs(offsets)) < 0.8 * size
    return sum(offset**2 for offset in offsets) < size**2


def volumes(batch_size, side, seed):
    """Yields noisy volumes with a ball and a box in each; labels 0 (nothing), 1 and 2."""
    rng = np.random.default_rng(seed)
    while True:
        label = np.zeros((batch_size, side, side, side), np.int32)
        for one in label:
            one[shape(rng, side, is_box=False)] = 1
            one[shape(rng, side, is_box=True)] = 2
        volume = (label > 0) + rng.normal(0, 0.2, label.shape)
        yield {"volume": volume[..., None].astype(np.float32), "label": label}


def main():
    parser = argparse.ArgumentParser(description="Train a 3-D U-Net on volumes of simple shapes.")
    parser.add_argument(
        "--model_args", default="", help="changes of the model: filters=16,levels=3"
    )
    parser.add_argument("--mesh_shape", help="mesh axes and their sizes: data:2,x:2,y:2")
    parser.add_argument("--layout", help="dims split over mesh axes: batch:data;depth:x;height:y")
    parser.add_argument("--host_devices", type=int, help="make this many virtual CPU devices")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--side", type=int, default=16, help="voxels of a volume each way")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--workdir", help="folder for metrics.jsonl and TensorBoard")
    given = parser.parse_args()
    if given.host_devices:
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", given.host_devices)
    model = models.load("unet3d_mini", given.model_args)
    held_out = volumes(given.batch_size, given.side, seed=1)
    optimizer = optim.AdamW(
        optim.schedules.warmup_cosine(1e-2, min(10, given.steps // 2), given.steps)
    )
    result = train(
        Recipe(model.init, model.loss, optimizer),
        Data(volumes(given.batch_size, given.side, seed=0), DIMS),
        steps=given.steps,
        mesh=given.mesh_shape,
        layout=given.layout,
        workdir=given.workdir,
        evaluation=Evaluation([next(held_out) for _ in range(4)]),
    )
    print(f"nats per voxel on held-out volumes: {result.history[-1]['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
