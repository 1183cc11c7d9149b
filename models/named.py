"""The named models: a configuration each, with the batch it is usually trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshdsl.models.bert import BertConfig, bert
from meshdsl.models.configs import TransformerConfig
from meshdsl.models.model import Model
from meshdsl.models.resnet import ResNetConfig, resnet
from meshdsl.models.t5 import T5Config, t5
from meshdsl.models.transformer import transformer
from meshdsl.models.unet3d import UNet3DConfig, unet3d


@dataclass(frozen=True)
class Named:
    """A configuration, the family that makes a model of it, and a batch."""

    config: Any
    batch_size: int
    length: int
    family: Callable[[str, Any, int, int], Model] = transformer

    def __post_init__(self) -> None:
        if self.family is transformer and not isinstance(self.config, TransformerConfig):
            raise ValueError(
                f"{type(self.config).__name__} is no TransformerConfig: give Named, in "
                "models/named.py, the family that makes a model of it"
            )

    def model(self, name: str) -> Model:
        return self.family(name, self.config, self.batch_size, self.length)


def _gpt2(layers: int, embed: int, heads: int) -> Named:
    """Radford et al. 2019, table 2."""
    config = TransformerConfig(
        layers, embed, heads, 50257, 1024, norm="layer", positions="learned", bias=True
    )
    return Named(config, batch_size=512, length=1024)


def _bert(
    layers: int, embed: int, heads: int, vocab: int, max_length: int, mask: int
) -> BertConfig:
    return BertConfig(
        layers,
        embed,
        heads,
        vocab,
        max_length,
        norm="layer",
        norm_order="post",
        norm_eps=1e-12,
        positions="learned",
        bias=True,
        mask_token=mask,
    )


def _t5(layers: int, embed: int, heads: int, kv: int, d_ff: int, vocab: int) -> T5Config:
    return T5Config(
        layers,
        embed,
        heads,
        vocab,
        512,
        kv=kv,
        d_ff=d_ff,
        positions="relative",
        scaled=False,
        mlp="relu",
    )


MODELS = {
    "gpt_mini": Named(TransformerConfig(4, 256, 8, 256, 1024), batch_size=16, length=128),
    "gpt2_small": _gpt2(layers=12, embed=768, heads=12),
    "gpt2_medium": _gpt2(layers=24, embed=1024, heads=16),
    "gpt2_xl": _gpt2(layers=48, embed=1600, heads=25),
    # Touvron et al. 2023, "LLaMA", table 2.
    "llama_7b": Named(
        TransformerConfig(32, 4096, 32, 32000, 2048, mlp="swiglu", tied=False),
        batch_size=2048,
        length=2048,
    ),
    # Grattafiori et al. 2024, "The Llama 3 herd of models", table 3.
    "llama3_8b": Named(
        TransformerConfig(
            32,
            4096,
            32,
            128256,
            8192,
            kv_heads=8,
            d_ff=14336,
            mlp="swiglu",
            tied=False,
            rotary_base=500000.0,
        ),
        batch_size=512,
        length=8192,
    ),
    # Brown et al. 2020, table 2.1; the batch as in Narayanan et al. 2021, "Efficient large-scale
    # language model training", section 5.1.
    "gpt3_175b": Named(
        TransformerConfig(
            96,
            12288,
            96,
            50257,
            2048,
            norm="layer",
            positions="learned",
            bias=True,
            remat="full",
        ),
        batch_size=1536,
        length=2048,
    ),
    # Jiang et al. 2024, "Mixtral of experts", table 1, which drops no tokens; a capacity is what
    # keeps the slots of an expert from being as many as there are tokens.
    "mixtral_8x7b": Named(
        TransformerConfig(
            32,
            4096,
            32,
            32000,
            32768,
            kv_heads=8,
            d_ff=14336,
            mlp="swiglu",
            experts=8,
            capacity=1.25,
            dispatch="gather",
            tied=False,
            rotary_base=1e6,
        ),
        batch_size=256,
        length=4096,
    ),
    "mixtral_mini": Named(
        TransformerConfig(
            2,
            128,
            4,
            256,
            1024,
            kv_heads=2,
            d_ff=256,
            mlp="swiglu",
            experts=4,
            capacity=1.25,
            dispatch="gather",
        ),
        batch_size=16,
        length=128,
    ),
    # DeepSeek-AI 2024, "DeepSeek-V2", section 3.1.2; the router's scale is that of V2-Lite, which
    # has about as few experts in each group.
    "deepseek_mini": Named(
        TransformerConfig(
            2,
            128,
            4,
            256,
            1024,
            attention="latent",
            query_rank=96,
            kv_rank=64,
            kv=32,
            rotary_kv=16,
            d_ff=64,
            mlp="swiglu",
            experts=8,
            shared_experts=2,
            dense_layers=1,
            router_normalise=False,
            router_groups=4,
            router_chosen_groups=2,
            capacity=1.25,
            dispatch="gather",
        ),
        batch_size=16,
        length=128,
    ),
    # Devlin et al. 2019, section 3.
    "bert_base": Named(_bert(12, 768, 12, 30522, 512, mask=103), 256, 512, bert),
    "bert_mini": Named(_bert(2, 128, 4, 257, 512, mask=256), 16, 128, bert),
    # Raffel et al. 2020, section 3.1.2 and table 14; the vocabulary of 32,000 has 128 more.
    "t5_small": Named(_t5(6, 512, 8, 64, 2048, 32128), 128, 1024, t5),
    "t5_base": Named(_t5(12, 768, 12, 64, 3072, 32128), 128, 1024, t5),
    "t5_mini": Named(_t5(2, 128, 4, 32, 256, 256), 16, 128, t5),
    # He et al. 2016, table 1; the length of image models is that of an image's sides.
    "resnet50": Named(ResNetConfig(), 256, 224, resnet),
    "resnet18": Named(ResNetConfig((2, 2, 2, 2), block="basic"), 256, 224, resnet),
    "resnet_mini": Named(
        ResNetConfig((1, 1), (16, 32), (1, 2), block="basic", stem=16, classes=4), 32, 32, resnet
    ),
    # Çiçek et al. 2016, figure 2, with padded convolutions.
    "unet3d": Named(UNet3DConfig(), 2, 128, unet3d),
    "unet3d_mini": Named(UNet3DConfig(filters=8, levels=2, groups=4), 4, 16, unet3d),
}
