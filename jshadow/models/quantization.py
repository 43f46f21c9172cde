"""Quantizing the kernels of projections while they are read, one after another, in NumPy.

The layout of the codes is that of `jshadow.ops.projections`. The embedding, the head, norms, biases and routers stay
as they are.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jshadow.errors import check_one_of
from jshadow.ops.projections import KINDS, group_of, record_of

CHOICES = (None, *KINDS)
_PROJECTIONS = re.compile(
    r"layer_\d+/(attention|recurrent|mlp(/experts|/shared)?)/(q|k|v|o|gate|up|down|latent_in|latent_out)/kernel"
)
BLOCK = 2**22  # how many numbers are converted to float32 at once
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_LEAST = np.float32(2.0**-120)  # a factor of at least this can be inverted
_SMALL = 2**21  # a kernel of fewer numbers stays in int8 where others are in int4
_SHARES = (1, 0.92, 0.84, 0.76, 0.68, 0.6)  # of a group's range that the 16 codes of int4 span


def check_quantize(quantize: str | None) -> None:
    """Raise ConfigError unless `quantize` is None or one of KINDS."""
    check_one_of("quantize", quantize, CHOICES)


def kind_of_kernel(path: str, shape: tuple[int, ...], quantize: str | None) -> str | None:
    """Return the kind of a weight in a model that is loaded with `quantize`, or None for a plain weight.

    Where other kernels are in int4, those of keys and values, and those of fewer than 2^21 numbers, stay in int8. They
    are a small part of a large model. Attention is sensitive to keys and values, and small models to all of theirs.
    """
    if quantize is None or not quantized(path):
        return None
    small = path.endswith(("attention/k/kernel", "attention/v/kernel")) or math.prod(shape) < _SMALL
    return "int8" if quantize == "int4" and small else quantize


def quantized(path: str) -> bool:
    """Whether the weight at `path` is a projection of a layer's attention or MLP, which `load` can quantize."""
    return _PROJECTIONS.fullmatch(path) is not None


def stored(shapes: Mapping[str, tuple[int, ...]], quantize: str | None) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return the arrays that `load` makes of weights: path -> shape and dtype. The dtype None is that of the model.

    Args:
        shapes: weight path -> shape.
        quantize: None or one of KINDS.

    Raises:
        ConfigError: see `group_of`.
    """
    found: dict[str, tuple[tuple[int, ...], Any]] = {}
    for path, shape in shapes.items():
        if kind := kind_of_kernel(path, shape, quantize):
            own = path.removesuffix("kernel")
            found |= {own + name: made for name, made in record_of(kind, shape).items()}
        else:
            found[path] = (shape, None)
    return found


def quantize_kernel(kind: str, kernel: np.ndarray) -> dict[str, np.ndarray]:
    """Quantize a kernel [D, F], or the kernels [E, D, F] of a stack of experts.

    Args:
        kind: one of KINDS.
        kernel: floating.

    Returns:
        The arrays of `jshadow.ops.projections.record_of`.

    Raises:
        ConfigError: see `group_of`.
    """
    if kernel.ndim == 3:
        parts = [quantize_kernel(kind, one) for one in kernel]
        return {name: np.stack([part[name] for part in parts]) for name in parts[0]}
    if kind == "int4":
        return dict(zip(("kernel", "kernel_scale", "kernel_zero"), _quantize_int4(kernel), strict=True))
    quantize = {"int8": _quantize_int8, "fp8": _quantize_fp8}[kind]
    factors = np.empty(kernel.shape[1], np.float32)
    out = np.empty(kernel.shape, {"int8": np.int8, "fp8": _FP8}[kind], order="F" if kernel.flags.f_contiguous else "C")
    for columns in _blocks(kernel):
        out[:, columns], factors[columns] = quantize(kernel[:, columns].astype(np.float32))
    return {"kernel": out, "kernel_scale": factors}


def _blocks(kernel: np.ndarray) -> list[slice]:
    step = max(1, BLOCK // kernel.shape[0])
    return [slice(start, start + step) for start in range(0, kernel.shape[1], step)]


def _quantize_int8(wide: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The largest magnitude of a column becomes 127."""
    top = np.abs(wide).max(axis=0)
    factors = np.where(top > 0, top / 127, 1)
    return np.rint(wide / factors), factors


def _quantize_fp8(wide: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The largest magnitude of a column becomes 448, the largest of the dtype."""
    top = np.abs(wide).max(axis=0)
    factors = np.where(top > 0, np.maximum(top / 448, _LEAST), 1)
    return (wide / factors).astype(_FP8), factors


def _quantize_int4(kernel: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the packed codes, and the factors and zeros of each group.

    The codes span a share of the range of a group's numbers. Numbers past it get the first or the last code. The factor
    and the zero are then fitted to the codes by least squares. Of the shares in `_SHARES`, the one with the least
    squared error is taken.
    """
    inputs, features = kernel.shape
    group = group_of(inputs)
    codes = np.empty((inputs // group, group // 2, features), np.uint8)
    scales, zeros = (np.empty((inputs // group, features), _BFLOAT16) for _ in range(2))
    for columns in _blocks(kernel):
        wide = np.ascontiguousarray(kernel[:, columns]).astype(np.float32).reshape(inputs // group, group, -1)
        scales[:, columns], zeros[:, columns] = _fitted(wide)
        scale, zero = (part[:, None, columns].astype(np.float32) for part in (scales, zeros))
        code = np.clip(np.rint((wide - zero) / scale), 0, 15).astype(np.uint8)
        codes[..., columns] = code[:, : group // 2] | code[:, group // 2 :] << 4
    return codes.reshape(inputs // 2, features), scales, zeros


def _fitted(wide: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the factors and zeros of groups [G, g, F], both float32 [G, F]."""
    low, high, mean = wide.min(axis=1), wide.max(axis=1), wide.mean(axis=1)
    least = np.full(low.shape, np.inf, np.float32)
    scale, zero = np.ones_like(low), np.zeros_like(low)
    for share in _SHARES:
        step = np.maximum((high - low) * np.float32(share / 15), _LEAST)
        start = (low + high) / 2 - 7.5 * step
        code = np.clip(np.rint((wide - start[:, None]) / step[:, None]), 0, 15)
        middle = code.mean(axis=1)
        code -= middle[:, None]
        squares = (code * code).sum(axis=1)
        fitted = np.where(squares > 0, (code * wide).sum(axis=1) / np.maximum(squares, 1e-6), step)
        fitted = np.maximum(fitted, _LEAST)
        code *= fitted[:, None]
        code -= wide - mean[:, None]
        error = (code * code).sum(axis=1)
        better = error < least
        for kept, new in ((least, error), (scale, fitted), (zero, mean - fitted * middle)):
            np.copyto(kept, new, where=better)
    return scale, zero
