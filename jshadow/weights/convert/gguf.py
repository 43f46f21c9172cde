"""Reading a GGUF file of the architectures llama, qwen2, qwen3 and qwen3moe as a Hugging Face checkpoint.

The tables below map GGUF's tensor names and metadata keys to those of Hugging Face."""

import functools
import mmap
import re
import struct
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from jshadow.errors import CheckpointError, ConfigError, JshadowError
from jshadow.models.config import ModelConfig, RopeConfig
from jshadow.models.family import ModelFamily, Rule
from jshadow.models.registry import family_of
from jshadow.ops.rope import inverse_frequencies
from jshadow.weights.convert.files import check_file, quiet_transformers, read_json, write_json
from jshadow.weights.convert.huggingface import GENERATION, place
from jshadow.weights.convert.safetensors_file import raise_all
from jshadow.weights.convert.source import Source

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_KIND = "a GGUF file"
STRING, ARRAY = 8, 9
SCALARS: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in {
        0: "<u1",
        1: "<i1",
        2: "<u2",
        3: "<i2",
        4: "<u4",
        5: "<i4",
        6: "<f4",
        7: "?",
        10: "<u8",
        11: "<i8",
        12: "<f8",
    }.items()
}
MIN_FIELD, MIN_STRING, MIN_TENSOR = 13, 8, 24  # the smallest possible entry of each kind, in bytes
_MAX_DIMENSIONS = 4


class _TensorInfo(NamedTuple):
    """The place of a tensor in the file.

    Attributes:
        shape: shape in NumPy's order.
        kind: code of the tensor's type in ggml.
        start: offset of the first byte in the file.
        nbytes: number of bytes.
    """

    shape: tuple[int, ...]
    kind: int
    start: int
    nbytes: int


class _GGUFFile:
    """An opened GGUF file whose header is checked. The tensor data is memory-mapped and not read yet.

    Attributes:
        path: the file.
        metadata: key -> number, bool, string, list of strings, or list of numbers.
        tensors: name -> TensorInfo. Every tensor lies inside the file.

    Raises:
        CheckpointError: the file is missing, empty, a Git LFS pointer, not GGUF, of an unsupported version, big-endian
            or truncated; or it has an impossible count, length, type or offset.
    """

    def __init__(self, path: Path) -> None:
        check_file(path, _KIND)
        self.path = path
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(path, self._map)
        tensor_count, field_count = _counts(cursor)
        self.metadata: dict[str, Any] = {}
        for _ in range(field_count):
            key = cursor.string("metadata key")
            if key in self.metadata:
                raise cursor.error(f"metadata key {key!r} occurs twice")
            self.metadata[key] = cursor.value(f"metadata {key!r}")
        self.tensors = _tensor_infos(cursor, tensor_count, self.metadata.get("general.alignment", 32))

    def read(self, name: str) -> np.ndarray:
        """Read tensor `name`, and convert it to float32. Its shape is that in `tensors`.

        Raises:
            CheckpointError: `gguf.quants` cannot decode the type of the tensor.
        """
        gguf = _gguf_package()
        info = self.tensors[name]
        kind = gguf.GGMLQuantizationType(info.kind)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        rows = np.frombuffer(self._map, np.uint8, info.nbytes, info.start)
        rows = rows.reshape(*info.shape[:-1], info.shape[-1] // block * size)
        try:
            with np.errstate(all="ignore"):  # an overflowing scale becomes Inf, which is reported later
                return gguf.quants.dequantize(rows, kind).astype(np.float32, copy=False).reshape(info.shape)
        except (NotImplementedError, ValueError, IndexError) as error:
            raise CheckpointError(f"{self.path}: tensor {name} of type {kind.name} cannot be read: {error}") from error


def _gguf_package() -> ModuleType:
    """Import the optional package `gguf`. Raises CheckpointError with the install command if it is missing."""
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise CheckpointError("reading GGUF needs the package gguf: pip install 'jshadow[gguf]'") from error
    return gguf


class _Cursor:
    """A position in the file that never runs past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.size = path, data, 0, len(data)

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is not a valid GGUF file: {what} (at byte {self.at} of {self.size})")

    def take(self, count: int, what: str) -> bytes:
        self.fits(count, 1, what)
        start, self.at = self.at, self.at + count
        return self.data[start : self.at]

    def fits(self, count: int, each: int, what: str) -> None:
        """Raise CheckpointError if fewer bytes are left than `count` items of at least `each` bytes need."""
        if count > (self.size - self.at) // each:
            raise self.error(f"{what} announces {count}, but only {self.size - self.at} bytes are left; truncated?")

    def u32(self, what: str) -> int:
        return int(struct.unpack("<I", self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack("<Q", self.take(8, what))[0])

    def string(self, what: str) -> str:
        raw = self.take(self.u64(f"length of {what}"), f"length of {what}")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8") from error

    def numbers(self, code: int, count: int, what: str) -> list[Any]:
        dtype = SCALARS.get(code)
        if dtype is None:
            raise self.error(f"{what} has the unknown or nested type {code}")
        self.fits(count, dtype.itemsize, what)
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype).tolist()

    def value(self, what: str) -> Any:
        code = self.u32(f"type of {what}")
        if code == STRING:
            return self.string(what)
        if code != ARRAY:
            return self.numbers(code, 1, what)[0]
        code, count = self.u32(f"element type of {what}"), self.u64(f"array length of {what}")
        if code != STRING:
            return self.numbers(code, count, f"array length of {what}")
        self.fits(count, MIN_STRING, f"array length of {what}")
        return [self.string(what) for _ in range(count)]


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """Check the magic bytes and the version, and return (number of tensors, number of metadata fields)."""
    magic = bytes(cursor.data[:4])
    if magic != _MAGIC:
        raise CheckpointError(f"{cursor.path} must be {_KIND} (magic {_MAGIC!r}), got {magic!r}")
    cursor.at = 4
    version = cursor.u32("version")
    if version not in _VERSIONS:
        hint = " (a big-endian file)" if version & 0xFFFF == 0 else ""
        raise cursor.error(f"version must be one of {_VERSIONS}, got {version}{hint}")
    tensors, fields = cursor.u64("tensor count"), cursor.u64("metadata count")
    cursor.fits(tensors, MIN_TENSOR, "tensor count")
    cursor.fits(fields, MIN_FIELD, "metadata count")
    return tensors, fields


def _tensor_infos(cursor: _Cursor, count: int, alignment: Any) -> dict[str, _TensorInfo]:
    gguf = _gguf_package()
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment must be a power of two, got {alignment!r}")
    infos: dict[str, _TensorInfo] = {}
    for _ in range(count):
        name = cursor.string("tensor name")
        if name in infos:
            raise cursor.error(f"tensor {name!r} occurs twice")
        rank = cursor.u32(f"rank of {name!r}")
        if not 1 <= rank <= _MAX_DIMENSIONS:
            raise cursor.error(f"rank of tensor {name!r} must lie in [1, {_MAX_DIMENSIONS}], got {rank}")
        shape = tuple(cursor.u64(f"shape of {name!r}") for _ in range(rank))[::-1]
        code, start = cursor.u32(f"type of {name!r}"), cursor.u64(f"offset of {name!r}")
        try:
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(code)]
        except (ValueError, KeyError) as error:
            raise cursor.error(f"tensor {name!r} has the unknown type {code}") from error
        if 0 in shape or shape[-1] % block or start % alignment:
            raise cursor.error(f"tensor {name!r} has an impossible shape {shape} or offset {start}")
        nbytes = size * (shape[-1] // block)
        for extent in shape[:-1]:
            nbytes *= extent  # Python integers do not overflow
        infos[name] = _TensorInfo(shape, code, start, nbytes)
    data = -(-cursor.at // alignment) * alignment
    for name, info in infos.items():
        end = data + info.start + info.nbytes
        if end > cursor.size:
            raise cursor.error(f"tensor {name!r} ends at byte {end}, beyond the file: an interrupted download?")
    return {name: info._replace(start=data + info.start) for name, info in infos.items()}


CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")  # each digit is a word
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


_LLAMA3 = _Pre(pattern=LLAMA3_PATTERN, ignore_merges=True, add_bos=True)
_PRE_TYPES: dict[str, _Pre] = {
    "gpt2": _Pre(),
    "gpt-2": _Pre(),
    "smollm": _Pre(digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _Pre(pattern=_QWEN2_PATTERN, composed=True),
}


def _write_tokenizer(metadata: dict[str, Any], directory: Path, context: int) -> bool:
    """Write tokenizer.json and tokenizer_config.json, and chat_template.jinja if the file has a template."""
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        return False
    if model != "gpt2":
        raise ConfigError(f"tokenizer.ggml.model must be 'gpt2' (byte-level BPE), got {model!r}")
    name = metadata.get("tokenizer.ggml.pre")
    if name not in _PRE_TYPES:
        raise ConfigError(f"tokenizer.ggml.pre must be one of {sorted(_PRE_TYPES)}, got {name!r}")
    tokens, kinds, merges = _lists(metadata)
    named = {
        field: token
        for field, key in _NAMED_TOKENS
        if (token := _token(metadata, tokens, f"tokenizer.ggml.{key}_token_id")) is not None
    }
    tokenizer = _byte_level_bpe(tokens, kinds, merges, _PRE_TYPES[name])
    _add_ends(tokenizer, metadata, named, _PRE_TYPES[name], tokens)
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


def _byte_level_bpe(tokens: list[str], kinds: list[int], merges: list[tuple[str, str]], pre: _Pre) -> Any:
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


_ROPE_FACTORS = "rope_freqs.weight"  # not a weight, but the frequency divisors of llama3 scaling
_STEMS = (
    (r"token_embd", "model.embed_tokens", "copy"),
    (r"output_norm", "model.norm", "copy"),
    (r"output", "lm_head", "copy"),
    (r"blk\.(\d+)\.attn_norm", "model.layers.{0}.input_layernorm", "copy"),
    (r"blk\.(\d+)\.attn_q", "model.layers.{0}.self_attn.q_proj", "unpermute_q"),
    (r"blk\.(\d+)\.attn_k", "model.layers.{0}.self_attn.k_proj", "unpermute_k"),
    (r"blk\.(\d+)\.attn_q_norm", "model.layers.{0}.self_attn.q_norm", "copy"),
    (r"blk\.(\d+)\.attn_k_norm", "model.layers.{0}.self_attn.k_norm", "copy"),
    (r"blk\.(\d+)\.attn_v", "model.layers.{0}.self_attn.v_proj", "copy"),
    (r"blk\.(\d+)\.attn_output", "model.layers.{0}.self_attn.o_proj", "copy"),
    (r"blk\.(\d+)\.ffn_norm", "model.layers.{0}.post_attention_layernorm", "copy"),
    (r"blk\.(\d+)\.ffn_gate", "model.layers.{0}.mlp.gate_proj", "copy"),
    (r"blk\.(\d+)\.ffn_up", "model.layers.{0}.mlp.up_proj", "copy"),
    (r"blk\.(\d+)\.ffn_down", "model.layers.{0}.mlp.down_proj", "copy"),
    (r"blk\.(\d+)\.ffn_gate_inp", "model.layers.{0}.mlp.gate", "copy"),
)
# One tensor has all experts of a layer.
_STACKED = r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight"
_NAMES = tuple(
    Rule(rf"{stem}\.{part}", f"{name}.{part}", transform)
    for stem, name, transform in _STEMS
    for part in ("weight", "bias")
)
"""Rules from GGUF names to Hugging Face names, for weights and biases."""

_KEYS = (
    ("num_hidden_layers", "block_count", int),
    ("hidden_size", "embedding_length", int),
    ("intermediate_size", "feed_forward_length", int),
    ("num_attention_heads", "attention.head_count", int),
    ("max_position_embeddings", "context_length", int),
    ("rms_norm_eps", "attention.layer_norm_rms_epsilon", float),
)
"""Names of config.json, and keys of the metadata after the name of the architecture."""
_LLAMA3_FACTORS = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
"""The settings of llama3 scaling in every published model. GGUF stores only the divisors that follow from them."""


class _Architecture(NamedTuple):
    """How GGUF stores the models of a `general.architecture`.

    Attributes:
        class_name: the class of the model in Hugging Face.
        model_type: the model type of Hugging Face, if it has not the name of the architecture.
        has_experts: whether the layers have experts.
        permuted: whether the rows of q and k are in GGML's order.
        has_biases: whether config.json says which projections have biases.
        ends: tokens that end a text in every model, beside those that the file names.
    """

    class_name: str
    model_type: str | None = None
    has_experts: bool = False
    permuted: bool = False
    has_biases: bool = False
    ends: tuple[str, ...] = ()


_ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", permuted=True, has_biases=True),
    "qwen2": _Architecture("Qwen2ForCausalLM", ends=("<|im_end|>", "<|endoftext|>")),
    "qwen3": _Architecture("Qwen3ForCausalLM", ends=("<|im_end|>", "<|endoftext|>")),
    "qwen3moe": _Architecture("Qwen3MoeForCausalLM", "qwen3_moe", True, ends=("<|im_end|>", "<|endoftext|>")),
}


def open_gguf(path: Path) -> Source:
    """Open a GGUF file of one of the `_ARCHITECTURES`, in any quantization that `gguf.quants` can decode.

    Raises:
        CheckpointError: the file is damaged, tensors do not match the metadata (all listed in one error), or the
            package `gguf` is not installed.
        ConfigError: the architecture, the tokenizer or the RoPE scaling is not supported.
    """
    file = _GGUFFile(path)
    hf = _config_of(file)
    family, config = _parsed(hf, path)
    rules, shapes, problems = _renamed(file)
    _, misfits = place(shapes, family, config)
    raise_all(str(path), problems + misfits)
    permuted = _ARCHITECTURES[file.metadata["general.architecture"]].permuted
    decoded = functools.lru_cache(maxsize=1)(file.read)  # experts share a tensor

    def read(name: str) -> np.ndarray:
        original, transform, expert = rules[name]
        if expert is not None:
            return decoded(original)[expert]
        value = file.read(original)
        heads = {"unpermute_q": config.q_heads, "unpermute_k": config.kv_heads}.get(transform) if permuted else None
        return _unpermute(value, heads) if heads else value

    def accompany(target: Path) -> None:
        ids = {key: hf[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if hf.get(key) is not None}
        write_json(target / GENERATION, ids)
        _write_tokenizer(file.metadata, target, config.context)

    return Source(hf, family, config, shapes, read, accompany)


def _unpermute(value: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGML's order of the rows of q and k. The shape [heads * d, ...] does not change.

    RoPE rotates rows 2i and 2i + 1 of a head together in GGML, and rows i and i + d / 2 in Hugging Face. The converter
    of llama.cpp reorders the rows of each head accordingly.
    """
    rows = value.reshape(heads, value.shape[0] // heads // 2, 2, *value.shape[1:])
    return rows.swapaxes(1, 2).reshape(value.shape)


def _config_of(file: _GGUFFile) -> dict[str, Any]:
    """Build the config.json of a GGUF file from its metadata."""
    metadata = file.metadata
    if metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(
            f"{file.path} is a part of a GGUF model that is split into split.count={metadata['split.count']!r} files "
            f"(split.no={metadata.get('split.no')!r}); join them first, with llama-gguf-split --merge"
        )
    name = metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise ConfigError(f"general.architecture must be one of {list(_ARCHITECTURES)}, got {name!r}")
    architecture = _ARCHITECTURES[name]
    if metadata.get(f"{name}.expert_count") and not architecture.has_experts:
        raise ConfigError(f"{name}.expert_count must be 0 (no experts), got {metadata[f'{name}.expert_count']!r}")
    hf: dict[str, Any] = {field: _number(metadata, f"{name}.{key}", kind) for field, key, kind in _KEYS}
    heads, width = hf["num_attention_heads"], hf["hidden_size"]
    if heads < 1:
        raise CheckpointError(f"{name}.attention.head_count must be at least 1, got {heads}")
    head_dim = _number(metadata, f"{name}.attention.key_length", int, width // heads)
    rotated = _number(metadata, f"{name}.rope.dimension_count", int, head_dim)
    if rotated != head_dim:
        raise ConfigError(f"{name}.rope.dimension_count must be the head width {head_dim}, got {rotated}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: token_embd.weight: missing")
    if architecture.has_biases:
        hf["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        hf["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if architecture.has_experts:
        keys = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
        keys["moe_intermediate_size"] = "expert_feed_forward_length"
        hf |= {field: _number(metadata, f"{name}.{key}", int) for field, key in keys.items()}
        hf |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return hf | {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type or name,
        "vocab_size": embedding.shape[0],
        "num_key_value_heads": _number(metadata, f"{name}.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": _number(metadata, f"{name}.rope.freq_base", float, 10000.0),
        "rope_scaling": _rope_scaling(file, head_dim),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos(metadata, architecture),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _eos(metadata: dict[str, Any], architecture: _Architecture) -> int | list[int] | None:
    """Return the token ids that end a text: those that the file names, and those of the architecture."""
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        ids += [tokens.index(token) for token in architecture.ends if token in tokens]
    known = list(dict.fromkeys(i for i in ids if i is not None))
    return known[0] if len(known) == 1 else (known or None)


def _number(metadata: dict[str, Any], key: str, kind: type, default: Any = None) -> Any:
    value = metadata.get(key, default)
    if value is None:
        raise CheckpointError(f"GGUF metadata lacks {key}")
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        raise CheckpointError(f"{key} must be one number ({kind.__name__}), got {value!r:.80}")
    # Take the shortest decimal that rounds to the float32: 1e-05, not 9.999999747378752e-06.
    with np.errstate(over="ignore"):
        return float(str(np.float32(value))) if kind is float and np.float32(value) == value else value


def _rope_scaling(file: _GGUFFile, head_dim: int) -> dict[str, Any] | None:
    """Build rope_scaling of config.json. Raises ConfigError if no llama3 settings reproduce the divisors."""
    rope = f"{file.metadata['general.architecture']}.rope"
    kind = file.metadata.get(f"{rope}.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": _number(file.metadata, f"{rope}.scaling.factor", float)}
    if kind != "none":
        raise ConfigError(f"{rope}.scaling.type must be 'none' or 'linear', got {kind!r}")
    if _ROPE_FACTORS not in file.tensors:
        return None
    divisors = file.read(_ROPE_FACTORS).reshape(-1)
    theta = _number(file.metadata, f"{rope}.freq_base", float, 10000.0)
    scaling = {"rope_type": "llama3", "factor": float(divisors.max()), **_LLAMA3_FACTORS}
    sound = divisors.shape == (head_dim // 2,) and bool(np.isfinite(divisors).all()) and divisors.min() >= 1
    if sound:
        plain = inverse_frequencies(RopeConfig(theta=theta), head_dim)
        scaled = inverse_frequencies(RopeConfig.from_hf({"rope_theta": theta, "rope_scaling": scaling}), head_dim)
        if np.allclose(plain / divisors, scaled, rtol=1e-4, atol=0):
            return scaling
    raise ConfigError(
        f"{_ROPE_FACTORS} must be the divisors of llama3 scaling with {_LLAMA3_FACTORS}, got {divisors[:4].tolist()}..."
    )


def _parsed(hf: dict[str, Any], source: Path) -> tuple[ModelFamily, ModelConfig]:
    try:
        family = family_of(hf)
        return family, family.config_from_hf(hf)
    except JshadowError as error:
        raise type(error)(f"{source}, metadata read as a config: {error}") from error


_Origin = tuple[str, str, int | None]  # the tensor of the file, how its rows change, and which of its experts it is


def _renamed(file: _GGUFFile) -> tuple[dict[str, _Origin], dict[str, tuple[int, ...]], list[str]]:
    """Rename the tensors of a GGUF file."""
    rules: dict[str, _Origin] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    problems: list[str] = []
    for original, info in file.tensors.items():
        if original == _ROPE_FACTORS:
            continue  # already read for the config
        if (stack := re.fullmatch(_STACKED, original)) and len(info.shape) == 3:
            for expert in range(info.shape[0]):
                name = f"model.layers.{stack[1]}.mlp.experts.{expert}.{stack[2]}_proj.weight"
                rules[name], shapes[name] = (original, "copy", expert), info.shape[1:]
            continue
        matches = [(name, rule.transform) for rule in _NAMES for name in rule.match(original)]
        if len(matches) != 1 or matches[0][0] in rules:
            problems.append(f"{original}: extra, no supported model has such a weight")
            continue
        rules[matches[0][0]] = (original, matches[0][1], None)
        shapes[matches[0][0]] = info.shape
    return rules, shapes, problems
