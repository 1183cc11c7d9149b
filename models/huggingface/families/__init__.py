"""The families of models, by the `model_type` of their `config.json`: one file each.

A model that several families could have is exported as the first of them.
"""

from meshdsl.models.huggingface.families.bert import BERT, ROBERTA, XLM_ROBERTA
from meshdsl.models.huggingface.families.deepseek import DEEPSEEK2, DEEPSEEK3
from meshdsl.models.huggingface.families.gemma import GEMMA, GEMMA2, GEMMA3
from meshdsl.models.huggingface.families.gpt2 import GPT2
from meshdsl.models.huggingface.families.llama import LLAMA
from meshdsl.models.huggingface.families.mistral import MISTRAL
from meshdsl.models.huggingface.families.mixtral import MIXTRAL
from meshdsl.models.huggingface.families.phi3 import PHI3
from meshdsl.models.huggingface.families.qwen import QWEN2, QWEN3
from meshdsl.models.huggingface.families.t5 import MT5, T5
from meshdsl.models.huggingface.family import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        GPT2,
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        MIXTRAL,
        PHI3,
        GEMMA,
        GEMMA2,
        GEMMA3,
        DEEPSEEK2,
        DEEPSEEK3,
        T5,
        MT5,
        BERT,
        ROBERTA,
        XLM_ROBERTA,
    )
}
