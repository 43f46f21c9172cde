"""Steered selections: the share of chunks that stay is the one that was asked for, with one and two landmark levels."""

import jax
import numpy as np
import pytest
from gpu.sizes import DRY, REAL
from gpu.steered import PHASE, SHARE
from gpu.synthetic import refetched, state, steered

from jshadow.cache.records import StepKV
from jshadow.evaluation.speed import Shape, random_step


def policy_of(sizes, code, capacity):
    """Return a steered policy whose settings are all given."""
    return steered(sizes.policies[code].resolve(sizes.config, capacity), sizes.prompt(capacity), capacity)


@pytest.mark.parametrize("capacity", REAL.capacities)
@pytest.mark.parametrize("code", REAL.policies)
def test_a_steered_selection_fits_the_real_sizes(code, capacity):
    policy = policy_of(REAL, code, capacity)
    wheel, count = policy.wheel, policy.taken
    assert wheel >= 2 * count
    assert np.asarray(policy.eligible()).sum() == wheel
    ranks = np.asarray(policy.ranks())[: policy.chunks]
    assert sorted(ranks) == list(range(policy.chunks))
    near = np.abs(np.diff(ranks))
    assert np.minimum(near, policy.chunks - near).min() > count  # neighboring chunks are never selected together
    assert 1 - policy.moved / count == pytest.approx(SHARE, abs=0.01)


def selections(code, first, steps=4, capacity=1024):
    """Return the policy, the selected chunks of each step [steps, B, h, k], and the hits of each later step."""
    policy, config = policy_of(DRY, code, capacity), DRY.layer_config
    held = state(config, policy, 2, capacity, policy.prompt, "resident")
    [spec], [layer] = held.specs, held.layers

    @jax.jit
    def select(layer, step: StepKV):
        selection, layer = policy.select(spec, layer, step)
        total, hits = selection.counts
        return selection.ids, selection.valid, hits.sum() / total.sum(), layer

    ids, hits = [], []
    for token in range(first, first + steps):
        shape = Shape(policy.prompt + token, 2, config.q_heads, config.kv_heads, config.head_dim)
        chosen, valid, hit, layer = select(layer, random_step(shape, token))
        assert np.asarray(valid).all()
        ids.append(np.sort(np.asarray(chosen), axis=-1))
        hits.append(float(hit))
    return policy, np.stack(ids), hits[1:]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "share"), [(0, 0.0), (PHASE, SHARE)])
@pytest.mark.parametrize("code", ["paper", "packed", "packed small"])
def test_steered_steps_keep_the_share_that_was_asked_for(code, first, share):
    policy, ids, hits = selections(code, first)
    assert hits == pytest.approx([share] * len(hits), abs=0.05)
    # Exactly the chunks of the window are selected, which numpy finds again from the definition.
    ranks, chunks = np.asarray(policy.ranks()), np.arange(policy.max_chunks(1024))
    for step, token in enumerate(range(first, first + len(ids))):
        for head in range(2):
            start = policy.taken * min(token, PHASE) + policy.moved * max(token - PHASE, 0)
            start += head * (policy.wheel // 2)
            window = {(start + place) % policy.wheel for place in range(policy.taken)}
            want = [chunk for chunk in chunks if chunk < policy.chunks and ranks[chunk] in window]
            assert all(list(row[head]) == want for row in ids[step])


@pytest.mark.slow
def test_steering_reads_the_real_landmarks_of_every_chunk():
    policy, config = policy_of(DRY, "packed", 1024), DRY.layer_config
    held = state(config, policy, 2, 1024, policy.prompt, "resident")
    step = random_step(Shape(policy.prompt, 2, config.q_heads, config.kv_heads, config.head_dim), 1)
    [mine] = policy.marks(held.specs[0], held.layers[0], step)
    [real] = super(type(policy), policy).marks(held.specs[0], held.layers[0], step)
    assert jax.tree.leaves(mine.landmarks)[0] is jax.tree.leaves(real.landmarks)[0]
    assert (mine.open.shape, mine.open.dtype) == (real.open.shape, real.open.dtype)
    assert not (np.asarray(mine.open) & ~np.asarray(real.open)).any()


@pytest.mark.slow
def test_a_state_keeps_its_rows_in_another_fetch_mode():
    policy, config = policy_of(DRY, "paper", 1024), DRY.layer_config
    held = state(config, policy, 2, 1024, policy.prompt, "zero_copy")
    rows = held.layers[0].host.prompt.array
    put = refetched(held, "device_put")
    assert put.layers[0].live.values is None
    assert held.layers[0].live.values.is_deleted()
    again = refetched(put, "zero_copy")
    assert again.layers[0].live.values.shape == held.layers[0].live.values.shape
    assert (np.asarray(again.layers[0].live.resident) == -1).all()
    assert again.layers[0].host.prompt.array is rows
    assert not rows.is_deleted()
