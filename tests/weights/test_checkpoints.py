"""Checkpoints: loaded, saved, and converted to orbax and back, bit by bit; onto a mesh; the memory of a conversion."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import seeded
from checkpoint_files import TINY, assert_same, bare, edit_json, edit_tensors, shard, tiny_directory
from family_cases import ONE_OF_EACH, family_config
from few import one_of
from forced_devices import FLAGS
from quantized_files import read_file, write_file
from safetensors.numpy import load_file, save_file
from tiny_text import byte_tokenizer

from jshadow.cli.main import main
from jshadow.errors import CheckpointError, ConfigError
from jshadow.models.config import Experts, RopeConfig
from jshadow.models.registry import family_of
from jshadow.models.transformer import abstract_weights
from jshadow.weights.convert import convert
from jshadow.weights.convert.huggingface import config_to_hf, flat_abstract, read_config, write_shards
from jshadow.weights.convert.source import placements
from jshadow.weights.params import Params, init_params, load, save

ROOT = Path(__file__).resolve().parents[2]


def tensors(directory: Path) -> dict[str, tuple[Any, bytes]]:
    """Tensor name -> dtype, shape and bytes, for all safetensors files of a directory."""
    return {
        name: ((value.dtype.name, value.shape), value.tobytes())
        for file in directory.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


CASES = [
    (("float32", "bfloat16", "float16")[index % 3], name, (20_000, 10**9)[index % 2])
    for index, name in enumerate((*ONE_OF_EACH, "gpt_oss", "gemma4_moe", "nemotron_h_latent"))
]


@pytest.mark.parametrize(("dtype", "name", "shard_bytes"), one_of(3, CASES))
def test_huggingface_to_orbax_and_back_is_bit_equal(tmp_path, name, dtype, shard_bytes):
    save(load(seeded.write_checkpoint(name, tmp_path / "seeded"), dtype), tmp_path / "plain")  # norms and biases too
    edit_json(tmp_path / "plain" / "config.json", mark=name)  # a key that no reader knows
    (tmp_path / "plain" / "chat_template.jinja").write_text("{{ messages }}")
    convert(tmp_path / "plain", tmp_path / "source", dtype, shard_bytes=shard_bytes)
    shards = list((tmp_path / "source").glob("*.safetensors"))
    assert (len(shards) > 1) == (shard_bytes == 20_000)
    convert(tmp_path / "source", tmp_path / "orbax", dtype, format="orbax")
    assert not list((tmp_path / "orbax").glob("*.safetensors"))
    convert(tmp_path / "orbax", tmp_path / "back", dtype, shard_bytes=shard_bytes)
    assert tensors(tmp_path / "back") == tensors(tmp_path / "source") == tensors(tmp_path / "plain")
    for file in ("config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "source" / file).read_bytes()
    if len(shards) > 1:
        told = [json.loads((tmp_path / one / "model.safetensors.index.json").read_text()) for one in ("source", "back")]
        assert set(told[0]["weight_map"]) == set(told[1]["weight_map"]) == set(tensors(tmp_path / "plain"))
    assert_same(load(tmp_path / "orbax", dtype), load(tmp_path / "plain", dtype))


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_dtypes_are_cast_on_the_way(tmp_path, stored, wanted):
    directory, params = tiny_directory(tmp_path / "m", stored)
    convert(directory, tmp_path / "cast", wanted, format="orbax")
    assert_same(load(tmp_path / "cast", wanted), load(directory, wanted))
    convert(directory, tmp_path / "kept", stored, format="orbax")
    assert_same(load(tmp_path / "kept", wanted), load(directory, wanted))
    assert load(tmp_path / "kept", stored).config == params.config


def test_save_to_orbax_is_the_same_model_and_any_orbax_user_reads_it(tmp_path):
    _, params = tiny_directory(tmp_path / "m", "bfloat16")
    save(params, tmp_path / "orbax", format="orbax")
    assert_same(load(tmp_path / "orbax"), params)
    convert(tmp_path / "orbax", tmp_path / "hf")
    assert tensors(tmp_path / "hf") == tensors(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out", format="orbax")
    with ocp.StandardCheckpointer() as checkpointer:
        for name in ("orbax", "out"):
            tree = checkpointer.restore((tmp_path / name / "weights").absolute(), params.weights)
            jax.tree.map(np.testing.assert_array_equal, tree, params.weights)


def test_the_command(tmp_path, directory, params, capsys):
    assert main(["convert", str(directory), str(tmp_path / "o"), "--dtype", "float32", "--format", "orbax"]) == 0
    assert main(["convert", str(tmp_path / "o"), str(tmp_path / "h"), "--dtype", "float32", "--shard-gb", "1e-5"]) == 0
    assert len(list((tmp_path / "h").glob("model-*.safetensors"))) > 1
    assert_same(load(tmp_path / "h", "float32"), params)
    capsys.readouterr()
    assert main(["convert", str(directory), str(tmp_path / "p"), "--format", "pickle"]) == 2
    assert "format must be one of" in capsys.readouterr().err


def run(code: str, *arguments: Any, **environment: str) -> str:
    """Run code in another process on the CPU, and return what it prints."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    told = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=told, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


MESH = """
import jax, numpy as np, sys
from jax.sharding import Mesh
from jshadow import Full, load, prefill, save
from jshadow.models import quantization
alone, tokens = load(sys.argv[1], "float32"), np.arange(40)[None] % 90
asked = dict(policy=Full(), capacity=48, logits="all")
want, _ = prefill(alone, tokens, np.array([40]), **asked)
four = Mesh(np.array(jax.devices()[:4]).reshape(1, 4), ("data", "tp"))
for mesh in (jax.make_mesh((2,), ("tp",)), four):
    params, devices = load(sys.argv[1], "float32", mesh=mesh), mesh.shape["tp"]
    for path, leaf in jax.tree_util.tree_flatten_with_path(params.weights)[0]:
        held = {shard.device: shard.data.nbytes for shard in leaf.addressable_shards}
        assert len(held) == devices, path
        assert {*held.values()} == {leaf.nbytes // (1 if "norm" in str(path) else devices)}, (path, held)
    got, _ = prefill(params, tokens, np.array([40]), **asked)
    np.testing.assert_allclose(got, want, atol=1e-4)
save(params, sys.argv[2], format="orbax")
jax.tree.map(np.testing.assert_array_equal, load(sys.argv[2], "float32").weights, alone.weights)
int8 = load(sys.argv[1], "float32", quantize="int8", mesh=four)
assert len(int8.weights["layer_0"]["mlp"]["up"]["kernel"].addressable_shards) == 4
quantization._SMALL = 0
one, two = (load(sys.argv[1], "float32", quantize="int4", mesh=mesh) for mesh in (None, jax.make_mesh((2,), ("tp",))))
assert len(two.weights["layer_0"]["mlp"]["down"]["kernel_scale"].addressable_shards) == 2
want, got = (prefill(params, tokens, np.array([40]), **asked)[0] for params in (one, two))
np.testing.assert_allclose(got, want, atol=1e-4)
print("spread")
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("format", ["huggingface", "orbax"])
def test_weights_go_straight_to_a_mesh(tmp_path, format):
    """In a process of four CPU devices, each holds its part, results are the same, and saving gathers the weights."""
    save(
        init_params(
            dataclasses.replace(TINY, kv_heads=4, head_dim=2 * TINY.head_dim, vocab_size=96, eos_ids=()), seed=1
        ),
        tmp_path / "m",
    )
    convert(tmp_path / "m", tmp_path / "c", "float32", format=format)
    assert run(MESH, tmp_path / "c", tmp_path / "again", XLA_FLAGS=FLAGS.format(8)) == "spread\n"


MEMORY = """
import sys
import jshadow.weights.convert as c
import numpy as np, jax, orbax.checkpoint, safetensors
jax.devices()
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
open("/proc/self/clear_refs", "w").write("5")  # the highest mark so far was that of the imports
before = status("VmRSS")
c.convert(sys.argv[1], sys.argv[2], sys.argv[3], format=sys.argv[4], shard_bytes=int(sys.argv[5]))
print(status("VmHWM") - before)
"""


SHARD = 128 * 2**20


def large_directory(path: Path, layers: int) -> int:
    """Write a checkpoint of `layers` times 32 MiB in bfloat16, in shards of 128 MiB. Return the largest file size."""
    sizes = {"model_dim": 1024, "ffn_dim": 4096, "q_heads": 16, "kv_heads": 8, "head_dim": 64, "vocab_size": 8192}
    config, rng = dataclasses.replace(TINY, num_layers=layers, **sizes), np.random.default_rng(0)
    wanted = flat_abstract(config)
    placed = placements(family_of({"model_type": "llama"}), wanted)
    shapes = {name: one.tensor_shape(wanted) for name, one in placed.items()}
    path.mkdir()
    edit_json(path / "config.json", **config_to_hf(config, "bfloat16"))
    layout = {name: ("bfloat16", shape) for name, shape in shapes.items()}
    write_shards(path, layout, lambda name: rng.standard_normal(shapes[name], np.float32), SHARD)
    return max(file.stat().st_size for file in path.glob("*.safetensors"))


def in_fp8(source: Path, target: Path) -> None:
    """Write a checkpoint in bfloat16 again, with codes of fp8 in the place of its projections."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    edit_json(target / "config.json", quantization_config={"quant_method": "fp8", "weight_block_size": None})
    codes, scale, table = np.random.default_rng(0).integers(0, 127, 2**22, np.uint8), np.ones(1, np.float32), {}
    for path in source.glob("*.safetensors"):
        stored = read_file(path)
        for name, (_, array) in list(stored.items()):
            if "_proj." in name:
                stored[name] = ("F8_E4M3", codes[: array.size].reshape(array.shape))
                stored[name.replace("weight", "weight_scale_inv")] = ("F32", scale)
        write_file(target / path.name, stored)
        table |= dict.fromkeys(stored, path.name)
    edit_json(target / "model.safetensors.index.json", weight_map=table)


@pytest.mark.slow
@pytest.mark.process
def test_memory_of_a_conversion_is_that_of_two_files(tmp_path):
    """The checkpoint has 0.75 GiB, of which 0.13 GiB are a file. The process has imported everything before."""
    largest = large_directory(tmp_path / "m", layers=24)
    assert largest <= SHARD + 10_000
    in_fp8(tmp_path / "m", tmp_path / "fp8")
    for source, target, dtype, format in (
        ("m", "orbax", "bfloat16", "orbax"),
        ("orbax", "back", "bfloat16", "huggingface"),
        ("m", "cast", "float16", "huggingface"),
        ("fp8", "decoded", "bfloat16", "huggingface"),
    ):
        raised = int(run(MEMORY, tmp_path / source, tmp_path / target, dtype, format, SHARD))
        assert raised <= 2 * largest + 64 * 10**6, target
        if target != "orbax":
            shutil.rmtree(tmp_path / target)


Q0 = "model.layers.0.self_attn.q_proj.weight"
EMBED = "model.embed_tokens.weight"


VARIANTS: list[dict[str, Any]] = [
    {},
    {"tie_embeddings": True},
    {"attention_bias": True, "mlp_bias": True},
    {"head_dim": 6, "kv_heads": 1, "eos_ids": ()},
    {"rope": RopeConfig(theta=500000.0, kind="llama3", factor=8.0), "eos_ids": (1, 7)},
    {"rope": RopeConfig(kind="linear", factor=2.5)},
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: "+".join(changes) or "plain")
def test_save_then_load_gives_the_same_model(tmp_path: Path, changes: dict[str, Any], dtype: str) -> None:
    directory, params = tiny_directory(tmp_path / "m", dtype, **changes)
    assert params.dtype.name == dtype
    assert_same(load(directory, dtype), params)
    assert load(directory).tokenizer is None
    assert sorted(os.listdir(tmp_path)) == ["m"]


def test_weights_have_the_abstract_tree(tmp_path):
    directory, _ = tiny_directory(tmp_path / "m", attention_bias=True)
    weights, config = load(directory, "float32").weights, dataclasses.replace(TINY, attention_bias=True)
    of, wanted = (
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (weights, abstract_weights(config))
    )
    assert of == wanted
    stored = load_file(directory / "model.safetensors")
    np.testing.assert_array_equal(weights["layer_0"]["attention"]["q"]["kernel"], stored[Q0].T)
    np.testing.assert_array_equal(weights["head"]["kernel"], stored["lm_head.weight"].T)


def test_shards_and_harmless_extras_give_the_same_model(tmp_path):
    directory, params = tiny_directory(tmp_path / "m", tie_embeddings=True)
    inverse = "model.layers.1.self_attn.rotary_emb.inv_freq"
    edit_tensors(directory, lambda held: held.update({inverse: np.ones(4, np.float32), "lm_head.weight": held[EMBED]}))
    assert_same(load(directory, "float32"), params)
    shard(directory)
    assert_same(load(directory, "float32"), params)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "nemotron_h"])
@pytest.mark.parametrize("place", ["row", "last", "dtype"])
def test_another_head_than_the_embedding_is_used_in_spite_of_the_config(tmp_path, caplog, name, place):
    """The logits are those of the head in the file, and a warning says so. A conversion keeps the head."""
    config = dataclasses.replace(family_config(name), tie_embeddings=True)
    params = init_params(config, seed=5)
    save(params, tmp_path / "m")
    head = np.array(params.weights["embed"]["embedding"])
    if place == "dtype":
        head = head.astype(np.float64)
    else:
        head[0 if place == "row" else -1] += 1
    edit_tensors(tmp_path / "m", lambda held: held.update({"lm_head.weight": head}))
    loaded = load(tmp_path / "m", "float32")
    assert "lm_head.weight is not the embedding" in caplog.text
    assert not loaded.config.tie_embeddings
    np.testing.assert_array_equal(loaded.weights["head"]["kernel"], head.T.astype(np.float32))
    convert(tmp_path / "m", tmp_path / "converted", "float32")
    assert_same(load(tmp_path / "converted", "float32"), loaded)


DRAFTS = (
    "mtp.fc.weight",  # Qwen
    "mtp.layers.0.self_attn.q_proj.weight",
    "model.mtp_layers.0.input_proj.weight",  # MiMo
    "model.layers.2.eh_proj.weight",  # DeepSeek and GLM: the layer behind the last one
    "model.layers.2.input_layernorm.weight",
    "model.layers.2.embed_tokens.weight",
    "model.layers.3.nextn_predict.shared_head_norm.weight",
)


def converted(source: Path, target: Path) -> Params:
    """The model after a conversion to orbax and back."""
    convert(source, target / "orbax", "float32", format="orbax")
    convert(target / "orbax", target / "back", "float32")
    return load(target / "back", "float32")


@pytest.mark.parametrize("named", [lambda held: None, bare], ids=["whole", "base"])
def test_layers_of_multi_token_prediction_are_ignored(tmp_path, named):
    """Their dtype and their values do not matter either, because they are not read."""
    directory, params = tiny_directory(tmp_path / "m", tie_embeddings=True)
    edit_tensors(directory, lambda held: held.update({name: np.full(4, np.nan, np.float32) for name in DRAFTS}))
    edit_tensors(directory, lambda held: (held.update({"mtp.scale": np.ones(4, np.int8)}), named(held)))
    assert_same(load(directory, "float32"), params)
    assert_same(converted(directory, tmp_path), params)


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_of_the_base_class_is_read(tmp_path, tied):
    """It is a whole model if the head is the embedding, or if the file has the head."""
    directory, params = tiny_directory(tmp_path / "m", tie_embeddings=tied)
    edit_tensors(directory, bare)
    assert "layers.0.self_attn.q_proj.weight" in load_file(directory / "model.safetensors")
    assert_same(load(directory, "float32"), params)
    shard(directory)
    assert_same(load(directory, "float32"), params)
    assert_same(converted(directory, tmp_path), params)


def test_two_loads_share_a_config_and_seeds_differ(directory):
    assert hash(load(directory).config) == hash(load(directory).config)
    a, same, b = (init_params(TINY, seed) for seed in (1, 1, 2))
    assert_same(a, same)
    a, b = (one.weights["layer_0"]["mlp"]["up"]["kernel"] for one in (a, b))
    assert not np.array_equal(a, b)


def test_end_tokens_are_those_of_both_configs(directory):
    for eos, expected in ((5, (5, 0)), ([5, 6], (5, 6, 0)), (None, (0,)), ([0, 5], (0, 5))):
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        assert load(directory).config.eos_ids == expected


CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "end", "expected"),
    [
        (CHATML, "</s>", ("</s>", "<|im_end|>")),
        (CHATML, "<|im_end|>", ("<|im_end|>",)),
        (CHATML, None, ("<|im_end|>",)),
        ("{% for m in messages %}{{ m['content'] }} </s>{% endfor %}", None, ("</s>",)),
        ("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", "</s>", ("</s>",)),
        ("{{ raise_exception('no') }}", "</s>", ("</s>",)),
        (None, "</s>", ("</s>",)),
        (None, None, ()),
        (CHATML, "<|far|>", ("<|im_end|>",)),
    ],
)
def test_end_tokens_of_the_tokenizer_and_of_its_template(tmp_path, template, end, expected):
    """Those that the model has no embedding for are left out."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>", "</s>"], special_tokens=True)
    tokenizer.add_tokens([f"<{number}>" for number in range(40)])
    tokenizer.add_tokens(["<|far|>"], special_tokens=True)
    tokenizer.eos_token = end
    tokenizer.chat_template = template
    params = init_params(dataclasses.replace(TINY, vocab_size=288, eos_ids=(3,)), seed=3)
    save(dataclasses.replace(params, tokenizer=tokenizer), tmp_path / "m")
    found = load(tmp_path / "m").config.eos_ids
    assert found == (3, *(tokenizer.convert_tokens_to_ids(name) for name in expected))


def test_other_sources(tmp_path, directory, params, monkeypatch):
    asked = []

    def download(name, **options):
        asked.append((name, options["allow_patterns"]))
        if name != "org/name":
            raise OSError("no network")
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert_same(load("org/name", "float32"), params)
    assert asked[0][0] == "org/name"
    assert not any(pattern.endswith((".bin", "*")) for pattern in asked[0][1])
    monkeypatch.chdir(tmp_path)
    for source, message in {
        "org/other": r"org/other.*no network",
        tmp_path / "none.gguf": "no such file",
        directory / "config.json": "must be a directory",
        "m/other": "does not exist",
        "a/b/c": "does not exist",
        "nothing": "does not exist",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            load(source)
    with pytest.raises(ConfigError, match="path_or_hub_id"):
        load(None)
    assert len(asked) == 2


@pytest.mark.parametrize("format", ["huggingface", "orbax"])
def test_save_refuses_and_leaves_nothing(tmp_path, directory, params, format):
    bad = {
        kind: Params(jax.tree.map(lambda leaf, value=value: np.full(leaf.shape, *value), params.weights), params.config)
        for kind, value in {"NaN": (np.nan, "float32"), "integers": (1, "int32")}.items()
    }
    bad["Inf"] = dataclasses.replace(params, weights=jax.tree.map(np.asarray, params.weights))
    bad["Inf"].weights["norm"]["scale"] = np.where(np.arange(32) == 3, np.inf, 1).astype(np.float32)
    (tmp_path / "file").write_text("")
    for refused, place, error, message in (
        (params, "m", CheckpointError, "must not exist"),
        (params, "file/below", CheckpointError, "cannot be created"),
        (bad["NaN"], "bad", CheckpointError, "NaN"),
        (bad["Inf"], "bad", CheckpointError, "1 of 32 values are NaN or Inf"),
        (bad["integers"], "bad", ConfigError, "dtype"),
    ):
        with pytest.raises(error, match=message):
            save(refused, tmp_path / place, format=format)
    assert sorted(os.listdir(tmp_path)) == ["file", "m"]


@pytest.mark.process
def test_load_without_torch_is_silent(tmp_path, source):
    convert(source, tmp_path / "out")
    code = "import sys; sys.modules['torch'] = None; import jshadow.weights.params as p; print(p.load(sys.argv[1]).tokenizer('hell').input_ids)"  # noqa: E501
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
    assert done.stdout.strip() == str([TINY.vocab_size - 3])


OLDER, NEWER = ("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")
# A case of a text model -> the type of the whole model
WRAPPERS = {"gemma3": "gemma3", "mistral": "mistral3", "ministral3": "mistral3", "gemma4": "gemma4"}
WRAPPERS |= {"qwen3_5": "qwen3_5", "qwen3_5_moe": "qwen3_5_moe"}


def stacked_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors as Qwen3.5 is published: those of all experts of a layer in one, and gate above up."""
    kept = {name: value for name, value in tensors.items() if ".experts." not in name}
    for layer in sorted({name.split(".experts.")[0] for name in tensors.keys() - kept.keys()}):
        gate, up, down = (
            np.stack([tensors[f"{layer}.experts.{expert}.{name}_proj.weight"] for expert in range(5)])
            for name in ("gate", "up", "down")
        )
        kept |= {f"{layer}.experts.gate_up_proj": np.concatenate([gate, up], 1), f"{layer}.experts.down_proj": down}
    return kept


@pytest.mark.parametrize("case", WRAPPERS)
@pytest.mark.parametrize("prefixes", [OLDER, NEWER], ids=["older", "newer"])
def test_the_text_model_inside_a_model_of_texts_and_images(tmp_path, case, prefixes):
    """A conversion and a save write the text model alone."""
    plain = seeded.write_checkpoint(case, tmp_path / "plain")
    whole = seeded.write_checkpoint(case, tmp_path / "whole")
    config = json.loads((whole / "config.json").read_text())
    outer = {"tie_word_embeddings": config.pop("tie_word_embeddings"), "vision_config": {"a": 1}}
    outer["model_type"] = WRAPPERS[case]
    if case == "mistral":
        del config["model_type"]  # that of the text may be left out
    (whole / "config.json").write_text(json.dumps(outer | {"text_config": config}))
    tensors = load_file(whole / "model.safetensors")
    if case == "qwen3_5_moe":
        tensors = stacked_experts(tensors)
    renamed = {
        prefixes[0] + name.removeprefix("model.")
        if name.startswith("model.")
        else prefixes[1] + name.removeprefix("lm_head."): value
        for name, value in tensors.items()
    }
    images = {"vision_tower.encoder.weight": np.ones(3, np.float32), "multi_modal_projector.w": np.ones(2, np.float32)}
    images |= {"model.visual.patch_embed.proj.weight": np.ones(2, np.float32), "mtp.fc.weight": np.ones(2, np.float32)}
    save_file(renamed | images, whole / "model.safetensors")
    first, second = (load(folder, dtype="float32") for folder in (plain, whole))
    assert first.config == second.config
    jax.tree.map(np.testing.assert_array_equal, first.weights, second.weights)
    convert(whole, tmp_path / "orbax", "float32", format="orbax")
    jax.tree.map(np.testing.assert_array_equal, first.weights, load(tmp_path / "orbax", dtype="float32").weights)
    convert(whole, tmp_path / "text", "float32")
    assert json.loads((tmp_path / "text" / "config.json").read_text())["model_type"] == first.config.model_type
    again = load(tmp_path / "text", dtype="float32")
    assert again.config == first.config
    jax.tree.map(np.testing.assert_array_equal, first.weights, again.weights)


def test_parts_that_a_checkpoint_counts_as_layers(tmp_path):
    """Nemotron's, in the names of its files and in those of transformers, with experts apart or in one tensor."""
    params = init_params(family_config("nemotron_h_moe"), seed=5)  # M and E, M, * and E
    for block, name, more in ((0, "mlp_norm", 1), (1, "attention_norm", 2), (2, "mlp_norm", 3)):
        params.weights[f"layer_{block}"][name]["scale"] += more
    save(params, tmp_path / "m")
    stored, layer = load_file(tmp_path / "m" / "model.safetensors"), "backbone.layers."
    parts = {"norm.weight", "mixer.gate.weight", "mixer.shared_experts.up_proj.weight", "mixer.q_proj.weight"}
    found = {part: [number for number in range(5) if f"{layer}{number}.{part}" in stored] for part in parts}
    assert sorted(found.values()) == [[0, 1, 2, 3, 4], [1, 4], [1, 4], [3]]
    assert [stored[f"{layer}{number}.norm.weight"].max() for number in range(5)] == [1, 2, 3, 1, 4]

    def rename(held):
        for number in (1, 4):
            for name in ("up_proj", "down_proj"):
                own = f"{layer}{number}.mixer.experts."
                held[own + name] = np.stack([held.pop(f"{own}{expert}.{name}.weight") for expert in range(6)])
        held |= {name.replace("backbone", "model"): held.pop(name) for name in list(held)}
        held |= {f"mtp.layers.0.{part}": np.ones(3, np.float32) for part in ("norm.weight", "mixer.q_proj.weight")}

    edit_tensors(tmp_path / "m", rename)
    assert_same(load(tmp_path / "m", "float32"), params)
    assert_same(converted(tmp_path / "m", tmp_path), params)
    edit_tensors(tmp_path / "m", lambda held: held.pop("model.layers.4.norm.weight"))
    with pytest.raises(CheckpointError, match=r"layers\.4\.norm\.weight: missing"):
        load(tmp_path / "m")


def test_a_text_config_that_is_no_object_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": 3}))
    with pytest.raises(ConfigError, match="text_config must be an object, got 3"):
        read_config(tmp_path)


@pytest.mark.parametrize("format", ["huggingface", "orbax"])
def test_the_bias_of_a_router_is_written_in_float32(tmp_path, format):
    """`save` and `convert` do not round it as the other weights. A checkpoint that has it rounded loads."""
    experts = Experts(4, 2, TINY.ffn_dim, (0, 1), "sigmoid", corrected=True)
    config = dataclasses.replace(TINY, model_type="minimax_m2", joint_qk_norm=True, experts=experts)
    exact, params = (init_params(config, 3, dtype) for dtype in ("float32", "bfloat16"))
    bias = np.asarray(exact.weights["layer_0"]["mlp"]["router"]["correction"])
    assert not np.array_equal(bias, bias.astype(ml_dtypes.bfloat16).astype(np.float32))
    save(params, tmp_path / "saved", format=format)
    assert_same(load(tmp_path / "saved"), params)
    save(exact, tmp_path / "exact")
    convert(tmp_path / "exact", tmp_path / "converted", format=format)
    assert_same(load(tmp_path / "converted"), params)
    if format == "huggingface":
        name = "model.layers.0.block_sparse_moe.e_score_correction_bias"
        for folder in ("saved", "converted"):
            stored = load_file(tmp_path / folder / "model.safetensors")
            assert {key for key, one in stored.items() if one.dtype == np.float32} == {name, name.replace("0", "1")}
        stored = load_file(tmp_path / "saved" / "model.safetensors")
        save_file(stored | {name: stored[name].astype(ml_dtypes.bfloat16)}, tmp_path / "saved" / "model.safetensors")
        rounded = load(tmp_path / "saved").weights["layer_0"]["mlp"]["router"]["correction"]
        np.testing.assert_array_equal(rounded, bias.astype(ml_dtypes.bfloat16).astype(np.float32))
