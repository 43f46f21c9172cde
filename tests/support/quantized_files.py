"""Tiny quantized checkpoints, and their numbers by the definitions of the formats: number by number, and bit by bit.

Codes are random bits. So every code occurs, also those that a quantizer would not choose.
"""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

Array = np.ndarray
Tensors = dict[str, tuple[str, Array]]  # name -> (tag, array)
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


def write_file(path: Path, tensors: Tensors) -> None:
    """Write a safetensors file. The tags are written as they are given."""
    header, start = {}, 0
    for name, (tag, array) in tensors.items():
        end = start + array.nbytes
        header[name] = {"dtype": tag, "shape": list(array.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    payload = b"".join(np.ascontiguousarray(array).tobytes() for _, array in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + payload)


def read_file(path: Path) -> Tensors:
    """Read what `write_file` wrote. Tensors of dtypes that no edit needs are bytes."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    kinds = {"F32": np.float32, "F16": np.float16, "BF16": BF16, "I32": np.int32, "I64": np.int64, "I8": np.int8}
    tensors = {}
    for name, entry in json.loads(content[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + place for place in entry["data_offsets"])
            flat = np.frombuffer(content[begin:end], kinds.get(entry["dtype"], np.uint8))
            tensors[name] = (entry["dtype"], flat.reshape(entry["shape"]).copy())
    return tensors


def integer(words: Array, start: int, bits: int) -> int:
    """The unsigned integer of some bits, which begins at bit `start` of 32-bit words."""
    places = range(start, start + bits)
    return sum((int(words[place // 32]) >> place % 32 & 1) << place - start for place in places)


def small_float(code: int, exponents: int, mantissas: int, bias: int) -> float:
    """The number of a code of one sign bit, exponent bits and mantissa bits."""
    fraction, exponent = code % 2**mantissas, code >> mantissas & 2**exponents - 1
    sign = -1 if code >> exponents + mantissas & 1 else 1
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias - mantissas)
    return sign * (2**mantissas + fraction) * 2.0 ** (exponent - bias - mantissas)


def e4m3(code: int) -> float:
    return small_float(code, 4, 3, 7)


def e2m1(code: int) -> float:
    return small_float(code, 2, 1, 1)


def e8m0(code: int) -> float:
    return 2.0 ** (int(code) - 127)


def fp4_number(row: Array, column: int) -> float:
    """A number of a row of bytes that have two each, the first in the lower half."""
    return e2m1(int(row[column // 2]) >> (4 if column % 2 else 0) & 15)


class Made(NamedTuple):
    """The tensors of one weight, by what their names have behind that of the module, and its numbers [out, in]."""

    tensors: Tensors
    decoded: Array


Maker = Callable[[np.random.Generator, int, int], Made]


def made(tensors: Tensors, out: int, columns: int, number: Callable[[int, int], float]) -> Made:
    decoded = np.array([[number(i, j) for j in range(columns)] for i in range(out)], np.float32)
    return Made(tensors, decoded)


def times(level: float, scale: Any) -> np.float32:
    """The product of two numbers, rounded once to float32."""
    return np.float32(level) * np.float32(scale)


def scales(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> Array:
    return (rng.random(shape, np.float32) * 0.02 + 0.001).astype(dtype)


def bytes_of(rng: np.random.Generator, *shape: int) -> Array:
    return rng.integers(0, 256, shape, np.uint8)


def words_of(rng: np.random.Generator, *shape: int) -> Array:
    return rng.integers(-(2**31), 2**31, shape, np.int64).astype(np.int32)


def e4m3_bytes(rng: np.random.Generator, *shape: int) -> Array:
    codes = bytes_of(rng, *shape)
    return np.where(codes & 127 == 127, codes - 1, codes)  # those are NaN


def fp8_blocks(tag: str, block: tuple[int, int] | None, name: str = ".weight_scale_inv", ones: int = 0) -> Maker:
    """fp8 with scales for blocks, or for the tensor (None), whose scale then has `ones` axes."""

    def make(rng: np.random.Generator, out: int, columns: int) -> Made:
        high, wide = block or (out, columns)
        grid = (-(-out // high), -(-columns // wide))
        codes = e4m3_bytes(rng, out, columns)
        if tag in ("F8_E8M0", "U8"):
            scale = rng.integers(100, 140, grid, np.uint8)
            factors = np.array([[e8m0(one) for one in row] for row in scale])
        else:
            scale = scales(rng, *grid, dtype={"F32": np.float32, "BF16": BF16, "F16": np.float16}[tag])
            factors = scale.astype(np.float32)
        stored = scale if block else scale.reshape((1,) * ones)
        return made(
            {".weight": ("F8_E4M3", codes), name: (tag, stored)},
            out,
            columns,
            lambda i, j: times(e4m3(int(codes[i, j])), factors[i // high, j // wide]),
        )

    return make


def int8(zeros: bool) -> Maker:
    """int-quantized of compressed-tensors, with a scale for each output."""

    def make(rng: np.random.Generator, out: int, columns: int) -> Made:
        codes, scale = bytes_of(rng, out, columns).view(np.int8), scales(rng, out, 1, dtype=BF16)
        zero = bytes_of(rng, out, 1).view(np.int8) if zeros else np.zeros((out, 1), np.int8)
        more = {".weight_zero_point": ("I8", zero)} if zeros else {}
        return made(
            {".weight": ("I8", codes), ".weight_scale": ("BF16", scale), **more},
            out,
            columns,
            lambda i, j: times(int(codes[i, j]) - int(zero[i, 0]), scale[i, 0]),
        )

    return make


def packed(bits: int, group: int | None, zeros: str = "", order: bool = False) -> Maker:
    """pack-quantized. `zeros` is "", "packed" or "plain". `order`: each column names its group."""

    def make(rng: np.random.Generator, out: int, columns: int) -> Made:
        size = group or columns
        groups, half = -(-columns // size), 2 ** (bits - 1)
        words, scale = words_of(rng, out, -(-columns * bits // 32)), scales(rng, out, groups, dtype=BF16)
        index = rng.permutation(np.arange(columns, dtype=np.int32) // size) if order else np.arange(columns) // size
        tensors: Tensors = {
            ".weight_packed": ("I32", words),
            ".weight_scale": ("BF16", scale),
            ".weight_shape": ("I64", np.array([out, columns])),
        }
        if order:
            tensors[".weight_g_idx"] = ("I32", index.astype(np.int32))
        zero_words = words_of(rng, -(-out * bits // 32), groups)
        plain = bytes_of(rng, out, groups).view(np.int8)
        if zeros:
            tensors[".weight_zero_point"] = ("I32", zero_words) if zeros == "packed" else ("I8", plain)

        def zero(i: int, g: int) -> int:
            if zeros == "packed":
                return integer(zero_words[:, g], i * bits, bits) - half
            return int(plain[i, g]) if zeros else 0

        def number(i: int, j: int) -> float:
            level = integer(words[i], j * bits, bits) - half
            return times(level - zero(i, index[j]), scale[i, index[j]])

        return made(tensors, out, columns, number)

    return make


def nvfp4(main: str, total: str, divides: bool) -> Maker:
    def make(rng: np.random.Generator, out: int, columns: int) -> Made:
        codes, scale = bytes_of(rng, out, columns // 2), e4m3_bytes(rng, out, columns // 16) & 127
        whole = np.float32(300.7 if divides else 0.0031)

        def number(i: int, j: int) -> float:
            block = np.float32(e4m3(int(scale[i, j // 16])))
            return times(fp4_number(codes[i], j), block / whole if divides else block * whole)

        tensors = {main: ("U8", codes), ".weight_scale": ("F8_E4M3", scale), total: ("F32", whole.reshape(1))}
        return made(tensors, out, columns, number)

    return make


def mxfp4_matrix(rng: np.random.Generator, out: int, columns: int) -> Made:
    codes, scale = bytes_of(rng, out, columns // 2), rng.integers(100, 140, (out, columns // 32), np.uint8)
    return made(
        {".weight_packed": ("U8", codes), ".weight_scale": ("U8", scale)},
        out,
        columns,
        lambda i, j: fp4_number(codes[i], j) * e8m0(scale[i, j // 32]),
    )


def gptq(bits: int, group: int, version: int = 1, order: bool = False) -> Maker:
    """GPTQ. Zero points of version 1 are stored less one: words as a whole, so that a 0 borrows from its neighbor."""

    def make(rng: np.random.Generator, out: int, columns: int) -> Made:
        size = columns if group == -1 else group
        groups = -(-columns // size)
        words, true = words_of(rng, columns * bits // 32, out), words_of(rng, groups, out * bits // 32)
        ones = sum(1 << shift for shift in range(0, 32, bits)) if version == 1 else 0
        stored = [[(int(word) - ones) % 2**32 for word in row] for row in true]
        scale, index = scales(rng, groups, out, dtype=np.float16), np.arange(columns, dtype=np.int32) // size
        index = rng.permutation(index) if order else index

        def number(i: int, j: int) -> float:
            level, zero = integer(words[:, i], j * bits, bits), integer(true[index[j]], i * bits, bits)
            return times(level - zero, scale[index[j], i])

        tensors: Tensors = {
            ".qweight": ("I32", words),
            ".qzeros": ("I32", np.array(stored, np.uint32).view(np.int32)),
            ".scales": ("F16", scale),
            ".g_idx": ("I32", index),
        }
        return made(tensors, out, columns, number)

    return make


def awq(group: int) -> Maker:
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight columns each half byte of a word has, from the lowest one

    def make(rng: np.random.Generator, out: int, columns: int) -> Made:
        size = columns if group == -1 else group
        words, zeros = words_of(rng, columns, out // 8), words_of(rng, columns // size, out // 8)
        scale = scales(rng, columns // size, out, dtype=np.float16)

        def number(i: int, j: int) -> float:
            place = i // 8 * 32 + 4 * order.index(i % 8)
            level, zero = integer(words[j], place, 4), integer(zeros[j // size], place, 4)
            return times(level - zero, scale[j // size, i])

        tensors: Tensors = {".qweight": ("I32", words), ".qzeros": ("I32", zeros), ".scales": ("F16", scale)}
        return made(tensors, out, columns, number)

    return make


def compressed(format: str, kind: str, bits: int, symmetric: bool = True, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group."""
    told = {"num_bits": bits, "type": kind, "symmetric": symmetric, **weights}
    group = {"targets": ["Linear"], "weights": told, "input_activations": {"num_bits": 8, "dynamic": True}}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


CHANNEL, PACK = {"strategy": "channel"}, "pack-quantized"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "sym": False}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


class Case(NamedTuple):
    """A format: its quantization_config, what makes its tensors, and an awkward shape."""

    settings: dict[str, Any]
    make: Maker
    shape: tuple[int, int]


def group_of(size: int) -> dict[str, Any]:
    return {"strategy": "group", "group_size": size}


CASES: dict[str, Case] = {
    "fp8": Case(FP8, fp8_blocks("F32", (16, 32)), (37, 70)),
    "fp8 bf16": Case(FP8, fp8_blocks("BF16", (16, 32)), (37, 70)),
    "fp8 e8m0": Case(FP8 | {"scale_fmt": "ue8m0"}, fp8_blocks("F8_E8M0", (16, 32)), (37, 70)),
    "fp8 tensor": Case(
        FP8 | {"weight_block_size": None, "activation_scheme": "static"}, fp8_blocks("F32", None), (37, 5)
    ),
    "fp8 AutoFP8": Case({"quant_method": "fp8"}, fp8_blocks("F32", None, ".weight_scale", 1), (37, 5)),
    "float channel": Case(
        compressed("float-quantized", "float", 8, **CHANNEL), fp8_blocks("BF16", (1, 999), ".weight_scale"), (37, 45)
    ),
    "float tensor": Case(
        compressed("float-quantized", "float", 8, strategy="tensor"),
        fp8_blocks("F32", None, ".weight_scale", 1),
        (37, 45),
    ),
    "float block": Case(
        compressed("naive-quantized", "float", 8, strategy="block", block_structure=[16, 32]),
        fp8_blocks("F16", (16, 32), ".weight_scale"),
        (37, 70),
    ),
    "int8": Case(compressed("int-quantized", "int", 8, **CHANNEL), int8(False), (37, 45)),
    "int8 zeros": Case(compressed("int-quantized", "int", 8, False, **CHANNEL), int8(True), (37, 45)),
    "pack4": Case(compressed(PACK, "int", 4, **group_of(16)), packed(4, 16), (37, 48)),
    "pack4 order": Case(
        compressed(PACK, "int", 4, **group_of(16), actorder="group"), packed(4, 16, order=True), (37, 48)
    ),
    "pack4 zeros": Case(compressed(PACK, "int", 4, False, **group_of(15)), packed(4, 15, "packed"), (37, 45)),
    "pack8": Case(compressed(PACK, "int", 8, **CHANNEL), packed(8, None), (37, 45)),
    "pack3 zeros": Case(compressed(PACK, "int", 3, False, **group_of(15)), packed(3, 15, "packed"), (37, 45)),
    "pack5 plain zeros": Case(compressed(PACK, "int", 5, False, **CHANNEL), packed(5, None, "plain"), (37, 45)),
    "nvfp4": Case(
        compressed("nvfp4-pack-quantized", "float", 4, strategy="tensor_group", group_size=16),
        nvfp4(".weight_packed", ".weight_global_scale", True),
        (37, 48),
    ),
    "mxfp4 matrix": Case(compressed("mxfp4-pack-quantized", "float", 4, **group_of(32)), mxfp4_matrix, (37, 64)),
    "mxfp8": Case(
        compressed("mxfp8-quantized", "float", 8, **group_of(32)),
        fp8_blocks("U8", (1, 32), ".weight_scale"),
        (37, 64),
    ),
    "awq": Case(AWQ, awq(16), (40, 48)),
    "awq one group": Case(AWQ | {"group_size": -1}, awq(-1), (40, 48)),
    "gptq": Case(GPTQ, gptq(4, 16, order=True), (40, 40)),
    "gptq v2": Case(GPTQ | {"checkpoint_format": "gptq_v2", "desc_act": False}, gptq(4, 16, 2), (40, 40)),
    "gptq 8 bits": Case(GPTQ | {"bits": 8, "group_size": -1, "dynamic": {"-:.*head": {}}}, gptq(8, -1), (40, 36)),
    "gptq 2 bits": Case(GPTQ | {"bits": 2}, gptq(2, 16), (48, 48)),
    "modelopt nvfp4": Case(NVFP4, nvfp4(".weight", ".weight_scale_2", False), (37, 48)),
    "modelopt fp8": Case(NVFP4 | {"quant_algo": "FP8"}, fp8_blocks("F32", None, ".weight_scale"), (37, 45)),
}


def quantize_directory(directory: Path, case: Case, names: Callable[[str], bool], files: int = 1) -> None:
    """Replace weights of a plain checkpoint in float32 by random quantized ones, and the plain ones by their numbers.

    Writes `directory`-quantized beside `directory`, with the tensors spread over some files.
    """
    target = directory.with_name(f"{directory.name}-quantized")
    target.mkdir()
    rng, plain = np.random.default_rng(5), read_file(directory / "model.safetensors")
    stored: Tensors = {}
    for name, (tag, array) in plain.items():
        if not names(name):
            stored[name] = (tag, array)
            continue
        weight = case.make(rng, *array.shape)
        stored |= {name.removesuffix(".weight") + suffix: one for suffix, one in weight.tensors.items()}
        plain[name] = ("F32", weight.decoded)
    write_file(directory / "model.safetensors", plain)
    config = json.loads((directory / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": case.settings}))
    shards = {f"model-{i:05d}.safetensors": sorted(stored)[i::files] for i in range(files)}
    for shard, held in shards.items():
        write_file(target / shard, {name: stored[name] for name in held})
    table = {name: shard for shard, held in shards.items() for name in held}
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
