"""How far arrays of ours are from those of JAX, and the layouts of decoders it is measured on."""

import numpy as np

_MODEL = "heads:model; d_ff:model; vocab:model"
LAYOUTS = (
    "batch:data",
    f"batch:data; {_MODEL}",
    "batch:data; params/embed:data",
    f"batch:data; {_MODEL}; length:model?",
)


def distances(ours, theirs):
    """Returns the largest difference of each array, in units of its largest number.

    Some gradients are sums that cancel, as those of the biases of keys: their scale is at least a
    hundredth of that of all arrays.
    """
    sizes = [np.max(np.abs(each)) for each in theirs]
    differences = [
        np.max(np.abs(np.asarray(mine) - other)) for mine, other in zip(ours, theirs, strict=True)
    ]
    floor = max(sizes) / 100
    return [float(d / max(size, floor)) for d, size in zip(differences, sizes, strict=True)]
