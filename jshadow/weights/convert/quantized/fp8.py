"""Weights in fp8 with scales for blocks (DeepSeek-V3, arXiv 2412.19437, section 3.3) or for whole tensors.

`X.weight` is F8_E4M3 [out, in]. `X.weight_scale_inv` has a factor for each block of 128 x 128 numbers. In spite of its
name, a weight is its code times its factor. Files of AutoFP8 have one factor for a tensor, `X.weight_scale`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jshadow.errors import ConfigError
from jshadow.models.config import check_positive
from jshadow.weights.convert.quantized.base import (
    FLOATS,
    ONE_NUMBER,
    Codes,
    Packing,
    Part,
    Scheme,
    Stored,
    blocks_of,
    matrix,
)
from jshadow.weights.convert.quantized.codes import from_e4m3

_SCALES = (".weight_scale_inv", ".weight_scale")


def fp8(settings: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a `quantization_config`.

    Raises:
        ConfigError: the numbers are not E4M3, or the blocks have no sizes.
    """
    if settings.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ConfigError(f"config.json quantization_config.fmt must be 'e4m3', got {settings['fmt']!r}")
    block = settings.get("weight_block_size", (128, 128))
    if block is not None:
        if not isinstance(block, list | tuple) or len(block) != 2:
            raise ConfigError(f"config.json quantization_config.weight_block_size must be two sizes, got {block!r}")
        check_positive("config.json quantization_config.weight_block_size", rows=block[0], columns=block[1])

    def packing(module: str, found: Mapping[str, Stored]) -> Packing:
        shape = matrix(found[".weight"], "F8_E4M3")
        scale = next((suffix for suffix in _SCALES if suffix in found), _SCALES[0])
        # Without the key, files of AutoFP8 have one scale for a tensor.
        whole = block is None or ("weight_block_size" not in settings and scale == ".weight_scale")
        size = shape if whole or block is None else (block[0], block[1])
        grid = blocks_of(shape, size)
        return Packing(
            shape,
            {
                ".weight": Part(("F8_E4M3",), (shape,)),
                scale: Part((*FLOATS, "F8_E8M0"), ONE_NUMBER if whole else (grid,), is_scale=True),
            },
            lambda arrays: e4m3_codes(arrays[".weight"], arrays[scale], size, grid),
        )

    return Scheme((".weight",), _SCALES, packing)


def e4m3_codes(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int], grid: tuple[int, int]) -> Codes:
    """Return the codes of a weight [out, in] of E4M3 numbers."""
    return Codes(lambda start, end: from_e4m3(weight[start:end]), scale.reshape(grid), block)
