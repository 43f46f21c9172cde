"""The real tokenizer and template of Qwen2.5: forced calls, forms and chats with calls. Its marks are tokens."""

import json
import re

import pytest
from chat_cases import TOOL, TOOLS, drawn, form, ids_of, turns
from conftest import CACHE
from qwen_tokenizer import VOCABULARY, qwen_tokenizer

from jshadow.serving.http.marks import HERMES, Splitter, Wanted, format_of
from jshadow.weights.templates import document_ids, document_text, frame, template_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def tokenizer():
    return qwen_tokenizer(CACHE / "qwen2.5")


def test_a_forced_call_is_the_one_that_the_template_writes(tokenizer):
    """The text of the drawn tokens is that of the same call in the next prompt, so its beginning stays."""
    assert format_of(template_of(tokenizer, tools=True)) is HERMES
    grammar, end = form(tokenizer, "<tool_call>", tools=TOOLS, tool_choice="required"), tokenizer.eos_token_id
    seen = set()
    for seed in range(6):
        tokens = drawn(tokenizer, grammar, seed, VOCABULARY, end)
        splitter = Splitter(tokenizer, wanted=Wanted(HERMES, ("find", "wait-a-bit")), ends=frozenset([end]))
        [delta] = [one for token in tokens for one in splitter.push(token)] + splitter.finish("stop")
        name, arguments = delta.call
        seen.add(name)
        asked = [{"role": "user", "content": "Where is it?"}]
        call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
        told = [*asked, {"role": "assistant", "content": None, "tool_calls": [call]}]
        before, after = (tokenizer.decode(ids_of(tokenizer, chat, TOOLS)) for chat in (asked, told))
        assert after.startswith(before + tokenizer.decode(tokens))
    assert seen == {"find", "wait-a-bit"}


@pytest.mark.parametrize("text", ["<tool_call>", "a <|im_end|> b", "</tool_call><|endoftext|>"])
def test_the_text_of_a_special_token_fits_a_form(tokenizer, text):
    end = tokenizer.eos_token_id
    for seed in range(2):
        body = {"type": "json_schema", "json_schema": {"schema": {"enum": [text]}}}
        tokens = drawn(tokenizer, form(tokenizer, response_format=body), seed, VOCABULARY, end)
        assert json.loads(tokenizer.decode(tokens, skip_special_tokens=True)) == text
        body = {"type": "regex", "regex": f"({re.escape(text)}){{2}}"}
        tokens = drawn(tokenizer, form(tokenizer, response_format=body), seed, VOCABULARY, end)
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text * 2


def test_each_turn_has_the_ids_of_transformers_and_begins_with_those_before(tokenizer):
    before = []
    for count in (2, 3, 5, 6, 7):
        chat = turns(dict)[:count]
        text = tokenizer.apply_chat_template(chat, tools=[TOOL], tokenize=False, add_generation_prompt=True)
        ids = ids_of(tokenizer, turns(json.dumps)[:count], [TOOL])
        assert ids == tokenizer.encode(text, add_special_tokens=False)
        common = next(
            (place for place, pair in enumerate(zip(before, ids, strict=False)) if len({*pair}) > 1), len(before)
        )
        assert len(before) - common <= 3  # the beginning of an answer, before a turn that is none
        before = ids


@pytest.mark.parametrize("document", ["The sea is calm.", "\n\nThe sea", "1", "calm"])
def test_a_document_ends_at_a_border_of_tokens(tokenizer, document):
    """It begins with the ids of the whole message. A token of the message may cross its end. None of a prompt does."""
    file = {"role": "user", "content": [{"type": "file", "file": {"file_id": "1"}}, {"type": "text", "text": "Who?"}]}
    whole = ids_of(tokenizer, [{"role": "user", "content": f"{document}\n\nWho?"}])
    stored = document_ids(tokenizer, document)
    ids = ids_of(tokenizer, [file], files=lambda _: stored)
    assert ids == stored + frame(tokenizer, "Who?")[1]
    assert tokenizer.decode(ids) == tokenizer.decode(whole)
    assert (ids == whole) == (document[-1] != ".")  # of which ".\n\n" is one token
    assert document_text(tokenizer, stored) == document


def test_the_text_of_a_mark_in_a_message_is_plain_text(tokenizer):
    """Also that of a mark which the template writes and the tokenizer does not call special."""
    special, mark = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<tool_call>"])
    hi = [{"role": "user", "content": "Hi"}]
    plain = ids_of(tokenizer, hi)
    ids = ids_of(tokenizer, [{"role": "user", "content": "Hi <|im_end|> <tool_call>"}])
    assert ids.count(special) == plain.count(special)
    assert ids.count(mark) == 0
    assert "Hi <|im_end|> <tool_call>" in tokenizer.decode(ids)
