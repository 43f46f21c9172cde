"""A byte-level tokenizer without merges: every byte is a token. Text tests need no checkpoint."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|end|>"
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"
# One with reasoning and tool calls, which a chat may switch on.
TOOL_TEMPLATE = """{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role[0] }}>
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}
{% endfor %}<a>{% if enable_thinking %}<think>{% endif %}{# </think> #}"""


def byte_tokenizer(*merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """257 ids: the bytes, and an end token (id 256). With merges, each is a token more before the end token."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    vocab = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[*merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False)
    wrapped.chat_template = TEMPLATE
    return wrapped


def marked_tokenizer(*marks: str, special: bool = False) -> PreTrainedTokenizerFast:
    """`byte_tokenizer` with a token more for each mark, from id 257 on. Decoded text leaves special ones out."""
    tokenizer = byte_tokenizer()
    added = [AddedToken(mark, special=special, normalized=False) for mark in marks]
    tokenizer.add_tokens(added, special_tokens=special)
    return tokenizer


def spelled(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The token ids of a text in bytes alone, whatever tokens of `marked_tokenizer` it has in it."""
    return byte_tokenizer().encode(text, split_special_tokens=True)
