"""The keys of ShadowKV+'s later tokens: in a code of their own, and projected on the prompt's."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from cases import LENGTHS, PLUS, PROMPT, STEPS, TINY, model, random_tokens, run_steps

from jshadow.cache.offload import FETCH_MODES
from jshadow.engine import decode
from jshadow.errors import ConfigError
from jshadow.evaluation import metrics
from jshadow.models.config import RopeConfig
from jshadow.planner.bytes import abstract_state
from jshadow.policies import Full, ShadowKVPlus
from jshadow.policies.shadowkv import ExactKeys, Landmarks

POLICY = ShadowKVPlus(rank=4, budget=160, **PLUS)
PROJECTED = dataclasses.replace(POLICY, later_keys="projected")


@functools.cache
def divergence(policy, prompt: int = 24, new: int = 60) -> np.ndarray:
    """KL from full attention after each of `new` random tokens, of which all may be selected, [B, new]."""
    tokens, logits = random_tokens(2, prompt + new, seed=3), []
    for one in (Full(), policy):
        _, state = decode.prefill(model(), tokens[:, :prompt], [prompt] * 2, one, capacity=160, fetch="resident")
        out, _ = decode.extend(model(), tokens[:, prompt:], [new] * 2, state, logits="all")
        logits.append(np.asarray(out))
    return np.stack([metrics.kl(*pair) for pair in zip(*logits, strict=True)])


@pytest.mark.slow
def test_later_keys_need_no_basis_of_the_prompt():
    """Of a prompt with 4 of 32 columns, projected keys lose most, and the loss stays as long as they are read."""
    own, projected = divergence(POLICY)[:, 30:].mean(), divergence(PROJECTED)[:, 30:].mean()
    assert own < 0.5 * projected


@pytest.mark.slow
def test_exact_prompts_leave_only_the_error_of_the_code():
    """With exact keys of the prompt, projected keys are exact, keys of 6 bits nearly so, and keys of 4 bits less so."""
    exact = dataclasses.replace(PROJECTED, rank=None, keys=ExactKeys())
    assert divergence(exact).max() < 1e-6
    four, six = (divergence(dataclasses.replace(exact, later_keys=code))[:, 30:].mean() for code in ("int4", "int6"))
    assert 1e-7 < 4 * six < four < 0.02


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bytes_of_a_later_token(dtype):
    """A later token has 6 bits for each number and a scale for each head, and its share of the landmark."""
    item = np.dtype("float32").itemsize if dtype == "float32" else 2
    sizes = []
    for capacity in (96, 160):
        state = abstract_state(TINY, POLICY, batch=1, capacity=capacity, prompt=60, dtype=dtype, fetch="device_put")
        live = [layer.live for layer in state.layers]
        sizes.append([sum(x.size * x.dtype.itemsize for x in (one.left, one.landmarks)) for one in live])
    each = TINY.kv_heads * (TINY.head_dim * 6 // 8 + item + TINY.head_dim * item // PLUS["chunk_size"])
    assert [more - less for less, more in zip(*sizes, strict=True)] == [64 * each] * TINY.num_layers


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_later_token_of_packed_takes_less_than_a_quarter(head_dim):
    """Its key and its share of the landmarks, compared with key and value in bfloat16."""
    config = dataclasses.replace(TINY, head_dim=head_dim, rope=RopeConfig())
    sizes = {"batch": 1, "prompt": 1024, "dtype": "bfloat16", "fetch": "device_put"}
    less, more = (
        [layer.live for layer in abstract_state(config, ShadowKVPlus.packed(), capacity=capacity, **sizes).layers]
        for capacity in (2048, 3072)
    )
    grown = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(more))
    grown -= sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(less))
    full = 1024 * config.num_layers * config.kv_heads * 2 * head_dim * 2
    assert 0.2 < grown / full < 0.25


@pytest.mark.slow
@pytest.mark.parametrize("landmarks", [Landmarks(), Landmarks(tokens=2, levels=2, order=2, dtype="int4")])
def test_later_keys_come_alike_in_every_fetch_mode(landmarks):
    policy = dataclasses.replace(POLICY, budget=16, landmarks=landmarks, pool=2.0)
    prefilled = decode.prefill_many(
        model(), PROMPT, LENGTHS, [policy] * len(FETCH_MODES), capacity=96, fetch=list(FETCH_MODES)
    )
    logits = [np.asarray(run_steps(model(), state, STEPS[:, :12])[0]) for _, state in prefilled]
    for one in logits[1:]:
        np.testing.assert_allclose(one, logits[0], atol=1e-5)


def test_zero_copy_is_refused_on_a_gpu(monkeypatch):
    """No kernel rebuilds keys of this code."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    sizes = {"batch": 1, "capacity": 96, "prompt": 90, "fetch": "zero_copy"}
    with pytest.raises(ConfigError, match="for shadowkv_plus with later_keys='int6' on a GPU"):
        abstract_state(TINY, POLICY, **sizes)
    assert abstract_state(TINY, PROJECTED, **sizes).fetch == "zero_copy"


def test_refusals():
    with pytest.raises(ConfigError, match=r"later_keys must be one of .*'int6', 'int4', 'projected'.* got 'lowrank'"):
        dataclasses.replace(POLICY, later_keys="lowrank").resolve(TINY, 96)
    odd = dataclasses.replace(TINY, head_dim=15, rope=RopeConfig(rotary_share=0.8))
    for code, multiple in (("int6", 4), ("int4", 2)):
        with pytest.raises(
            ConfigError, match=f"later_keys='{code}' must have a head_dim that is a multiple of {multiple}"
        ):
            dataclasses.replace(POLICY, later_keys=code).resolve(odd, 96)
    assert PROJECTED.resolve(odd, 96).later_keys == "projected"


def test_the_paper_s_settings_project():
    settings = ShadowKVPlus.paper(), ShadowKVPlus.reference(), ShadowKVPlus.lossless(96, TINY)
    assert {policy.later_keys for policy in settings} == {"projected"}
    assert ShadowKVPlus.packed().later_keys == ShadowKVPlus().later_keys == "int6"
