"""Checkpoints of NVIDIA's Model Optimizer in NVFP4 and FP8. The dtype of `X.weight` says which of them it is in."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jshadow.errors import CheckpointError, ConfigError
from jshadow.weights.convert.quantized.base import FLOATS, ONE_NUMBER, Packing, Part, Scheme, Stored, matrix
from jshadow.weights.convert.quantized.fp4 import nv_packing
from jshadow.weights.convert.quantized.fp8 import e4m3_codes

_TAGS = {"FP8": "F8_E4M3", "NVFP4": "U8", "W4A16_NVFP4": "U8"}  # each algorithm, and the dtype of its weights
_WEIGHT, _SCALE, _TOTAL = ".weight", ".weight_scale", ".weight_scale_2"


def modelopt(settings: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a `quantization_config`, or of `quantization` in hf_quant_config.json.

    Raises:
        ConfigError: an algorithm is not read.
    """
    named = {str(settings.get("quant_algo"))}
    if named == {"MIXED_PRECISION"}:
        named = {str(layer.get("quant_algo")) for layer in settings["quantized_layers"].values()}
    if unknown := sorted(named - {*_TAGS}):
        raise ConfigError(
            f"config.json quantization_config.quant_algo must be one of {sorted(_TAGS)}, got {unknown[0]!r}"
        )
    tags = tuple(sorted(_TAGS[one] for one in named))

    def packing(module: str, found: Mapping[str, Stored]) -> Packing:
        stored = found[_WEIGHT]
        if stored.tag not in tags:
            raise CheckpointError(f"{stored.name}: dtype must be one of {tags}, got {stored.tag}")
        if stored.tag == "U8":
            return nv_packing(_WEIGHT, stored, _TOTAL, np.multiply)
        shape = matrix(stored, "F8_E4M3")
        parts = {_WEIGHT: Part(("F8_E4M3",), (shape,)), _SCALE: Part(FLOATS, ONE_NUMBER, is_scale=True)}
        return Packing(shape, parts, lambda arrays: e4m3_codes(arrays[_WEIGHT], arrays[_SCALE], shape, (1, 1)))

    return Scheme((_WEIGHT,), (_SCALE, _TOTAL), packing)
