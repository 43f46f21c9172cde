"""Saved states of another model, policy, format or content: refused by name, all differences in one error."""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import model, prefilled
from checkpoint_files import LFS
from probe import Probe
from safetensors import safe_open
from safetensors.numpy import save_file
from small_state import POLICY, SMALL, equal, save_small, small
from tiny_text import byte_tokenizer

from jshadow import Full, StreamingLLM, load_state, save_state
from jshadow.cache import host_memory, offload
from jshadow.engine.saved.file import header_digest
from jshadow.engine.saved.state import read_state_info
from jshadow.errors import CheckpointError, ConfigError, HostMemoryError, StateMismatch
from jshadow.models.config import RopeConfig
from jshadow.policies.settings import with_settings
from jshadow.weights.digest import canonical, raw_bytes, sha256
from jshadow.weights.params import Params, init_params

# Other files


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "no such file"),
        (b"", "empty file"),
        (LFS, "git lfs pull"),
        (b"short", "5 bytes"),
        (b"\x80\x04\x95pickle" * 9, "something else"),
        (b"\xff" * 99, "something else"),
        (b"[" * 999, "something else"),
    ],
)
def test_no_state_at_all(tmp_path, content, told):
    if content is not None:
        (tmp_path / "state").write_bytes(content)
    for read in (lambda path: load_state(path, small()[0]), read_state_info):
        with pytest.raises(CheckpointError, match=told):
            read(tmp_path / "state")


def test_a_directory_or_another_safetensors_file(tmp_path):
    with pytest.raises(CheckpointError, match="not a regular file"):
        load_state(tmp_path, small()[0])
    for metadata, told in ((None, "None"), ({"format": "pt"}, "'pt'")):
        save_file({"lengths": np.zeros(2, np.int32)}, tmp_path / "model", metadata)
        with pytest.raises(CheckpointError, match=f"must be a saved KV state.*format {told}"):
            load_state(tmp_path / "model", small()[0])


# Files that another writer sealed well, and whose content is wrong all the same

Tensors = dict[str, np.ndarray]
Texts = dict[str, Any]


def seal(path: Path, edit: Callable[[Tensors, Texts], Any], *, digests: bool = True) -> None:
    """Write the small state's file with another content and digests that are right for it."""
    save_small(path)
    with safe_open(path, "numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        texts = {
            name: text if name == "format" else json.loads(text)
            for name, text in file.metadata().items()
            if name != "header_sha256"
        }
    edit(tensors, texts)
    if digests:
        texts["sha256"] = {name: sha256(raw_bytes(value)) for name, value in tensors.items()}
    told = {name: text if name == "format" else canonical(text).decode() for name, text in texts.items()}
    save_file(tensors, path)
    with safe_open(path, "numpy") as file:
        table = {
            name: (part.get_dtype(), tuple(part.get_shape()))
            for name, part in ((name, file.get_slice(name)) for name in tensors)
        }
    save_file(tensors, path, told | {"header_sha256": header_digest(told, table)})


def sets(**fields: Any) -> Callable[[Tensors, Texts], Any]:
    return lambda tensors, texts: texts.update(fields)


def fills(name: str, value: int) -> Callable[[Tensors, Texts], Any]:
    return lambda tensors, texts: tensors[name].fill(value)


def test_the_seal_itself_is_no_difference(tmp_path):
    seal(tmp_path / "state", lambda tensors, texts: None)
    assert equal(load_state(tmp_path / "state", small()[0]), small()[1])


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (sets(version=2), "format version 2; this jshadow understands version 3"),
        (sets(version="x"), "format version x"),
        (lambda t, x: x.pop("version"), "version must be present"),
        (lambda t, x: x.pop("weights"), "weights must be present"),
        (sets(config=[1]), "config must be"),
        (sets(policy={"name": "shadowkv"}), "policy must be"),
        (sets(batch=True), "batch, capacity must be"),
        (sets(capacity=-1), "batch, capacity must be"),
        (sets(dtype="float8"), "dtype must be"),
        (sets(fetch="auto"), "fetch must be"),
        (sets(windows=[1.5]), "windows must be"),
        (sets(windows=[]), "1 layers .* got 0 windows"),
        (sets(windows=[2**31 - 1]), r"window\.k: expected"),
        (sets(capacity=257), "context=256.* 257"),
        (sets(capacity=12), "tensor"),
        (sets(batch=3), "tensor"),
        (sets(fitted_tree=[1]), "no state has these sizes"),
        (sets(fitted_tree={"a": ["F99", [2]]}), "fitted_tree must"),
        (sets(fitted_tree={"a": ["int32", [2]]}), r"fitted\.a: missing"),
        (lambda t, x: t.pop("lengths"), "lengths"),
        (lambda t, x: t.update(stranger=t["lengths"]), "stranger: extra"),
        (lambda t, x: t.pop("tokens.0"), r"tokens\.1: extra"),
        (lambda t, x: t.update({"tokens.1": t["tokens.0"]}), r"tokens\.1 must have 6 ids, got 13"),
        (lambda t, x: t.update({"tokens.1": t["tokens.1"].astype(np.float32)}), r"tokens\.1: extra"),
        (lambda t, x: t.update(lengths=t["lengths"].astype(np.uint32)), "lengths: expected .*I32.*got .*U32"),
        (lambda t, x: t.update(lengths=t["lengths"].astype(np.int64)), "I64"),
        (fills("lengths", 17), r"capacity=16.*got \[17, 17\]"),
        (fills("lengths", -1), r"got \[-1, -1\]"),
        (fills("layers.0.frozen.chunks", -7), "room of each row must be at least 0"),
    ],
)
def test_a_well_sealed_file_with_a_wrong_content(tmp_path, edit, told):
    seal(tmp_path / "state", edit)
    with pytest.raises(CheckpointError, match=told):
        load_state(tmp_path / "state", small()[0])
    with contextlib.suppress(CheckpointError):
        read_state_info(tmp_path / "state")


def test_digests_of_other_tensors_than_the_files(tmp_path):
    seal(tmp_path / "state", lambda tensors, texts: texts["sha256"].pop("lengths"), digests=False)
    with pytest.raises(CheckpointError, match="one digest for each tensor"):
        load_state(tmp_path / "state", small()[0])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"name": "shadowkv", "settings": {"speed": 1}}, "'speed'"),
        ({"name": "shadowkv", "settings": {"rank": 99}}, "rank"),
        ({"name": "shadowkv", "settings": {"rank": [1]}}, "rank"),
        ({"name": "other", "settings": {}}, "policy.name: file has 'other'.*pass policy="),
    ],
)
def test_a_policy_that_is_none_here(tmp_path, settings, told):
    seal(tmp_path / "state", sets(policy=settings))
    with pytest.raises(StateMismatch, match=told):
        load_state(tmp_path / "state", small()[0])


# Files of other settings, and files that are good but not for this machine


def without(name: str) -> Any:
    """A change that deletes one of the policy's settings."""

    def change(tensors: Tensors, texts: Texts) -> None:
        del texts["policy"]["settings"][name]

    return change


@pytest.mark.parametrize("name", ["rank", "keys.weights", "landmarks.tokens"])
def test_a_file_that_lacks_a_setting_is_refused(tmp_path, name):
    seal(tmp_path / "state", without(name))
    with pytest.raises(StateMismatch, match=rf"policy\.settings\.{name}: file has nothing"):
        load_state(tmp_path / "state", small()[0])


def test_other_codes_are_refused_by_their_dotted_names(tmp_path):
    save_small(tmp_path / "state")
    other = with_settings(POLICY, {"landmarks.tokens": 2, "values.dtype": "int8"})
    differences = lines_of(tmp_path / "state", small()[0], other)
    assert differences == ["policy.settings.landmarks.tokens", "policy.settings.values.dtype"]
    other = with_settings(POLICY, {"rank": None, "keys": "transform"})
    differences = lines_of(tmp_path / "state", small()[0], other)
    assert differences == [f"policy.settings.{name}" for name in ("keys", "keys.bits", "keys.profile", "rank")]


def test_a_state_that_cannot_be_held_here_is_not_damaged(tmp_path, monkeypatch):
    """A fetch mode that this machine lacks for such rows."""
    save_small(tmp_path / "state")

    def refuse(layout, spec):
        raise ConfigError("fetch must be 'device_put' or 'resident'")

    monkeypatch.setattr(offload, "tier_shapes", refuse)
    with pytest.raises(ConfigError, match="state cannot be loaded here: fetch must be 'device_put'"):
        load_state(tmp_path / "state", small()[0])


# Files of another model, policy, dtype or tokenizer


def lines_of(path: Path, params: Params, policy: Any = None) -> list[str]:
    """The fields that a refusal lists."""
    with pytest.raises(StateMismatch) as caught:
        load_state(path, params, policy)
    head, *lines = str(caught.value).split("\n  ")
    assert head.endswith(f"{len(lines)} difference(s):")
    assert all(": file has " in line for line in lines)
    return [line.split(":")[0] for line in lines]


def test_another_model_is_refused_field_by_field(tmp_path):
    params, state = small()
    save_state(tmp_path / "state", state, params)
    wider = dataclasses.replace(SMALL, ffn_dim=12, rope=RopeConfig(theta=5e5), eos_ids=(3,))
    found = lines_of(tmp_path / "state", init_params(wider))
    assert found == ["config.eos_ids", "config.ffn_dim", "config.rope.theta", "weights"]
    deeper = dataclasses.replace(SMALL, num_layers=2)
    assert lines_of(tmp_path / "state", init_params(deeper)) == ["config.num_layers", "weights"]


def test_other_weights_of_the_same_sizes_are_refused(tmp_path):
    save_state(tmp_path / "state", small()[1], small()[0])
    assert lines_of(tmp_path / "state", init_params(SMALL, seed=1)) == ["weights"]


def test_another_dtype_is_refused(tmp_path):
    params, state = small()
    save_state(tmp_path / "state", state, params)
    narrow = Params(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params.weights), SMALL)
    assert lines_of(tmp_path / "state", narrow) == ["dtype", "weights"]


def test_another_tokenizer_is_refused(tmp_path):
    plain, state = small()
    params, other = (Params(plain.weights, SMALL, byte_tokenizer()) for _ in range(2))
    save_state(tmp_path / "state", state, params)
    assert equal(load_state(tmp_path / "state", other), state)
    other = Params(plain.weights, SMALL, byte_tokenizer())
    other.tokenizer.chat_template += "!"
    for params in (other, plain):
        assert lines_of(tmp_path / "state", params) == ["tokenizer"]


def test_another_policy_is_refused(tmp_path):
    params, state = small()
    save_state(tmp_path / "state", state, params)
    assert lines_of(tmp_path / "state", params, dataclasses.replace(POLICY, rank=3)) == ["policy.settings.rank"]
    for policy in (Full(), StreamingLLM()):
        assert "policy.name" in lines_of(tmp_path / "state", params, policy)


def test_a_policy_that_is_not_listed_must_be_given(tmp_path):
    _, state = prefilled("probe", "restricted", "device_put")
    save_state(tmp_path / "state", state, model())
    assert lines_of(tmp_path / "state", model()) == ["policy.name"]
    assert lines_of(tmp_path / "state", model(), Probe(keep=4)) == ["policy.settings.keep"]
    assert equal(load_state(tmp_path / "state", model(), Probe(keep=3)), state)


def test_everything_at_once_is_one_error(tmp_path):
    save_state(tmp_path / "state", small()[1], small()[0])
    other = Params(
        init_params(dataclasses.replace(SMALL, ffn_dim=4), dtype="bfloat16").weights,
        dataclasses.replace(SMALL, ffn_dim=4),
        byte_tokenizer(),
    )
    found = lines_of(tmp_path / "state", other, Full())
    assert {"config.ffn_dim", "dtype", "weights", "tokenizer", "policy.name"} <= set(found)


def test_a_host_without_the_memory_is_told_before(tmp_path, monkeypatch):
    params, state = small()
    save_state(tmp_path / "state", state, params)
    asked = []

    def lacking(plans) -> None:
        asked.extend(plans)
        raise HostMemoryError("too little")

    monkeypatch.setattr(host_memory, "check_host_memory", lacking)
    monkeypatch.setattr(jax, "device_put", lambda *_: pytest.fail("placed"))
    with pytest.raises(HostMemoryError):
        load_state(tmp_path / "state", params)
    assert asked == [state.specs]
