"""The families of models, by the `model_type` of their `config.json`: one file each."""

from meshdsl.models.huggingface.families.gpt2 import GPT2
from meshdsl.models.huggingface.families.llama import LLAMA
from meshdsl.models.huggingface.family import Family

FAMILIES: dict[str, Family] = {family.name: family for family in (GPT2, LLAMA)}
