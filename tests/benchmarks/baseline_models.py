"""Models that are measured beside hand-written programs only: a vision transformer, a recommender.

They are written as a user would write them: `meshdsl.models` has neither.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import meshdsl as md
from meshdsl import nn
from meshdsl.models import Model
from meshdsl.models.configs import TransformerConfig
from meshdsl.models.layers import (
    Block,
    Drawing,
    Norm,
    Shared,
    first_positions,
    init_blocks,
    init_learned,
    init_norm,
    run_blocks,
)
from meshdsl.tensors.named_array import Spec

COLORS = 3


class Vision(md.Module):
    """A transformer over patches of images (Dosovitskiy et al. 2021, "An image is worth ...")."""

    patches: md.Tensor  # patch_height, patch_width, colors, embed
    patch_bias: md.Tensor  # embed
    positions: md.Tensor | None  # max_length, embed
    blocks: Block
    final_norm: Norm
    head: md.Tensor  # embed, classes
    head_bias: md.Tensor  # classes


def vision(config: TransformerConfig, patch: int, rows: int, batch: int) -> Model:
    """Returns a classifier of images of `rows * rows` patches; `config.vocab` counts its classes.

    Args:
        patch: the height and the width of a patch, in pixels.
    """
    policy, embed = config.policy, config.dims[1]
    classes = md.Dimension("classes", config.vocab)
    patch_dims = md.dims(patch_height=patch, patch_width=patch, colors=COLORS)

    def init(key: md.Tensor) -> Vision:
        draw = Drawing(key, 40, policy.params)
        return Vision(
            patches=draw.into(patch_dims, [*patch_dims, embed]),
            patch_bias=draw.zeros([embed]),
            positions=init_learned(config, draw),
            blocks=init_blocks(config, draw),
            final_norm=init_norm(config, draw, [embed]),
            head=draw.into(embed, [embed, classes]),
            head_bias=draw.zeros([classes]),
        )

    def loss(params: Vision, batch: Mapping[str, md.Tensor]) -> md.Tensor:
        outer = policy.to_compute(params)
        x = policy.to_compute(batch["image"])
        x = x.split("height", md.dims(rows=rows, patch_height=patch))
        x = x.split("width", md.dims(columns=rows, patch_width=patch))
        x = md.einsum(x, outer.patches, over=patch_dims).merge(["rows", "columns"], "length")
        assert outer.positions is not None
        x = x + outer.patch_bias + first_positions(outer.positions, x.shape.get("length"))
        x, _ = run_blocks(config, params.blocks, x, Shared(causal=False))
        x = md.mean(outer.final_norm(x), "length")
        scores = md.einsum(x, outer.head, over="embed") + outer.head_bias
        scores = policy.to_output(scores)
        return md.mean(nn.softmax_cross_entropy(scores, batch["label"], over="classes"))

    def batch_spec(batch_size: int, length: int = 1) -> dict[str, Spec]:
        side = rows * patch
        image = md.dims(batch=batch_size, height=side, width=side, colors=COLORS)
        return {"image": md.spec(image), "label": md.spec(image[:1], "int32")}

    return Model("vision", init, loss, batch, 1, batch_spec)


@dataclass(frozen=True)
class RecommenderSizes:
    """Sizes of a recommender: `bottom` and `top` are the widths of its two MLPs."""

    tables: int
    rows: int
    features: int
    dense: int
    bottom: int
    top: int
    batch: int


class Recommender(md.Module):
    """All parameters."""

    tables: md.Tensor  # tables, rows, features
    bottom_in: md.Tensor  # dense, bottom
    bottom_out: md.Tensor  # bottom, features
    top_in: md.Tensor  # vectors, other_vectors, top
    top_dense: md.Tensor  # features, top
    top_middle: md.Tensor  # top, next_top
    top_out: md.Tensor  # next_top


def recommender(sizes: RecommenderSizes, policy: md.Policy) -> Model:
    """Returns a predictor of clicks (Naumov et al. 2019, "Deep learning recommendation model").

    A batch has one row number per table. The rows' vectors, and one made of dense features, are
    multiplied with each other, all with all; an MLP reads the products.
    """
    tables, rows, features = md.dims(tables=sizes.tables, rows=sizes.rows, features=sizes.features)
    dense, bottom, top, next_top = md.dims(
        dense=sizes.dense, bottom=sizes.bottom, top=sizes.top, next_top=sizes.top
    )
    vectors, others = md.dims(vectors=sizes.tables + 1, other_vectors=sizes.tables + 1)

    def init(key: md.Tensor) -> Recommender:
        draw = Drawing(key, 7, policy.params)
        return Recommender(
            tables=draw.normal(0.1, [tables, rows, features]),
            bottom_in=draw.into(dense, [dense, bottom]),
            bottom_out=draw.into(bottom, [bottom, features]),
            top_in=draw.into([vectors, others], [vectors, others, top]),
            top_dense=draw.into(features, [features, top]),
            top_middle=draw.into(top, [top, next_top]),
            top_out=draw.into(next_top, [next_top]),
        )

    def loss(params: Recommender, batch: Mapping[str, md.Tensor]) -> md.Tensor:
        looked_up = md.take_along(params.tables, batch["row"].rename(batch="rows"), "rows")
        # Tables are split over devices until here, and the batch is from here on.
        looked_up = policy.to_compute(looked_up).rename(rows="batch", tables="vectors")
        w = policy.to_compute(params.replace(tables=None))
        x = md.relu(md.einsum(policy.to_compute(batch["dense"]), w.bottom_in, over="dense"))
        x = md.relu(md.einsum(x, w.bottom_out, over="bottom"))
        all_of_them = md.concat(
            [md.broadcast(x, [*x.shape[:1], md.Dimension("vectors", 1), features]), looked_up],
            "vectors",
        )
        products = md.einsum(
            all_of_them, all_of_them.rename(vectors="other_vectors"), over="features"
        )
        h = md.einsum(products, w.top_in, over=[vectors, others])
        h = md.relu(h + md.einsum(x, w.top_dense, over="features"))
        h = md.relu(md.einsum(h, w.top_middle, over="top"))
        score = policy.to_output(md.einsum(h, w.top_out, over="next_top"))
        # -log of the sigmoid of the score, or of its negative, where there was no click.
        return md.mean(md.softplus(score) - score * policy.to_output(batch["click"]))

    def batch_spec(batch_size: int, length: int = 1) -> dict[str, Spec]:
        batch = md.Dimension("batch", batch_size)
        return {
            "row": md.spec([batch, tables], "int32"),
            "dense": md.spec([batch, dense]),
            "click": md.spec([batch]),
        }

    return Model("recommender", init, loss, sizes.batch, 1, batch_spec)
