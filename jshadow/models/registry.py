"""The families that jshadow can load, by Hugging Face `model_type`."""

from collections.abc import Mapping
from typing import Any

from jshadow.errors import ConfigError
from jshadow.models.family import ModelFamily
from jshadow.models.llama import LLAMA

FAMILIES: dict[str, ModelFamily] = {family.model_type: family for family in (LLAMA,)}


def family_of(hf: Mapping[str, Any]) -> ModelFamily:
    """The family of a `config.json`. Raises ConfigError naming an unknown `model_type`."""
    model_type = hf.get("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(f"config.json model_type must be one of {sorted(FAMILIES)}, got {model_type!r}")
    return FAMILIES[str(model_type)]
