"""The config of a model: sizes and switches, frozen, hashable and validated.

A config holds no choices of a run, such as dtype, capacity or policy. So two loads of one checkpoint give equal configs
and share compiled programs.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jshadow.errors import ConfigError, check_integer, check_one_of
from jshadow.ops.rope import RopeConfig as RopeConfig

# The activation of the MLP's gate: Hugging Face's name -> the name in ModelConfig.
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_CLAMPED = "swiglu_clamped"  # has settings of its own, so no key of config.json names it alone
_UNGATED = "relu2"


_POSITIVE = (
    *("query_scalar", "embedding_scale", "residual_scale", "logit_scale", "logit_cap"),
    *("swiglu_alpha", "swiglu_limit"),
)
ROUTERS = ("softmax", "sigmoid", "softmax_of_chosen")
# "rms": root-mean-square norm, rounded and then multiplied by scale. "wide": multiplied by scale in float32. "unit":
# multiplied by 1 + scale in float32. "layer": as "wide", after the mean is subtracted.
NORMS = ("rms", "wide", "unit", "layer")


def check_positive(owner: str, **fields: Any) -> None:
    """Raise ConfigError unless every field is an integer of at least 1."""
    for name, value in fields.items():
        check_integer(f"{owner}.{name}", value, least=1)


@dataclasses.dataclass(frozen=True)
class AttentionKind:
    """The properties of attention in which the layers of a model may differ.

    Attributes:
        rope: rotary position embedding.
        window: number of tokens that a query sees, including itself. None means all of them.
        recurrent: whether the layer does not attend, but has a recurrent state.
    """

    rope: RopeConfig
    window: int | None = None
    recurrent: bool = False

    @property
    def sees_all(self) -> bool:
        """Whether the layer attends to all tokens. Only such a layer takes the policy that the user chose."""
        return self.window is None and not self.recurrent


@dataclasses.dataclass(frozen=True)
class Recurrent:
    """The recurrent layers of a hybrid model.

    Attributes:
        layers: indices of the recurrent layers. All other layers attend.
        key_heads: number of heads of queries and keys. In Mamba-2, they are the groups of C and B.
        value_heads: number of heads of values, a multiple of key_heads. Each has a state [key_dim, value_dim].
        key_dim, value_dim: widths of a head.
        taps: number of tokens that the convolution before the state sees, including a token itself.
        kind: "delta": gated DeltaNet (Yang et al. 2024, arXiv 2412.06464, section 3). "mamba2": Mamba-2 (Dao and Gu
            2024, arXiv 2405.21060, section 7). "convolution": a short convolution between two gates (LFM2, arXiv
            2511.23404). Keys gate the values before it, and queries after it, so all have the same heads.
        tap_biases: whether the convolution has biases. With "convolution", the projections then have biases too.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    kind: str = "delta"
    tap_biases: bool = False

    def __post_init__(self) -> None:
        sizes = ("key_heads", "value_heads", "key_dim", "value_dim", "taps")
        check_positive("config.recurrent", **{name: getattr(self, name) for name in sizes})
        if self.value_heads % self.key_heads:
            raise ConfigError(
                f"config.recurrent.value_heads must be a multiple of key_heads={self.key_heads}, got {self.value_heads}"
            )

    @property
    def corrects(self) -> bool:
        """Whether a token replaces what a state holds for its key (the delta rule), instead of adding to it."""
        return self.kind == "delta"

    @property
    def has_state(self) -> bool:
        """Whether the layer has a state beside the newest inputs of its convolution."""
        return self.kind != "convolution"


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts of a mixture-of-experts model.

    Attributes:
        count: number of experts of a layer.
        chosen: number of experts that a token uses.
        width: width of an expert's MLP.
        layers: indices of the layers with experts. All other layers have a plain MLP.
        router: what turns the router's products into the experts' shares: "softmax" over all experts, "sigmoid", or
            "softmax_of_chosen".
        normalized: whether the shares of the chosen experts are divided by their sum.
        least_sum: number that is added to this sum.
        scale: factor of the shares.
        corrected: whether the router has a bias that counts in the choice only (arXiv 2408.15664).
        groups: number of groups of experts.
        chosen_groups: number of groups whose experts a token may choose.
        shared_width: width of the MLP that every token uses beside its experts, or 0.
        latent_width: width of what the experts take and give, where a projection before them and one behind them change
            it. 0: that of the residual stream.
        shared_gate: whether the output of this MLP is multiplied by the sigmoid of a product of the token.
        own_norms: whether the experts and the router norm the residual stream on their own, the outputs of the experts
            and of the shared MLP are normed before they are added, and the shares of each expert have a weight as
            factor (Gemma 4).
        biases: whether the router and the projections of the experts have biases.
    """

    count: int
    chosen: int
    width: int
    layers: tuple[int, ...]
    router: str = "softmax"
    normalized: bool = True
    least_sum: float = 0.0
    scale: float = 1.0
    corrected: bool = False
    groups: int = 1
    chosen_groups: int = 1
    shared_width: int = 0
    latent_width: int = 0
    shared_gate: bool = False
    own_norms: bool = False
    biases: bool = False

    def __post_init__(self) -> None:
        sizes = ("count", "chosen", "width", "groups", "chosen_groups")
        check_positive("config.experts", **{name: getattr(self, name) for name in sizes})
        if self.chosen > self.count:
            raise ConfigError(f"config.experts.chosen must be at most count={self.count}, got {self.chosen}")
        if self.count % self.groups or (self.groups > 1 and self.count // self.groups < 2):
            raise ConfigError(
                f"config.experts.groups must divide count={self.count} into groups of at least 2, got {self.groups}"
            )
        if self.chosen > self.chosen_groups * (self.count // self.groups) or self.chosen_groups > self.groups:
            raise ConfigError(
                f"config.experts.chosen_groups must be at most groups={self.groups} and have at least "
                f"chosen={self.chosen} experts, got {self.chosen_groups}"
            )
        check_one_of("config.experts.router", self.router, ROUTERS)

    @property
    def active_width(self) -> int:
        """Width of all MLPs that a token uses in a layer."""
        return self.chosen * self.width + self.shared_width


def experts_of(config: "ModelConfig") -> Experts:
    """Return the experts of a model that has some."""
    assert config.experts is not None
    return config.experts


def recurrent_of(config: "ModelConfig") -> Recurrent:
    """Return the recurrent layers of a model that has some."""
    assert config.recurrent is not None
    return config.recurrent


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a decoder-only transformer.

    Attributes:
        model_type: the family, as Hugging Face names it ("llama").
        vocab_size: number of token ids.
        num_layers: number of transformer blocks.
        model_dim: width of the residual stream.
        ffn_dim: width of the MLP.
        q_heads: number of query heads.
        kv_heads: number of key and value heads. q_heads is a multiple of it. If the sliding layers have other heads,
            this and head_dim are those of the layers that see all tokens.
        head_dim: width of one head.
        norm_eps: epsilon of the norms.
        context: longest sequence, in tokens, that the model supports.
        rope: rotary position embedding.
        tie_embeddings: whether the output head is the transposed embedding.
        attention_bias: whether the q, k and v projections have a bias.
        mlp_bias: whether the MLP projections have a bias.
        eos_ids: token ids that end a generation.
        output_bias: whether attention_bias also applies to the o projection.
        qk_norm: whether each head's queries and keys are normalized before RoPE.
        joint_qk_norm: whether the queries of all heads are normalized together, and so are the keys.
        value_norm: whether each head's values are normalized, without a scale.
        values_from_keys: whether values are the projected keys, before the norm of the keys. With `sliding_heads`, this
            holds only in the layers that see all tokens.
        pre_norms: whether the inputs of attention and MLP are normalized.
        post_norms: whether the outputs of attention and MLP are also normalized, before they join the residual stream.
        norm: the kind of the norms, one of NORMS.
        parallel: whether attention and MLP have the same normalized input (GPT-J), instead of one after the other.
        activation: activation of the MLP: "silu", "gelu_tanh", or "swiglu_clamped", which is
            g * sigmoid(swiglu_alpha * g) * (u + 1) of a gate g and an up u that are clamped (gpt-oss). With "relu2",
            which is max(0, u)^2, the MLP has no gate (Nemotron-H).
        swiglu_alpha: for "swiglu_clamped", the factor inside the sigmoid.
        swiglu_limit: for "swiglu_clamped". The gate is at most this number. Up is at most this far from 0.
        embedding_scale: factor of the embeddings.
        residual_scale: factor of the outputs of attention and MLP, before they join the residual stream.
        layer_scale: whether the output of each block is multiplied by a weight.
        logit_scale: factor of the logits.
        logit_cap: logits x become logit_cap * tanh(x / logit_cap). None means that they stay as they are.
        query_scalar: scores are divided by the square root of this number. None means head_dim.
        sliding_window: number of tokens that a query of a sliding layer sees, including itself.
        sliding_layers: indices of the sliding layers. All other layers see all tokens.
        sliding_heads: number and width of the KV heads of the sliding layers. None means those of the other layers.
        sliding_rope: rotary position embedding of the sliding layers. None means that of the other layers.
        unrotated_layers: indices of the layers without RoPE.
        layers_without_mlp: indices of the layers that have no MLP.
        experts: the experts of some or all layers, or None.
        sinks: whether each query head has an attention sink, a learned logit (`jshadow/ops/attention.py`).
        output_gate: whether the output of attention is multiplied by the sigmoid of a projection of its input.
        recurrent: the recurrent layers of a hybrid model, or None.
        mixer: "attention", or "recurrent" in the config of a recurrent layer (`at`).
        has_mlp: whether there are MLPs. It is false in the config of a layer without one (`at`).
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
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_ids: tuple[int, ...] = ()
    output_bias: bool = True
    qk_norm: bool = False
    joint_qk_norm: bool = False
    value_norm: bool = False
    values_from_keys: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    norm: str = "rms"
    parallel: bool = False
    activation: str = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    layer_scale: bool = False
    logit_scale: float = 1.0
    logit_cap: float | None = None
    query_scalar: float | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    sliding_heads: tuple[int, int] | None = None
    sliding_rope: RopeConfig | None = None
    unrotated_layers: tuple[int, ...] = ()
    layers_without_mlp: tuple[int, ...] = ()
    experts: Experts | None = None
    sinks: bool = False
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    output_gate: bool = False
    recurrent: Recurrent | None = None
    mixer: str = "attention"
    has_mlp: bool = True

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "num_layers", "model_dim", "ffn_dim", "q_heads", "kv_heads", "head_dim", "context")
        check_positive("config", **{name: getattr(self, name) for name in sizes})
        near = self.sliding_heads or (self.kv_heads, self.head_dim)
        check_positive("config.sliding_heads", number=near[0], width=near[1])
        for rope, (kv_heads, width) in (
            (self.rope, (self.kv_heads, self.head_dim)),
            (self.sliding_rope or self.rope, near),
        ):
            if self.q_heads % kv_heads:
                raise ConfigError(f"config.q_heads must be a multiple of kv_heads={kv_heads}, got {self.q_heads}")
            if self.mixer == "attention":
                rope.check_width(width)
        if self.sliding_heads and self.query_scalar is None:
            raise ConfigError("config.query_scalar must be given with sliding_heads, so that layers have one scale")
        if not self.norm_eps > 0:
            raise ConfigError(f"config.norm_eps must be above 0, got {self.norm_eps!r}")
        check_one_of("config.norm", self.norm, NORMS)
        if self.parallel and not self.pre_norms:
            raise ConfigError(f"config.pre_norms must be true in a parallel block, got {self.pre_norms!r}")
        for token in self.eos_ids:
            if not 0 <= token < self.vocab_size:
                raise ConfigError(f"config.eos_ids must lie in [0, {self.vocab_size}), got {token}")
        activations = sorted([*ACTIVATIONS.values(), _CLAMPED, _UNGATED])
        check_one_of("config.activation", self.activation, activations)
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"config.{name} must be above 0 and finite, got {value!r}")
        if self.sliding_window is not None:
            check_positive("config", sliding_window=self.sliding_window)
        names = ("sliding_layers", "unrotated_layers", "layers_without_mlp")
        layers = {name: getattr(self, name) for name in names}
        layers["experts.layers"] = () if self.experts is None else self.experts.layers
        layers["recurrent.layers"] = () if self.recurrent is None else self.recurrent.layers
        if self.recurrent is not None and len(set(self.recurrent.layers)) == self.num_layers:
            raise ConfigError(f"config.recurrent.layers must leave a layer that attends, got all {self.num_layers}")
        for name, indices in layers.items():
            for layer in indices:
                if not 0 <= layer < self.num_layers:
                    raise ConfigError(f"config.{name} must lie in [0, {self.num_layers}), got {layer}")

    @property
    def group(self) -> int:
        """Number of query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def key_columns(self) -> int:
        """Width of all KV heads side by side. ShadowKV factorizes the matrix of keys that has these columns."""
        return self.kv_heads * self.head_dim

    def at(self, layer: int) -> "ModelConfig":
        """Return the config whose heads and widths are those of one layer. It is this one if all layers are alike."""
        return self._layers[layer]

    @functools.cached_property
    def _layers(self) -> Sequence["ModelConfig"]:
        """The results of `at`."""
        if self.layers_without_mlp:
            whole = dataclasses.replace(self, layers_without_mlp=())
            bare = {kind: dataclasses.replace(kind, has_mlp=False) for kind in whole.kinds}
            kinds = map(whole.at, range(self.num_layers))
            return [bare[kind] if layer in self.layers_without_mlp else kind for layer, kind in enumerate(kinds)]
        if self._is_hybrid:
            return [self.kinds[layer not in recurrent_of(self).layers] for layer in range(self.num_layers)]
        if self.sliding_heads:
            return [self.kinds[layer not in self.sliding_layers] for layer in range(self.num_layers)]
        return [self] * self.num_layers

    @property
    def _is_hybrid(self) -> bool:
        """Whether this config describes a whole hybrid model. The config of a single layer (`at`) does not."""
        return self.recurrent is not None and self.mixer == "attention"

    @functools.cached_property
    def kinds(self) -> tuple["ModelConfig", ...]:
        """The different results of `at`: this config, or those of the recurrent or sliding layers and of the others.

        Layers without an MLP are not told apart.
        """
        if self._is_hybrid:
            r = recurrent_of(self)
            recurrent = dataclasses.replace(
                self,
                mixer="recurrent",
                q_heads=r.value_heads,
                kv_heads=r.key_heads,
                head_dim=r.key_dim,
                rope=RopeConfig(kind="none"),
            )
            return recurrent, dataclasses.replace(self, recurrent=None)
        if self.sliding_heads is None:
            return (self,)
        heads, width = self.sliding_heads
        far = dataclasses.replace(self, sliding_heads=None)
        return dataclasses.replace(far, kv_heads=heads, head_dim=width, values_from_keys=False), far

    @property
    def keys_follow(self) -> bool:
        """Whether a value, times a weight for each column of a head, is the key before RoPE."""
        return self.values_from_keys and self.value_norm and self.qk_norm

    @property
    def query_columns(self) -> int:
        """Width of all query heads side by side."""
        return self.q_heads * self.head_dim

    @property
    def most_query_columns(self) -> int:
        """Width of all query heads of the attention layer in which it is largest."""
        return max(kind.query_columns for kind in self.kinds if kind.mixer == "attention")

    @property
    def most_key_columns(self) -> int:
        """Width of all KV heads of the attention layer in which it is largest."""
        return max(kind.key_columns for kind in self.kinds if kind.mixer == "attention")

    @property
    def gated(self) -> bool:
        """Whether MLPs and experts have a gate."""
        return self.activation != _UNGATED

    @property
    def active_width(self) -> int:
        """Width of the MLPs that a token uses in a layer. If layers differ, it is that of the widest."""
        experts = self.experts
        if not self.has_mlp:
            return 0
        if experts is None:
            return self.ffn_dim
        plain = self.num_layers - len(experts.layers) - len(self.layers_without_mlp)
        return max(experts.active_width, self.ffn_dim if plain else 0)

    @property
    def attention_scale(self) -> float:
        """Factor by which attention scores are multiplied."""
        return float((self.head_dim if self.query_scalar is None else self.query_scalar) ** -0.5)

    def attention_kind(self, layer: int) -> AttentionKind:
        """Return the RoPE and the window of one layer's attention."""
        return self.attention_kinds[layer]

    @functools.cached_property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """The attention kind of every layer.

        A window that covers the whole context counts as no window, unless the layers that have it have other heads.
        """
        window = self.sliding_window
        if window is not None and window >= self.context and self.sliding_heads is None:
            window = None
        near = AttentionKind(self.sliding_rope or self.rope, window)
        kinds = []
        recurrent = () if self.recurrent is None else self.recurrent.layers
        for layer in range(self.num_layers):
            kind = near if layer in self.sliding_layers else AttentionKind(self.rope)
            if layer in recurrent:
                kind = AttentionKind(RopeConfig(kind="none"), recurrent=True)
            if layer in self.unrotated_layers:  # such a layer has no attention factor either
                kind = AttentionKind(RopeConfig(kind="none"), kind.window)
            kinds.append(kind)
        return tuple(kinds)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], **overrides: Any) -> "ModelConfig":
        """Return the config that a `config.json` of a Llama-like model describes.

        Args:
            hf: the parsed `config.json`, with the defaults of the family for the keys that it leaves out.
            overrides: fields of ModelConfig that the model family has read. They replace the fields that are read here.

        Raises:
            ConfigError: a key has the wrong type, the weights are quantized, the model needs remote code
                (`auto_map`), or it uses an activation, a kind of attention or a RoPE variant that is not supported.
        """
        _refuse_unsafe(hf)
        _refuse_other_attention(hf)
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
            tie_embeddings=flag_of(hf, "tie_word_embeddings"),
            attention_bias=flag_of(hf, "attention_bias"),
            mlp_bias=flag_of(hf, "mlp_bias"),
            eos_ids=token_ids(hf.get("eos_token_id")),
        )
        rope = overrides["rope"] if "rope" in overrides else RopeConfig.from_hf(hf)
        if "activation" not in overrides:
            fields["activation"] = activation_of(hf, "hidden_act")
        # With dynamic scaling and YaRN, the file names the context before scaling.
        stretched = rope.kind in ("dynamic", "yarn")
        reach = int(rope.original_context * rope.factor) if stretched else 0
        context = max(hf["max_position_embeddings"], reach)
        if chunks := hf.get(_DUAL_CHUNKS):
            # Beyond this length the published model changes the positions of far keys. Up to it, it is plain RoPE.
            check_positive(f"config.json {_DUAL_CHUNKS}", **{_ORIGINAL_CONTEXT: chunks.get(_ORIGINAL_CONTEXT)})
            context = min(context, chunks[_ORIGINAL_CONTEXT])
        return cls(**(fields | {"rope": rope, "context": context} | overrides))


_DUAL_CHUNKS = "dual_chunk_attention_config"  # Qwen2.5-1M
_ORIGINAL_CONTEXT = "original_max_position_embeddings"
# Keys with "attention" or "attn" in their name whose value is read, or changes nothing in inference.
_ATTENTION_KEYS = (
    "num_attention_heads",
    "attention_bias",
    "attention_dropout",
    "output_attentions",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "use_bidirectional_attention",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    _DUAL_CHUNKS,
)


def activation_of(hf: Mapping[str, Any], key: str) -> str:
    """Return the activation that a key of config.json names, or "silu" if the key is missing."""
    name = hf.get(key) or "silu"
    check_one_of(f"config.json {key}", name, sorted(ACTIVATIONS))
    return ACTIVATIONS[name]


def flag_of(hf: Mapping[str, Any], key: str) -> bool:
    """Read a boolean key of config.json. A missing or null key is False."""
    value = hf.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"config.json {key} must be true or false, got {value!r}")
    return bool(value)


def _refuse_unsafe(hf: Mapping[str, Any]) -> None:
    """Raise ConfigError for a checkpoint that is quantized or that needs remote code."""
    if hf.get("quantization_config") is not None:
        method = hf["quantization_config"]
        method = method.get("quant_method", method) if isinstance(method, Mapping) else method
        raise ConfigError(f"config.json quantization_config must be absent (plain weights only), got {method!r}")
    if hf.get("auto_map"):
        raise ConfigError(f"config.json auto_map must be absent (remote code is never run), got {hf['auto_map']!r}")


def _refuse_other_attention(hf: Mapping[str, Any]) -> None:
    """Raise ConfigError for a key about attention that is set and not known. To ignore it could give wrong answers."""
    for key, value in hf.items():
        if ("attention" in key or "attn" in key) and key not in _ATTENTION_KEYS and value:
            raise ConfigError(f"config.json {key} must be absent (it is not supported), got {value!r:.80}")


def token_ids(value: Any) -> tuple[int, ...]:
    """Read token ids from a JSON field that is null, one id or a list of ids."""
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int):
            raise ConfigError(f"eos_token_id must be an integer or a list of integers, got {value!r}")
    return tuple(values)
