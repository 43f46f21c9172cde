"""Conversations in the template of each family: the ids of transformers, turn by turn, on a stored document or not."""

import datetime
import json
from types import SimpleNamespace

import pytest
from chat_cases import FOUND, TOOL, ids_of, turns
from family_templates import FAMILIES
from transformers.utils import chat_template_utils

from jshadow.engine.text import encode as encode_prompt
from jshadow.serving.http.marks import format_of, short_id
from jshadow.weights.templates import DATE, beginning, document_ids, document_text, frame
from jshadow.weights.tokenizer import encode

DOCUMENT = "The sea is calm.\nThe lamp of the harbor burns."
FILE = {"type": "file", "file": {"file_id": "file-1"}}
TOKENIZERS = {name: family.tokenizer() for name, family in FAMILIES.items()}


@pytest.fixture(autouse=True)
def date(monkeypatch):
    """Today is the day that documents are told."""
    day = datetime.datetime.combine(DATE, datetime.time())
    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: day))


def spoken(name, arguments, lead, tools):
    """What a client sends, without a document: a system text if there is a lead, and calls if there are tools."""
    chat = turns(arguments)
    return (chat if lead else chat[1:]) if tools else [*(chat[:1] if lead else []), chat[1], *chat[5:]]


def told(name, chat, tools):
    """What the template gets of a chat: objects, ids, calls and tools as its model has them."""
    template, made = FAMILIES[name].template, []
    form = format_of(template)
    for message in chat:
        message = dict(message)
        calls = message.get("tool_calls", [])
        if form is not None and form.short_ids:
            calls = [call | {"id": short_id(call["id"])} for call in calls]
            if "tool_call_id" in message:
                message["tool_call_id"] = short_id(message["tool_call_id"])
        if calls and "tool_calls" not in template:
            said = [form.written("find", json.dumps(one, ensure_ascii=False)) for one in (FOUND, {})]
            message["content"] += "".join(said)
            del message["tool_calls"]
        elif calls:
            message["tool_calls"] = calls
        made.append(message)
    if name == "llama3.1" and len(chat) > 2 and tools:  # one call in a message, with its answer behind it
        place = next(place for place, message in enumerate(made) if "tool_calls" in message)
        asked, answers = made[place], made[place + 1 : place + 3]
        both = [asked | {"tool_calls": [call]} for call in asked["tool_calls"]]
        made[place : place + 3] = [one for pair in zip(both, answers, strict=True) for one in pair]
    if name == "phi4-mini" and tools:
        if made[0]["role"] != "system":
            made.insert(0, {"role": "system", "content": ""})
        made[0]["tools"] = json.dumps(tools, ensure_ascii=False)
    return made


def rendered(name, chat, tools):
    """What transformers makes of the whole chat."""
    more = {"xml_tools": tools} if name == "smollm3" and tools else {}
    options = {"add_generation_prompt": True, "tokenize": False} | more
    return TOKENIZERS[name].apply_chat_template(told(name, chat, tools), tools, **options)


def turn_ends(chat):
    """The numbers of messages after which the model answers."""
    roles = [message["role"] for message in chat] + [""]
    return [place + 1 for place in range(len(chat)) if roles[place] in ("user", "tool") and roles[place + 1] != "tool"]


def cases(family):
    """Whether there are a system text and tools."""
    leads = (False, True) if family.system else (False,)
    return [(lead, tools) for lead in leads for tools in ([None, [TOOL]] if family.tools else [None])]


@pytest.mark.parametrize("name", FAMILIES)
def test_each_turn_has_the_ids_that_transformers_gives_the_whole_chat(name):
    tokenizer = TOKENIZERS[name]
    for lead, tools in cases(FAMILIES[name]):
        mine, theirs = (spoken(name, arguments, lead, tools) for arguments in (json.dumps, dict))
        for count in turn_ends(mine):
            want = tokenizer.encode(rendered(name, theirs[:count], tools), add_special_tokens=False)
            assert ids_of(tokenizer, mine[:count], tools) == want, (lead, tools, count)


@pytest.mark.parametrize("place", ["first", "behind a text", "in the last question"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_document_in_a_chat_has_the_ids_of_its_text_and_those_that_are_stored(name, place):
    """The stored ids are the beginning of each turn before whose document the template writes nothing else."""
    family, tokenizer = FAMILIES[name], TOKENIZERS[name]
    stored = document_ids(tokenizer, DOCUMENT)
    for lead, tools in cases(family):
        mine, theirs = (spoken(name, arguments, lead, tools) for arguments in (json.dumps, dict))
        at = max(turn_ends(mine)) - 1 if place == "in the last question" else int(lead)
        asked, before = mine[at]["content"], "Read this." if place == "behind a text" else ""
        texts = [{"type": "text", "text": text} for text in (before, asked)]
        mine[at] = {"role": "user", "content": [*texts[:1] * bool(before), FILE, texts[1]]}
        theirs[at] = {"role": "user", "content": "\n\n".join([*[before] * bool(before), DOCUMENT, asked])}
        for count in turn_ends(mine):
            if at < count:
                text = rendered(name, theirs[:count], tools)
                ids = ids_of(tokenizer, mine[:count], tools, files=lambda _: stored)
                assert ids == tokenizer.encode(text, add_special_tokens=False), (lead, tools, count)
                if place == "first" and count == 1 and not lead and not tools:
                    assert ids == stored + frame(tokenizer, asked)[1], "as Library.ask puts them together"
                begins = text.startswith(beginning(tokenizer).text + DOCUMENT)
                assert (ids[: len(stored)] == stored) == begins
                # Mistral's template puts tools and the system text before the last question.
                leads = (lead or tools) and not (name.startswith("mistral-") and family.tools and count == len(mine))
                assert begins == (place == "first" and not leads), (lead, tools, count)


# The blanks that a template puts before an answer and behind it, with that of the tokenizer behind a special token.
BLANKS = {"mistral-v0.3": ("  ", ""), "mistral-nemo": (" ", ""), "llama2": (" ", " "), "mistral-v0.2": (" ", " ")}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_state_that_is_continued_turn_by_turn_has_the_ids_of_the_whole_chat(name):
    """As in `generate(state=...)`. A mark that the template writes before an answer and leaves out later stays."""
    tokenizer, ids, chat = TOKENIZERS[name], [], []
    before, behind = BLANKS.get(name, ("", ""))
    for question, answer in (("the sea is", "calm."), ("and the land?", "it is not."), ("so?", "yes")):
        chat.append({"role": "user", "content": question})
        ids += encode_prompt(tokenizer, chat[-1:], len(tokenizer), after=ids[-1] if ids else None)
        whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        left = tokenizer.convert_tokens_to_ids("<think>") if name == "glm-z1" else None
        assert [token for token in ids if token != left] == [token for token in whole if token != left]
        ids += encode(tokenizer, before + answer + behind)
        chat.append({"role": "assistant", "content": answer})


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "document", [DOCUMENT, " the sea ", "\nthe sea", "1", "\u4e2d [INST]<|im_end|></s>", "a" * 300]
)
def test_the_text_of_a_document_comes_back_from_its_ids(name, document):
    """With the blank or the line break that the tokenizer joins with its first word."""
    tokenizer = TOKENIZERS[name]
    ids = document_ids(tokenizer, document)
    assert document_text(tokenizer, ids) == document
    assert beginning(tokenizer).begins(tokenizer, ids)
    assert not beginning(tokenizer).begins(tokenizer, ids[3:])
