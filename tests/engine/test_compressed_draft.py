"""The model drafts with a compressed cache that is made from its exact keys and values."""

import dataclasses

import numpy as np
import pytest
from cases import CAPACITY, TINY, model, random_tokens

import jshadow
from jshadow import CompressedDraft, Full, Offloaded, Quest, Sampler, ShadowKV
from jshadow.engine import decode
from jshadow.engine.speculation import parse_drafter
from jshadow.engine.speculation.drafter import Text
from jshadow.errors import ConfigError

PROMPTS = [random_tokens(1, count, seed=count)[0].tolist() for count in (50, 23, 3)]
SMALL = ShadowKV(rank=8, budget=8, chunk_size=4, outlier_chunks=1, local_chunks=1)
WHOLE = CompressedDraft(tokens=4, policy=Full())
SPARSE = CompressedDraft(tokens=4, policy=SMALL)
SLIDING = dataclasses.replace(TINY, sliding_window=12, sliding_layers=(1,))


def generate(drafter, policy=None, config=TINY, temperature=0.0, **options):
    asked = {"max_new_tokens": 24, "capacity": CAPACITY, "sampler": Sampler(temperature), "seed": 4}
    policy = policy or Offloaded(block=16)
    return jshadow.generate(model(config), PROMPTS, policy, **asked | options, speculate=drafter)


def padded():
    tokens = np.zeros((3, 50), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = prompt
    return tokens, np.array(list(map(len, PROMPTS)))


@pytest.mark.parametrize("temperature", [0.8, pytest.param(0.0, marks=pytest.mark.slow)])
def test_a_cache_of_all_tokens_is_the_model_itself(temperature):
    plain = generate(None, temperature=temperature)
    out = generate(WHOLE, temperature=temperature)
    assert [one.tokens for one in out] == [one.tokens for one in plain]
    for one in out:
        assert one.report.accepted_tokens == one.report.proposed_tokens > 0


@pytest.mark.parametrize(
    ("policy", "config"),
    [
        (Offloaded(block=16), TINY),
        pytest.param(Full(), TINY, marks=pytest.mark.slow),
        pytest.param(Full(), SLIDING, marks=pytest.mark.slow),
        pytest.param(Offloaded(block=16), SLIDING, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_compressed_cache_changes_no_token(policy, config):
    plain, out = generate(None, policy, config), generate(SPARSE, policy, config)
    assert [one.tokens for one in out] == [one.tokens for one in plain]
    assert 0 < sum(one.report.accepted_tokens for one in out) < sum(one.report.proposed_tokens for one in out)
    again = [
        jshadow.generate(model(config), [5, 6], state=one.state, max_new_tokens=6, speculate=drafter).tokens
        for one, drafter in ((plain[1], None), (out[1], SPARSE))
    ]
    assert again[0] == again[1]


@pytest.mark.parametrize("target", [Offloaded(block=16), pytest.param(Full(), marks=pytest.mark.slow)], ids=str)
def test_the_cache_is_that_of_a_prefill(target):
    """The compressed state is the one that the policy makes of the prompt, up to the rounding of a rotation."""
    tokens, lengths = padded()
    _, state = decode.prefill(model(), tokens, lengths, target, capacity=CAPACITY)
    _, want = decode.prefill(model(), tokens, lengths, SMALL, capacity=CAPACITY)
    memory = SPARSE.begin(Text(tokens, lengths, TINY), state)
    got = decode.KVState.of(memory.fixed[1], memory.live)
    assert got.specs == want.specs
    tokens = random_tokens(3, 6, seed=8)
    logits = [decode.extend(model(), tokens, [6] * 3, one, logits="all")[0] for one in (got, want)]
    np.testing.assert_allclose(*logits, atol=1e-3)


def test_its_names():
    assert parse_drafter("compressed") == CompressedDraft()
    drafter = parse_drafter("compressed:shadowkv:tokens=16:budget=512")
    assert drafter == CompressedDraft(tokens=16, policy=ShadowKV(budget=512))
    wrapped = parse_drafter("compressed:dense_first.layers=1").policy
    assert wrapped == jshadow.DenseFirst(inner=ShadowKV(), layers=1)
    for wrong in ("compressed:shadowkv:tokens=abc", "compressed:tokens=-3", "self:quest:tokens="):
        with pytest.raises(ConfigError, match="tokens=NUMBER, got"):
            parse_drafter(wrong)
    with pytest.raises(ConfigError, match="policy must be"):
        CompressedDraft(policy="shadowkv")


def test_a_drafter_s_window_follows_the_room_of_the_state():
    tokens, lengths = padded()
    _, state = decode.prefill(model(), tokens, lengths, Full(), capacity=CAPACITY)
    _, small = decode.prefill(model(), tokens, lengths, Offloaded(block=16), capacity=CAPACITY, room=8)
    windows = [SPARSE.begin(Text(tokens, lengths, TINY), one).fixed[1].specs[1].window for one in (state, small)]
    assert windows[1] < windows[0]


@pytest.mark.parametrize(
    ("drafter", "policy", "error"),
    [
        (SPARSE, jshadow.SnapKV(), "policy must keep all keys and values for speculate='compressed'.*got snapkv"),
        (CompressedDraft(policy=jshadow.SnapKV(20, 8)), None, "must be made from keys and values alone"),
        (CompressedDraft(policy=jshadow.H2O()), None, "keys and values alone|give tokens back"),
        (CompressedDraft(policy=Quest(budget=8, unit=4), tokens=12), None, "compressed.tokens must be at most 8"),
        (CompressedDraft(policy=jshadow.SpeCache(group=8)), None, r"compressed\.policy must"),
    ],
    ids=["target", "queries", "h2o", "ring", "specache"],
)
def test_what_cannot_draft_is_refused(drafter, policy, error):
    with pytest.raises(ConfigError, match=error):
        generate(drafter, policy)
