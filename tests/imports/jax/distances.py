"""How far arrays of ours are from those of JAX."""

import numpy as np


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
