"""Quantized weights in safetensors files. They are decoded while they are read, so a loaded model is a plain one."""

from collections.abc import Callable, Mapping
from typing import Any

from jshadow.errors import ConfigError, JshadowError
from jshadow.weights.convert.quantized.base import Scheme
from jshadow.weights.convert.quantized.compressed import compressed_tensors
from jshadow.weights.convert.quantized.fp4 import mxfp4
from jshadow.weights.convert.quantized.fp8 import fp8
from jshadow.weights.convert.quantized.gptq_awq import awq, gptq
from jshadow.weights.convert.quantized.modelopt import modelopt

QUANTIZATION = "quantization_config"  # the key of config.json
_METHODS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "awq": awq,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "gptq": gptq,
    "modelopt": modelopt,
    "mxfp4": mxfp4,
}


def scheme_of(hf: Mapping[str, Any]) -> Scheme | None:
    """Return how the weights of a checkpoint are stored, or None if they are plain.

    Raises:
        ConfigError: the method of the `quantization_config` in a parsed config.json, or a setting of it, is not read.
    """
    settings = hf.get(QUANTIZATION)
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise ConfigError(f"config.json {QUANTIZATION} must be an object, got {settings!r:.80}")
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise ConfigError(f"config.json {QUANTIZATION}.quant_method must be one of {sorted(_METHODS)}, got {method!r}")
    try:
        return _METHODS[method](settings)
    except JshadowError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"config.json {QUANTIZATION} lacks a key, or has a value of the wrong type: {error}"
        ) from error
