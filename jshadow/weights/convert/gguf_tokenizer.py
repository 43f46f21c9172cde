"""Rebuilding the tokenizer of a GGUF file, which stores it as lists, without torch.

Only byte-level BPE is supported. GGUF's "pre" type says how text is split into words before BPE. A wrong split gives
wrong token ids without any error, so an unknown type is refused.
"""

from pathlib import Path
from typing import Any, NamedTuple

from jshadow.errors import CheckpointError, ConfigError
from jshadow.weights.convert.files import read_json, write_json
from jshadow.weights.convert.quiet import quiet_transformers

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")  # each digit is a word
NAMED_TOKENS = (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))


class Pre(NamedTuple):
    """How text is split before BPE, for one "pre" type.

    Attributes:
        digits: whether every digit is split off first.
        pattern: regular expression that isolates words. None means the pattern of GPT-2.
        ignore_merges: whether a word that is a token becomes that token without applying the merges.
        add_bos: whether the bos token is put in front of a text if the file has no setting for this.
        composed: whether the text is brought into normal form C first, as the model's own tokenizer does.
    """

    digits: bool = False
    pattern: str | None = None
    ignore_merges: bool = False
    add_bos: bool = False
    composed: bool = False


LLAMA3 = Pre(pattern=LLAMA3_PATTERN, ignore_merges=True, add_bos=True)
PRE_TYPES: dict[str, Pre] = {
    "gpt2": Pre(),
    "gpt-2": Pre(),
    "smollm": Pre(digits=True),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "qwen2": Pre(pattern=QWEN2_PATTERN, composed=True),
}


def write_tokenizer(metadata: dict[str, Any], directory: Path, context: int) -> bool:
    """Write tokenizer.json and tokenizer_config.json, and chat_template.jinja if the file has a template.

    Args:
        metadata: the metadata of the GGUF file.
        directory: directory to write to.
        context: context length of the model, which becomes model_max_length of the tokenizer.

    Returns:
        Whether the file has a tokenizer. If it has none, nothing is written.

    Raises:
        ConfigError: the tokenizer model is not "gpt2", or the pre type is unknown.
        CheckpointError: the lists do not form a valid tokenizer.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        return False
    if model != "gpt2":
        raise ConfigError(f"tokenizer.ggml.model must be 'gpt2' (byte-level BPE), got {model!r}")
    name = metadata.get("tokenizer.ggml.pre")
    if name not in PRE_TYPES:
        raise ConfigError(f"tokenizer.ggml.pre must be one of {sorted(PRE_TYPES)}, got {name!r}")
    tokens, kinds, merges = _lists(metadata)
    named = {
        field: token
        for field, key in NAMED_TOKENS
        if (token := _token(metadata, tokens, f"tokenizer.ggml.{key}_token_id")) is not None
    }
    tokenizer = _byte_level_bpe(tokens, kinds, merges, PRE_TYPES[name])
    _add_ends(tokenizer, metadata, named, PRE_TYPES[name], tokens)
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"tokenizer.chat_template must be a string, got a {type(template).__name__}")
    with quiet_transformers() as transformers:  # slow to import; only conversion needs it
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, model_max_length=context, **named
        )
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(directory)
    _name_class(directory)
    return True


def _strings(metadata: dict[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"{key} must be a list of strings, got a {type(value).__name__}")
    return value


def _lists(metadata: dict[str, Any]) -> tuple[list[str], list[int], list[tuple[str, str]]]:
    tokens, merges = _strings(metadata, "tokenizer.ggml.tokens"), _strings(metadata, "tokenizer.ggml.merges")
    if len(set(tokens)) != len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.tokens must be distinct, got {len(tokens) - len(set(tokens))} duplicates"
        )
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.token_type must have {len(tokens)} entries, got {kinds!r:.80}")
    pairs = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not space or not left or not right or " " in right:
            raise CheckpointError(f"tokenizer.ggml.merges must be two tokens with a space between, got {merge!r}")
        pairs.append((left, right))
    return tokens, kinds, pairs


def _token(metadata: dict[str, Any], tokens: list[str], key: str) -> str | None:
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(tokens):
        raise CheckpointError(f"{key} must lie in [0, {len(tokens)}), got {value!r}")
    return tokens[value]


def _byte_level_bpe(tokens: list[str], kinds: list[int], merges: list[tuple[str, str]], pre: Pre) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=False, ignore_merges=pre.ignore_merges))
    except Exception as error:  # the Rust library raises plain Exception
        raise CheckpointError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from error
    if pre.composed:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if pre.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    return tokenizer


def _add_ends(tokenizer: Any, metadata: dict[str, Any], named: dict[str, str], pre: Pre, tokens: list[str]) -> None:
    """Make the tokenizer put bos and eos around encoded text if the file asks for it."""
    from tokenizers import processors

    before, after = [], []
    if metadata.get("tokenizer.ggml.add_bos_token", pre.add_bos) and "bos_token" in named:
        before = [named["bos_token"]]
    if metadata.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in named:
        after = [named["eos_token"]]
    ends = sorted({*before, *after})
    if not ends:
        return
    second = [f"{part}:1" for part in (*before, "$B", *after)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *second],
        special_tokens=[(token, tokens.index(token)) for token in ends],
    )


def _name_class(directory: Path) -> None:
    """Set the class of the tokenizer to the generic one, so that transformers uses tokenizer.json unchanged.

    A model-specific class such as LlamaTokenizer would replace the splitting of text.
    """
    path = directory / "tokenizer_config.json"
    write_json(path, read_json(path) | {"tokenizer_class": "PreTrainedTokenizerFast"})
