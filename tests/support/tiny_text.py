"""A byte-level tokenizer without merges: every byte is a token. Text tests need no checkpoint."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|end|>"
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """257 ids: the bytes, and an end token (id 256)."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False)
    wrapped.chat_template = TEMPLATE
    return wrapped
