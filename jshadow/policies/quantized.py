"""Full attention over keys and values of 8 or 4 bits, as serving engines offer it.

Keys after RoPE and values are rounded. Each token of each head has its own scale, as in those dtypes of vLLM's cache
whose names end in `per_token_head`. "fp8" is E4M3 (Micikevicius et al. 2022, arXiv 2209.05433, section 3). Its largest
number is 448. "int8" and "int4" are whole multiples of a step.

The prompt's attention is exact. After it, every query attends to all tokens in this form, its own included.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from jshadow.cache.records import Fetched, HostWrite, LayerState, PromptKV, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.ops.layout import fit_tokens, write_rows
from jshadow.ops.packing import ROW_BITS, Scaled, dequantize_rows, quantize_rows, scaled_rows
from jshadow.policies.base import HookInputs, UniformPolicy
from jshadow.policies.capabilities import Sized
from jshadow.policies.checks import check_choice
from jshadow.policies.full import attend_all
from jshadow.policies.registry import register

_LARGEST = 448.0  # of E4M3


class QuantizedLive(struct.PyTreeNode):
    """The keys and values of all tokens. The token at position p is in slot p.

    Attributes:
        k, v: codes uint8 [B, h_kv, capacity, d, or d / 2 with 4 bits], and scales [B, h_kv, capacity, 1]. The codes of
            "fp8" are the bits of the numbers.
    """

    k: Scaled
    v: Scaled


@register()
@dataclasses.dataclass(frozen=True)
class Quantized(UniformPolicy, Sized):
    """Keep all keys and values in 8 or 4 bits, and attend to all of them.

    Attributes:
        dtype: "fp8", "int8" or "int4".
    """

    dtype: str = "fp8"

    name = "quantized"
    takes_sinks = True
    source = "vLLM's quantized KV cache"

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        check_choice(self.name, "dtype", self.dtype, ("fp8", *ROW_BITS))
        if self.dtype == "int4" and config.head_dim % 2:
            raise ConfigError(f"config.head_dim must be even for quantized.dtype='int4', got {config.head_dim}")
        return self

    @property
    def reads(self) -> HookInputs:
        return HookInputs(piece=16, whole_turns=True)

    def encode(self, spec: CacheSpec, x: Array) -> Scaled:
        """Round rows [..., d]. Each has its own scale, in `scale_dtype(spec.dtype)`."""
        if self.dtype != "fp8":
            return quantize_rows(x, ROW_BITS[self.dtype], spec.dtype)
        numbers, scale = scaled_rows(x, _LARGEST, spec.dtype)
        return Scaled(lax.bitcast_convert_type(numbers.astype(jnp.float8_e4m3fn), jnp.uint8), scale)

    def decode(self, spec: CacheSpec, rows: Scaled) -> Array:
        """Undo `encode` up to rounding: return rows [..., d] in the model's dtype."""
        if self.dtype != "fp8":
            return dequantize_rows(rows, ROW_BITS[self.dtype], spec.dtype)
        numbers = lax.bitcast_convert_type(rows.codes, jnp.float8_e4m3fn).astype(jnp.float32)
        return (numbers * rows.scale.astype(jnp.float32)).astype(spec.dtype)

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        zeros = self.encode(spec, jnp.zeros((spec.batch, spec.kv_heads, spec.capacity, spec.head_dim), spec.dtype))
        return LayerState(live=QuantizedLive(zeros, zeros))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        k, v = (fit_tokens(x, spec.capacity).transpose(0, 2, 1, 3) for x in (prompt.k_post, prompt.v))
        return state.replace(live=QuantizedLive(self.encode(spec, k), self.encode(spec, v))), None

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """Round each new token, and write it at its position."""

        def put(old: Scaled, new: Array) -> Scaled:
            rows = self.encode(spec, new)
            codes, scale = (
                write_rows(held, x, step.positions, step.valid)
                for held, x in ((old.codes, rows.codes), (old.scale, rows.scale))
            )
            return Scaled(codes, scale)

        live = state.live
        return state.replace(live=QuantizedLive(put(live.k, step.k_post), put(live.v, step.v))), None

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        k, v = self.decode(spec, state.live.k), self.decode(spec, state.live.v)
        return attend_all(spec, step, k, v), state

    def earliest(self, spec: CacheSpec, state: LayerState, reached: Array) -> Array | None:
        """Return 1: every token has a slot of its own."""
        return jnp.ones_like(reached)

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        return {"quantized": lengths.astype(jnp.float32)}

    def step_temporaries(self, spec: CacheSpec) -> int:
        row = 2 * spec.kv_heads * spec.head_dim * (4 + jnp.dtype(spec.dtype).itemsize)
        return super().step_temporaries(spec) + spec.batch * spec.capacity * row

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        return [[dataclasses.replace(self, dtype=dtype) for dtype in ("fp8", "int4")]]
