"""Weight-only int8 quantization: int8 projections with one float32 factor for each output (absmax, vector-wise).

This is LLM.int8() (Dettmers et al. 2022, arXiv 2208.07339, section 2.1) for the weights only. Activations stay in the
model's dtype, and each output of a product is multiplied by its factor.
"""

import re

import numpy as np

from jshadow.errors import ConfigError

CHOICES = (None, "int8")
PROJECTIONS = re.compile(r"layer_\d+/(attention|mlp)/(q|k|v|o|gate|up|down)/kernel")
BLOCK = 2**22  # how many numbers are converted to float32 at once


def check_quantize(quantize: str | None) -> None:
    """Raise ConfigError unless `quantize` is None or "int8"."""
    if quantize not in CHOICES:
        raise ConfigError(f"quantize must be one of {CHOICES}, got {quantize!r}")


def quantized(path: str) -> bool:
    """Whether the weight at `path` is one of the seven projections of a layer, which are stored in int8."""
    return PROJECTIONS.fullmatch(path) is not None


def quantize_int8(kernel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize a kernel [D, F] column by column, so that the largest magnitude of a column becomes 127.

    Returns:
        The kernel as int8 [D, F], and the factors of its columns, float32 [F].
    """
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
