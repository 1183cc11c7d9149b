"""A multi-layer perceptron that classifies vectors, such as flattened images.

Its hidden layers are stacked along the dim `layers` and all have the dim `hidden`, so
`hidden:model` splits every one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import meshdsl as md
from meshdsl import nn
from meshdsl.models.model import Model
from meshdsl.nn import initializers
from meshdsl.tensors.named_array import Spec


@dataclass(frozen=True)
class MLPConfig:
    """Sizes of a classifier; `layers` counts the square layers between the first and the last."""

    features: int = 64
    hidden: int = 128
    layers: int = 1
    classes: int = 10

    def __post_init__(self) -> None:
        problems = [f"{k}={v}: needs to be at least 1" for k, v in vars(self).items() if v < 1]
        if problems:
            raise ValueError("; ".join(problems))


class Classifier(md.Module):
    """All parameters."""

    w_in: md.Tensor  # features, hidden
    bias_in: md.Tensor  # hidden
    w_hidden: md.Tensor  # layers, hidden, next_hidden
    bias_hidden: md.Tensor  # layers, hidden
    w_out: md.Tensor  # hidden, classes
    bias_out: md.Tensor  # classes

    def __call__(self, inputs: md.Tensor) -> md.Tensor:
        """Returns the scores of the classes: [batch, classes] for inputs [batch, features]."""
        x = md.relu(md.einsum(inputs, self.w_in, over="features") + self.bias_in)

        def layer(x: md.Tensor, slices: tuple[md.Tensor, md.Tensor]) -> tuple[md.Tensor, None]:
            weights, bias = slices
            x = md.einsum(x, weights, over="hidden").rename(next_hidden="hidden")
            return md.relu(x + bias), None

        x, _ = md.scan(layer, x, (self.w_hidden, self.bias_hidden), dim="layers")
        return md.einsum(x, self.w_out, over="hidden") + self.bias_out


def init(config: MLPConfig, key: md.Tensor) -> Classifier:
    """Returns initial parameters, scaled for ReLU (He et al. 2015, equation 10)."""
    features, hidden, next_hidden, layers, classes = md.dims(
        features=config.features,
        hidden=config.hidden,
        next_hidden=config.hidden,
        layers=config.layers,
        classes=config.classes,
    )
    first, middle, last = md.random.split(key, 3)
    kept = 2**0.5
    return Classifier(
        w_in=initializers.fan_in(features, kept)(first, [features, hidden]),
        bias_in=md.zeros(hidden),
        w_hidden=initializers.fan_in(hidden, kept)(middle, [layers, hidden, next_hidden]),
        bias_hidden=md.zeros([layers, hidden]),
        w_out=initializers.fan_in(hidden)(last, [hidden, classes]),
        bias_out=md.zeros(classes),
    )


def loss(params: Classifier, batch: Mapping[str, md.Tensor]) -> md.Tensor:
    """Returns the mean negative log-likelihood of the labels, in nats."""
    scores = params(batch["inputs"])
    return md.mean(nn.softmax_cross_entropy(scores, batch["labels"], over="classes"))


def classifier(config: MLPConfig | None = None, name: str = "mlp", batch_size: int = 64) -> Model:
    """Returns the model of a configuration; its batches are inputs [batch, features] and labels."""
    sizes = config or MLPConfig()

    def batch_spec(batch_size: int, length: int = 1) -> dict[str, Spec]:
        batch, features = md.dims(batch=batch_size, features=sizes.features)
        return {"inputs": md.spec([batch, features]), "labels": md.spec([batch], "int32")}

    return Model(
        name=name,
        init=partial(init, sizes),
        loss=loss,
        batch_size=batch_size,
        length=1,
        batch_spec=batch_spec,
        config=sizes,
        rebuild=lambda config: classifier(config, name, batch_size),
    )
