"""Quantized checkpoints: their decoded weights are those of an oracle that reads bit by bit, and bad ones are refused.

On 2026-11-28, the decoder was compared with the formats' own tools on random weights, and all numbers were equal to the
bit: compressed-tensors 0.20.0 (float-, int- and pack-quantized of 2, 3, 4, 5 and 8 bits, with and without zero points,
in float32 and bfloat16; nvfp4, mxfp4 and mxfp8 in float32), auto-gptq 0.7.1 (2, 4 and 8 bits, with and without
act-order), AutoAWQ 0.2.9 (gemm), Model Optimizer 0.47.0 (NVFP4), and transformers 5.23.0 (fp8 with scales in float32,
bfloat16 and E8M0, and mxfp4 of gpt-oss). So were the weights of whole tiny models that compressed-tensors (float, 4
bits with and without zero points, nvfp4) and Model Optimizer (NVFP4, FP8) wrote, and those that transformers read from
fp8 files of these tests. Not compared with a tool: GPTQ's second version, zero points of 0 in its first one, and
act-order of compressed-tensors, which version 0.20.0 no longer writes.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import TINY, assert_same, edit_json, refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantized_files import (
    CASES,
    FP8,
    Case,
    Tensors,
    compressed,
    e2m1,
    e4m3,
    e8m0,
    gptq,
    packed,
    quantize_directory,
    read_file,
    write_file,
)

from jshadow.errors import CheckpointError, ConfigError, JshadowError
from jshadow.models.config import Experts
from jshadow.weights.convert import convert
from jshadow.weights.convert.huggingface import open_tensors, read_config
from jshadow.weights.convert.quantized import base
from jshadow.weights.params import init_params, load, save

BF16 = np.dtype(ml_dtypes.bfloat16)
PROJECTION = "model.layers.0.mlp.up_proj"


def decoded(directory: Path, case: Case, tensors: Tensors, **changes: Any) -> dict[str, Any]:
    """Read all tensors of a file, by name; or, if there are misfits, these instead."""
    write_file(directory / "model.safetensors", tensors)
    opened = open_tensors(directory, {"quantization_config": case.settings | changes})
    return {name: opened.misfits(name) or opened.read(name) for name in opened.shapes}


@pytest.mark.parametrize("name", CASES)
def test_decoded_weights_are_exact(tmp_path, monkeypatch, name):
    case = CASES[name]
    weight = case.make(np.random.default_rng(1), *case.shape)
    tensors: Tensors = {f"m{suffix}": one for suffix, one in weight.tensors.items()}
    extras: Tensors = {
        "m.input_scale": ("F32", np.full((), np.nan, np.float32)),
        "attn.k_scale": ("F32", np.zeros(1, np.float32)),
        "norm.weight": ("BF16", np.ones(3, BF16)),
    }
    both = decoded(tmp_path, case, tensors | extras)
    assert set(both) == {"m.weight", "norm.weight"}
    np.testing.assert_array_equal(both["m.weight"].astype(np.float32), weight.decoded)
    monkeypatch.setattr(base, "_BLOCK", 1)  # the smallest slices
    opened = open_tensors(tmp_path, {"quantization_config": case.settings})
    assert opened.shapes["m.weight"] == weight.decoded.shape
    for dtype in (BF16, np.dtype(np.float16)):
        with np.errstate(over="ignore"):
            wanted = weight.decoded.astype(dtype)
        got = opened.read("m.weight", dtype)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, wanted)


def test_mxfp4_of_gpt_oss_gives_the_plain_layout(tmp_path):
    """[E, in, out] in bfloat16, which holds all numbers of the format, also the least scale."""
    rng = np.random.default_rng(2)
    blocks = rng.integers(0, 256, (3, 10, 2, 16), np.uint8)
    scales = rng.integers(0, 251, (3, 10, 2), np.uint8)
    tensors: Tensors = {"e.gate_up_proj_blocks": ("U8", blocks), "e.gate_up_proj_scales": ("U8", scales)}
    tensors["e.gate_up_proj_bias"] = ("BF16", np.ones((3, 10), BF16))
    got = decoded(tmp_path, Case({"quant_method": "mxfp4"}, gptq(4, 16), (0, 0)), tensors)
    assert set(got) == {"e.gate_up_proj", "e.gate_up_proj_bias"}
    assert got["e.gate_up_proj"].dtype == BF16
    wanted = np.zeros((3, 64, 10))
    for e, i, j in np.ndindex(3, 10, 64):
        byte = int(blocks[e, i, j // 32, j % 32 // 2])
        wanted[e, j, i] = e2m1(byte >> 4 if j % 2 else byte & 15) * e8m0(scales[e, i, j // 32])
    np.testing.assert_array_equal(got["e.gate_up_proj"].astype(np.float64), wanted)


def test_all_codes_of_small_floats():
    codes = np.arange(256, dtype=np.uint8)
    finite = codes & 127 != 127
    numbers = base.from_e4m3(codes)
    assert np.isnan(numbers[~finite]).all()
    np.testing.assert_array_equal(numbers[finite], [e4m3(int(code)) for code in codes[finite]])
    np.testing.assert_array_equal(base.from_e8m0(codes)[:255], [np.float32(e8m0(code)) for code in codes[:255]])
    assert np.isnan(base.from_e8m0(codes)[255])


def test_indices_that_no_writer_has_set(tmp_path):
    """GPTQ leaves zeros, and compressed-tensors -1. The groups are then in the order of the inputs."""
    for name, suffix, unset in (("gptq v2", ".g_idx", 0), ("pack4 order", ".weight_g_idx", -1)):
        case = CASES[name]
        weight = case.make(np.random.default_rng(1), *case.shape)
        tensors: Tensors = {f"m{key}": one for key, one in weight.tensors.items()}
        ordered = np.arange(case.shape[1], dtype=np.int32) // 16
        results = [
            decoded(tmp_path, case, tensors | {f"m{suffix}": ("I32", index)})["m.weight"]
            for index in (np.full_like(ordered, unset), ordered)
        ]
        del tensors[f"m{suffix}"]
        results.append(decoded(tmp_path, case, tensors)["m.weight"])
        np.testing.assert_array_equal(results[0], results[1])
        np.testing.assert_array_equal(results[0], results[2])


def is_projection(name: str) -> bool:
    return "_proj." in name


def both_directories(folder: Path, case: Case, files: int = 3, **changes: Any) -> tuple[Path, Path]:
    """A quantized checkpoint, and the plain one with its numbers."""
    config = dataclasses.replace(TINY, num_layers=1, eos_ids=(0,), **changes)
    save(init_params(config, seed=3), folder / "plain")
    quantize_directory(folder / "plain", case, is_projection, files)
    return folder / "plain-quantized", folder / "plain"


WHOLE = [name for name, case in CASES.items() if case.settings.get("group_size") != 15 and " zeros" not in name]
WHOLE += ["int8 zeros"]


@pytest.mark.parametrize("name", WHOLE)
def test_a_quantized_checkpoint_loads_as_its_plain_one(tmp_path, name):
    """Its tensors lie in three files, so that most companions are in another file than the codes."""
    quantized, plain = both_directories(tmp_path, CASES[name])
    for dtype in ("float32", "bfloat16"):
        assert_same(load(quantized, dtype), load(plain, dtype))


@pytest.mark.parametrize("name", ["fp8 bf16", "pack4"])
@pytest.mark.parametrize("experts", [False, True])
def test_conversions_and_int8_take_the_decoded_weights(tmp_path, name, experts):
    changes = {"model_type": "qwen3_moe", "qk_norm": True, "experts": Experts(3, 2, 16, (0,))} if experts else {}
    quantized, plain = both_directories(tmp_path, CASES[name], **changes)
    assert_same(load(quantized, "float32", quantize="int8"), load(plain, "float32", quantize="int8"))
    assert_same(load(quantized, quantize="int8"), load(plain, quantize="int8"))
    for format in ("huggingface", "orbax"):
        convert(quantized, tmp_path / format, "float32", format=format)
        assert "quantization_config" not in json.loads((tmp_path / format / "config.json").read_text())
        assert_same(load(tmp_path / format, "float32"), load(plain, "float32"))
    save(load(quantized), tmp_path / "saved")
    assert_same(load(tmp_path / "saved"), load(plain))


def test_a_model_in_a_wrapper_and_tensors_beside_it(tmp_path):
    """Images and multi-token prediction are not read, whatever their tensors are."""
    quantized, plain = both_directories(tmp_path, CASES["pack4"], files=1)
    (path,) = quantized.glob("*.safetensors")
    tensors = read_file(path)
    tensors = {
        (
            "language_model." + name
            if name.startswith("lm_head")
            else name.replace("model.", "language_model.model.", 1)
        ): one
        for name, one in tensors.items()
    }
    spoiled: Tensors = {
        ".weight_packed": ("I32", np.ones((3, 3), np.int32)),
        ".weight_scale": ("U8", np.ones(1, np.uint8)),
    }
    for module in ("vision_tower.q", "language_model.model.layers.1.mlp.up_proj", "mtp.fc"):
        tensors |= {module + suffix: one for suffix, one in spoiled.items()}
    tensors["language_model.model.layers.1.eh_proj.weight"] = ("F8_E5M2", np.ones((2, 2), np.uint8))
    write_file(path, tensors)
    edit_json(quantized / "model.safetensors.index.json", weight_map=dict.fromkeys(tensors, path.name))
    inner = json.loads((quantized / "config.json").read_text())
    settings = inner.pop("quantization_config")
    settings["config_groups"]["group_0"]["targets"] = ["re:model[.]layers[.].*_proj"]
    wrapper = {"model_type": "mistral3", "quantization_config": settings, "tie_word_embeddings": False}
    (quantized / "config.json").write_text(json.dumps(wrapper | {"text_config": inner}))
    assert_same(load(quantized, "float32"), load(plain, "float32"))
    convert(quantized, tmp_path / "text", "float32")
    assert "quantization_config" not in (tmp_path / "text" / "config.json").read_text()
    assert_same(load(tmp_path / "text", "float32"), load(plain, "float32"))


def test_groups_of_modules(tmp_path):
    """A name comes before a regular expression, and that before a class."""
    eight, four, three = packed(8, None), packed(4, 16), packed(3, 16)
    settings = compressed("pack-quantized", "int", 8, strategy="channel")
    groups = settings["config_groups"]
    groups["group_1"] = {"targets": ["re:.*up"], "weights": {"num_bits": 4, "type": "int", "group_size": 16}}
    groups["group_2"] = {"targets": ["a.up"], "weights": {"num_bits": 3, "type": "int", "group_size": 16}}
    groups["group_3"] = {"targets": ["Attention"], "weights": None}
    rng, tensors, wanted = np.random.default_rng(0), Tensors(), {}
    for module, make in (("a.down", eight), ("b.up", four), ("a.up", three)):
        weight = make(rng, 37, 48)
        tensors |= {module + suffix: one for suffix, one in weight.tensors.items()}
        wanted[f"{module}.weight"] = weight.decoded
    got = decoded(tmp_path, Case(settings, eight, (0, 0)), tensors)
    for name, numbers in wanted.items():
        np.testing.assert_array_equal(got[name], numbers)
    got = decoded(tmp_path, Case(settings, eight, (0, 0)), tensors, ignore=["re:.*[.]down"])
    assert got["a.down.weight"] == ["a.down: quantized, but quantization_config.ignore has it"]
    del groups["group_0"]
    got = decoded(tmp_path, Case(settings, eight, (0, 0)), tensors)
    assert "no group of quantization_config.config_groups has it" in got["a.down.weight"][0]


def test_model_optimizer_has_its_settings_in_a_file(tmp_path):
    quantized, plain = both_directories(tmp_path, CASES["modelopt nvfp4"])
    edit_json(quantized / "config.json", quantization_config=None)
    whole = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    edit_json(quantized / "hf_quant_config.json", **whole)
    assert_same(load(quantized, "float32"), load(plain, "float32"))
    layers = {"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "FP8"}}
    edit_json(
        quantized / "hf_quant_config.json", quantization={"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    )
    assert_same(load(quantized, "float32"), load(plain, "float32"))
    for wrong, told in (
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo must be one of .*got 'W4A8_AWQ'"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "NVFP4_AWQ"}}}, "'NVFP4_AWQ'"),
    ):
        edit_json(quantized / "hf_quant_config.json", quantization=wrong)
        with pytest.raises(ConfigError, match=told):
            load(quantized)
    edit_json(quantized / "hf_quant_config.json", quantization=3)
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: quantization must be an object, got 3"):
        load(quantized)


def test_biases_that_gptq_adds_are_ignored_if_they_are_zeros(tmp_path):
    quantized, plain = both_directories(tmp_path, CASES["gptq v2"], files=1)
    (path,) = quantized.glob("*.safetensors")
    tensors = read_file(path)
    zeros = np.zeros(64, np.float16)
    write_file(path, tensors | {f"{PROJECTION}.bias": ("F16", zeros)})
    assert_same(load(quantized, "float32"), load(plain, "float32"))
    zeros[5] = 1
    for name in (f"{PROJECTION}.bias", "model.norm.bias"):
        write_file(path, tensors | {name: ("F16", zeros)})
        with pytest.raises(CheckpointError, match=f"{name}: extra"):
            load(quantized)


def test_a_tied_model_with_a_quantized_head_uses_it(tmp_path):
    _, plain = both_directories(tmp_path, CASES["fp8"])
    with_head = plain.with_name("head")
    with_head.mkdir()
    for path in plain.iterdir():
        (with_head / path.name).write_bytes(path.read_bytes())
    quantize_directory(with_head, CASES["fp8"], lambda name: name == "lm_head.weight")
    wanted = load(with_head, "float32")
    tied = with_head.with_name("head-quantized")
    edit_json(tied / "config.json", tie_word_embeddings=True)
    assert_same(load(tied, "float32"), wanted)


UP = f"{PROJECTION}.weight"
Edit = Any


def put(suffix: str, edit: Edit) -> Edit:
    """An edit that replaces the array of a tensor of the projection. With None, the tensor is removed."""

    def change(tensors: Tensors, _: dict[str, Any]) -> None:
        tag, array = tensors.pop(PROJECTION + suffix)
        if edit is not None:
            tensors[PROJECTION + suffix] = (tag, edit(array.copy()))

    return change


def tagged(suffix: str, tag: str) -> Edit:
    return lambda tensors, _: tensors.update({PROJECTION + suffix: (tag, tensors[PROJECTION + suffix][1])})


def add(**named: tuple[str, np.ndarray]) -> Edit:
    return lambda tensors, _: tensors.update({PROJECTION + "." + name: one for name, one in named.items()})


def told(**changes: Any) -> Edit:
    return lambda _, config: config["quantization_config"].update(changes)


def weights_told(**changes: Any) -> Edit:
    return lambda _, config: config["quantization_config"]["config_groups"]["group_0"]["weights"].update(changes)


def set_to(number: Any, place: int = 0) -> Edit:
    def change(array: np.ndarray) -> np.ndarray:
        array.reshape(-1)[place] = number
        return array

    return change


ONE = ("F32", np.ones(1, np.float32))
SCALE, SCALES = ".weight_scale_inv", ".weight_scale"
BAD: dict[str, tuple[str, Edit, type[JshadowError], tuple[str, ...]]] = {
    "method": ("fp8", told(quant_method="bitsandbytes"), ConfigError, ("quant_method", "'gptq'", "'bitsandbytes'")),
    **{
        f"method {name}": ("fp8", told(quant_method=name), ConfigError, ("quant_method", f"'{name}'"))
        for name in ("hqq", "aqlm", "torchao", "exl2", "fbgemm_fp8")
    },
    "no method": ("fp8", told(quant_method=None), ConfigError, ("quant_method", "None")),
    "no object": ("fp8", lambda _, config: config.update(quantization_config=[1]), ConfigError, ("object", "[1]")),
    "method of another kind": ("fp8", told(quant_method=[1]), ConfigError, ("config.json",)),
    "e5m2": ("fp8", told(fmt="e5m2"), ConfigError, ("fmt", "'e5m2'")),
    "block sizes": ("fp8", told(weight_block_size=[0, 16]), ConfigError, ("weight_block_size.rows", "0")),
    "block": ("fp8", told(weight_block_size=16), ConfigError, ("weight_block_size", "16")),
    "other blocks": ("fp8", told(weight_block_size=[32, 32]), CheckpointError, (SCALE, "[2, 1]", "[4, 1]")),
    "no scale": ("fp8", put(SCALE, None), CheckpointError, (f"{PROJECTION}{SCALE}: missing",)),
    "no weight": ("fp8", put(".weight", None), CheckpointError, (f"{UP}: missing", f"{PROJECTION}{SCALE}: extra")),
    "plain weight": ("fp8", tagged(".weight", "I8"), CheckpointError, (UP, "F8_E4M3", "I8")),
    "E5M2 weight": ("fp8", tagged(".weight", "F8_E5M2"), CheckpointError, (UP, "F8_E4M3", "F8_E5M2")),
    "two scales": ("fp8", add(weight_scale=ONE), CheckpointError, (f"{PROJECTION}.weight_scale: left over",)),
    "scale of another kind": ("fp8", tagged(SCALE, "I32"), CheckpointError, (SCALE, "F8_E8M0", "I32")),
    "weight misshaped": ("fp8", put(".weight", lambda a: a.T), CheckpointError, (SCALE, "[2, 2]", "[4, 1]")),
    "scale NaN": ("fp8", put(SCALE, set_to(np.nan)), CheckpointError, (SCALE, "1 of 4 scales are NaN or Inf")),
    "scale Inf": ("fp8", put(SCALE, set_to(np.inf)), CheckpointError, (SCALE, "1 of 4 scales are NaN or Inf")),
    "scale zero": (
        "fp8",
        put(SCALE, set_to(0)),
        CheckpointError,
        (SCALE, "weights that are not zero", "scale of zero"),
    ),
    "e8m0 NaN": ("fp8 e8m0", put(SCALE, set_to(255)), CheckpointError, (SCALE, "1 of 4 scales are NaN or Inf")),
    "weight NaN": ("fp8", put(".weight", set_to(127)), CheckpointError, (UP, "1 of 2048 values are NaN or Inf")),
    "scale zero of a tensor": ("fp8 tensor", put(SCALE, lambda a: a * 0), CheckpointError, (SCALE, "scale of zero")),
    "all at once": (
        "fp8",
        lambda tensors, config: (
            put(SCALE, set_to(np.nan))(tensors, config),
            tensors.pop("model.layers.0.mlp.down_proj.weight_scale_inv"),
            tensors.update({"model.norm.weight": ("I32", np.ones(32, np.int32))}),
        ),
        CheckpointError,
        (
            ": 3 tensor(s)",
            f"{PROJECTION}{SCALE}: 1 of 4",
            "down_proj.weight_scale_inv: missing",
            "model.norm.weight",
            "I32",
        ),
    ),
    "format": ("pack4", told(format="marlin-24"), ConfigError, ("group_0.format", "pack-quantized", "'marlin-24'")),
    "sparse": ("pack4", told(sparsity_config={"format": "sparse-24"}), ConfigError, ("sparsity_config", "sparse-24")),
    "transforms": ("pack4", told(transform_config={"a": 1}), ConfigError, ("transform_config",)),
    "targets": ("pack4", told(ignore="lm_head"), ConfigError, ("ignore", "list of strings", "'lm_head'")),
    "expression": ("pack4", told(ignore=["re:("]), ConfigError, ("ignore", "regular expressions")),
    "no groups": ("pack4", told(config_groups=None), ConfigError, ("config.json",)),
    "9 bits": ("pack4", weights_told(num_bits=9), ConfigError, ("num_bits", "1 to 8", "9")),
    "float": ("pack4", weights_told(type="float"), ConfigError, ("weights.type", "'float'")),
    "strategy": ("pack4", weights_told(strategy="token"), ConfigError, ("strategy", "'token'")),
    "group of 0": ("pack4", weights_told(group_size=0), ConfigError, ("group_size", "0")),
    "other bits": ("pack4", weights_told(num_bits=8), CheckpointError, (".weight_packed", "[64, 8]", "[64, 4]")),
    "other group": ("pack4", weights_told(group_size=8), CheckpointError, (SCALES, "[64, 4]", "[64, 2]")),
    "no zeros": ("pack4", weights_told(symmetric=False), CheckpointError, (".weight_zero_point: missing",)),
    "zeros": ("pack4", add(weight_zero_point=ONE), CheckpointError, (".weight_zero_point: left over",)),
    "no shape": ("pack4", put(".weight_shape", None), CheckpointError, (".weight_shape: missing",)),
    "shape of rows": (
        "pack4",
        put(".weight_shape", set_to(63)),
        CheckpointError,
        (".weight_shape", "[64, in]", "[63, 32]"),
    ),
    "shape of columns": (
        "pack4",
        put(".weight_shape", set_to(40, 1)),
        CheckpointError,
        (".weight_packed: misshaped, expected [64, 5], got [64, 4]",),
    ),
    "negative shape": ("pack4", put(".weight_shape", set_to(-8, 1)), CheckpointError, (".weight_shape", "-8")),
    "shape that the config denies": (
        "pack4",
        put(".weight_shape", set_to(31, 1)),
        CheckpointError,
        (f"{UP}: misshaped, expected [64, 32], got [64, 31]",),
    ),
    "index": ("pack4 order", put(".weight_g_idx", set_to(2)), CheckpointError, (".weight_g_idx", "[0, 2)", "0 to 2")),
    "packed and plain": ("pack4", add(weight=ONE), CheckpointError, (f"{UP}: left over",)),
    "ignored": ("pack4", told(ignore=["re:.*up_proj"]), CheckpointError, (f"{PROJECTION}: quantized", "ignore")),
    "nvfp4 group": ("nvfp4", weights_told(group_size=32), ConfigError, ("group_size", "16", "32")),
    "nvfp4 total": ("nvfp4", put(".weight_global_scale", set_to(0)), CheckpointError, (UP, "NaN or Inf")),
    "nvfp4 asymmetric": ("nvfp4", weights_told(symmetric=False), ConfigError, ("symmetric", "False")),
    "nvfp4 NaN": ("modelopt nvfp4", put(SCALES, set_to(127)), CheckpointError, (SCALES, "scales are NaN or Inf")),
    "modelopt total": ("modelopt nvfp4", put(".weight_scale_2", set_to(0)), CheckpointError, ("scale of zero",)),
    "modelopt other": ("modelopt nvfp4", told(quant_algo="FP8"), CheckpointError, (UP, "F8_E4M3", "U8")),
    "modelopt rows": ("modelopt nvfp4", put(".weight", lambda a: a[:, :12]), CheckpointError, (UP, "8 bytes", "12")),
    "modelopt awq": ("modelopt nvfp4", add(pre_quant_scale=ONE), CheckpointError, (".pre_quant_scale: extra",)),
    "mxfp4 NaN": ("mxfp4 matrix", put(SCALES, set_to(255)), CheckpointError, (SCALES, "1 of 64 scales")),
    "mxfp4 Inf": ("mxfp4 matrix", put(SCALES, lambda a: a * 0 + 254), CheckpointError, (UP, "NaN or Inf")),
    "awq bits": ("awq", told(bits=8), ConfigError, ("bits", "(4,)", "8")),
    "awq version": ("awq", told(version="gemv"), ConfigError, ("version", "'gemm'", "'gemv'")),
    "awq symmetric": ("awq", told(zero_point=False), ConfigError, ("zero_point", "False")),
    "awq index": ("awq", add(g_idx=ONE), CheckpointError, (".g_idx",)),
    "awq group": ("awq", told(group_size=32), CheckpointError, (".scales", "[1, 64]", "[2, 64]")),
    "awq zero": ("awq", put(".scales", set_to(0)), CheckpointError, (".scales", "scale of zero")),
    "gptq bits": ("gptq v2", told(bits=3), ConfigError, ("bits", "(2, 4, 8)", "3")),
    "gptq no bits": ("gptq v2", told(bits=None), ConfigError, ("bits", "None")),
    "gptq no group": ("gptq v2", told(group_size=None), ConfigError, ("group_size", "None")),
    "gptq format": ("gptq v2", told(checkpoint_format="marlin"), ConfigError, ("checkpoint_format", "'marlin'")),
    "gptq dynamic": ("gptq v2", told(dynamic={"+:.*": {"bits": 8}}), ConfigError, ("dynamic", "'+:.*'")),
    "gptq index": ("gptq v2", put(".g_idx", set_to(-1)), CheckpointError, (".g_idx", "[0, 2)", "-1 to 1")),
    "gptq long index": ("gptq v2", put(".g_idx", lambda a: a[:-1]), CheckpointError, (".g_idx", "[32]", "[31]")),
    "gptq no zeros": ("gptq v2", put(".qzeros", None), CheckpointError, (f"{PROJECTION}.qzeros: missing",)),
    "gptq infinite": ("gptq v2", put(".scales", set_to(np.inf)), CheckpointError, (".scales", "1 of 128 scales")),
    "gptq other bits": (
        "gptq v2",
        told(bits=8),
        CheckpointError,
        (".g_idx: misshaped", ".qzeros", "[1, 16]", "[2, 8]"),
    ),
    "cut short": (
        "gptq v2",
        lambda tensors, config: config.update(cut=0.6),
        CheckpointError,
        ("interrupted download",),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_quantized_checkpoint_is_refused_by_name(tmp_path, case):
    """A conversion to either format refuses it too, and leaves nothing."""
    name, edit, error, fragments = BAD[case]
    quantized, _ = both_directories(tmp_path, CASES[name], files=1)
    (path,) = quantized.glob("*.safetensors")
    tensors, config = read_file(path), json.loads((quantized / "config.json").read_text())
    edit(tensors, config)
    keep = config.pop("cut", 1)
    write_file(path, tensors)
    edit_json(quantized / "model.safetensors.index.json", weight_map=dict.fromkeys(tensors, path.name))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(error) as caught:
        load(quantized)
    assert all(fragment in str(caught.value) for fragment in fragments), caught.value
    refused(quantized, tmp_path / "out", error, fragments[-1:])
    with pytest.raises(error):
        convert(quantized, tmp_path / "out", format="orbax")
    assert not (tmp_path / "out").exists()


def test_scales_of_zero_where_they_say_nothing_false(tmp_path):
    """Weights that are zero may have a scale of zero. In NVFP4, small ones may: E4M3 has no number below 2^-9."""
    case = CASES["fp8"]
    weight = case.make(np.random.default_rng(1), *case.shape)
    tensors: Tensors = {f"m{suffix}": (tag, array.copy()) for suffix, (tag, array) in weight.tensors.items()}
    tensors["m.weight"][1][:16, :32] = 0
    tensors["m.weight_scale_inv"][1][0, 0] = 0
    got = decoded(tmp_path, case, tensors)["m.weight"]
    weight.decoded[:16, :32] = 0
    np.testing.assert_array_equal(got, weight.decoded)
    case = CASES["modelopt nvfp4"]
    weight = case.make(np.random.default_rng(1), *case.shape)
    tensors = {f"m{suffix}": (tag, array.copy()) for suffix, (tag, array) in weight.tensors.items()}
    tensors["m.weight_scale"][1][2, 1] = 0
    weight.decoded[2, 16:32] = 0
    np.testing.assert_array_equal(decoded(tmp_path, case, tensors)["m.weight"], weight.decoded)


def test_orbax_with_a_quantization_config_is_refused(tmp_path):
    quantized, _ = both_directories(tmp_path, CASES["fp8"])
    convert(quantized, tmp_path / "o", format="orbax")
    edit_json(tmp_path / "o" / "config.json", quantization_config=FP8)
    with pytest.raises(ConfigError, match="quantization_config must be absent"):
        read_config(tmp_path / "o")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_settings_of_any_kind_are_read_or_refused(tmp_path, data: st.DataObject) -> None:
    case = CASES[data.draw(st.sampled_from(["fp8", "pack4 order", "nvfp4", "awq", "gptq", "modelopt nvfp4"]))]
    inner = whole = json.loads(json.dumps(case.settings))
    while isinstance(inner[key := data.draw(st.sampled_from(sorted(inner)))], dict) and data.draw(st.booleans()):
        inner = inner[key]
    inner[key] = data.draw(JSON)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": whole}))
    weight = case.make(np.random.default_rng(1), 32, 32)
    try:
        read_config(tmp_path)
        read = decoded(tmp_path, case._replace(settings=whole), {f"m{key}": one for key, one in weight.tensors.items()})
    except JshadowError:
        return
    assert all(isinstance(one, np.ndarray | list) for one in read.values())


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_mutated_files_are_read_or_refused(tmp_path_factory, data: st.DataObject) -> None:
    """Bytes of the header are changed, or those of the tensors, which have scales, indices and shapes."""
    folder = tmp_path_factory.mktemp("mutated")
    case = CASES[data.draw(st.sampled_from(["fp8", "pack4 order", "modelopt nvfp4", "gptq"]))]
    weight, path = case.make(np.random.default_rng(1), 32, 32), folder / "model.safetensors"
    write_file(path, {f"m{key}": one for key, one in weight.tensors.items()})
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    reach = data.draw(st.sampled_from([header, len(content)]))
    for at in data.draw(st.lists(st.integers(0, reach - 1), min_size=1, max_size=6)):
        content[at] = data.draw(st.integers(0, 255) | st.sampled_from(list(b'0123456789-,:[]{}" ')))
    path.write_bytes(content)
    try:
        opened = open_tensors(folder, {"quantization_config": case.settings})
        for name in opened.shapes:
            if not opened.misfits(name):
                opened.read(name)
    except JshadowError:
        return
