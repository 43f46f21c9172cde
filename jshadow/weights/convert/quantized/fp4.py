"""Weights in E2M1, two in a byte, with scales for small blocks: MXFP4 (OCP microscaling formats) and NVFP4 (NVIDIA)."""

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np

from jshadow.errors import CheckpointError
from jshadow.weights.convert.quantized.base import ONE_NUMBER, Codes, Packing, Part, Scheme, Stored, matrix
from jshadow.weights.convert.quantized.codes import from_e2m1

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)  # holds all products of E2M1 and E8M0 numbers
_MX, _NV = 32, 16  # numbers of a block


def mxfp4(_: Mapping[str, object]) -> Scheme:
    """Return the scheme of gpt-oss (OpenAI, arXiv 2508.10925): the experts of a layer are one weight, [E, in, out].

    `X_blocks` is U8 [E, out, in / 32, 16], and `X_scales` is U8 [E, out, in / 32] with E8M0 numbers. The weight `X` is
    that of the plain checkpoints of gpt-oss.
    """

    def packing(module: str, found: Mapping[str, Stored]) -> Packing:
        blocks = found["_blocks"]
        if blocks.tag != "U8":
            raise CheckpointError(f"{blocks.name}: dtype must be U8, got {blocks.tag}")
        if len(blocks.shape) != 4 or blocks.shape[3] != _MX // 2 or 0 in blocks.shape:
            raise CheckpointError(f"{blocks.name}: misshaped, expected [E, out, in / 32, 16], got {list(blocks.shape)}")
        experts, out, groups, _ = blocks.shape
        return Packing(
            (experts, out, groups * _MX),
            {
                "_blocks": Part(("U8",), (blocks.shape,)),
                "_scales": Part(("U8", "F8_E8M0"), (blocks.shape[:3],), is_scale=True),
            },
            lambda arrays: Codes(
                _levels(arrays["_blocks"].reshape(experts * out, -1)),
                arrays["_scales"].reshape(-1, groups),
                (1, _MX),
            ),
            transposed=True,
            exact=_BFLOAT16,
        )

    return Scheme(("_blocks",), ("_scales",), packing, weight="")


def mx_packing(suffix: str, stored: Stored) -> Packing:
    """Return how a weight in MXFP4 is packed: codes U8 [out, in / 2], and E8M0 scales `.weight_scale` [out, in / 32].

    Raises:
        CheckpointError: the codes are no matrix of whole blocks.
    """
    out, columns = _columns(stored, _MX)
    return Packing(
        (out, columns),
        {
            suffix: Part(("U8",), (stored.shape,)),
            ".weight_scale": Part(("U8", "F8_E8M0"), ((out, columns // _MX),), is_scale=True),
        },
        lambda arrays: Codes(_levels(arrays[suffix]), arrays[".weight_scale"], (1, _MX)),
        exact=_BFLOAT16,
    )


def nv_packing(
    suffix: str, stored: Stored, total: str, combine: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> Packing:
    """Return how a weight in NVFP4 is packed: codes U8 [out, in / 2], and scales E4M3 `.weight_scale` [out, in / 16].

    The scale of a block is zero if its weights are so small beside the others of the tensor that E4M3 has no number for
    it. Writers did not set the codes of such blocks to zero. Their weights are zero.

    Args:
        suffix, stored: the codes.
        total: suffix of the scale of the whole tensor, F32.
        combine: makes one factor of the scale of a block and of that of the tensor.

    Raises:
        CheckpointError: the codes are no matrix of whole blocks.
    """
    out, columns = _columns(stored, _NV)

    def codes(arrays: Mapping[str, np.ndarray]) -> Codes:
        whole = arrays[total].reshape(())
        scales = combine(arrays[".weight_scale"], whole)
        return Codes(_levels(arrays[suffix]), scales, (1, _NV), may_vanish=bool(whole))

    return Packing(
        (out, columns),
        {
            suffix: Part(("U8",), (stored.shape,)),
            ".weight_scale": Part(("F8_E4M3",), ((out, columns // _NV),), is_scale=True),
            total: Part(("F32",), ONE_NUMBER, is_scale=True),
        },
        codes,
    )


def _columns(stored: Stored, block: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of a matrix that has two columns in a byte."""
    out, half = matrix(stored, "U8")
    if 2 * half % block:
        raise CheckpointError(f"{stored.name}: misshaped, expected a multiple of {block // 2} bytes a row, got {half}")
    return out, 2 * half


def _levels(packed: np.ndarray) -> Callable[[int, int], np.ndarray]:
    return lambda start, end: from_e2m1(packed[start:end])
