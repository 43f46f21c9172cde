"""The laws on every family: another model's attention (partial or no rotation, windows, norms) keeps them all.

`test_laws.py` holds every policy to them on one family. Here `shadowkv` meets all the others. The tests of a family
share one prefilled batch of a policy, and one step.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from cases import CAPACITY, LENGTHS, POLICIES, POLICY_CASES, PROMPT, SMALL, mode_of, run_steps, setting
from family_cases import ONE_OF_EACH, family_config

import jshadow
from jshadow.cache.accounting import leaf_bytes, state_nbytes
from jshadow.engine import decode
from jshadow.engine.sparse_prefill import AShape, VerticalSlash
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import full_bytes
from jshadow.planner.machine import abstract_state
from jshadow.policies import Full, InfiniGen, Loki, OmniKV, Policy, Quest, ShadowKV
from jshadow.policies.base import full_layers
from jshadow.policies.recurrent import RecurrentState
from jshadow.policies.shadowkv import ExactKeys, FromValues
from jshadow.policies.sliding_window import SlidingWindow
from jshadow.weights.params import Params, init_params

# Longer turns than a window and than a piece of a turn; 61 + 20 tokens go round every ring of the cases.
TURN = np.random.default_rng(5).integers(3, 97, (len(LENGTHS), 20), dtype=np.int32)
NEW = np.array([20, 7, 0])
TOKENS = PROMPT % 97
HYBRID = "qwen3_5_apart"
SHADOWKV = ShadowKV(rank=8, budget=16, **SMALL)
FROM_VALUES = dataclasses.replace(SHADOWKV, rank=None, keys=FromValues())
ALIKE = ("llama_yarn", "qwen2", "qwen3", "glm", "glm4")
FAMILIES = (*ONE_OF_EACH, "nemotron_h_moe")
SPARSE = VerticalSlash(vertical=9, slash=11, last_queries=8, first_columns=3, local_diagonals=5, block=16)
QUEST = Quest(budget=16, recent=8, unit=4)


def config_of(name: str) -> ModelConfig:
    """The config of a family. Where all layers are alike, one is enough."""
    config = family_config(name)
    return dataclasses.replace(config, num_layers=1) if name in ALIKE else config


@functools.cache
def params_of(name: str) -> Params:
    """Random weights, in which the scales of the norms differ too."""
    params = init_params(config_of(name), seed=4)

    def uneven(path: tuple, leaf: jax.Array) -> jax.Array:
        return leaf * (1 + 0.3 * np.cos(np.arange(leaf.size))) if path[-1].key == "scale" else leaf

    return dataclasses.replace(params, weights=jax.tree_util.tree_map_with_path(uneven, params.weights))


@functools.cache
def held(name: str, policy: Policy, fetch: str = "resident", **options):
    """Logits and state of the ragged batch. The state must be forked."""
    return decode.prefill(params_of(name), TOKENS, LENGTHS, policy, capacity=CAPACITY, fetch=fetch, **options)


@functools.cache
def six_steps(name: str, policy: Policy, fetch: str = "resident", **options) -> np.ndarray:
    """Logits of six steps after the prompts."""
    return run_steps(params_of(name), held(name, policy, fetch, **options)[1].fork(), TURN[:, :6])[0]


def agree(*cases) -> None:
    """The logits of the prompts and of six steps are the same."""
    for logits in ([held(*case, **options)[0] for case, options in cases], [six_steps(*c, **o) for c, o in cases]):
        np.testing.assert_allclose(*logits, atol=1e-4)


def check_turn(name: str, policy: Policy, fetch: str, other: Policy) -> None:
    """A turn of 20, 7 and 0 tokens: its logits, lengths and next logits are those of single steps of `other`."""
    active, params = np.arange(TURN.shape[1]) < NEW[:, None], params_of(name)
    stepped, after = run_steps(params, held(name, other)[1].fork(), TURN, active)
    turned, at_once = decode.extend(params, TURN, NEW, held(name, policy, fetch)[1].fork(), logits="all")
    for row, count in enumerate(NEW):
        np.testing.assert_allclose(np.asarray(turned)[row, :count], stepped[row, :count], atol=1e-4)
    np.testing.assert_array_equal(after.lengths, at_once.lengths)
    np.testing.assert_allclose(*(run_steps(params, one, TURN[:, :2])[0] for one in (after, at_once)), atol=1e-4)


def check_bytes(name: str, policy: Policy, fetch: str = "resident") -> None:
    """Bytes are the plan's, and sliding layers keep a window."""
    config, state = config_of(name), held(name, policy, fetch)[1]
    sizes = {"batch": len(LENGTHS), "capacity": CAPACITY, "prompt": min(LENGTHS)}
    planned = abstract_state(config, policy, **sizes, dtype="float32", fetch=fetch)
    assert state_nbytes(state) == state_nbytes(planned)
    counted = sum(device + host for device, host in state_nbytes(state).values())
    assert counted == sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(state.layers))
    if isinstance(policy, Full):
        assert counted == len(LENGTHS) * full_bytes(config, CAPACITY, itemsize=4)
    for layer, spec in enumerate(state.specs):
        kind, window = config.attention_kind(layer), config.attention_kind(layer).window
        its = type(policy) if kind.sees_all else RecurrentState if kind.recurrent else SlidingWindow
        assert isinstance(spec.policy, its)
        assert spec.sliding_window == window
        if window is not None:
            assert state.layers[layer].live.cache.k.shape[2] == min(window + 15, CAPACITY)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_lossless(name):
    """The logits of prompts, of a turn and of steps are those of full attention in single steps."""
    lossless = dataclasses.replace(ShadowKV.lossless(CAPACITY, config_of(name)), **SMALL)
    case = (lossless, "device_put")  # the other laws here run resident
    np.testing.assert_allclose(held(name, *case)[0], held(name, Full())[0], atol=1e-4)
    check_turn(name, *case, Full())
    check_bytes(name, *case)
    check_bytes(name, Full())


# What a turn selects, where layers have windows, rotate a part, make keys from values, or are recurrent.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy"),
    [("gemma3", Full()), ("gemma4", FROM_VALUES), ("gemma4", QUEST)]
    + [(name, SHADOWKV) for name in ("gemma3", "glm", "qwen3_5")],
)
def test_a_turn_is_its_steps(name, policy):
    check_turn(name, policy, "resident", policy)
    if policy is not QUEST:  # its first layer is one of `Full`
        check_bytes(name, policy)


# Every registered policy runs where layers that attend have recurrent layers before and between them. Every second one,
# and those that read the layers before them, run where keys are made from values in layers of other heads. A few run
# where queries are rotated on their own, where queries grow, or beside experts.
OTHERS = [name for name in POLICIES if name != "full"]
READ_LAYERS = {"infinigen", "omnikv", "specache"}
EVERYWHERE = [(HYBRID, name) for name in OTHERS]
EVERYWHERE += [("gemma4", name) for name in sorted(READ_LAYERS.union(OTHERS[::2]))]
EVERYWHERE += [("gemma4", "shadowkv_plus_transform"), (HYBRID, "pyramid")]
EVERYWHERE += [("nemotron_h", "infinigen"), ("nemotron_h", "specache")]  # no MLP behind all
EVERYWHERE += [("ministral3", "streaming_llm"), ("ministral3", "infllm"), ("ministral3", "infinigen")]
EVERYWHERE += [("lfm2_moe", "infinigen")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), EVERYWHERE)
def test_policies_on_a_family(name, policy):
    """A policy with lossless settings is full attention. The others run."""
    kind = "restricted" if POLICY_CASES[policy].lossless is None else "lossless"
    chosen = setting(policy, kind, family_config(name))
    if isinstance(chosen, OmniKV):
        chosen = dataclasses.replace(chosen, filter_layers=full_layers(family_config(name))[:1])
    case = (name, chosen, mode_of(policy))
    if kind == "lossless":
        agree((case, {}), ((name, Full()), {}))
    else:
        assert np.isfinite(six_steps(*case)).all()


@pytest.mark.slow
@pytest.mark.parametrize("fetch", ["device_put", "zero_copy"])
def test_keys_from_values_are_the_keys(fetch):
    """They select what exact keys select, and give the same logits. The state has no code of the keys."""
    policies = [dataclasses.replace(SHADOWKV, rank=None, keys=keys) for keys in (ExactKeys(), FROM_VALUES.keys)]
    agree(*((("gemma4", policy, fetch), {}) for policy in policies))
    assert state_nbytes(held("gemma4", policies[1], fetch)[1])["left"] == (0, 0)
    whole = dataclasses.replace(policies[1], budget=CAPACITY)
    agree((("gemma4", whole, fetch), {}), (("gemma4", Full()), {}))


@pytest.mark.slow
def test_the_host_has_values_alone():
    """Half of the bytes of a model of the same sizes whose keys are stored. The steps in all fetch modes agree."""
    config = family_config("gemma4")
    stored = dataclasses.replace(config, values_from_keys=False)
    sizes = {"batch": len(LENGTHS), "capacity": CAPACITY, "prompt": min(LENGTHS), "fetch": "device_put"}
    mine, other = (abstract_state(one, QUEST, **sizes, dtype="float32") for one in (config, stored))
    rows = [state_nbytes(state)["host rows"][1] for state in (mine, other)]
    assert 2 * rows[0] == rows[1]
    agree((("gemma4", QUEST, "device_put"), {}), (("gemma4", QUEST, "resident"), {}))


# Windows, experts and each kind of recurrent layer: what reads a prompt, and what may depend on the rows beside.
READS = ("gemma3", "qwen3_5", "lfm2", "nemotron_h_moe")


@pytest.mark.slow
@pytest.mark.parametrize("name", READS)
def test_pieces_of_a_prompt_give_the_same_model(name):
    agree(((name, SHADOWKV), {"prefill_chunk": 23}), ((name, SHADOWKV), {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", READS)
def test_a_row_alone_is_the_row_in_a_batch(name):
    """The shortest row, which has the most padding beside it."""
    params, sizes, row = params_of(name), {"capacity": CAPACITY, "fetch": "resident"}, 2
    alone, state = decode.prefill(params, TOKENS[row:, : LENGTHS[row]], LENGTHS[row:], SHADOWKV, **sizes)
    np.testing.assert_allclose(alone[0], np.asarray(held(name, SHADOWKV)[0])[row], atol=1e-4)
    again = run_steps(params, state, TURN[row:, :6])[0]
    np.testing.assert_allclose(again[0], six_steps(name, SHADOWKV)[row], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Loki(budget=CAPACITY), InfiniGen(budget=CAPACITY, alpha=1e9, dense_layers=1)])
def test_bases_are_learned_where_layers_attend(policy):
    """A recurrent layer has zeros. With all tokens, every basis gives full attention."""
    params = params_of(HYBRID)
    fitted = policy.fit(params, TOKENS[0, : LENGTHS[0]])
    (basis,) = fitted.values()
    told = np.abs(basis).max(axis=(1, 2, 3)) > 0
    np.testing.assert_array_equal(told, [kind.sees_all for kind in params.config.attention_kinds])
    logits, state = decode.prefill(params, TOKENS, LENGTHS, policy.with_fitted(), capacity=CAPACITY, fitted=fitted)
    np.testing.assert_allclose(logits, held(HYBRID, Full())[0], atol=1e-4)
    np.testing.assert_allclose(run_steps(params, state, TURN[:, :6])[0], six_steps(HYBRID, Full()), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("attention", [VerticalSlash(block=16), AShape(block=16), SPARSE])
def test_a_hybrid_takes_a_sparse_prefill(attention):
    """Recurrent layers read all tokens. A sparse attention that covers all tokens is exact."""
    case = (HYBRID, Full())
    if attention is SPARSE:
        assert np.abs(held(*case, attention=attention)[0] - held(*case)[0]).max() > 1e-3
        pieces = [{"attention": attention, "prefill_chunk": 2048}, {"attention": attention, "prefill_chunk": 32}]
        agree(*((case, options) for options in pieces))
    else:
        agree((case, {"attention": attention}), (case, {}))


@pytest.mark.slow
def test_a_hybrid_s_report_is_of_the_layers_that_attend():
    """And `verify` compares the offloaded path with the resident one."""
    params, prompt = params_of("qwen3_5"), TOKENS[0, : LENGTHS[0]].tolist()
    dense = jshadow.generate(params, prompt, Full(), max_new_tokens=5)
    sparse = jshadow.generate(params, prompt, SHADOWKV, max_new_tokens=5, fetch="device_put", verify=True)
    assert dense.report.attended_tokens == LENGTHS[0] + np.mean([1, 2, 3, 4])
    assert dense.report.attended_parts == {"window": LENGTHS[0], "generated": 4}
    assert dense.report.device_bytes == dense.report.full_bytes
    assert sparse.report.verified_steps == 4
    assert sparse.report.attended_tokens < dense.report.attended_tokens
    assert sum(sparse.report.attended_parts.values()) < sum(dense.report.attended_parts.values())
    assert state_nbytes(sparse.state)["recurrent"] == state_nbytes(dense.state)["recurrent"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
def test_a_family_generates(name):
    """Greedy tokens are those of the steps below it; a row ends with its stop token."""
    params = params_of(name)
    prompts = [row[:length].tolist() for row, length in zip(TOKENS, LENGTHS, strict=True)]
    outs = jshadow.generate(params, prompts, SHADOWKV, max_new_tokens=5, fetch="resident")
    first, state = decode.prefill(params, TOKENS, LENGTHS, SHADOWKV, capacity=outs[0].state.capacity, fetch="resident")
    tokens = np.array([out.tokens + [0] * (5 - len(out.tokens)) for out in outs])
    more, _ = run_steps(params, state, tokens[:, :4])
    best = np.concatenate([np.asarray(first)[:, None], more], axis=1).argmax(-1)
    for out, row in zip(outs, best, strict=True):
        assert out.tokens == row[: len(out.tokens)].tolist()
        assert len(out.tokens) == 5 or out.tokens[-1] in params.config.eos_ids
