"""The parts that transformers are made of, each of a kind that the configuration names."""

from meshdsl.models.layers.attention import (
    Attention,
    LatentAttention,
    LayerCache,
    Shared,
    empty_cache,
)
from meshdsl.models.layers.block import (
    Block,
    balanced,
    init_blocks,
    run_blocks,
    step_blocks,
    with_routers,
)
from meshdsl.models.layers.drawing import Drawing, plus
from meshdsl.models.layers.mlp import ACTIVATIONS, MLP, Experts, undropping
from meshdsl.models.layers.norm import Norm, init_norm
from meshdsl.models.layers.positions import (
    distance_bias,
    first_positions,
    init_distances,
    init_learned,
    learned_positions,
    rotation_of,
    rotations_of,
)
from meshdsl.models.layers.unrolled import (
    apart,
    empty_caches,
    joined_caches,
    layers_of,
    step_apart,
    unrolls,
)
