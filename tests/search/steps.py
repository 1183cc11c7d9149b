"""Small training steps to search layouts for."""

import meshdsl as md
from meshdsl import nn
from meshdsl.models import load
from meshdsl.optim import Sgd
from meshdsl.search.steps import recipe_step
from meshdsl.training import Recipe


def step_of(
    init, loss, batch, microbatches=(1,), optimizer=None, options=None, batch_dim="batch", clip=None
):
    """Returns the step of a model, with some numbers of microbatches.

    Args:
        clip: the norm that gradients are clipped to; None: they are not.
    """
    recipe = Recipe(init, loss, optimizer or Sgd(1e-3), batch_dim=batch_dim, clip_norm=clip)
    return recipe_step(recipe, batch, microbatches, options=options)


def mlp(batch, sizes, layers, dtype="float32", **rest):
    """Returns the step of an MLP of `layers` products in a dtype, of alternating dims a and b."""
    rows, a, b = md.dims(batch=batch, a=sizes, b=sizes)

    def init(key):
        keys = md.random.split(key, layers)
        make = nn.initializers.normal(0.02)
        return [make(keys[i], [a, b] if i % 2 == 0 else [b, a]) for i in range(layers)]

    def loss(params, batch):
        x = md.cast(batch["x"], dtype)
        for i, weight in enumerate(md.cast(weight, dtype) for weight in params):
            x = md.relu(md.einsum(x, weight, over="a" if i % 2 == 0 else "b"))
        return md.mean(md.square(x))

    return step_of(init, loss, {"x": md.spec([rows, a], "float32")}, **rest)


def gpt(**rest):
    """Returns the step of a transformer of two layers."""
    model = load("gpt_mini").with_overrides("layers=2")
    return step_of(model.init, model.loss, model.batch_spec(16, 128), **rest)
