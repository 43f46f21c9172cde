"""The families that jshadow can load, by Hugging Face `model_type`."""

from collections.abc import Mapping
from typing import Any

from jshadow.errors import ConfigError, check_one_of
from jshadow.models.cohere import COHERE2
from jshadow.models.cwm import CWM
from jshadow.models.ernie import ERNIE45, ERNIE45_MOE
from jshadow.models.exaone import EXAONE4
from jshadow.models.family import ModelFamily
from jshadow.models.gemma import GEMMA3_TEXT
from jshadow.models.gemma4 import GEMMA4_TEXT, GEMMA4_UNIFIED_TEXT
from jshadow.models.glm import GLM, GLM4, GLM4_MOE
from jshadow.models.gpt_oss import GPT_OSS
from jshadow.models.granite import GRANITE, GRANITE_MOE
from jshadow.models.granite_hybrid import GRANITE_HYBRID
from jshadow.models.iquest import IQUEST_CODER
from jshadow.models.lfm import LFM2, LFM2_MOE
from jshadow.models.llama import LLAMA
from jshadow.models.minimax import MINIMAX_M2
from jshadow.models.mistral import MINISTRAL3, MISTRAL
from jshadow.models.mixtral import MIXTRAL
from jshadow.models.nemotron import NEMOTRON_H
from jshadow.models.olmo import OLMO2, OLMO3
from jshadow.models.phi import PHI3
from jshadow.models.qwen import QWEN2, QWEN3
from jshadow.models.qwen_hybrid import QWEN3_NEXT, QWEN35_MOE_TEXT, QWEN35_TEXT
from jshadow.models.qwen_moe import QWEN3_MOE
from jshadow.models.seed_oss import SEED_OSS
from jshadow.models.smollm3 import SMOLLM3

_FAMILIES = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, GLM, GLM4, GEMMA3_TEXT, SMOLLM3),
    *(MINISTRAL3, SEED_OSS, GRANITE, OLMO2, OLMO3, EXAONE4, COHERE2, ERNIE45, CWM, IQUEST_CODER),
    *(GEMMA4_TEXT, GEMMA4_UNIFIED_TEXT),
    *(MIXTRAL, QWEN3_MOE, GLM4_MOE, MINIMAX_M2, GRANITE_MOE, ERNIE45_MOE, GPT_OSS),
    *(QWEN3_NEXT, QWEN35_TEXT, QWEN35_MOE_TEXT, GRANITE_HYBRID, NEMOTRON_H),
    *(LFM2, LFM2_MOE),
)
FAMILIES: dict[str, ModelFamily] = {family.model_type: family for family in _FAMILIES}


# Models of texts and images: the type of the text model inside, where the file leaves it out. Its keys are under
# `text_config`. These keys of the whole model count for the text too.
_WRAPPERS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
_SHARED_KEYS = ("eos_token_id", "tie_word_embeddings", "quantization_config", "auto_map")


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `config.json` of the text model: that of the file, or that inside of a model of texts and images.

    Raises:
        ConfigError: `text_config` is not an object.
    """
    inner = hf.get("text_config")
    if hf.get("model_type") not in _WRAPPERS:
        return dict(hf)
    if not isinstance(inner, Mapping):
        raise ConfigError(f"config.json text_config must be an object, got {inner!r:.80}")
    outer = {key: hf[key] for key in _SHARED_KEYS if key in hf}
    kind = {"model_type": _WRAPPERS[hf["model_type"]], "tie_word_embeddings": True}
    return {**kind, **inner, **outer}


def family_of(hf: Mapping[str, Any]) -> ModelFamily:
    """Return the family of a parsed `config.json`. Raises ConfigError if its `model_type` is unknown."""
    model_type = hf.get("model_type")
    check_one_of("config.json model_type", model_type, sorted(FAMILIES))
    return FAMILIES[str(model_type)]


def support_matrix() -> str:
    """Return the supported families as a Markdown table. docs/models.md contains this table."""
    rows = [(f"`{name}`", family.models, family.differs) for name, family in FAMILIES.items()]
    head = [("`model_type`", "models", "how it differs"), ("---", "---", "---")]
    return "\n".join("| " + " | ".join(row) + " |" for row in [*head, *rows])
