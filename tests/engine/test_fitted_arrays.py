"""Learned arrays in files: they come back to the bit; what is damaged, foreign or another model's is refused."""

import dataclasses
import functools
import json
import os

import jax
import numpy as np
import pytest
from cases import TINY, model, random_tokens
from less_arrays import SMALL, fitted_for
from sealed import content_of, seal

import jshadow
from jshadow.engine.saved.fitted import FORMAT, read_fitted_info
from jshadow.errors import CheckpointError, ConfigError, StateMismatch
from jshadow.policies import InfiniGen, Loki
from jshadow.policies.capabilities import Learns, with_fitted
from jshadow.policies.checks import reads_fitted
from jshadow.weights.params import init_params

TEXT = random_tokens(60, seed=5)
LOKI = Loki(budget=9, columns=3, calibration="offline")
POLICIES = {"loki": LOKI, "infinigen": InfiniGen(columns=4, calibration="offline"), "less": SMALL}


@functools.cache
def learned(name):
    """A policy and random arrays as if it had learned them."""
    policy = POLICIES[name]
    if name == "less":
        return policy, jax.tree.map(np.asarray, fitted_for(TINY))
    rng, shapes = np.random.default_rng(1), policy.fitted_shapes(TINY)
    is_shape = {"is_leaf": lambda node: isinstance(node, tuple)}
    return policy, jax.tree.map(lambda shape: rng.standard_normal(shape).astype(np.float32), shapes, **is_shape)


def written(path, name="less"):
    policy, fitted = learned(name)
    jshadow.save_fitted(path, fitted, policy, model(), about={"tokens": 60})
    return path.read_bytes()


def load(path, policy=SMALL):
    return jshadow.load_fitted(path, model(), policy)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_what_a_fit_learned_comes_back_and_is_used(name, tmp_path):
    policy = POLICIES[name]
    fitted = learned("less")[1] if name == "less" else policy.fit(model(), TEXT)
    jshadow.save_fitted(tmp_path / "a", fitted, policy, model())
    back = load(tmp_path / "a", policy)
    jax.tree.map(np.testing.assert_array_equal, back, fitted)
    logits, _ = jshadow.prefill(model(), TEXT[None], [60], policy, capacity=96, fitted=back)
    assert np.isfinite(logits).all()


OTHER_SETTINGS = {
    "loki": dataclasses.replace(LOKI, budget=30, columns=16),
    "less": dataclasses.replace(SMALL, heavy=1, recent=3, normalize=True),
}


@pytest.mark.parametrize("kind", POLICIES)
def test_arrays_come_back(kind, tmp_path):
    """Settings that decide no shape may differ."""
    policy, fitted = learned(kind)
    assert written(tmp_path / "a", kind) == written(tmp_path / "b", kind)
    for one in (policy, OTHER_SETTINGS.get(kind, policy)):
        back = load(tmp_path / "a", one)
        jax.tree.map(np.testing.assert_array_equal, back, fitted)
        assert jax.tree.map(lambda leaf: leaf.shape, back) == policy.fitted_shapes(TINY)
    info = read_fitted_info(tmp_path / "a")
    assert (info["policy"]["name"], info["about"], info["dtype"]) == (kind, {"tokens": 60}, "float32")


OTHERS = [
    (lambda: init_params(TINY, seed=9), SMALL, "weights: file has"),
    (lambda: init_params(dataclasses.replace(TINY, ffn_dim=64)), SMALL, r"config\.ffn_dim: file has 48, params has 64"),
    (lambda: model(TINY, "bfloat16"), SMALL, "dtype: file has 'float32', params has 'bfloat16'"),
    (model, LOKI, r"policy\.name: file has 'less', policy has 'loki'"),
    (model, dataclasses.replace(SMALL, state_rank=8), r"arrays\.phi\.second: file has"),
    (model, jshadow.Full(), r"policy\.name"),
]


def test_what_belongs_to_another_is_refused(tmp_path):
    written(tmp_path / "a")
    for make, policy, told in OTHERS:
        with pytest.raises(StateMismatch, match=told):
            jshadow.load_fitted(tmp_path / "a", make(), policy)
    written(tmp_path / "b", "loki")
    with pytest.raises(ConfigError, match="policy must use learned arrays"):
        load(tmp_path / "b", Loki())


FORGED = [
    ({"version": "2"}, "format version 2"),
    ({"version": "one"}, "version must be JSON"),
    ({"policy": "[]"}, "policy must have settings"),
    ({"policy": json.dumps({"name": "magic", "settings": {}})}, "policy must have settings"),
    ({"policy": json.dumps({"name": "less", "settings": []})}, "policy must have settings"),
    ({"sha256": "{}"}, "one digest for each tensor"),
    ({"config": "3"}, "config: file has 3"),
    (None, "does not have the SHA-256"),
]


def test_metadata_that_no_one_wrote(tmp_path):
    written(tmp_path / "a")
    arrays, texts = content_of(tmp_path / "a")
    assert texts["format"] == FORMAT
    for changes, told in FORGED:
        wrong = {"sha256": json.dumps(dict.fromkeys(json.loads(texts["sha256"]), "0" * 64))}
        seal(tmp_path / "a", arrays, texts | (wrong if changes is None else changes))
        with pytest.raises((CheckpointError, StateMismatch), match=told):
            load(tmp_path / "a")


def test_what_cannot_be_saved_is_told(tmp_path, monkeypatch):
    """A write that fails leaves the file of before, and no other."""

    def full(*_):
        raise OSError(28, "no space left")

    (policy, fitted), before, path = learned("less"), written(tmp_path / "a"), tmp_path / "a"
    nan = fitted | {"psi": fitted["psi"] | {"scale": fitted["psi"]["scale"] * np.float32("nan")}}
    monkeypatch.setattr("jshadow.engine.saved.file.write_payload", full)
    for place, arrays, own, error, told in (
        (path, nan, policy, CheckpointError, r"psi\.scale: 24 of 24 values are NaN"),
        (path, None, jshadow.Full(), ConfigError, "may learn nothing"),
        (path, learned("loki")[1], policy, ConfigError, "must be what the fit of less returned"),
        ("/dev/null/a", fitted, policy, CheckpointError, "cannot be written"),
        (path, fitted, policy, CheckpointError, "no space left"),
    ):
        with pytest.raises(error, match=told):
            jshadow.save_fitted(place, arrays, own, model())
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a"]


def test_only_learners_have_shapes():
    """Whoever fits tells the shapes, and uses the arrays once it is set so."""
    for policy in jshadow.policies.POLICIES.values():
        if issubclass(policy, Learns):
            assert policy().fitted_shapes(TINY)
            assert with_fitted(policy()).reads_fitted
        else:
            assert with_fitted(policy()) == policy()
            assert not reads_fitted(policy())
