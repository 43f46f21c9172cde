"""Weight-only int8: projections with one byte a number and a float32 factor for each output (absmax, vector-wise).

This is LLM.int8() (Dettmers et al. 2022, arXiv 2208.07339, section 2.1) for the weights only: activations stay in the
model's dtype, and the outputs of a product are multiplied by their factors.
"""

import re

import numpy as np

from jshadow.errors import ConfigError

CHOICES = (None, "int8")
PROJECTIONS = re.compile(r"layer_\d+/(attention|mlp)/(q|k|v|o|gate|up|down)/kernel")
BLOCK = 2**22  # numbers that are in float32 at once


def check_quantize(quantize: str | None) -> None:
    """Raise ConfigError unless it is None or "int8"."""
    if quantize not in CHOICES:
        raise ConfigError(f"quantize must be one of {CHOICES}, got {quantize!r}")


def quantized(path: str) -> bool:
    """Whether the weight at a path is kept in int8: it is one of the seven projections of a layer."""
    return PROJECTIONS.fullmatch(path) is not None


def quantize_int8(kernel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A kernel [D, F] as int8 [D, F] and float32 factors [F]: column by column, the largest magnitude becomes 127."""
    factors = np.empty(kernel.shape[1], np.float32)
    out = np.empty(kernel.shape, np.int8, order="F" if kernel.flags.f_contiguous else "C")
    step = max(1, BLOCK // kernel.shape[0])
    for start in range(0, kernel.shape[1], step):
        columns = slice(start, start + step)
        wide = kernel[:, columns].astype(np.float32)
        top = np.abs(wide).max(axis=0)
        factors[columns] = np.where(top > 0, top / 127, 1)
        out[:, columns] = np.rint(wide / factors[columns])
    return out, factors
