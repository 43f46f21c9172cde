"""Self-drafting: the model proposes tokens over a sparse view of its own cache."""

import dataclasses

import jax
import numpy as np
import pytest
from cases import CAPACITY, TINY, model, random_tokens

import jshadow
from jshadow import Full, Loki, Quest, Sampler, SelfDraft
from jshadow.engine import decode
from jshadow.engine.speculation import parse_drafter
from jshadow.engine.speculation.drafter import Text
from jshadow.errors import ConfigError

PROMPTS = [random_tokens(1, count, seed=count)[0].tolist() for count in (50, 23, 3)]
SMALL = SelfDraft(tokens=4, policy=Quest(budget=8, unit=4, recent=3, dense_layers=1))
WHOLE = SelfDraft(tokens=4, policy=Quest(budget=CAPACITY, unit=4, recent=3, dense_layers=0))
SLIDING = dataclasses.replace(TINY, sliding_window=12, sliding_layers=(1,))


def generate(drafter, config=TINY, temperature=0.0, **options):
    asked = {"max_new_tokens": 24, "capacity": CAPACITY, "sampler": Sampler(temperature), "seed": 4}
    return jshadow.generate(model(config), PROMPTS, Full(), **asked | options, speculate=drafter)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_view_of_all_tokens_is_the_model_itself(temperature):
    """Then all that is proposed is accepted, also where tokens are drawn at random: a draw has its number's key."""
    plain = generate(None, temperature=temperature)
    out = generate(WHOLE, temperature=temperature)
    assert [one.tokens for one in out] == [one.tokens for one in plain]
    for one in out:
        assert one.report.accepted_tokens == one.report.proposed_tokens > 0
        assert one.report.cycles <= 6


@pytest.mark.parametrize("config", [TINY, pytest.param(SLIDING, marks=pytest.mark.slow)])
def test_a_sparse_view_changes_no_token(config):
    plain, out = generate(None, config), generate(SMALL, config)
    assert [one.tokens for one in out] == [one.tokens for one in plain]
    assert 0 < sum(one.report.accepted_tokens for one in out) < sum(one.report.proposed_tokens for one in out)
    again = [
        jshadow.generate(model(config), [5, 6], state=one.state, max_new_tokens=4).tokens for one in (plain[1], out[1])
    ]
    assert again[0] == again[1]


def test_summaries_follow_the_state():
    """After turns of any length, the summaries are those of all whole units, computed anew."""
    policy, rng = SMALL.policy, np.random.default_rng(0)
    tokens = np.zeros((3, 50), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = prompt
    lengths = np.array(list(map(len, PROMPTS)))
    _, state = decode.prefill(model(), tokens, lengths, Full(), capacity=CAPACITY)
    text = Text(tokens, lengths, TINY)
    memory = SMALL.begin(text, state)
    assert memory.live[0] is None  # a dense layer
    for _ in range(4):
        counts = rng.integers(0, 6, 3).astype(np.int32)
        drawn = rng.integers(0, TINY.vocab_size, (3, 6)).astype(np.int32)
        _, state = decode.extend(model(), drawn, counts, state)
        memory = memory._replace(live=SMALL.heard(memory, drawn, counts, state))
        whole = np.asarray(state.lengths) // policy.unit
        for kept, fresh in zip(
            jax.tree.leaves(memory.live), jax.tree.leaves(SMALL.begin(text, state).live), strict=True
        ):
            for row, count in enumerate(whole):
                np.testing.assert_array_equal(kept[row, :, :count], fresh[row, :, :count])


def test_its_names():
    assert parse_drafter("self") == SelfDraft()
    assert parse_drafter("self:quest:tokens=4:budget=64").tokens == 4
    assert parse_drafter("self:quest:budget=64").policy == Quest(budget=64)
    assert parse_drafter("self:budget=64").policy == dataclasses.replace(SelfDraft().policy, budget=64)
    with pytest.raises(ConfigError, match="a policy such as quest, got h2o"):
        parse_drafter("self:h2o")


def test_what_cannot_draft_for_itself_is_refused():
    with pytest.raises(ConfigError, match="policy must be full for speculate='self', got snapkv"):
        jshadow.generate(model(), PROMPTS, jshadow.SnapKV(), speculate=SMALL)
    with pytest.raises(ConfigError, match="must be a retrieval policy without a basis"):
        generate(SelfDraft(policy=Loki(budget=8)))
