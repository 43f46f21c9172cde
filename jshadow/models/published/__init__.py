"""The `config.json` of the models that the ShadowKV paper measures (arXiv 2410.21465, section 5 and table 10).

They serve to plan without a checkpoint: sizes, RoPE, stop ids. They are as their owners published them, with one
difference. The converted checkpoint of GLM-4-9B-Chat-1M ("-hf") has rope_theta 10000, because its conversion dropped
the factor of 10000 (`rope_ratio`) with which the weights were trained; here the factor is included. Phi-3-mini is the
revision of July 2024.
"""

import json
from importlib import resources
from typing import Any


def published_names() -> tuple[str, ...]:
    """Names of all models."""
    files = resources.files(__name__).iterdir()
    return tuple(sorted(path.name.removesuffix(".json") for path in files if path.name.endswith(".json")))


def published_config(name: str) -> dict[str, Any]:
    """The config.json of a model, parsed; `name` is one of `published_names()`."""
    return dict(json.loads(resources.files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8")))
