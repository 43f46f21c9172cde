"""One tokenizer of each kind: with a chat template, without one, one whose tokens have several bytes; SentencePiece."""

import functools
import json

from tiny_text import byte_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from jshadow.evaluation.tasks import framing, texts
from jshadow.evaluation.tasks.needles import QUESTION


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Several bytes a token, a first token of its own, no chat template, and a short limit that it warns of."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts.NOISE, framing.HEAD, QUESTION, *texts.paragraphs()[:40]], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A", "</s>"], special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=420,
        clean_up_tokenization_spaces=False,
    )


def plain_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


INST = "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
INST += "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
TURNS = "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
TURNS += "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"


def sentencepiece(blank: str, template: str | None = INST, *, size: int = 600) -> PreTrainedTokenizerFast:
    """A small vocabulary of the kind of SentencePiece: blanks are U+2581, and characters without a token are bytes.

    Args:
        blank: how a blank comes before a text. "prepend": a normalizer puts one before each text between special
            tokens, as in Llama 2 and Phi-3. "first": before the first text, as in Mistral 7B. "never": as in Gemma.
        template: the chat template.
        size: number of tokens, without some marks of the template. Only more than 300 have tokens for all bytes.
    """
    model = models.BPE(*_sentencepiece_vocabulary(size), unk_token="<unk>", fuse_unk=True, byte_fallback=size > 300)
    tokenizer = Tokenizer(model)
    replaced = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if blank == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        prepend = [normalizers.Prepend("\u2581")] if blank == "prepend" else []
        tokenizer.normalizer = normalizers.Sequence([*prepend, replaced])
    if blank != "never":
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in ("<unk>", "<s>", "</s>", "<|end|>")]
        + [AddedToken(f"<|{role}|>", special=True, normalized=False) for role in ("user", "assistant", "system")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )


@functools.cache
def _sentencepiece_vocabulary(size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The ids of the tokens, without a line break, and the merges."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256 if size > 300 else 0))]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=names, show_progress=False, max_token_length=12)
    learned = [*texts.NOISE, framing.HEAD, QUESTION, *texts.paragraphs()[:40]]
    tokenizer.train_from_iterator([text.replace("\n", " ") for text in learned], trainer)
    made = json.loads(tokenizer.to_str())["model"]
    return made["vocab"], [tuple(pair) for pair in made["merges"]]


SENTENCEPIECE = {
    "llama2": sentencepiece("prepend"),
    "phi3": sentencepiece("prepend", TURNS),
    "mistral": sentencepiece("first"),
    "gemma": sentencepiece("never", TURNS),
    "plain-llama2": sentencepiece("prepend", None),
}
TOKENIZERS = {"chat": byte_tokenizer(), "plain": plain_tokenizer(), "merging": merging_tokenizer()}
