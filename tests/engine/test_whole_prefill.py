"""A prefill in which attention takes the whole prompt at once: projections in pieces, one call, the rest in pieces.

On a GPU, cuDNN computes the call. Here it is JAX's own attention, which is written without ours.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from cases import TINY
from family_cases import family_config
from jax.sharding import AbstractMesh
from layer_reading import read_layer

from jshadow import VerticalSlash
from jshadow.cache.shards import Shards
from jshadow.engine import decode
from jshadow.engine.prefill import job as prefill_job
from jshadow.engine.prefill.job import PrefillJob, PrefillOptions, check_job
from jshadow.engine.prefill.layer import Given
from jshadow.engine.prefill.layer_run import LayerPlan
from jshadow.models.config import ModelConfig
from jshadow.ops.rope import inverse_frequencies
from jshadow.ops.whole_attention import cudnn_attends
from jshadow.planner.prefill_pieces import rows_at_once
from jshadow.policies import H2O, Full, InfLLM, ShadowKV
from jshadow.weights.params import Params, init_params

SIZE = 20
LENGTHS = (55, SIZE + 1, SIZE, 1)  # the longest has three pieces, and is longer than every window but one
HOPPER, AMPERE = (9, 0), (8, 0)


@functools.cache
def params_of(config: ModelConfig, dtype: str = "float32") -> Params:
    """Random weights."""
    return init_params(config, seed=7, dtype=dtype)


def read(
    config: ModelConfig, layer: int, plan: LayerPlan, tokens: int, lengths: tuple[int, ...], dtype: str = "float32"
):
    """The hidden states after a layer, and its PromptKV, for random hidden states."""
    shape = (len(lengths), tokens, config.model_dim)
    x = np.random.default_rng(layer).standard_normal(shape, np.float32).astype(jnp.dtype(dtype))
    inverse = inverse_frequencies(plan.kind.rope, config.head_dim, 512)
    weights = params_of(config, dtype).weights[f"layer_{layer}"]
    return read_layer(plan, Given(weights, inverse), x, lengths)


def check_equal(config: ModelConfig, layer: int, plan: LayerPlan, tokens: int, lengths: tuple[int, ...]) -> None:
    """Reading with a plan gives what reading piece by piece gives, except for the rounding of float32."""
    usual = dataclasses.replace(plan, whole=None, rows=None)
    (want, want_kv), (x, kv) = (read(config, layer, one, tokens, lengths) for one in (usual, plan))
    real = np.arange(tokens) < np.asarray(lengths)[:, None]
    x, want = np.asarray(x), np.asarray(want)
    np.testing.assert_allclose(x[real], want[real], atol=2e-5, rtol=2e-5)
    for name in ("k_pre", "k_post", "v", "q_tail"):
        np.testing.assert_allclose(getattr(kv, name), getattr(want_kv, name), atol=1e-5, err_msg=name)
    assert not np.asarray(kv.v)[~real].any()
    np.testing.assert_array_equal(kv.positions, want_kv.positions)
    np.testing.assert_array_equal(kv.lengths, lengths)
    assert kv.extra is kv.q_post is kv.lse is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_yarn", "qwen2", "phi3_partial_longrope", "glm4", "gemma3", "smollm3"])
def test_every_kind_of_layer(name):
    config = family_config(name)
    kinds = {config.attention_kind(layer): layer for layer in range(config.num_layers)}
    for kind, layer in kinds.items():
        plan = LayerPlan(config, kind, False, 9, SIZE, whole="xla", rows=2)
        check_equal(config, layer, plan, 3 * SIZE, LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "rows"), [((1,), 1), ((SIZE,), None), ((SIZE + 1,), 1), ((3, SIZE + 1, 2), 1), ((3, SIZE + 1, 2), None)]
)
def test_prompts_around_a_piece(lengths, rows):
    config = family_config("gemma3")
    count = -(-max(lengths) // SIZE)
    size = -(-max(lengths) // count)
    plan = LayerPlan(config, config.attention_kind(0), False, 5, size, whole="xla", rows=rows)
    check_equal(config, 0, plan, count * size, lengths)


def test_a_window_of_one_token_and_no_tail():
    kind = dataclasses.replace(TINY.attention_kind(0), window=1)
    x, kv = read(TINY, 0, LayerPlan(TINY, kind, False, 0, 8, whole="xla"), 16, (16, 3))
    want = read(TINY, 0, LayerPlan(TINY, kind, False, 0, 8), 16, (16, 3))[0]
    x, want = np.asarray(x), np.asarray(want)
    np.testing.assert_allclose(x[0], want[0], atol=2e-5)
    np.testing.assert_allclose(x[1, :3], want[1, :3], atol=2e-5)
    assert kv.q_tail is None


@pytest.mark.slow
def test_bfloat16():
    """The state is that of projections in bfloat16, and attention differs by the rounding of its output."""
    config = family_config("gemma3")
    plan = LayerPlan(config, config.attention_kind(0), False, 5, SIZE, whole="xla", rows=1)
    usual = dataclasses.replace(plan, whole=None, rows=None)
    (want, want_kv), (x, kv) = (read(config, 0, one, 3 * SIZE, LENGTHS, "bfloat16") for one in (usual, plan))
    assert x.dtype == kv.k_post.dtype == jnp.bfloat16
    for name in ("k_pre", "k_post", "v", "q_tail"):
        np.testing.assert_allclose(*(np.asarray(getattr(one, name), np.float32) for one in (kv, want_kv)), rtol=0.01)
    real = np.arange(3 * SIZE) < np.asarray(LENGTHS)[:, None]
    x, want = (np.asarray(one, np.float32)[real] for one in (x, want))
    assert np.linalg.norm(x - want) < 0.02 * np.linalg.norm(want)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Full(), ShadowKV(rank=8, budget=16, chunk_size=4, outlier_chunks=2)])
def test_a_prefill_of_all_layers(policy, monkeypatch):
    config = family_config("gemma3")
    tokens = np.random.default_rng(3).integers(3, 97, (4, 55), dtype=np.int32)
    settings = dict(capacity=80, prefill_chunk=SIZE, logits="all")

    def prefill():
        return decode.prefill(params_of(config), tokens, np.array(LENGTHS), policy, **settings)

    want, usual = prefill()
    plan_of, rows = PrefillJob.layer_plan, []

    def whole(job, index, count, size):
        rows.append(rows_at_once(len(job.lengths), size, SIZE))
        return dataclasses.replace(plan_of(job, index, count, size), whole="xla", rows=rows[-1])

    monkeypatch.setattr(PrefillJob, "layer_plan", whole)
    logits, state = prefill()
    assert rows == [1] * config.num_layers
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(logits[row, :length], want[row, :length], atol=1e-4)
    steps = [decode.decode_step(params_of(config), tokens[:, 0], one.fork())[0] for one in (state, usual)]
    np.testing.assert_allclose(*steps, atol=1e-4)


# The choice


def plans(monkeypatch, config=None, policy=None, dtype="bfloat16", **changes):
    """The plan of each layer on a GPU of compute capability 9.0, or the given one, or without a GPU."""
    config = config or family_config("gemma3")
    device = changes.pop("capability", HOPPER)
    monkeypatch.setattr(prefill_job, "capability_here", lambda: device)
    options = PrefillOptions(80, None, "last", SIZE, None, None, changes.pop("attention", None), None)
    tokens = np.full((4, 55), 5, np.int32)
    job = check_job(params_of(config, dtype), tokens, LENGTHS, [policy or Full()], "resident", options)
    job = dataclasses.replace(job, **changes)
    return [job.layer_plan(layer, 3, SIZE) for layer in range(config.num_layers)]


def test_where_cudnn_reads_a_prompt(monkeypatch):
    config = dataclasses.replace(family_config("gemma3"), head_dim=24)
    assert [(plan.whole, plan.rows) for plan in plans(monkeypatch, config)] == [("cudnn", 1)] * 3
    assert {plan.whole for plan in plans(monkeypatch, config, capability=None)} == {None}
    assert {plan.whole for plan in plans(monkeypatch, config, dtype="float32")} == {None}
    assert {plan.whole for plan in plans(monkeypatch, config, H2O())} == {None, "cudnn"}  # sliding layers are not H2O's
    pattern = plans(monkeypatch, config, attention=VerticalSlash())
    assert [plan.whole for plan in pattern] == [None if plan.attention else "cudnn" for plan in pattern]
    assert {plan.whole for plan in pattern} == {None, "cudnn"}
    assert {plan.whole for plan in plans(monkeypatch, TINY, InfLLM())} == {None}
    meshed = plans(monkeypatch, config, shards=Shards(AbstractMesh((1, 1, 2), ("data", "sp", "tp"))))
    assert {plan.whole for plan in meshed} == {None}
    assert {plan.whole for plan in plans(monkeypatch)} == {None}  # a head width of 20


def test_what_cudnn_attends_to():
    for dim, dtype, capability, want in (
        (128, "bfloat16", AMPERE, True),
        (128, "float16", AMPERE, True),
        (128, "float32", HOPPER, False),
        (256, "bfloat16", AMPERE, False),
        (256, "bfloat16", HOPPER, True),
        (264, "bfloat16", HOPPER, False),
        (20, "bfloat16", HOPPER, False),
        (64, "float16", (7, 5), False),
    ):
        assert cudnn_attends(dim, dtype, capability) == want, (dim, dtype, capability)
