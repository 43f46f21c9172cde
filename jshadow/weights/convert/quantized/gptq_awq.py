"""Integer weights of GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978), packed into 32-bit words.

Both store the transpose of a weight [out, in]. `X.qweight` has the integers, `X.qzeros` the zero points and `X.scales`
the scales, one for each output and group of inputs. A weight is (integer - zero point) * scale.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jshadow.errors import ConfigError
from jshadow.models.config import check_positive
from jshadow.weights.convert.quantized.base import FLOATS, Codes, Packing, Part, Scheme, Stored, matrix
from jshadow.weights.convert.quantized.codes import unpacked
from jshadow.weights.convert.safetensors_file import UnfitTensor

_WHERE = "config.json quantization_config"
_WORD = 32
_COMPANIONS = (".weight", ".qzeros", ".scales", ".g_idx")
_AWQ_SHIFTS = 4 * np.array([0, 4, 1, 5, 2, 6, 3, 7], np.int32)  # where each of eight outputs lies in a word


def gptq(settings: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a `quantization_config` of GPTQ.

    `qweight` is I32 [in * bits / 32, out]: the words of a column have its inputs from the lowest bits upwards.
    `qzeros` is I32 [groups, out * bits / 32]. `g_idx` I32 [in] has the group of each input. In the format "gptq",
    zero points are stored less one. The writer subtracts from whole words, so a zero point of 0 borrows from its
    neighbor, and the reader adds to whole words.

    Raises:
        ConfigError: the number of bits, the group size or the format is not read.
    """
    bits, size = _sizes(settings, (2, 4, 8))
    name = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if name not in ("gptq", "gptq_v2"):
        raise ConfigError(f"{_WHERE}.checkpoint_format must be 'gptq' or 'gptq_v2', got {name!r}")
    changed = [key for key, value in (settings.get("dynamic") or {}).items() if not key.startswith("-:") and value]
    if changed:
        raise ConfigError(f"{_WHERE}.dynamic must only leave modules out ('-:...'), got {changed[0]!r}")
    below = np.uint32(sum(1 << shift for shift in range(0, _WORD, bits)) if name == "gptq" else 0)

    def packing(module: str, found: Mapping[str, Stored]) -> Packing:
        words, out = matrix(found[".qweight"], "I32")
        columns = words * _WORD // bits
        groups = -(-columns // (size or columns))

        def codes(arrays: Mapping[str, np.ndarray]) -> Codes:
            columns_of, index = np.ascontiguousarray(arrays[".qweight"].T), arrays.get(".g_idx")
            if index is not None:
                if index.min() < 0 or index.max() >= groups:
                    raise UnfitTensor(
                        f"{found['.g_idx'].name}: must lie in [0, {groups}), got {index.min()} to {index.max()}"
                    )
                index = index if index.any() else None  # some writers leave zeros if the inputs are in order
            return Codes(
                lambda start, end: unpacked(columns_of[start:end], bits, columns),
                arrays[".scales"].T,
                (1, size or columns),
                unpacked(arrays[".qzeros"].view(np.uint32) + below, bits, out).T,
                index,
            )

        index = {".g_idx": Part(("I32",), ((columns,),), optional=True)}
        return Packing((out, columns), _parts(found, out, groups, bits) | index, codes)

    return Scheme((".qweight",), _COMPANIONS, packing, adds_biases=True)


def awq(settings: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a `quantization_config` of AWQ's version "gemm".

    `qweight` is I32 [in, out / 8], and `qzeros` is I32 [in / group, out / 8]. The eight outputs of a word are in the
    order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits upwards.

    Raises:
        ConfigError: the number of bits, the group size or the version is not read, or there are no zero points.
    """
    bits, size = _sizes(settings, (4,))
    version = str(settings.get("version") or settings.get("format") or settings.get("checkpoint_format") or "gemm")
    if version.lower() != "gemm":
        raise ConfigError(f"{_WHERE}.version must be 'gemm', got {version!r}")
    if settings.get("zero_point", True) is not True:
        raise ConfigError(f"{_WHERE}.zero_point must be true, got {settings['zero_point']!r}")

    def integers(words: np.ndarray) -> np.ndarray:
        """Return the integers [8 W, N] of words [W, N]."""
        return (words[:, None] >> _AWQ_SHIFTS[:, None] & 15).reshape(-1, words.shape[1]).astype(np.float32)

    def packing(module: str, found: Mapping[str, Stored]) -> Packing:
        columns, words = matrix(found[".qweight"], "I32")
        out = words * len(_AWQ_SHIFTS)
        groups = -(-columns // (size or columns))

        def codes(arrays: Mapping[str, np.ndarray]) -> Codes:
            rows = np.ascontiguousarray(arrays[".qweight"].T)
            return Codes(
                lambda start, end: integers(rows[start // len(_AWQ_SHIFTS) : end // len(_AWQ_SHIFTS)]),
                arrays[".scales"].T,
                (1, size or columns),
                integers(arrays[".qzeros"].T),
            )

        return Packing((out, columns), _parts(found, out, groups, bits), codes)

    return Scheme((".qweight",), _COMPANIONS[:-1], packing)


def _parts(found: Mapping[str, Stored], out: int, groups: int, bits: int) -> dict[str, Part]:
    return {
        ".qweight": Part(("I32",), (found[".qweight"].shape,)),
        ".qzeros": Part(("I32",), ((groups, -(-out * bits // _WORD)),)),
        ".scales": Part(FLOATS, ((groups, out),), is_scale=True),
    }


def _sizes(settings: Mapping[str, Any], widths: tuple[int, ...]) -> tuple[int, int | None]:
    """Return the bits of a weight and the inputs of a group, or None if a group has all inputs."""
    bits, size = settings.get("bits"), settings.get("group_size")
    if isinstance(bits, bool) or bits not in widths:
        raise ConfigError(f"{_WHERE}.bits must be one of {widths}, got {bits!r}")
    if size == -1:
        return bits, None
    check_positive(_WHERE, group_size=size)
    return bits, size
