"""Where a generation stops, and what its text, its tokens and its state then say."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byte_models import BARE, PARAMS, SHADOW
from tiny_text import END, byte_tokenizer

import jshadow
from jshadow.engine import token_steps
from jshadow.engine.generation import GenerationLoop
from jshadow.engine.options import GenerateOptions
from jshadow.engine.text import TextStream, split_stops
from jshadow.engine.token_steps import TokenSteps
from jshadow.errors import ConfigError, NumericalError

FULL = jshadow.Full()
TOKENIZER = byte_tokenizer()


def scripted(monkeypatch, texts, params=PARAMS):
    """Make the model answer each row with the given text, whatever its logits are."""
    answers = [params.tokenizer.encode(text) if isinstance(text, str) else text for text in texts]
    sample = GenerationLoop.read_tokens

    def read(loop, values, index, active):
        sample(loop, values, index, active)
        return np.array([answer[min(index, len(answer) - 1)] for answer in answers], np.int32)

    monkeypatch.setattr(GenerationLoop, "read_tokens", read)
    without_running_ahead(monkeypatch)  # the device does not know the script


def without_running_ahead(monkeypatch):
    """Make each step wait until the host has read the tokens of the step before."""
    step = TokenSteps.next
    monkeypatch.setattr(TokenSteps, "next", lambda steps, *args, ahead: step(steps, *args, ahead=False))


# Special tokens


def test_a_special_token_as_a_stop_string_is_its_id():
    assert split_stops(END, TOKENIZER) == ((), (256,))
    assert split_stops(["x", END, 7], TOKENIZER) == (("x",), (7, 256))


def test_a_special_token_beside_other_text_is_refused():
    with pytest.raises(ConfigError, match=r"stop must not have the special token '<\|end\|>' beside other text"):
        split_stops(END + "\n", TOKENIZER)


def test_generation_ends_at_a_special_token_given_as_text(monkeypatch):
    scripted(monkeypatch, [[*PARAMS.tokenizer.encode("ab"), 256, 99, 99]])
    out = jshadow.generate(PARAMS, "some text", FULL, max_new_tokens=5, stop=END)
    assert (out.text, len(out.tokens), out.tokens[-1]) == ("ab", 3, 256)
    assert out.state.lengths.tolist() == [len("some text") + 3]


# Steps that the device runs before the host has read the tokens


@pytest.mark.parametrize("sampler", [None, jshadow.Sampler(temperature=1.0)], ids=["greedy", "sampled"])
def test_running_ahead_changes_nothing(monkeypatch, sampler):
    prompts = [np.random.default_rng(row).integers(0, 256, size).tolist() for row, size in enumerate((203, 57, 120))]
    free = jshadow.generate(BARE, prompts, SHADOW, max_new_tokens=8, sampler=sampler)
    # The rows end in different steps: one at its first token, one at its fourth, and one at the limit or before.
    stop = [free[0].tokens[0], free[1].tokens[3]]

    def run():
        return jshadow.generate(BARE, prompts, SHADOW, max_new_tokens=8, sampler=sampler, stop=stop)

    ahead = run()
    assert len({len(out.tokens) for out in ahead}) > 1
    without_running_ahead(monkeypatch)
    for mine, want in zip(ahead, run(), strict=True):
        assert mine.tokens == want.tokens
        assert mine.report.attended_tokens == want.report.attended_tokens
        assert mine.report.hit_rate == want.report.hit_rate
        for one, other in zip(jax.tree.leaves(mine.state), jax.tree.leaves(want.state), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_step_is_dispatched_before_the_token_is_read(monkeypatch):
    order, dispatch, read = [], TokenSteps._dispatch, GenerationLoop.read_tokens

    def dispatched(steps, *args):
        order.append("dispatch")
        return dispatch(steps, *args)

    def reads(loop, *args):
        order.append("read")
        return read(loop, *args)

    monkeypatch.setattr(TokenSteps, "_dispatch", dispatched)
    monkeypatch.setattr(GenerationLoop, "read_tokens", reads)
    jshadow.generate(BARE, [1, 2, 3], FULL, max_new_tokens=4)
    assert order == ["read", "dispatch", "dispatch", "read", "dispatch", "read", "read"]
    order.clear()
    jshadow.generate(PARAMS, "text", FULL, max_new_tokens=3, stop="never")  # the host alone finds a stop string
    assert order == ["read", "dispatch", "read", "dispatch", "read"]


# What the state holds


class Pieces:
    """A tokenizer whose tokens are longer than a character."""

    def decode(self, ids, **_):
        return "".join(["ab", "c.", "\nd"][index] for index in ids)


def tokens_before(text, stop):
    stream = TextStream(TOKENIZER, [stop])
    for token in TOKENIZER.encode(text):
        stream.push(token)
    return TOKENIZER.decode(stream.tokens[: stream.kept()])


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("abEND", "END", "ab"),
        ("aENEND", "END", "aEN"),
        ("aa\n\n\n\nX", "\n\nX", "aa\n\n"),
        ("END", "END", ""),
        ("ab\u00e9", "\u00e9", "ab"),
        ("ab\u00e9cd", "cd", "ab\u00e9"),
    ],
)
def test_the_tokens_before_a_stop_string(text, stop, kept):
    assert tokens_before(text, stop) == kept


def test_a_token_that_holds_more_than_the_stop_string_is_left_out_whole():
    """The text is cut inside the token; the tokens are not."""
    stream = TextStream(
        type("Pairs", (), {"decode": lambda self, ids, **_: "".join(["ab", "c.", "\nd"][i] for i in ids)})()
    )
    stream.stops = (".\n",)
    for token in range(3):
        stream.push(token)
    assert (stream.text, stream.kept()) == ("abc", 1)


@pytest.mark.parametrize("policy", [FULL, SHADOW], ids=["full", "shadowkv"])
def test_the_state_ends_where_the_text_ends(monkeypatch, policy):
    prompt = "some text " * 20
    scripted(monkeypatch, ["ab\n\nEND and more"])
    out = jshadow.generate(PARAMS, prompt, policy, max_new_tokens=16, capacity=300, stop="\nEND")
    assert out.text == PARAMS.tokenizer.decode(out.tokens) == "ab\n"
    assert out.report.generated_tokens == 7
    state = out.state
    assert state.lengths.tolist() == [len(prompt) + 3]
    assert out.state is state
    monkeypatch.undo()
    _, held = jshadow.prefill(PARAMS, [PARAMS.tokenizer.encode(prompt)], [len(prompt)], policy, capacity=300)
    for token in out.tokens:
        _, held = jshadow.decode_step(PARAMS, [token], held)
    turn = PARAMS.tokenizer.encode(" next")
    want = jshadow.generate(PARAMS, turn, state=held, max_new_tokens=5)
    assert jshadow.generate(PARAMS, turn, state=state, max_new_tokens=5).tokens == want.tokens


def test_each_row_of_a_batch_ends_where_its_text_ends(monkeypatch):
    answers = ["aENDxxxx", "ENENDxxx", "abcdefgh", "abcdefEN", "END....."]
    scripted(monkeypatch, answers)
    prompts = ["p" * size for size in (20, 7, 13, 9, 5)]
    outs = jshadow.generate(PARAMS, prompts, FULL, max_new_tokens=8, capacity=64, stop="END")
    assert [out.text for out in outs] == ["a", "EN", "abcdefgh", "abcdefEN", ""]
    for out, prompt in zip(outs, prompts, strict=True):
        assert PARAMS.tokenizer.decode(out.tokens) == out.text
        assert out.state.lengths.tolist() == [len(prompt) + len(out.tokens)]
        assert out.state.last.tolist() == (out.tokens or PARAMS.tokenizer.encode(prompt))[-1:]


def test_a_state_is_forked_only_while_a_stop_string_may_begin(monkeypatch):
    forks, fork = [], jshadow.KVState.fork
    monkeypatch.setattr(jshadow.KVState, "fork", lambda state: forks.append(1) or fork(state))
    scripted(monkeypatch, ["abEcdeENfgh"])
    jshadow.generate(PARAMS, "some text", FULL, max_new_tokens=11, stop="END")
    assert len(forks) == 2
    forks.clear()
    list(jshadow.stream(PARAMS, "some text", FULL, max_new_tokens=11, stop="END"))
    jshadow.generate(PARAMS, "some text", FULL, max_new_tokens=11)
    assert not forks  # a stream returns no state


# Logits that are not numbers


def broken(params):
    """The model with a NaN in its weights."""
    return dataclasses.replace(params, weights=jax.tree.map(lambda leaf: leaf * jnp.nan, params.weights))


@pytest.mark.parametrize("sampler", [None, jshadow.Sampler(temperature=1.0)], ids=["greedy", "sampled"])
def test_logits_that_are_nan_are_an_error(monkeypatch, sampler):
    once = token_steps.sample_once
    with monkeypatch.context() as patch:
        patch.setattr(
            token_steps,
            "sample_once",
            lambda logits, *args, **options: once(logits.at[1].set(jnp.nan), *args, **options),
        )
        with pytest.raises(NumericalError, match=r"NaN in row 1 at step 0, .* follow the prompt"):
            jshadow.generate(BARE, [[1, 2, 3], [4]], sampler=sampler, max_new_tokens=4)
    loop = GenerationLoop(BARE, [[1, 2, 3], [4]], GenerateOptions(sampler=sampler, max_new_tokens=4))
    tokens = iter(loop)
    next(tokens)
    next(tokens)
    loop.steps.params = broken(BARE)
    with pytest.raises(NumericalError, match=r"NaN in row 0 at step 1, .* follow 1 generated"):
        next(tokens)
