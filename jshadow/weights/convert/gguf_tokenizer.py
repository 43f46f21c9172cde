"""The tokenizer in the metadata of a GGUF file, written as the files of a Hugging Face tokenizer."""

from pathlib import Path
from typing import Any, NamedTuple

from jshadow.errors import CheckpointError, ConfigError
from jshadow.weights.convert.files import quiet_transformers, read_json, write_json

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")  # each digit is a word
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased_pattern(ending: str, digits: str) -> str:
    """Return a pattern that ends a word before a capital letter, as in o200k of OpenAI."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_GPT4O_PATTERN = _cased_pattern(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}")
_TEKKEN_PATTERN = _cased_pattern("", r"\p{N}")
_NAMED_TOKENS = (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))


class _Pre(NamedTuple):
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


_QWEN2 = _Pre(pattern=_QWEN2_PATTERN, composed=True)
_LLAMA3 = _Pre(pattern=LLAMA3_PATTERN, ignore_merges=True, add_bos=True)
_PRE_TYPES: dict[str, _Pre] = {
    "gpt2": _Pre(),
    "gpt-2": _Pre(),
    "smollm": _Pre(digits=True),
    "starcoder": _Pre(digits=True),
    "refact": _Pre(digits=True),  # Granite 3
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "smaug-bpe": _LLAMA3._replace(add_bos=False),  # SmolLM3
    "dbrx": _Pre(pattern=LLAMA3_PATTERN),
    "glm4": _Pre(pattern=LLAMA3_PATTERN),
    "chatglm-bpe": _Pre(pattern=LLAMA3_PATTERN),
    "gpt-4o": _Pre(pattern=_GPT4O_PATTERN),
    "tekken": _Pre(pattern=_TEKKEN_PATTERN, ignore_merges=True, add_bos=True),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
# SentencePiece files have no pattern. This is their "pre" type.
_SENTENCE_PIECE = _Pre(add_bos=True)
# Phi-3 takes the blanks behind its marks away, but not those behind these tokens.
_PLAIN_MARKS = ("<unk>", "<s>", "<|endoftext|>")


def write_tokenizer(metadata: dict[str, Any], directory: Path, context: int) -> bool:
    """Write tokenizer.json and tokenizer_config.json, and chat_template.jinja if the file has a template.

    Args:
        metadata: the metadata of the file.
        directory: where to write.
        context: the longest sequence of the model, in tokens.

    Returns:
        Whether the file has a tokenizer.

    Raises:
        CheckpointError: lists or ids of tokens are damaged.
        ConfigError: the kind of the tokenizer is not known, or the way in which it splits a text.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        return False
    if model not in ("gpt2", "llama"):
        raise ConfigError(
            f"tokenizer.ggml.model must be 'gpt2' (byte-level BPE) or 'llama' (SentencePiece), got {model!r}"
        )
    name: Any = metadata.get("tokenizer.ggml.pre")
    if model == "gpt2" and (not isinstance(name, str) or name not in _PRE_TYPES):
        raise ConfigError(f"tokenizer.ggml.pre must be one of {sorted(_PRE_TYPES)}, got {name!r}")
    if model == "llama" and name not in (None, "default"):
        raise ConfigError(f"tokenizer.ggml.pre of a SentencePiece tokenizer must be 'default', got {name!r}")
    tokens, kinds = _tokens(metadata)
    named = {
        field: token
        for field, key in _NAMED_TOKENS
        if (token := _token(metadata, tokens, f"tokenizer.ggml.{key}_token_id")) is not None
    }
    pre = _PRE_TYPES[name] if model == "gpt2" else _SENTENCE_PIECE
    tokenizer = _byte_level_bpe(tokens, metadata, pre) if model == "gpt2" else _sentence_piece(tokens, kinds, metadata)
    strips = model == "llama" and metadata.get("general.architecture") == "phi3"
    _add_tokens(tokenizer, tokens, kinds, strips=strips)
    _add_ends(tokenizer, metadata, named, pre, tokens)
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


def _tokens(metadata: dict[str, Any]) -> tuple[list[str], list[int]]:
    """Return the tokens and their kinds."""
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.tokens must be distinct, got {len(tokens) - len(set(tokens))} duplicates"
        )
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.token_type must have {len(tokens)} entries, got {kinds!r:.80}")
    return tokens, kinds


def _token(metadata: dict[str, Any], tokens: list[str], key: str) -> str | None:
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(tokens):
        raise CheckpointError(f"{key} must lie in [0, {len(tokens)}), got {value!r}")
    return tokens[value]


def _byte_level_bpe(tokens: list[str], metadata: dict[str, Any], pre: _Pre) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = []
    for merge in _strings(metadata, "tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not space or not left or not right or " " in right:
            raise CheckpointError(f"tokenizer.ggml.merges must be two tokens with a space between, got {merge!r}")
        merges.append((left, right))
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
    return tokenizer


def _sentence_piece(tokens: list[str], kinds: list[int], metadata: dict[str, Any]) -> Any:
    """Build a tokenizer of SentencePiece, whose tokens have scores: of two neighbors, the best token is made first.

    In BPE the same happens if the pairs of tokens that make a token are merges, in the order of the tokens' scores.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not all(isinstance(one, float) for one in scores):
        raise CheckpointError(f"tokenizer.ggml.scores must be {len(tokens)} numbers, got {scores!r:.80}")
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    if not isinstance(prefix, bool):
        raise CheckpointError(f"tokenizer.ggml.add_space_prefix must be true or false, got {prefix!r:.80}")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [
        (scores[index], len(token[:cut]), token[:cut], token[cut:])
        for index, token in enumerate(tokens)
        if kinds[index] not in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    pairs.sort(key=lambda pair: (-pair[0], pair[1]))
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    unknown = unknown or _token(metadata, tokens, "tokenizer.ggml.unknown_token_id")
    merges = [(left, right) for *_, left, right in pairs]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    blank = "\N{LOWER ONE EIGHTH BLOCK}"
    before = [normalizers.Prepend(blank)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", blank)])
    behind = [decoders.Strip(content=" ", left=1)] if prefix else []
    steps = [decoders.Replace(blank, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *behind])
    return tokenizer


def _add_tokens(tokenizer: Any, tokens: list[str], kinds: list[int], *, strips: bool) -> None:
    """Add the tokens that are found in a text before it is split. `strips`: marks take the blanks behind them."""
    from tokenizers import AddedToken

    special, plain = [], []
    for token, kind in zip(tokens, kinds, strict=True):
        strip = strips and token not in _PLAIN_MARKS
        if kind in (_CONTROL, _UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False, rstrip=strip))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False, rstrip=strip))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _add_ends(tokenizer: Any, metadata: dict[str, Any], named: dict[str, str], pre: _Pre, tokens: list[str]) -> None:
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
