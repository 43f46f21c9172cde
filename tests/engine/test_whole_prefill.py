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
from jshadow.ops.rope import inverse_frequencies
from jshadow.ops.whole_attention import cudnn_attends
from jshadow.planner.prefill_pieces import rows_at_once
from jshadow.policies import H2O, Full, InfLLM, ShadowKV
from jshadow.weights.params import init_params

SIZE = 20
LENGTHS = (55, SIZE + 1, SIZE, 1)  # the longest has three pieces, and is longer than every window but one
HOPPER, AMPERE = (9, 0), (8, 0)
params_of = functools.cache(functools.partial(init_params, seed=7))


def check_equal(config, plan, tokens, lengths, layer=0, dtype="float32"):
    """A layer read with a plan is the layer read piece by piece, up to rounding: in bfloat16, of attention's output.

    Returns the PromptKV of the plan.
    """
    shape = (len(lengths), tokens, config.model_dim)
    x = np.random.default_rng(layer).standard_normal(shape, np.float32).astype(jnp.dtype(dtype))
    weights = params_of(config, dtype=dtype).weights[f"layer_{layer}"]
    given = Given(weights, inverse_frequencies(plan.kind.rope, config.head_dim, 512))
    usual = dataclasses.replace(plan, whole=None, rows=None)
    (want, want_kv), (x, kv) = (read_layer(one, given, x, lengths) for one in (usual, plan))
    assert x.dtype == kv.k_post.dtype == jnp.dtype(dtype)
    real = np.arange(tokens) < np.asarray(lengths)[:, None]
    x, want = (np.asarray(one, np.float32)[real] for one in (x, want))
    if dtype == "float32":
        np.testing.assert_allclose(x, want, atol=2e-5, rtol=2e-5)
    assert np.linalg.norm(x - want) < 0.02 * np.linalg.norm(want)
    tolerance = {"atol": 1e-5} if dtype == "float32" else {"rtol": 0.01}
    for name in ("k_pre", "k_post", "v", *["q_tail"] * bool(plan.q_tail)):
        mine, theirs = (np.asarray(getattr(one, name), np.float32) for one in (kv, want_kv))
        np.testing.assert_allclose(mine, theirs, err_msg=name, **tolerance)
    assert not np.asarray(kv.v)[~real].any()
    np.testing.assert_array_equal(kv.positions, want_kv.positions)
    np.testing.assert_array_equal(kv.lengths, lengths)
    assert kv.extra is kv.q_post is kv.lse is None
    return kv


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_yarn", "qwen2", "phi3_partial_longrope", "glm4", "gemma3", "smollm3"])
def test_every_kind_of_layer(name):
    config = family_config(name)
    kinds = {config.attention_kind(layer): layer for layer in range(config.num_layers)}
    for kind, layer in kinds.items():
        check_equal(config, LayerPlan(config, kind, False, 9, SIZE, whole="xla", rows=2), 3 * SIZE, LENGTHS, layer)


SHORT = [((1,), 1), ((SIZE,), None), ((SIZE + 1,), 1), ((3, SIZE + 1, 2), 1), ((3, SIZE + 1, 2), None)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "rows", "dtype"), [*((*case, "float32") for case in SHORT), (LENGTHS, 1, "bfloat16")]
)
def test_prompts_around_a_piece(lengths, rows, dtype):
    config, count = family_config("gemma3"), -(-max(lengths) // SIZE)
    size = -(-max(lengths) // count)
    plan = LayerPlan(config, config.attention_kind(0), False, 5, size, whole="xla", rows=rows)
    check_equal(config, plan, count * size, lengths, dtype=dtype)


def test_a_window_of_one_token_and_no_tail():
    kind = dataclasses.replace(TINY.attention_kind(0), window=1)
    assert check_equal(TINY, LayerPlan(TINY, kind, False, 0, 8, whole="xla"), 16, (16, 3)).q_tail is None


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Full(), ShadowKV(rank=8, budget=16, chunk_size=4, outlier_chunks=2)])
def test_a_prefill_of_all_layers(policy, monkeypatch):
    config, plan_of, rows = family_config("gemma3"), PrefillJob.layer_plan, []
    tokens = np.random.default_rng(3).integers(3, 97, (4, 55), dtype=np.int32)
    settings = {"capacity": 80, "prefill_chunk": SIZE, "logits": "all"}
    want, usual = decode.prefill(params_of(config), tokens, np.array(LENGTHS), policy, **settings)

    def whole(job, index, count, size):
        rows.append(rows_at_once(len(job.lengths), size, SIZE))
        return dataclasses.replace(plan_of(job, index, count, size), whole="xla", rows=rows[-1])

    monkeypatch.setattr(PrefillJob, "layer_plan", whole)
    logits, state = decode.prefill(params_of(config), tokens, np.array(LENGTHS), policy, **settings)
    assert rows == [1] * config.num_layers
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(logits[row, :length], want[row, :length], atol=1e-4)
    steps = [decode.decode_step(params_of(config), tokens[:, 0], one.fork())[0] for one in (state, usual)]
    np.testing.assert_allclose(*steps, atol=1e-4)


# The choice


def plans(monkeypatch, config, policy=None, dtype="bfloat16", capability=HOPPER, attention=None, **changes):
    """The plan of each layer on a GPU of a compute capability, or without a GPU."""
    monkeypatch.setattr(prefill_job, "capability_here", lambda: capability)
    options = PrefillOptions(80, None, "last", SIZE, None, None, attention, None)
    tokens = np.full((4, 55), 5, np.int32)
    job = check_job(params_of(config, dtype=dtype), tokens, LENGTHS, [policy or Full()], "resident", options)
    job = dataclasses.replace(job, **changes)
    return [job.layer_plan(layer, 3, SIZE) for layer in range(config.num_layers)]


def test_where_cudnn_reads_a_prompt(monkeypatch):
    gemma = family_config("gemma3")  # whose heads have a width of 20
    config = dataclasses.replace(gemma, head_dim=24)
    assert [(plan.whole, plan.rows) for plan in plans(monkeypatch, config)] == [("cudnn", 1)] * 3
    mesh = Shards(AbstractMesh((1, 1, 2), ("data", "sp", "tp")))
    for kinds, which, options in (
        ({None}, config, {"capability": None}),
        ({None}, config, {"dtype": "float32"}),
        ({None, "cudnn"}, config, {"policy": H2O()}),  # sliding layers are not H2O's
        ({None}, TINY, {"policy": InfLLM()}),
        ({None}, config, {"shards": mesh}),
        ({None}, gemma, {}),
    ):
        assert {plan.whole for plan in plans(monkeypatch, which, **options)} == kinds, options
    pattern = plans(monkeypatch, config, attention=VerticalSlash())
    assert [plan.whole for plan in pattern] == [None if plan.attention else "cudnn" for plan in pattern]
    assert {plan.whole for plan in pattern} == {None, "cudnn"}


ATTENDS = {(128, "bfloat16", AMPERE): True, (128, "float16", AMPERE): True, (128, "float32", HOPPER): False}
ATTENDS |= {(256, "bfloat16", AMPERE): False, (256, "bfloat16", HOPPER): True, (264, "bfloat16", HOPPER): False}
ATTENDS |= {(20, "bfloat16", HOPPER): False, (64, "float16", (7, 5)): False}


def test_what_cudnn_attends_to():
    assert {case: cudnn_attends(*case) for case in ATTENDS} == ATTENDS
