"""A draft model: another model of the same tokenizer proposes tokens."""

import dataclasses

import pytest
from cases import CAPACITY, TINY, model, random_tokens, setting

import jshadow
from jshadow import DraftModel, Full, Sampler
from jshadow.errors import ConfigError
from jshadow.weights.params import init_params

PROMPTS = [random_tokens(1, count, seed=count)[0].tolist() for count in (40, 17, 2)]
OTHER = init_params(dataclasses.replace(TINY, num_layers=1), seed=9)


def generate(drafter, policy=None, temperature=0.0, **options):
    asked = {"max_new_tokens": 20, "capacity": CAPACITY, "sampler": Sampler(temperature), "seed": 2}
    return jshadow.generate(model(), PROMPTS, policy or Full(), **asked | options, speculate=drafter)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_that_drafts_for_itself_is_always_right(temperature):
    plain = generate(None, temperature=temperature)
    out = generate(DraftModel(model(), tokens=4), temperature=temperature)
    assert [one.tokens for one in out] == [one.tokens for one in plain]
    for one in out:
        assert one.report.accepted_tokens == one.report.proposed_tokens > 0


@pytest.mark.parametrize("name", ["shadowkv", pytest.param("quest", marks=pytest.mark.slow)])
def test_another_model_changes_no_token(name):
    policy = setting(name, "restricted")
    plain = generate(None, policy)
    out = generate(DraftModel(OTHER, tokens=4), policy)
    assert [one.tokens for one in out] == [one.tokens for one in plain]
    assert [one.state.lengths.tolist() for one in out] == [one.state.lengths.tolist() for one in plain]
    assert sum(one.report.accepted_tokens for one in out) < sum(one.report.proposed_tokens for one in out)


def test_what_cannot_draft_is_refused():
    with pytest.raises(ConfigError, match="must have the tokenizer of the model, with vocab_size=101, got"):
        generate(DraftModel(init_params(dataclasses.replace(TINY, vocab_size=97), seed=0)))
    with pytest.raises(ConfigError, match=f"context of at least capacity={CAPACITY} tokens, got 64"):
        generate(DraftModel(init_params(dataclasses.replace(TINY, context=64), seed=0)))
    with pytest.raises(ConfigError, match=r"draft_model\.params must be Params"):
        DraftModel("a directory")
    state = generate(None)[0].state
    with pytest.raises(ConfigError, match="a state does not have its tokens"):
        jshadow.generate(model(), [1, 2], state=state, max_new_tokens=4, speculate=DraftModel(OTHER))
