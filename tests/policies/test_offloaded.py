"""Full attention over a prompt in host memory, which each step streams to the device."""

import numpy as np
import pytest
from cases import CAPACITY, TINY, model, random_tokens

from jshadow import Full, Offloaded
from jshadow.engine import decode
from jshadow.errors import ConfigError

LENGTHS = [61, 27, 5]
TOKENS = random_tokens(3, 61, seed=3)


def run(policy, fetch, dtype="float32", turn=70):
    """A prompt, a turn of more than 64 tokens, and two steps: the logits [B, T, V] of all, and the state."""
    params = model(dtype=dtype)
    logits, state = decode.prefill(params, TOKENS, LENGTHS, policy, capacity=192, fetch=fetch)
    outs = [logits[:, None]]
    more = random_tokens(3, turn, seed=4)
    out, state = decode.extend(params, more, [turn, 3, 0], state, logits="all")
    outs.append(out)
    for seed in (5, 6):
        out, state = decode.decode_step(params, random_tokens(3, 1, seed=seed)[:, 0], state)
        outs.append(out[:, None])
    return np.concatenate(outs, axis=1), state


@pytest.mark.slow
@pytest.mark.parametrize("block", [7, 1, 16, 500])
def test_a_stream_is_full_attention(block):
    """Blocks of any size, prompts that end inside a block, and turns longer than a short one."""
    real = np.ones((3, 73), bool)
    real[1, 4:71], real[2, 1:71] = False, False
    want, _ = run(Full(), "resident")
    got, state = run(Offloaded(block=block), "device_put")
    np.testing.assert_allclose(got[real], want[real], atol=2e-5)
    assert state.policy.block == min(block, 192)
    rows = TINY.num_layers * 2 * TINY.kv_heads * TINY.head_dim * 4
    blocks = -(-61 // state.policy.block)  # the longest prompt of the batch
    passes = np.array([3, 3, 2])  # the turn, unless a row has no tokens in it, and two steps
    moved = np.asarray(state.counters.fetched).astype(int) * 64
    assert moved.tolist() == (passes * blocks * state.policy.block * rows).tolist()


@pytest.mark.slow
def test_all_tokens_are_those_of_full():
    states = [run(policy, "resident", turn=8)[1] for policy in (Full(), Offloaded(block=16))]
    parts = [*(state.specs for state in states), *(state.layers for state in states)]
    for spec, other, full, streamed in zip(*parts, strict=True):
        want = spec.policy.all_tokens(spec, full)
        got = other.policy.all_tokens(other, streamed)
        for row, length in enumerate(np.asarray(states[0].lengths)):
            np.testing.assert_allclose(got.k[row, :, :length], want.k[row, :, :length], atol=1e-5)
            np.testing.assert_allclose(got.v[row, :, :length], want.v[row, :, :length], atol=1e-5)


def test_a_block_has_tokens():
    with pytest.raises(ConfigError, match=r"offloaded\.block must be"):
        decode.prefill(model(), TOKENS, LENGTHS, Offloaded(block=0), capacity=CAPACITY)
