"""One tokenizer of each kind: with a chat template, without one, and one whose tokens have several bytes."""

from tiny_text import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from jshadow.evaluation import tasks


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
    tokenizer.train_from_iterator([*tasks.NOISE, tasks.HEAD, tasks.QUESTION, *tasks.paragraphs()[:40]], trainer)
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


TOKENIZERS = {"chat": byte_tokenizer(), "plain": plain_tokenizer(), "merging": merging_tokenizer()}
