"""Checkpoints of the library compressed-tensors (LLM Compressor): groups of modules, each with its own format."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jshadow.errors import CheckpointError, ConfigError
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
from jshadow.weights.convert.quantized.codes import unpacked
from jshadow.weights.convert.quantized.fp4 import mx_packing, nv_packing
from jshadow.weights.convert.quantized.fp8 import e4m3_codes
from jshadow.weights.convert.safetensors_file import UnfitTensor
from jshadow.weights.convert.source import text_name

_WHERE = "config.json quantization_config"
_PACKED, _PLAIN, _SCALE = ".weight_packed", ".weight", ".weight_scale"
_ZERO, _INDEX, _SHAPE, _TOTAL = ".weight_zero_point", ".weight_g_idx", ".weight_shape", ".weight_global_scale"
_COMPANIONS = (_SCALE, _ZERO, _INDEX, _SHAPE, _TOTAL)
_Targets = tuple[str | re.Pattern[str], ...]
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
# Each format: the type of its numbers, and their bits.
_FORMATS: dict[str, tuple[tuple[str, ...], range]] = {
    "float-quantized": (("float",), range(8, 9)),
    "int-quantized": (("int",), range(1, 9)),
    "naive-quantized": (("float", "int"), range(8, 9)),
    "pack-quantized": (("int",), range(1, 9)),
    "nvfp4-pack-quantized": (("float",), range(4, 5)),
    "mxfp4-pack-quantized": (("float",), range(4, 5)),
    "mxfp8-quantized": (("float",), range(8, 9)),
}


@dataclasses.dataclass(frozen=True)
class _Group:
    """How the weights of some modules are stored.

    Attributes:
        targets: names of modules, regular expressions, or classes ("Linear").
        format: one of `_FORMATS`.
        kind: "int" or "float".
        bits: bits of a number.
        strategy: what has one scale: one of `_STRATEGIES`.
        size: numbers of rows and columns of a block with one scale. None means all of them.
        symmetric: whether there are no zero points.
    """

    targets: _Targets
    format: str
    kind: str
    bits: int
    strategy: str
    size: tuple[int | None, int | None]
    symmetric: bool


def compressed_tensors(settings: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a `quantization_config`.

    The modules in `ignore` are not quantized. The group of any other module is the first that names it, else the first
    whose regular expression matches its name, else the first with its class. Scales of activations are not read.

    Raises:
        ConfigError: a format, a number type or a strategy is not read.
    """
    for key in ("sparsity_config", "transform_config"):
        value = settings.get(key)
        if value and value.get("format") != "dense":
            raise ConfigError(f"{_WHERE}.{key} must be absent (it is not read), got {value!r:.80}")
    groups = [
        _group(name, group, settings)
        for name, group in sorted(settings["config_groups"].items())
        if group.get("weights") is not None
    ]
    ignored = _targets(f"{_WHERE}.ignore", settings.get("ignore") or [])

    def packing(module: str, found: Mapping[str, Stored]) -> Packing:
        names = (module, text_name(module + ".").removesuffix("."))
        if any(_matches(target, names) for target in ignored):
            raise CheckpointError(f"{module}: quantized, but quantization_config.ignore has it")
        return _packing(module, found, _group_of(names, groups))

    return Scheme((_PACKED, _PLAIN), _COMPANIONS, packing)


def _group(name: str, group: Mapping[str, Any], settings: Mapping[str, Any]) -> _Group:
    where, weights = f"{_WHERE}.config_groups.{name}", group["weights"]
    format = group.get("format") or settings.get("format")
    if format not in _FORMATS:
        raise ConfigError(f"{where}.format must be one of {sorted(_FORMATS)}, got {format!r}")
    kinds, widths = _FORMATS[format]
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    if kind not in kinds:
        raise ConfigError(f"{where}.weights.type must be one of {kinds} in {format}, got {kind!r}")
    if isinstance(bits, bool) or bits not in widths:
        raise ConfigError(f"{where}.weights.num_bits must be {widths[0]} to {widths[-1]} in {format}, got {bits!r}")
    size = weights.get("group_size")
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.get("strategy") or implied
    if strategy not in _STRATEGIES:
        raise ConfigError(f"{where}.weights.strategy must be one of {_STRATEGIES}, got {strategy!r}")
    block: tuple[int | None, int | None] = (1, None) if strategy == "channel" else (None, None)
    if strategy in ("group", "tensor_group"):
        check_positive(f"{where}.weights", group_size=size)
        block = (1, size)
    elif strategy == "block":
        rows, columns = weights["block_structure"]
        check_positive(f"{where}.weights.block_structure", rows=rows, columns=columns)
        block = (rows, columns)
    symmetric = weights.get("symmetric", True)
    if symmetric is not True and kind == "float":
        raise ConfigError(f"{where}.weights.symmetric must be true for floats, got {symmetric!r}")
    if format.startswith(("nvfp4", "mxfp4")) and block != (right := (1, 16 if format.startswith("nvfp4") else 32)):
        raise ConfigError(f"{where}.weights.group_size must be {right[1]} in {format}, got {size!r}")
    return _Group(_targets(f"{where}.targets", group["targets"]), format, kind, bits, strategy, block, bool(symmetric))


def _targets(where: str, targets: Any) -> _Targets:
    """Read names of modules, and regular expressions behind "re:"."""
    if not isinstance(targets, list) or not all(isinstance(one, str) for one in targets):
        raise ConfigError(f"{where} must be a list of strings, got {targets!r:.80}")
    try:
        return tuple(re.compile(one.removeprefix("re:")) if one.startswith("re:") else one for one in targets)
    except re.error as error:
        raise ConfigError(f"{where} must have regular expressions behind 're:': {error}") from error


def _matches(target: str | re.Pattern[str], names: tuple[str, ...]) -> bool:
    return target in names if isinstance(target, str) else any(map(target.match, names))


def _group_of(names: tuple[str, ...], groups: list[_Group]) -> _Group:
    """Return the group of the module that has one of the names."""
    kind = "Embedding" if names[0].endswith("embed_tokens") else "Linear"
    for sort, wanted in ((str, names), (re.Pattern, names), (str, (kind,))):
        for group in groups:
            if any(isinstance(target, sort) and _matches(target, wanted) for target in group.targets):
                return group
    raise CheckpointError(f"{names[0]}: quantized, but no group of quantization_config.config_groups has it")


def _packing(module: str, found: Mapping[str, Stored], group: _Group) -> Packing:
    main = _PACKED if "pack" in group.format else _PLAIN
    if main not in found:
        raise CheckpointError(f"{module}{main}: missing, but {group.format} has it")
    if group.format == "mxfp4-pack-quantized":
        return mx_packing(main, found[main])
    if group.format == "nvfp4-pack-quantized":
        return nv_packing(main, found[main], _TOTAL, np.divide)
    shape = _shape(found) if main == _PACKED else matrix(found[main], "F8_E4M3" if group.kind == "float" else "I8")
    block = (group.size[0] or shape[0], group.size[1] or shape[1])
    grid = blocks_of(shape, block)
    tags = ("U8", "F8_E8M0") if group.format == "mxfp8-quantized" else FLOATS
    scale = Part(tags, ONE_NUMBER if group.strategy == "tensor" else (grid,), is_scale=True)
    parts = {_SCALE: scale}
    if group.kind == "float":
        parts[main] = Part(("F8_E4M3",), (shape,))
        return Packing(shape, parts, lambda arrays: e4m3_codes(arrays[main], arrays[_SCALE], block, grid))
    if main == _PLAIN:
        parts[main] = Part(("I8",), (shape,))
    else:
        parts[main] = Part(("I32",), ((shape[0], _words(shape[1], group.bits)),))
        parts[_SHAPE] = Part(("I64", "I32"), ((2,),))
    if not group.symmetric:
        packed = main == _PACKED and group.strategy in ("channel", "group") and _tag(found, _ZERO) != "I8"
        shapes = ((_words(grid[0], group.bits), grid[1]),) if packed else scale.shapes
        parts[_ZERO] = Part(("I32",) if packed else ("I8",), shapes)
    if group.strategy == "group":
        parts[_INDEX] = Part(("I32",), ((shape[1],),), optional=True)
    return Packing(shape, parts, lambda arrays: _integers(arrays, module, group, (shape, block, grid)))


def _tag(found: Mapping[str, Stored], suffix: str) -> str | None:
    return found[suffix].tag if suffix in found else None


def _words(count: int, bits: int) -> int:
    return -(-count * bits // 32)


def _shape(found: Mapping[str, Stored]) -> tuple[int, int]:
    """Return the shape of a packed weight, which a tensor of its own has."""
    rows, _ = matrix(found[_PACKED], "I32")
    stored = found.get(_SHAPE)
    if stored is None:
        raise CheckpointError(f"{found[_PACKED].name.removesuffix(_PACKED)}{_SHAPE}: missing")
    if stored.shape != (2,) or stored.tag not in ("I64", "I32"):
        raise CheckpointError(f"{stored.name}: must be I64 of shape [2], got {stored.tag} {list(stored.shape)}")
    told = [int(size) for size in stored.read()]
    if told[0] != rows or not 0 < told[1] < 2**31:
        raise CheckpointError(f"{stored.name}: must be [{rows}, in], got {told}")
    return rows, told[1]


def _integers(
    arrays: Mapping[str, np.ndarray],
    module: str,
    group: _Group,
    sizes: tuple[tuple[int, int], tuple[int, int], tuple[int, int]],
) -> Codes:
    """Return the codes of an integer weight. `sizes` has its shape, that of a block, and the numbers of blocks."""
    (_, columns), block, grid = sizes
    half = 2 ** (group.bits - 1)  # packed numbers are stored with this added
    zeros, index = arrays.get(_ZERO), arrays.get(_INDEX)
    if zeros is not None and zeros.dtype == np.int32:
        zeros = unpacked(zeros.T, group.bits, grid[0]).T - half
    elif zeros is not None:
        zeros = zeros.astype(np.float32)
    if index is not None and (index == -1).all():  # the writer has not set it
        index = None
    if index is not None and (index.min() < 0 or index.max() >= grid[1]):
        raise UnfitTensor(f"{module}{_INDEX}: must lie in [0, {grid[1]}), got {index.min()} to {index.max()}")

    def levels(start: int, end: int) -> np.ndarray:
        if _PLAIN in arrays:
            return arrays[_PLAIN][start:end].astype(np.float32)
        return unpacked(arrays[_PACKED][start:end], group.bits, columns) - half

    scales = arrays[_SCALE].reshape(grid)
    return Codes(levels, scales, block, None if zeros is None else zeros.reshape(grid), index)
