"""Learned arrays in files: they come back to the bit; what is damaged, foreign or another model's is refused."""

import dataclasses
import functools
import json
import os
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import TINY, model, random_tokens
from less_arrays import SMALL, fitted_for

import jshadow
from jshadow.engine.saved.fitted import FORMAT, read_fitted_info
from jshadow.errors import CheckpointError, ConfigError, StateMismatch
from jshadow.policies import InfiniGen, Loki
from jshadow.policies.capabilities import Learns, with_fitted
from jshadow.policies.checks import reads_fitted
from jshadow.weights.convert.safetensors_file import encode_header, write_payload
from jshadow.weights.params import init_params

TEXT = random_tokens(60, seed=5)
LOKI = Loki(budget=9, columns=3, calibration="offline")


POLICIES = {"loki": LOKI, "infinigen": InfiniGen(columns=4, calibration="offline"), "less": SMALL}


@functools.cache
def learned(name):
    """A policy and random arrays as if it had learned them."""
    policy = POLICIES[name]
    if name == "less":
        return policy, fitted_for(TINY)
    rng, shapes = np.random.default_rng(1), policy.fitted_shapes(TINY)
    is_shape = {"is_leaf": lambda node: isinstance(node, tuple)}
    return policy, jax.tree.map(lambda shape: rng.standard_normal(shape).astype(np.float32), shapes, **is_shape)


def written(path: Path, name: str = "less") -> bytes:
    """A good file."""
    policy, fitted = learned(name)
    jshadow.save_fitted(path, fitted, policy, model(), about={"tokens": 60})
    return path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loki", "infinigen", "less"])
def test_what_a_fit_learned_comes_back_and_is_used(name, tmp_path):
    policy = POLICIES[name]
    fitted = learned("less")[1] if name == "less" else policy.fit(model(), TEXT)
    jshadow.save_fitted(tmp_path / "a", fitted, policy, model())
    back = jshadow.load_fitted(tmp_path / "a", model(), policy)
    jax.tree.map(np.testing.assert_array_equal, back, fitted)
    logits, _ = jshadow.prefill(model(), TEXT[None], [60], policy, capacity=96, fitted=back)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("kind", POLICIES)
def test_arrays_come_back(kind, tmp_path):
    policy, fitted = learned(kind)
    assert written(tmp_path / "a", kind) == written(tmp_path / "b", kind)
    back = jshadow.load_fitted(tmp_path / "a", model(), policy)
    jax.tree.map(np.testing.assert_array_equal, back, fitted)
    assert jax.tree.map(lambda leaf: leaf.shape, back) == policy.fitted_shapes(TINY)
    info = read_fitted_info(tmp_path / "a")
    assert (info["policy"]["name"], info["about"], info["dtype"]) == (kind, {"tokens": 60}, "float32")


def test_settings_that_decide_no_shape_may_differ(tmp_path):
    written(tmp_path / "a", "loki")
    jshadow.load_fitted(tmp_path / "a", model(), dataclasses.replace(LOKI, budget=30, columns=16))
    written(tmp_path / "b")
    jshadow.load_fitted(tmp_path / "b", model(), dataclasses.replace(SMALL, heavy=1, recent=3, normalize=True))


WIDER = dataclasses.replace(TINY, ffn_dim=64)
# params, policy, and what the StateMismatch says
OTHERS = {
    "weights": (lambda: init_params(TINY, seed=9), SMALL, "weights: file has"),
    "config": (lambda: init_params(WIDER), SMALL, r"config\.ffn_dim: file has 48, params has 64"),
    "dtype": (lambda: model(TINY, "bfloat16"), SMALL, "dtype: file has 'float32', params has 'bfloat16'"),
    "policy": (model, LOKI, r"policy\.name: file has 'less', policy has 'loki'"),
    "rank": (model, dataclasses.replace(SMALL, state_rank=8), r"arrays\.phi\.second: file has"),
    "no_learner": (model, jshadow.Full(), r"policy\.name"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_belongs_to_another_is_refused(case, tmp_path):
    make, policy, told = OTHERS[case]
    written(tmp_path / "a")
    with pytest.raises(StateMismatch, match=told):
        jshadow.load_fitted(tmp_path / "a", make(), policy)


def test_settings_that_would_not_use_them_are_refused(tmp_path):
    written(tmp_path / "a", "loki")
    with pytest.raises(ConfigError, match="policy must use learned arrays"):
        jshadow.load_fitted(tmp_path / "a", model(), Loki())


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        jshadow.load_fitted(tmp_path / "none", model(), SMALL)
    for content in (b"", b"{}", b"garbage" * 100, os.urandom(500)):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(CheckpointError):
            jshadow.load_fitted(tmp_path / "bad", model(), SMALL)
    with (tmp_path / "foreign").open("wb") as file:
        file.write(encode_header({"a": ("float32", (2,))}, {"format": "pt"}))
        write_payload(file, {"a": ("float32", (2,))}, lambda name: np.zeros(2, np.float32))
    with pytest.raises(CheckpointError, match="format 'pt'"):
        jshadow.load_fitted(tmp_path / "foreign", model(), SMALL)


def test_every_truncation_is_refused(tmp_path):
    whole, path = written(tmp_path / "a"), tmp_path / "cut"
    for size in np.unique(np.linspace(0, len(whole) - 1, 60).astype(int)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            jshadow.load_fitted(path, model(), SMALL)


def test_no_changed_bit_is_read(tmp_path):
    """In the header and in the arrays: refused, or nothing that the parser sees (a space for padding)."""
    whole, path = written(tmp_path / "a"), tmp_path / "flipped"
    fitted = learned("less")[1]
    (header,) = struct.unpack("<Q", whole[:8])
    rng = np.random.default_rng(0)
    places = [*rng.integers(0, 8 + header, 120), *rng.integers(8 + header, len(whole), 40)]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            got = jshadow.load_fitted(path, model(), SMALL)
        except (CheckpointError, StateMismatch):
            continue
        jax.tree.map(np.testing.assert_array_equal, got, fitted)


def forged(path: Path, **changes: str) -> None:
    """A good file with other metadata and a header digest that fits them."""
    from jshadow.engine.saved.file import header_digest
    from jshadow.weights.convert.safetensors_file import TensorFile

    file = TensorFile(path)
    texts = {key: value for key, value in file.metadata.items() if key != "header_sha256"} | changes
    layout = {name: ("float32", shape) for name, shape in file.shapes.items()}
    arrays = {name: file.read(name) for name in layout}
    table = {name: ("F32", shape) for name, shape in file.shapes.items()}
    with path.open("wb") as out:
        out.write(encode_header(layout, texts | {"header_sha256": header_digest(texts, table)}))
        write_payload(out, layout, lambda name: arrays[name])


FORGED = {
    "newer": (dict(version="2"), "format version 2"),
    "no_number": (dict(version="one"), "version must be JSON"),
    "policy_a_list": (dict(policy="[]"), "policy must have settings"),
    "policy_unknown": (dict(policy=json.dumps({"name": "magic", "settings": {}})), "policy must have settings"),
    "settings_a_list": (dict(policy=json.dumps({"name": "less", "settings": []})), "policy must have settings"),
    "digests": (dict(sha256="{}"), "one digest for each tensor"),
    "wrong_digests": (None, "does not have the SHA-256"),
    "config_a_number": (dict(config="3"), "config: file has 3"),
}


@pytest.mark.parametrize("case", FORGED)
def test_metadata_that_no_one_wrote(case, tmp_path):
    changes, told = FORGED[case]
    written(tmp_path / "a")
    if changes is None:
        digests = json.loads(read_texts(tmp_path / "a")["sha256"])
        changes = dict(sha256=json.dumps({name: "0" * 64 for name in digests}))
    forged(tmp_path / "a", **changes)
    assert read_texts(tmp_path / "a")["format"] == FORMAT
    with pytest.raises((CheckpointError, StateMismatch), match=told):
        jshadow.load_fitted(tmp_path / "a", model(), SMALL)


def read_texts(path):
    """The metadata of a file."""
    whole = path.read_bytes()
    (header,) = struct.unpack("<Q", whole[:8])
    return json.loads(whole[8 : 8 + header])["__metadata__"]


def test_nothing_half_written_is_left(tmp_path, monkeypatch):
    """A write that fails leaves the file of before, and no other."""
    before = written(tmp_path / "a")
    monkeypatch.setattr(
        "jshadow.engine.saved.fitted.write_payload", lambda *_: (_ for _ in ()).throw(OSError(28, "no space left"))
    )
    with pytest.raises(CheckpointError, match="no space left"):
        written(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_cannot_be_saved_is_told(tmp_path):
    policy, fitted = learned("less")
    nan = fitted | {"psi": fitted["psi"] | {"scale": fitted["psi"]["scale"] * jnp.nan}}
    with pytest.raises(CheckpointError, match=r"psi\.scale: 24 of 24 values are NaN"):
        jshadow.save_fitted(tmp_path / "a", nan, policy, model())
    with pytest.raises(ConfigError, match="may learn nothing"):
        jshadow.save_fitted(tmp_path / "a", None, jshadow.Full(), model())
    with pytest.raises(ConfigError, match="must be what the fit of less returned"):
        jshadow.save_fitted(tmp_path / "a", learned("loki")[1], policy, model())
    with pytest.raises(CheckpointError, match="cannot be written"):
        jshadow.save_fitted("/dev/null/a", fitted, policy, model())
    assert not list(tmp_path.iterdir())


def test_only_learners_have_shapes():
    """Whoever fits tells the shapes, and uses the arrays once it is set so."""
    for policy in jshadow.policies.POLICIES.values():
        if issubclass(policy, Learns):
            assert policy().fitted_shapes(TINY)
            assert with_fitted(policy()).reads_fitted
        else:
            assert with_fitted(policy()) == policy()
            assert not reads_fitted(policy())
