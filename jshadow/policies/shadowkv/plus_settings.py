"""The settings of ShadowKV+, and the counts that follow from them (Sun et al. 2024, arXiv 2410.21465, section 7.1)."""

import dataclasses
import math
from typing import ClassVar, Self

import jax.numpy as jnp
from jax import Array

from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.policies.checks import check_choice, check_range
from jshadow.policies.shadowkv.key_codecs import KeyCodec, TokenCodec
from jshadow.policies.shadowkv.policy import ShadowKV
from jshadow.policies.shadowkv.state import ShadowFrozen

LATER_BITS = {"int6": 6, "int4": 4}
LATER_KEYS = (*LATER_BITS, "projected")
MOST_TOKENS = 64  # limit on extend_piece: the ring holds a piece beside the window, and each chunk of it is one write


@dataclasses.dataclass(frozen=True)
class PlusSettings(ShadowKV):
    """The settings of `ShadowKVPlus`: those of ShadowKV, and those of later chunks, which come after the prompt's.

    Attributes:
        extra_outlier_chunks: slots of each KV head for later chunks that stay exact.
        later_keys: how the keys of later chunks are stored. "int6" or "int4": 6 or 4 bits for each number, and a scale
            for each token and head, whatever `keys` is. "projected": in the code of the prompt (the paper).
    """

    extra_outlier_chunks: int = 16
    later_keys: str = "int6"

    name = "shadowkv_plus"
    source = "arXiv 2410.21465, section 7.1"
    size_free: ClassVar[tuple[str, ...]] = (*ShadowKV.size_free, "later_keys")

    @classmethod
    def paper(cls) -> Self:
        """Return `ShadowKV.paper` with the keys of later chunks in the prompt's basis (section 7.1)."""
        return dataclasses.replace(super().paper(), later_keys="projected")

    @classmethod
    def packed(cls, *, small: bool = False) -> Self:
        """Return `ShadowKV.packed`, but with a landmark for every four tokens instead of two (not with `small`).

        So a later token takes less than a quarter of its device bytes in full attention, landmark included.
        """
        settings = super().packed(small=small)
        if small:
            return settings
        return dataclasses.replace(settings, landmarks=dataclasses.replace(settings.landmarks, tokens=4))

    @classmethod
    def reference(cls) -> Self:
        """Return the settings of `ShadowKV.reference`, with the keys of later chunks in the prompt's basis.

        Each query selects its own chunks, because it has its own window.
        """
        published = super().reference()
        quirks = dataclasses.replace(published.quirks, turn_selection="each")
        return dataclasses.replace(published, quirks=quirks, extend_piece=cls.extend_piece, later_keys="projected")

    @classmethod
    def lossless(cls, num_tokens: int, config: ModelConfig) -> Self:
        """Return `ShadowKV.lossless`. The prompt's basis has all columns, so later keys are projected without loss."""
        return dataclasses.replace(super().lossless(num_tokens, config), later_keys="projected")

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Check the settings of ShadowKV and those that ShadowKV+ adds or limits."""
        check_range(self.name, "extend_piece", self.extend_piece, 1, MOST_TOKENS)
        check_range(self.name, "extra_outlier_chunks", self.extra_outlier_chunks, 0)
        check_choice(self.name, "later_keys", self.later_keys, LATER_KEYS)
        multiple = 8 // math.gcd(8, LATER_BITS.get(self.later_keys, 8))  # so many numbers fill whole bytes
        if config.head_dim % multiple:
            needs = f"a head_dim that is a multiple of {multiple}"
            raise ConfigError(f"{self.name}.later_keys={self.later_keys!r} must have {needs}, got {config.head_dim}")
        resolved = super().resolve(config, capacity)
        if self.quirks.turn_selection == "shared":
            raise ConfigError(
                f"{self.name}.quirks.turn_selection must be 'each', since each query has its own window, got 'shared'"
            )
        return resolved

    @property
    def later_codec(self) -> KeyCodec:
        """The codec of the keys of later chunks."""
        return self.codec if self.later_keys == "projected" else TokenCodec(LATER_BITS[self.later_keys])

    # Counts

    @property
    def window_chunks(self) -> int:
        """Maximum number of chunks in a query's window, its own chunk included."""
        return max(2, self.local_chunks + self.quirks.chunk_multiple)

    @property
    def ring_slots(self) -> int:
        """Number of slots R of the ring: a window and a piece, so that a piece's first query has its whole window."""
        return (self.window_chunks - -self.extend_piece // self.chunk_size) * self.chunk_size

    def max_selected(self, capacity: int) -> int:
        """Return the number of chunks k that a query selects.

        The outliers are not subtracted, because later chunks can also be selected.
        """
        assert self.budget is not None
        return min(self.budget // self.chunk_size, self.max_chunks(capacity))

    def selected(self, spec: CacheSpec) -> int:
        """Return the number of chunks that a query can select on a device, later chunks included."""
        most = self.max_chunks(spec.capacity) + self.later_chunks(spec)
        return min(self.max_selected(spec.capacity), most)

    def later_chunks(self, spec: CacheSpec) -> int:
        """Return the number of later chunks m for which there is space."""
        return -(-spec.window // self.chunk_size)

    def left_behind(self, frozen: ShadowFrozen, positions: Array) -> Array:
        """Return how many later chunks have left the window of the query at each position, int32 [B, T]."""
        chunks = positions // self.chunk_size + 1 - self.window_chunks
        return jnp.maximum(chunks - frozen.chunks[:, None], 0)

    def host_layout(self, spec: CacheSpec) -> HostLayout | None:
        """Return the layout of the values of the prompt's chunks, with a tail for later chunks."""
        layout = super().host_layout(spec)
        assert layout is not None
        no_kernel = layout.no_kernel or ("" if self.later_codec.compiled else f"later_keys={self.later_keys!r}")
        return dataclasses.replace(layout, tail_units=self.later_chunks(spec), no_kernel=no_kernel)
