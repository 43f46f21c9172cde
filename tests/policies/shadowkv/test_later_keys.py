"""The keys of ShadowKV+'s later tokens: in a code of their own, and projected on the prompt's. Codes in all modes."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from cases import LENGTHS, PLUS, PROMPT, SMALL, STEPS, TINY, model, random_tokens, run_steps

from jshadow.cache.offload import FETCH_MODES
from jshadow.engine import decode
from jshadow.evaluation import metrics
from jshadow.models.config import RopeConfig
from jshadow.planner.machine import abstract_state
from jshadow.policies import Full, ShadowKV, ShadowKVPlus
from jshadow.policies.shadowkv import ExactKeys, Landmarks, Values

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
def test_later_keys_lose_what_their_code_loses():
    """Of a prompt with 4 of 32 columns, projected keys lose most, as long as they are read: own keys need no basis.

    With exact keys of the prompt, projected keys are exact, keys of 6 bits nearly so, and keys of 4 bits less so.
    """
    assert divergence(POLICY)[:, 30:].mean() < 0.5 * divergence(PROJECTED)[:, 30:].mean()
    exact = dataclasses.replace(PROJECTED, rank=None, keys=ExactKeys())
    assert divergence(exact).max() < 1e-6
    four, six = (divergence(dataclasses.replace(exact, later_keys=code))[:, 30:].mean() for code in ("int4", "int6"))
    assert 1e-7 < 4 * six < four < 0.02


def live_bytes(config, policy, capacity, dtype, names=(), **sizes):
    """The bytes of the arrays of all layers that grow with the tokens after a prompt."""
    state = abstract_state(config, policy, batch=1, capacity=capacity, dtype=dtype, fetch="device_put", **sizes)
    lives = [layer.live for layer in state.layers]
    parts = [[getattr(live, name) for name in names] if names else live for live in lives]
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(parts))


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2)])
def test_the_bytes_of_a_later_token(dtype, item):
    """A later token has 6 bits for each number and a scale for each head, and its share of the landmark."""
    less, more = (live_bytes(TINY, POLICY, n, dtype, ("left", "landmarks"), prompt=60) for n in (96, 160))
    each = TINY.kv_heads * (TINY.head_dim * 6 // 8 + item + TINY.head_dim * item // PLUS["chunk_size"])
    assert more - less == 64 * each * TINY.num_layers


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_later_token_of_packed_takes_less_than_a_quarter(head_dim):
    """Its key and its share of the landmarks, compared with key and value in bfloat16."""
    config = dataclasses.replace(TINY, head_dim=head_dim, rope=RopeConfig())
    less, more = (live_bytes(config, ShadowKVPlus.packed(), n, "bfloat16", prompt=1024) for n in (2048, 3072))
    full = 1024 * config.num_layers * config.kv_heads * 2 * head_dim * 2
    assert 0.2 < (more - less) / full < 0.25


LATER = dataclasses.replace(POLICY, budget=16, pool=2.0)
MODES = {
    "later": LATER,
    "later_levels": dataclasses.replace(LATER, landmarks=Landmarks(tokens=2, levels=2, order=2, dtype="int4")),
    "int8": ShadowKV(rank=12, budget=24, **SMALL, landmarks=Landmarks(dtype="int8"), values=Values("int8")),
    "int4": ShadowKV(rank=12, budget=24, **SMALL, values=Values(dtype="int4")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
def test_codes_beside_those_of_the_laws_come_alike_in_every_fetch_mode(name):
    policies, modes = [MODES[name]] * len(FETCH_MODES), list(FETCH_MODES)
    prefilled = decode.prefill_many(model(), PROMPT, LENGTHS, policies, capacity=96, fetch=modes)
    logits = [run_steps(model(), state, STEPS)[0] for _, state in prefilled]
    for one in logits[1:]:
        np.testing.assert_allclose(one, logits[0], atol=1e-5)
