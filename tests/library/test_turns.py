"""Chats whose template writes an earlier answer otherwise before the next question: they are read anew from there."""

import dataclasses

import numpy as np
import pytest
from byte_models import PARAMS
from family_cases import family_config
from family_templates import QWEN3
from tiny_text import marked_tokenizer, spelled

import jshadow
from jshadow.library.shelf import Entry
from jshadow.policies import Full
from jshadow.weights.params import init_params
from jshadow.weights.templates import document_ids

ENDS = "<|im_end|>"
# As Qwen3.5 does, the prompt opens what the model thinks.
OPENS = "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n"
QWEN35 = QWEN3.replace(OPENS, OPENS + "<think>\\n")
KEEPS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
KEEPS += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
MOVES = KEEPS.replace("m.content", "m.content.split('</think>')[-1]").replace(
    "<|im_end|>",
    "{% if '</think>' in m.content %}({{ m.content.split('</think>')[0].split('<think>')[1] }}){% endif %}<|im_end|>",
)
DOCUMENT, ASKED = "The sea is calm.", "\n\nWho?<|im_end|>\n<|im_start|>assistant\n"
NEXT = "<|im_end|>\n<|im_start|>user\nWhy <|im_end|>?<|im_end|>\n<|im_start|>assistant\n"
THOUGHT = "<think>\nIs it me?\n</think>\n\nMe."


def params_of(template, config=None):
    tokenizer = marked_tokenizer("<|im_start|>", ENDS, special=True)
    tokenizer.chat_template = template
    params = PARAMS if config is None else init_params(config)
    return dataclasses.replace(
        params,
        config=dataclasses.replace(params.config, vocab_size=259, eos_ids=(258,)),
        tokenizer=tokenizer,
    )


# The template, the answer that was drawn, what it is told before the next question, and the end of the prompt.
CASES = {
    "kept": (KEEPS, THOUGHT, None, ""),
    "no thoughts": (QWEN3, "Me.", None, ""),
    "blanks": (QWEN3, "\nMe. ", None, ""),
    "Qwen3": (QWEN3, THOUGHT, "Me.", ""),
    "Qwen3.5": (QWEN35, THOUGHT.removeprefix("<think>\n"), "Me.", "<think>\n"),
    "Qwen3.5, cut": (QWEN35, "Is it", "Is it", "<think>\n"),
    "moved": (MOVES, "<think>Is <|im_end|> it?</think>Me <|im_end|>.", "Me <|im_end|>.(Is <|im_end|> it?)", ""),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ended", [True, False])
def test_the_tokens_of_a_turn_are_those_of_the_template(tmp_path, name, ended):
    """A token of the template that a question or an answer spells is plain text."""
    template, answer, told, opened = CASES[name]
    params = params_of(template)
    tokenizer = params.tokenizer
    first = [*document_ids(tokenizer, DOCUMENT), *tokenizer.encode(ASKED + opened)]
    held = [*first, *spelled(tokenizer, answer), *[258] * ended]
    with jshadow.Library(tmp_path, params, Full(), capacity=256) as library:
        library.catalog.put("key", Entry(np.array(held, np.int32), {"ends": "answer"}))
        ids = library.prompt("key", "Why <|im_end|>?")
    written = opened + answer if told is None else told
    assert tokenizer.decode(ids) == f"<|im_start|>user\n{DOCUMENT}{ASKED}{written}{NEXT}{opened}"
    assert ids.count(258) == 3  # the ends of the messages
    assert ids[: len(first) - len(opened)] == first[: len(first) - len(opened)]
    assert (ids[: len(held)] == held) == (told is None)


@pytest.mark.slow
def test_a_hybrid_reads_a_changed_turn_anew_from_the_longest_stored_beginning(tmp_path):
    config = family_config("qwen3_5")
    sizes = {"num_layers": 2, "recurrent": dataclasses.replace(config.recurrent, layers=(0,)), "vocab_size": 259}
    params = params_of(QWEN35, dataclasses.replace(config, **sizes))
    with jshadow.Library(tmp_path, params, Full(), capacity=256) as library:
        document, held = library.add(DOCUMENT), []
        for said, stored in ((THOUGHT.removeprefix("<think>\n"), document.tokens), ("Me", 0)):
            held = [
                *document_ids(params.tokenizer, DOCUMENT),
                *params.tokenizer.encode(ASKED + "<think>\n" + said),
                258,
            ]
            state = jshadow.generate(params, held, Full(), max_new_tokens=0, capacity=256).state
            key = library.store(held, state, ends="answer")
            if not stored:
                library.remove(document.key)
            ids = library.prompt(key, "Why?")
            reply = library.ask(key, "Why?", max_new_tokens=5, store=True)
            assert (reply.stored_tokens, reply.read_tokens) == (stored, len(ids) - stored)
            assert reply.tokens == jshadow.generate(params, ids, Full(), max_new_tokens=5, capacity=256).tokens
            assert library.ids(reply.key).tolist() == [*ids, *reply.tokens]
