"""Prompts to ids, ids to text: every kind of prompt, stop strings across token borders, unfinished characters."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_text import END, byte_tokenizer

from jshadow.engine.text import TextStream, encode, split_prompts, split_stops
from jshadow.errors import ConfigError, PromptError

TOKENIZER = byte_tokenizer()
CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("prompt", "count", "bare"),
    [
        ("text", 1, True),
        (CHAT, 1, True),
        ([1, 2, 3], 1, True),
        (np.array([1, 2]), 1, True),
        (["a", "bc"], 2, False),
        ([CHAT, "x"], 2, False),
        ([[1], [2, 3]], 2, False),
        (["one"], 1, False),
    ],
)
def test_one_prompt_or_many(prompt, count, bare):
    prompts, is_bare = split_prompts(prompt)
    assert (len(prompts), is_bare) == (count, bare)
    assert all(encode(TOKENIZER, one, 257) for one in prompts)


@pytest.mark.parametrize("prompt", [[], (), None, 7, {}, np.zeros((0,), np.int32)])
def test_no_prompt_is_refused(prompt):
    def read():
        return [encode(TOKENIZER, one, 257) for one in split_prompts(prompt)[0]]

    with pytest.raises(PromptError, match="prompt"):
        read()


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "told"),
    [
        (TOKENIZER, "", "at least 1 token"),
        (TOKENIZER, [300], "vocab_size=257"),
        (TOKENIZER, [-1], "got -1"),
        (TOKENIZER, [1, True, "x"], "token ids"),
        (TOKENIZER, [True, False], "token ids"),
        (TOKENIZER, [1, True], "token ids"),
        (TOKENIZER, [{"role": "user"}], "role and content"),
        (None, "text", "no tokenizer"),
        (None, CHAT, "no tokenizer"),
    ],
)
def test_bad_prompts_are_told(tokenizer, prompt, told):
    with pytest.raises(PromptError, match=told):
        encode(tokenizer, prompt, 257)


def test_a_chat_goes_through_the_template():
    assert TOKENIZER.decode(encode(TOKENIZER, CHAT, 257)) == "<user>hi\n<assistant>"


def test_a_chat_needs_a_template():
    bare = byte_tokenizer()
    bare.chat_template = None
    with pytest.raises(PromptError, match="chat template"):
        encode(bare, CHAT, 257)


@pytest.mark.parametrize("stop", ["", [""], [1.5], [None], [True]])
def test_bad_stops_are_refused(stop):
    with pytest.raises(ConfigError, match="stop"):
        split_stops(stop, TOKENIZER)


def test_stop_strings_need_a_tokenizer():
    assert split_stops([3, 4], None) == ((), (3, 4))
    with pytest.raises(ConfigError, match="no tokenizer"):
        split_stops("x", None)


@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_pieces_join_to_the_text_before_the_first_stop(text, stops):
    stream = TextStream(TOKENIZER, stops)
    pieces = []
    for token in TOKENIZER.encode(text):
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    cuts = [text.find(stop) for stop in stops if stop in text]
    assert "".join(pieces) == stream.text == text[: min(cuts, default=len(text))]
    assert stream.stopped == bool(cuts)


def test_no_piece_is_half_a_character():
    stream = TextStream(TOKENIZER)
    pieces = [stream.push(token) for token in TOKENIZER.encode("a\u00e9\U0001f600")]
    assert pieces == ["a", "", "\u00e9", "", "", "", "\U0001f600"]


def test_what_may_become_a_stop_string_is_held_back():
    stream = TextStream(TOKENIZER, ["END"])
    pieces = [stream.push(token) for token in TOKENIZER.encode("aENxEND")]
    assert pieces == ["a", "", "", "ENx", "", "", ""]
    assert stream.stopped


def test_a_turn_closes_the_answer_before_it_unless_that_is_done():
    tokenizer = byte_tokenizer()
    turn = [{"role": "user", "content": "Why?"}]
    newline = tokenizer.encode("\n")[0]
    closed, left_open = encode(tokenizer, turn, 257, after=newline), encode(tokenizer, turn, 257, after=3)
    assert tokenizer.decode(left_open) == "\n<user>Why?\n<assistant>"
    assert tokenizer.decode(closed) == "<user>Why?\n<assistant>"
    assert encode(tokenizer, "plain", 257, after=3) == tokenizer.encode("plain", add_special_tokens=False)


def test_a_template_that_cannot_go_on_says_so():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(PromptError, match="leaves earlier answers out"):
        encode(tokenizer, [{"role": "user", "content": "x"}], 257, after=3)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(PromptError, match="roles must alternate"):
        encode(tokenizer, [{"role": "user", "content": "x"}], 257)


def test_special_tokens_as_stop_strings_are_their_ids():
    assert split_stops(END, TOKENIZER) == ((), (256,))
    assert split_stops(["x", END, 7], TOKENIZER) == (("x",), (7, 256))
    with pytest.raises(ConfigError, match=r"stop must not have the special token '<\|end\|>' beside other text"):
        split_stops(END + "\n", TOKENIZER)


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
    stream = TextStream(TOKENIZER, [stop])
    for token in TOKENIZER.encode(text):
        stream.push(token)
    assert TOKENIZER.decode(stream.tokens[: stream.kept()]) == kept


class Pairs:
    """A tokenizer whose tokens are longer than a character."""

    def decode(self, ids, **_):
        return "".join(["ab", "c.", "\nd"][index] for index in ids)


def test_a_token_that_holds_more_than_the_stop_string_is_left_out_whole():
    """The text is cut inside the token; the tokens are not."""
    stream = TextStream(Pairs(), [".\n"])
    for token in range(3):
        stream.push(token)
    assert (stream.text, stream.kept()) == ("abc", 1)
