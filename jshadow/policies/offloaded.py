"""Full attention whose prompt lies in host memory: each step moves all of it over the link, block by block.

The results are those of full attention, for prompts that the device cannot hold. A step takes the time of the link, so
it is slow alone. With speculation (`jshadow.CompressedDraft`), one pass over the link checks several tokens.

Sources: FlexGen keeps the cache in host memory (Sheng et al. 2023, arXiv 2303.06865, section 4). transformers moves a
whole layer at once (`OffloadedCache`). Here two blocks are on the device at once.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshadow.cache.accounting import layer_nbytes
from jshadow.cache.offload import unit_bytes
from jshadow.cache.records import Fetched, HostWrite, KeyValues, LayerState, PromptKV, StepKV
from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import Stream, attend_stream
from jshadow.ops.layout import to_chunks, write_rows
from jshadow.policies.base import Bytes, HookInputs, UniformPolicy
from jshadow.policies.capabilities import HasAll, Sized, Streams
from jshadow.policies.checks import check_range
from jshadow.policies.eviction import KeepsLaterTokens, LaterTokens, PromptLengths
from jshadow.policies.registry import register


@register(small={"block": 8}, lossless=lambda tokens, config: {"block": 8})
@dataclasses.dataclass(frozen=True)
class Offloaded(UniformPolicy, KeepsLaterTokens, HasAll, Streams, Sized):
    """Keep the keys and values of the prompt in host memory, and attend to all of them.

    Attributes:
        block: number of tokens of a layer that are moved at once. Larger blocks use the link better, and take more
            device memory.
    """

    block: int = 2048

    name = "offloaded"
    takes_sinks = True
    source = "arXiv 2303.06865, section 4"

    @property
    def reads(self) -> HookInputs:
        """The hooks of a step process all new tokens of a turn at once, so a turn moves the prompt once."""
        return HookInputs(piece=16, whole_turns=True)

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        check_range(self.name, "block", self.block, 1)
        return dataclasses.replace(self, block=min(self.block, capacity))

    def host_layout(self, spec: CacheSpec) -> HostLayout:
        return HostLayout(spec.kv_heads, -(-spec.capacity // self.block), self.block, planes=2)

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        zeros = jnp.zeros((spec.batch, spec.kv_heads, spec.window, spec.head_dim), spec.dtype)
        return LayerState(PromptLengths(jnp.zeros(spec.batch, jnp.int32)), LaterTokens(KeyValues(zeros, zeros)))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        layout = self.host_layout(spec)
        planes = [to_chunks(x, layout.units, layout.unit) for x in (prompt.k_post, prompt.v)]
        data = jnp.stack(planes, axis=3).reshape(spec.batch, spec.kv_heads, layout.units, -1)
        return state.replace(frozen=PromptLengths(prompt.lengths)), HostWrite(data)

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        """Compute exact attention over the prompt, block by block, and over the window."""
        lengths, window = state.frozen.lengths, state.live.window

        def read(index: Array | int) -> tuple[Array, Array]:
            return self.planes(spec, state, index, 1)

        with jax.named_scope("fetch"):
            stream = Stream(read, self.blocks(lengths), lengths[:, None, None, None])
            later = jnp.maximum(step.positions - lengths[:, None] + 1, 0)[:, None, :, None]
            return attend_stream(step.q_post, stream, [(window.k, window.v, later)], spec.scale, step.sinks), state

    def planes(self, spec: CacheSpec, state: LayerState, first: Array | int, count: int) -> tuple[Array, Array]:
        """Return keys and values [B, h_kv, count * block, d] of `count` blocks on the device."""
        assert state.host.prompt is not None
        rows = lax.dynamic_slice_in_dim(state.host.prompt.array, first, count, axis=2)
        if state.host.prompt.memory == "pinned_host":
            rows = jax.device_put(rows, jax.memory.Space.Device)
        rows = rows.reshape(spec.batch, spec.kv_heads, count, 2, self.block, spec.head_dim)
        k, v = (rows[:, :, :, plane].reshape(*rows.shape[:2], -1, spec.head_dim) for plane in (0, 1))
        return k, v

    def blocks(self, lengths: Array) -> Array:
        """Return the number of blocks that a step moves, int32 []: those of the longest prompt of the batch."""
        return jnp.maximum(-(-lengths.max() // self.block), 1)

    def streamed(self, spec: CacheSpec, state: LayerState) -> tuple[int, Array]:
        blocks = jnp.broadcast_to(self.blocks(state.frozen.lengths), (spec.batch, spec.kv_heads))
        return unit_bytes(spec, self.host_layout(spec)), blocks

    def all_tokens(self, spec: CacheSpec, state: LayerState) -> KeyValues:
        prompt, window = self.planes(spec, state, 0, self.host_layout(spec).units), state.live.window
        at = state.frozen.lengths[:, None] + jnp.arange(spec.window)
        k, v = (
            write_rows(old[:, :, : spec.capacity], new.swapaxes(1, 2), at, at < spec.capacity)
            for old, new in zip(prompt, (window.k, window.v), strict=True)
        )
        return KeyValues(k, v)

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        parts = {"prompt": state.frozen.lengths, "window": lengths - state.frozen.lengths}
        return {name: tokens.astype(jnp.float32) for name, tokens in parts.items()}

    # Costs

    def compress_bytes(self, spec: CacheSpec, tokens: int) -> int:
        layout = self.host_layout(spec)
        return 4 * spec.batch * layout.units * spec.kv_heads * unit_bytes(spec, layout) // 2

    def step_bytes(self, spec: CacheSpec, state: LayerState) -> Bytes:
        parts = layer_nbytes(state)
        size = sum(parts.pop("host rows"))
        return parts | {"prompt": (size, 0 if spec.fetch == "resident" else size)}

    def step_temporaries(self, spec: CacheSpec) -> int:
        block = spec.batch * spec.kv_heads * unit_bytes(spec, self.host_layout(spec))
        return 3 * block + 3 * 4 * spec.batch * spec.q_heads * max(self.block, spec.window)

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """Return only the usual settings, since all tokens of the prompt are in host memory."""
        return [[type(self)()]]
