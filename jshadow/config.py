"""What a model is, as numbers: frozen, hashable, validated.

Knows nothing of run-time choices: no dtype, no capacity, no policy. Two loads of the same checkpoint give equal
configs, so they share one compiled program.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jshadow.errors import ConfigError


def check_positive(owner: str, **fields: Any) -> None:
    """Raise ConfigError unless every field is an integer of at least 1."""
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{owner}.{name} must be an integer of at least 1, got {value!r}")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the base frequencies and how they are scaled.

    Attributes:
        theta: base of the geometric series of frequencies.
        kind: "default", "linear" (positions divided by factor) or "llama3" (Llama 3.1, section 3 of its model card:
            low frequencies divided by factor, high ones kept, a smooth ramp between).
        factor: the scaling factor of "linear" and "llama3".
        low_freq_factor: "llama3": wavelengths above original_context / low_freq_factor are fully scaled.
        high_freq_factor: "llama3": wavelengths below original_context / high_freq_factor are kept.
        original_context: "llama3": context length, in tokens, that the model was first trained for.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    KINDS = ("default", "linear", "llama3")

    def __post_init__(self) -> None:
        if self.kind not in self.KINDS:
            raise ConfigError(f"rope.kind must be one of {self.KINDS}, got {self.kind!r}")
        if not self.theta > 0:
            raise ConfigError(f"rope.theta must be above 0, got {self.theta!r}")
        if not self.factor >= 1:
            raise ConfigError(f"rope.factor must be at least 1, got {self.factor!r}")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                "rope.low_freq_factor must be above 0 and below rope.high_freq_factor, "
                f"got {self.low_freq_factor!r} and {self.high_freq_factor!r}"
            )

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "RopeConfig":
        """Read `rope_theta` and `rope_scaling` (or `rope_parameters`, as newer files spell it)."""
        scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        theta = float(scaling.get("rope_theta", hf.get("rope_theta", 10000.0)))
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in cls.KINDS:
            raise ConfigError(f"rope_scaling.rope_type must be one of {cls.KINDS}, got {kind!r}")
        names = {
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            "original_max_position_embeddings": "original_context",
        }
        given = {ours: scaling[theirs] for theirs, ours in names.items() if scaling.get(theirs) is not None}
        if kind == "default":
            given = {}
        return cls(theta=theta, kind=kind, **given)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a decoder-only transformer.

    Attributes:
        model_type: the family, as Hugging Face names it ("llama").
        vocab_size: number of token ids.
        num_layers: transformer blocks.
        model_dim: width of the residual stream.
        ffn_dim: width of the gated MLP.
        q_heads: query heads.
        kv_heads: key and value heads; q_heads is a multiple of it.
        head_dim: width of one head.
        norm_eps: epsilon of the RMS norms.
        context: longest sequence, in tokens, that the model was made for.
        rope: rotary position embedding.
        tie_embeddings: the output head is the transposed embedding.
        attention_bias: q, k, v and o projections carry a bias.
        mlp_bias: the MLP projections carry a bias.
        eos_ids: token ids that end a generation.
    """

    model_type: str
    vocab_size: int
    num_layers: int
    model_dim: int
    ffn_dim: int
    q_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context: int
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "num_layers", "model_dim", "ffn_dim", "q_heads", "kv_heads", "head_dim", "context")
        check_positive("config", **{name: getattr(self, name) for name in sizes})
        if self.q_heads % self.kv_heads:
            raise ConfigError(f"config.q_heads must be a multiple of kv_heads={self.kv_heads}, got {self.q_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"config.head_dim must be even (RoPE rotates pairs), got {self.head_dim}")
        if not self.norm_eps > 0:
            raise ConfigError(f"config.norm_eps must be above 0, got {self.norm_eps!r}")
        for token in self.eos_ids:
            if not 0 <= token < self.vocab_size:
                raise ConfigError(f"config.eos_ids must lie in [0, {self.vocab_size}), got {token}")

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def key_columns(self) -> int:
        """Width of all KV heads side by side: the columns that ShadowKV factorises."""
        return self.kv_heads * self.head_dim

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], **overrides: Any) -> "ModelConfig":
        """Read the keys that every Llama-like `config.json` shares; a family passes what differs as overrides.

        Raises:
            ConfigError: a key is missing or of the wrong kind, the weights are quantised, the model needs remote
                code (`auto_map`), or it uses something that is not built (activation, RoPE variant).
        """
        refuse_unsafe(hf)
        missing = sorted(set(REQUIRED_HF_KEYS) - hf.keys())
        if missing:
            raise ConfigError(f"config.json lacks {', '.join(missing)}")
        if hf.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"config.json hidden_act must be 'silu', got {hf['hidden_act']!r}")
        if hf.get("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError(f"config.json partial_rotary_factor must be 1.0, got {hf['partial_rotary_factor']!r}")
        heads = hf["num_attention_heads"]
        check_positive("config.json", num_attention_heads=heads, hidden_size=hf["hidden_size"])
        fields = dict(
            model_type=str(hf["model_type"]),
            vocab_size=hf["vocab_size"],
            num_layers=hf["num_hidden_layers"],
            model_dim=hf["hidden_size"],
            ffn_dim=hf["intermediate_size"],
            q_heads=heads,
            kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
            norm_eps=hf["rms_norm_eps"],
            context=hf["max_position_embeddings"],
            rope=RopeConfig.from_hf(hf),
            tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
            attention_bias=bool(hf.get("attention_bias", False)),
            mlp_bias=bool(hf.get("mlp_bias", False)),
            eos_ids=token_ids(hf.get("eos_token_id")),
        )
        return cls(**(fields | overrides))


REQUIRED_HF_KEYS = (
    "model_type", "vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "rms_norm_eps", "max_position_embeddings",
)  # fmt: skip


def refuse_unsafe(hf: Mapping[str, Any]) -> None:
    """Raise ConfigError for a checkpoint that is quantised or that asks to run code of its own."""
    if hf.get("quantization_config") is not None:
        method = hf["quantization_config"]
        method = method.get("quant_method", method) if isinstance(method, Mapping) else method
        raise ConfigError(f"config.json quantization_config must be absent (plain weights only), got {method!r}")
    if hf.get("auto_map"):
        raise ConfigError(f"config.json auto_map must be absent (remote code is never run), got {hf['auto_map']!r}")


def token_ids(value: Any) -> tuple[int, ...]:
    """Token ids from a JSON field that may be null, one id or a list of ids."""
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int):
            raise ConfigError(f"eos_token_id must be an integer or a list of integers, got {value!r}")
    return tuple(values)
