"""Documents in the first message of a chat: their ids are those of the message, whatever comes before them."""

import re
import time

import pytest
from tokenizers import AddedToken
from tokenizers_by_kind import INST, TOKENIZERS, TURNS, sentencepiece

from jshadow.errors import PromptError
from jshadow.weights.templates import beginning, document_ids, document_text, end_tokens, frame, rendered, template_of

# What a template has before a document: nothing, a token, a blank behind a text or behind a token, and a line break.
BARE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
BARE += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
SHAPES = {
    "nothing": (BARE, ()),
    "a token": (BARE.replace("{{ m['content'] }}", "<|user|>{{ m['content'] }}"), ()),
    "a blank": (INST, ()),
    "a token and a blank": (INST, ("[INST]", "[/INST]")),
    "a line break": (TURNS, ()),
}
DOCUMENTS = ("the sea", " the sea", "  the", "\nthe sea", "\n\n the", "the sea \n", "\u4e2d\U0001f600", "1.", "x" * 99)


def shaped(shape, blank):
    template, marks = SHAPES[shape]
    tokenizer = sentencepiece(blank, template)
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks], special_tokens=True)
    return tokenizer


@pytest.mark.parametrize("blank", ["prepend", "first", "never"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_document_and_its_question_have_the_ids_of_one_message(shape, blank):
    """And the text comes back from the stored ids, without the blank that is in one token with its first word."""
    tokenizer = shaped(shape, blank)
    for document in DOCUMENTS:
        chat = [{"role": "user", "content": f"{document}\n\nwhat is it?"}]
        whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        ids = document_ids(tokenizer, document)
        assert ids + frame(tokenizer, "what is it?")[1] == whole
        assert beginning(tokenizer).begins(tokenizer, ids)
        assert document_text(tokenizer, ids) == document


@pytest.mark.parametrize("kind", ["plain", "merging", "plain-llama2"])
@pytest.mark.parametrize("document", DOCUMENTS)
def test_without_a_template_a_document_begins_the_text(kind, document):
    tokenizer = sentencepiece("prepend", None) if kind == "plain-llama2" else TOKENIZERS[kind]
    ids, whole = document_ids(tokenizer, document), tokenizer.encode(document)
    assert ids == whole[: len(ids)]  # some tokenizers have an end token behind it
    assert document_text(tokenizer, ids) == document


@pytest.mark.parametrize("text", ["</s>", "<|end|> the sea", "a<|user|>b</s>"])
@pytest.mark.parametrize("shape", SHAPES)
def test_special_tokens_in_a_document_are_plain_text_and_come_back(shape, text):
    tokenizer = shaped(shape, "prepend")
    ids = document_ids(tokenizer, text)
    assert document_text(tokenizer, ids) == text
    marks = [token for token in ids if token in tokenizer.added_tokens_decoder]
    assert marks == [token for token in document_ids(tokenizer, "x") if token in tokenizer.added_tokens_decoder]


BLANKS_AFTER = [AddedToken(f"<|{name}|>", special=True, normalized=False, rstrip=True) for name in ("user", "end")]


@pytest.mark.parametrize("kind", ["phi3", "plain-llama2", "plain", "merging"])
@pytest.mark.parametrize(
    "document", ["<|end|> b", "</s>", "<s>the sea", "<|user|>\n<|user|>", "  sea", "\n\nsea", "sea\n "]
)
def test_each_document_that_is_added_can_be_asked_about(kind, document):
    """Phi-3's marks take the blanks behind them, so a message loses its first ones, as in transformers."""
    tokenizer = (
        sentencepiece("prepend", TURNS) if kind == "phi3" else TOKENIZERS.get(kind) or sentencepiece("prepend", None)
    )
    if kind == "phi3":
        tokenizer.add_special_tokens({"additional_special_tokens": BLANKS_AFTER})
    ids = document_ids(tokenizer, document)
    assert beginning(tokenizer).begins(tokenizer, ids)
    assert document_text(tokenizer, ids) == (document.lstrip() if kind == "phi3" else document)
    if kind == "phi3" and "<" not in document:
        chat = [{"role": "user", "content": f"{document}\n\nso?"}]
        whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert ids + frame(tokenizer, "so?")[1] == whole


@pytest.mark.parametrize("blank", ["prepend", "first", "never"])
@pytest.mark.parametrize("template", [INST, TURNS, None], ids=["inst", "turns", "none"])
@pytest.mark.parametrize("document", ["sea \u4e2d\u6587 calm\n", "\U0001f600", "sea\u4e2d", "\u4e2d sea", "the sea"])
def test_characters_that_the_tokenizer_does_not_know_stay_unknown(blank, template, document):
    """Their text comes back as U+FFFD, whose ids are those of the document."""
    tokenizer = sentencepiece(blank, template, size=300)
    ids = document_ids(tokenizer, document)
    text = document_text(tokenizer, ids)
    assert document_ids(tokenizer, text) == ids
    assert beginning(tokenizer).begins(tokenizer, ids)
    merged = template == TURNS and document[0] > "z"  # with the line break before them, which is unknown too
    assert text == "".join(
        "\ufffd" if run[0] > "z" or run == "\n" else run for run in re.split("([^ -z]+)", document)[merged * 2 :] if run
    )


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "nothing"])
def test_ids_that_begin_in_another_way_are_seen(shape):
    tokenizer = shaped(shape, "first")
    other = shaped("a line break" if shape == "a blank" else "a blank", "first")
    for ids in (document_ids(other, "the sea"), [], [5, 6], document_ids(tokenizer, "the sea")[1:]):
        assert not beginning(tokenizer).begins(tokenizer, ids)


LOOP = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
TURN = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("condition", "chat", "tools"),
    [
        ("messages[0].role == 'system'", [{"role": "system", "content": "Be brief."}, TURN], None),
        ("messages | length > 3", [TURN] * 4, None),
        ("tools", [TURN], [{"type": "function", "function": {"name": "f"}}]),
        ("messages[-1].content != 'Hi'", [TURN, {"role": "user", "content": "go"}], None),
    ],
)
def test_a_template_that_loops_for_some_chats_is_ended_for_them(condition, chat, tools):
    tokenizer = sentencepiece("never", f"{{% if {condition} %}}{LOOP}{{% endif %}}{BARE}")
    begin = time.monotonic()
    with pytest.raises(PromptError, match="does not come to an end"):
        rendered(tokenizer, chat, tools=tools)
    assert time.monotonic() - begin < 5
    assert rendered(tokenizer, [TURN]) == "<s>Hi<|assistant|>"
    assert rendered(tokenizer, [TURN] * 3) == "<s>HiHiHi<|assistant|>"


def test_a_long_chat_comes_to_an_end():
    tokenizer = sentencepiece(
        "never", TURNS + "{% for m in messages %}{% for b in range(500) %}{% endfor %}{% endfor %}"
    )
    assert rendered(tokenizer, [TURN] * 500).count("Hi") == 500


@pytest.mark.parametrize("change", ["lower", "upper", "title", "trim", "capitalize", "default('')", "string"])
@pytest.mark.parametrize("blank", ["", " ", "\n"])
def test_end_tokens_are_found_though_the_template_changes_texts(change, blank):
    """Else the first mark of a chat would end each answer."""
    answer = f"{{{{ m['content'] | {change} }}}}{blank}<|end|>"
    tokenizer = sentencepiece("never", f"<|user|>{{% for m in messages %}}<|assistant|>{answer}{{% endfor %}}")
    assert end_tokens(tokenizer) == tuple(tokenizer.convert_tokens_to_ids(["</s>", "<|end|>"]))
    tokenizer.chat_template = "<|user|>{% for m in messages %}<|assistant|>{{ m['content'][:3] }}<|end|>{% endfor %}"
    assert end_tokens(tokenizer) == (tokenizer.eos_token_id,)


def test_of_named_templates_one_is_for_documents_answers_and_end_tokens():
    tokenizer = sentencepiece("first")
    for names in (["default", "tool_use"], ["default"], ["chat"]):
        tokenizer.chat_template = {name: f"{name}: {TURNS}" for name in names}
        assert tokenizer.decode(document_ids(tokenizer, "the sea")).startswith(f"{names[0]}: <s>")
        assert template_of(tokenizer, tools=True).startswith(f"{names[-1]}: ")
        assert end_tokens(tokenizer) == tuple(tokenizer.convert_tokens_to_ids(["</s>", "<|end|>"]))
    tokenizer.chat_template = {"a": TURNS, "b": TURNS}
    assert end_tokens(tokenizer) == (tokenizer.eos_token_id,)
    for refused in (document_ids, frame):
        with pytest.raises(PromptError, match=r"named 'default', got \['a', 'b'\]"):
            refused(tokenizer, "the sea")
