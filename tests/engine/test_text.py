"""Prompts to ids, ids to text: every kind of prompt, stop strings across token borders, unfinished characters."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_text import END, byte_tokenizer

from jshadow.engine import text as text_module
from jshadow.engine.text import TextStream, encode, split_prompts, split_stops
from jshadow.errors import ConfigError, PromptError

TOKENIZER = byte_tokenizer()
CHAT = [{"role": "user", "content": "hi"}]


def with_template(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def pushed(text, stops=()):
    """A stream that has read all tokens of a text, and the pieces that it gave."""
    stream = TextStream(TOKENIZER, stops)
    return stream, [stream.push(token) for token in TOKENIZER.encode(text)]


@pytest.mark.parametrize("prompt", ["text", CHAT, [1, 2, 3], np.array([1, 2])])
def test_one_prompt_or_many(prompt):
    for many in (prompt, [prompt], [prompt, "x"]):
        prompts, is_bare = split_prompts(many)
        assert (len(prompts), is_bare) == (1 if many is prompt else len(many), many is prompt)
        assert all(encode(TOKENIZER, one, 257) for one in prompts)


@pytest.mark.parametrize(
    ("prompt", "told", "tokenizer"),
    [
        *((prompt, "prompt", TOKENIZER) for prompt in ([], (), None, 7, {}, np.zeros((0,), np.int32))),
        ("", "at least 1 token", TOKENIZER),
        ([300], "vocab_size=257", TOKENIZER),
        ([-1], "got -1", TOKENIZER),
        *((prompt, "token ids", TOKENIZER) for prompt in ([1, True, "x"], [True, False], [1, True])),
        ([{"role": "user"}], "role and content", TOKENIZER),
        *((prompt, "no tokenizer", None) for prompt in ("text", CHAT)),
        (CHAT, "chat template", with_template(None)),
        (CHAT, "roles must alternate", with_template("{{ raise_exception('roles must alternate') }}")),
    ],
)
def test_bad_prompts_are_told(prompt, told, tokenizer):
    with pytest.raises(PromptError, match=told):  # noqa: PT012 - either may raise
        for one in split_prompts(prompt)[0]:
            encode(tokenizer, one, 257)


def test_a_chat_goes_through_the_template():
    """A turn closes the answer before it, unless that is done."""
    newline = TOKENIZER.encode("\n")[0]
    for after, text in (
        (None, "<user>hi\n<assistant>"),
        (newline, "<user>hi\n<assistant>"),
        (3, "\n<user>hi\n<assistant>"),
    ):
        assert TOKENIZER.decode(encode(TOKENIZER, CHAT, 257, after=after)) == text
    assert encode(TOKENIZER, "plain", 257, after=3) == TOKENIZER.encode("plain", add_special_tokens=False)
    with pytest.raises(PromptError, match="leaves earlier answers out"):
        encode(with_template("{{ messages[-1]['content'] }}"), CHAT, 257, after=3)


def test_stops_are_strings_and_ids():
    """A special token as a string is its id."""
    assert split_stops([3, 4], None) == ((), (3, 4))
    assert split_stops(END, TOKENIZER) == ((), (256,))
    assert split_stops(["x", END, 7], TOKENIZER) == (("x",), (7, 256))


@pytest.mark.parametrize(
    ("stop", "tokenizer", "told"),
    [
        *((stop, TOKENIZER, "stop") for stop in ("", [""], [1.5], [None], [True])),
        ("x", None, "no tokenizer"),
        (END + "\n", TOKENIZER, r"stop must not have the special token '<\|end\|>' beside other text"),
    ],
)
def test_bad_stops_are_refused(stop, tokenizer, told):
    with pytest.raises(ConfigError, match=told):
        split_stops(stop, tokenizer)


@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_pieces_join_to_the_text_before_the_first_stop(text, stops):
    stream, pieces = TextStream(TOKENIZER, stops), []
    for token in TOKENIZER.encode(text):
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    cuts = [text.find(stop) for stop in stops if stop in text]
    assert "".join(pieces) == stream.text == text[: min(cuts, default=len(text))]
    assert stream.stopped == bool(cuts)


def test_half_a_character_and_what_may_become_a_stop_string_are_held_back():
    assert pushed("a\u00e9\U0001f600")[1] == ["a", "", "\u00e9", "", "", "", "\U0001f600"]
    stream, pieces = pushed("aENxEND", ["END"])
    assert pieces == ["a", "", "", "ENx", "", "", ""]
    assert stream.stopped


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
    stream, _ = pushed(text, [stop])
    assert TOKENIZER.decode(stream.tokens[: stream.kept()]) == kept


def test_a_token_that_holds_more_than_the_stop_string_is_left_out_whole():
    """The text is cut inside the token; the tokens are not."""
    pairs = byte_tokenizer()
    pairs.add_tokens(["ab", "c.", "\nd"])
    stream = TextStream(pairs, [".\n"])
    for token in pairs.encode("abc.\nd"):
        stream.push(token)
    assert (len(stream.tokens), stream.text, stream.kept()) == (3, "abc", 1)


def test_a_token_is_compared_with_the_newest_text_alone(monkeypatch):
    """A stop string of 1,000 characters, which the text begins again and again, after 20,000 characters."""
    compared, overlap = [], text_module.overlap
    spy = lambda tail, stop: compared.append(len(tail)) or overlap(tail, stop)  # noqa: E731
    monkeypatch.setattr(text_module, "overlap", spy)
    stream, pieces = pushed("xy" * 10_000 + ("ab" * 400 + "-") * 2, ["ab" * 500])
    assert "".join(pieces) == stream.text == "xy" * 10_000 + ("ab" * 400 + "-") * 2
    assert len(compared) == 21_602
    assert max(compared) <= 801
