"""The `config.json` of the models that the ShadowKV paper measures (arXiv 2410.21465, section 5 and table 10), and of
some later ones: Qwen3-30B-A3B (revision 2507), GLM-4.5-Air, gpt-oss, hybrids, and the text models of Gemma 4 31B,
Mistral Small 3.2, Ministral 3 8B and Command R7B.

`jshadow plan` uses them to compute the size of a model without its checkpoint. Their sizes are those that the authors
of the models published. Those of gpt-oss do not say that the published weights are quantized. The converted
checkpoint of GLM-4-9B-Chat-1M ("-hf") has rope_theta 10000. Its conversion dropped the factor of 10000 (`rope_ratio`)
that the weights were trained with. The file here includes that factor. Phi-3-mini is the revision of July 2024.
"""

import json
from importlib import resources
from typing import Any


def published_names() -> tuple[str, ...]:
    """Return the names of all models that have a published config here."""
    files = resources.files(__name__).iterdir()
    return tuple(sorted(path.name.removesuffix(".json") for path in files if path.name.endswith(".json")))


def published_config(name: str) -> dict[str, Any]:
    """Return the parsed config.json of a model. `name` is one of `published_names()`."""
    return dict(json.loads(resources.files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8")))
