"""The `config.json` of the models that the ShadowKV paper measures (arXiv 2410.21465, section 5 and table 10).

Facts, for planning without a checkpoint at hand: sizes, RoPE, stop ids. As their owners published them, with one
difference: the converted checkpoint of GLM-4-9B-Chat-1M ("-hf") says rope_theta 10000, because its conversion dropped
the factor of 10000 (`rope_ratio`) of the original, which the weights were trained with and which stands here. Of
Phi-3-mini it is the revision of July 2024.
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
