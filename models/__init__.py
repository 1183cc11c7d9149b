"""Model definitions and their named configurations: `models.load("gpt_mini", "layers=8")`."""

from meshdsl.models.configs import TransformerConfig
from meshdsl.models.lora import with_lora
from meshdsl.models.model import Cache, Decoding, Model
from meshdsl.models.registry import NAMES, load

__all__ = ["NAMES", "Cache", "Decoding", "Model", "TransformerConfig", "load", "with_lora"]
