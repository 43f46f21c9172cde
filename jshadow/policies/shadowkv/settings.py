"""ShadowKV's settings, and the counts that follow from them (Sun et al. 2024, arXiv 2410.21465)."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Self

import jax.numpy as jnp
from jax import Array

from jshadow.cache.spec import CacheSpec
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.policies.base import HookInputs, UniformPolicy
from jshadow.policies.capabilities import Budgeted, Sized
from jshadow.policies.checks import check_number, check_range
from jshadow.policies.settings import check_record
from jshadow.policies.shadowkv import sizes
from jshadow.policies.shadowkv.key_codecs import KeyCodec
from jshadow.policies.shadowkv.key_codecs.query_weights import TAIL
from jshadow.policies.shadowkv.key_codecs.split import Parts
from jshadow.policies.shadowkv.records import (
    Choice,
    Keys,
    Landmarks,
    LowRank,
    TransformCode,
    Values,
)
from jshadow.policies.shadowkv.reference import Quirks
from jshadow.policies.shadowkv.selection import Scoring
from pallas_kernels import MOST_AGE, MOST_PLACES


@dataclasses.dataclass(frozen=True)
class ShadowSettings(UniformPolicy, Budgeted, Sized):
    """The settings of `ShadowKV`, and the counts that follow from them.

    Attributes:
        rank: rank of the low-rank keys. None: 160 of every 1,024 key columns, in multiples of 8.
        chunk_size: tokens in a chunk.
        budget: number of tokens selected for a query, in addition to outliers and window. None: 1.56 % of the capacity,
            at least 256, or at least 512 if values have four bits.
        outlier_chunks: number of chunks that each KV head keeps exactly. None: 24 for every 1,024 tokens of budget.
        local_chunks: number of whole chunks at the end of the prompt that stay in the window.
        keys: how keys are stored: `LowRank` (the paper), `TransformCode`, `ExactKeys`, or another subclass of `Keys`.
        landmarks: the summaries of keys by which chunks are selected.
        values: how values are stored in host memory.
        choice: extensions of the paper's rules for choosing chunks.
        extend_piece: number of new tokens of a turn for which a layer selects chunks at once. In a long turn, it is the
            least such number if each query selects its own chunks.
        quirks: the published code's choices that differ from the paper.
        pool: size of the cache of recently selected chunks, in selections. The least recently selected chunk leaves it
            first. Chunks in it are neither fetched nor rebuilt, where `CacheSpec.keep` keeps rows. The cache holds at
            least the last selection. No result depends on it.
    """

    rank: int | None = None
    chunk_size: int = 8
    budget: int | None = None
    outlier_chunks: int | None = 48
    local_chunks: int = 4
    keys: Keys = dataclasses.field(default_factory=LowRank)
    landmarks: Landmarks = dataclasses.field(default_factory=Landmarks)
    values: Values = dataclasses.field(default_factory=Values)
    choice: Choice = dataclasses.field(default_factory=Choice)
    extend_piece: int = 16
    quirks: Quirks = dataclasses.field(default_factory=Quirks)
    pool: float = 0.0

    name = "shadowkv"
    source = "arXiv 2410.21465, section 4"
    budget_fields = ("budget",)
    size_free: ClassVar[tuple[str, ...]] = ("keys", "landmarks", "values", "choice")
    emptied = {"resident": -1, "ages": MOST_AGE, "values": 0, "keys": 0}  # noqa: RUF012, the base has its type

    @classmethod
    def paper(cls) -> Self:
        """Return the paper's settings (sections 4 and 5.1).

        Keys have rank 160 for 1,024 columns. A chunk of 8 tokens has one landmark. 1.56 % of the tokens are selected,
        48 chunks are outliers, and all numbers have the model's dtype.
        """
        return cls(keys=LowRank(), landmarks=Landmarks(), values=Values(), choice=Choice())

    @classmethod
    def reference(cls) -> Self:
        """Return the settings of the published code's throughput class (github.com/ByteDance-Seed/ShadowKV, e51904c).

        All queries of a turn of at most 4,096 tokens select the same chunks. Products are divided by sqrt(128) for
        every head width, and scores are rounded to bfloat16. Chunks that the prompt's last query selects begin with
        exact keys. The number of chunks is a multiple of 8, and the budget determines the number of outliers.
        Three properties of that code are not reproduced: it drops tokens when the window is full, it breaks ties at
        random, and all prompts of a batch must have equal length.
        """
        return cls(outlier_chunks=None, extend_piece=4096, quirks=Quirks.published())

    @classmethod
    def packed(cls, *, small: bool = False) -> Self:
        """Return settings with quantized codes that take about the paper's device bytes.

        The codes are this project's own. Keys are in the transform code with 2 bits a column, and landmarks and host
        values have 4 bits. There is a landmark for every two tokens, in two levels. With `small`, keys have 4/3 bits a
        column and a chunk has one landmark. In both cases, landmarks have order 2, and half of the outliers are the
        chunks with the largest coding error. Host values take a little more than a quarter of the paper's bytes.
        Both settings are for long prompts, because the basis takes 2.3 (small: 2.7) times the bytes of the paper's
        right factor at every prompt length. In total they take 1.04 (small: 0.45) times the paper's device bytes on
        Llama-3.1-8B at 131,072 tokens, and 1.11 (small: 0.83) times at 4,096. docs/benchmarks/key_codes.md has their
        quality on SmolLM2.
        """
        if small:
            keys, landmarks = TransformCode(bits=4 / 3, weights="queries"), Landmarks(order=2, dtype="int4")
        else:
            keys = TransformCode(bits=2, weights="queries")
            landmarks = Landmarks(tokens=2, levels=2, order=2, dtype="int4")
        return cls(keys=keys, landmarks=landmarks, values=Values("int4"), choice=Choice(outlier_rule="both"))

    @classmethod
    def lossless(cls, num_tokens: int, config: ModelConfig) -> Self:
        """Return settings that equal full attention for up to num_tokens: full rank, and a budget of all tokens."""
        return cls(rank=config.key_columns, budget=max(num_tokens, cls.chunk_size))

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """Return the policies of `sizes.shadow_candidates` that store and choose chunks as this policy does.

        They have the key code, landmarks, values and choice of this policy.
        With the transform code, the size also decides `landmarks.tokens`, unless they are given.

        Raises:
            ConfigError: the key code's bits or profile are given, although the size decides them.
        """
        if isinstance(self.keys, TransformCode):
            for field in ("profile", "bits"):
                if (value := getattr(self.keys, field)) is not None:
                    raise ConfigError(f"{self.name}.keys.{field} must be None where a share decides it, got {value!r}")
        codes = type(self)(**{name: getattr(self, name) for name in self.size_free})
        return sizes.shadow_candidates(codes, config)

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Check every setting and replace every None by a number, except a rank that the key code does not have."""
        check_record(self.name, "keys", self.keys, Keys)
        for name, kind in (("landmarks", Landmarks), ("values", Values), ("choice", Choice), ("quirks", Quirks)):
            check_record(self.name, name, getattr(self, name), kind)
        keys, rank = self.keys.resolve(self.name, self.rank, config)
        check_range(self.name, "chunk_size", self.chunk_size, 1)
        budget = self.budget
        if budget is None:
            budget = max(self.values.least_budget, round(capacity * 0.0156), self.chunk_size)
        check_range(self.name, "budget", budget, self.chunk_size)
        outliers = 24 * (budget // 1024) if self.outlier_chunks is None else self.outlier_chunks
        check_range(self.name, "outlier_chunks", outliers, 0)
        self.choice.check(self.name, keys)
        check_range(self.name, "local_chunks", self.local_chunks, 0)
        check_range(self.name, "extend_piece", self.extend_piece, 1)
        self.quirks.check(self.name)
        check_number(self.name, "pool", self.pool, 0)
        landmarks = self.landmarks.resolve(self.name, self.chunk_size, config)
        self.values.check(self.name, config)
        resolved = dataclasses.replace(
            self, rank=rank, keys=keys, budget=budget, outlier_chunks=outliers, landmarks=landmarks
        )
        places = resolved.max_places(capacity)
        if places > max(MOST_PLACES, resolved.max_selected(capacity)):
            raise ConfigError(
                f"{self.name}.pool must make at most {MOST_PLACES:,} places for each KV head, got {places:,} places "
                f"with pool={self.pool!r}"
            )
        return resolved

    # Counts. A count for a capacity is the maximum over all prompts; a row's count follows from its number of chunks.

    @property
    def reads(self) -> HookInputs:
        """The hooks need the prompt's last queries to compute key weights, or the last one to preload chunks."""
        last = TAIL if self.keys.weights == "queries" else int(self.quirks.exact_preload)
        return HookInputs(last_queries=last, piece=self.extend_piece)

    @property
    def budget_unit(self) -> int:
        """The number of tokens in a chunk."""
        return self.chunk_size

    @property
    def codec(self) -> KeyCodec:
        """The codec of the keys."""
        return self.keys.codec(self.rank)

    @property
    def later_codec(self) -> KeyCodec:
        """The codec of the keys of later chunks, of which only ShadowKV+ has any."""
        return self.codec

    @property
    def landmark_parts(self) -> int:
        """Number of landmarks of a chunk."""
        return self.chunk_size // (self.landmarks.tokens or self.chunk_size)

    @property
    def read_parts(self) -> int:
        """Number of landmark rows of a chunk that every step reads."""
        return self.landmark_parts if self.landmarks.levels == 1 else 1

    def scoring(self, spec: CacheSpec) -> Scoring:
        """Return how queries score chunks, as `selection` needs it."""
        return self.quirks.scoring(spec.scale)

    def max_chunks(self, capacity: int) -> int:
        """Return the number of chunks n of the longest prompt that fits."""
        return self.quirks.rounded(max(0, capacity // self.chunk_size - self.local_chunks))

    def prompt_chunks(self, lengths: Array) -> Array:
        """Return the number of chunks of prompts with these lengths, int32 [B]. All later tokens are in the window."""
        return self.quirks.rounded(jnp.maximum(0, lengths // self.chunk_size - self.local_chunks))

    def max_outliers(self, capacity: int) -> int:
        """Return the number of outlier chunks of the longest prompt that fits."""
        assert self.outlier_chunks is not None
        return min(self.outlier_chunks, self.max_chunks(capacity))

    def landmark_outliers(self, capacity: int) -> int:
        """Return the number of outliers that are chosen by their landmark. They are stored first."""
        assert self.outlier_chunks is not None
        first = self.outlier_chunks if self.choice.outlier_rule == "landmark" else -(-self.outlier_chunks // 2)
        return min(first, self.max_outliers(capacity))

    def row_outliers(self, chunks: Array) -> Array:
        """Return the number of outlier chunks of rows with `chunks` chunks, int32 [B]."""
        assert self.outlier_chunks is not None
        return jnp.minimum(self.outlier_chunks, chunks)

    def max_selected(self, capacity: int) -> int:
        """Return the number of chunks k that a query selects from the longest prompt that fits."""
        assert self.budget is not None
        return min(self.budget // self.chunk_size, self.max_chunks(capacity) - self.max_outliers(capacity))

    def max_places(self, capacity: int) -> int:
        """Return the number of places P in the cache of recently selected chunks, for each KV head."""
        count = self.max_selected(capacity)
        return max(count, round(min(self.pool * count, self.max_chunks(capacity))))

    def selected(self, spec: CacheSpec) -> int:
        """Return the number of chunks that a query can select."""
        return min(self.max_selected(spec.capacity), self.max_chunks(spec.capacity))

    def places(self, spec: CacheSpec) -> int:
        """Return the number of places of the cache of recently selected chunks."""
        return max(self.selected(spec), min(self.max_places(spec.capacity), self.max_chunks(spec.capacity)))

    def splits_left(self, spec: CacheSpec) -> bool:
        """Return whether the devices of `tp` each have the left rows of some chunks."""
        return spec.shards is not None and spec.shards.splits_left and self.codec.joint

    def left_chunks(self, spec: CacheSpec) -> int:
        """Return the number of chunks whose left rows a device stores."""
        shards, whole = spec.shards, self.max_chunks(spec.capacity)
        if shards is None or not self.codec.joint:
            return whole
        return shards.left_units(spec.capacity // self.chunk_size + 1 if shards.splits_left else whole)

    def key_parts(self, spec: CacheSpec) -> Parts | None:
        """Return the part of the key code that a device of a mesh has, or None if it has the whole code."""
        if spec.shards is None or not self.splits_left(spec):
            return None
        return Parts(spec.shards, self.max_chunks(spec.capacity), self.left_chunks(spec), self.chunk_size)

    def fallback(self, config: ModelConfig, capacity: int) -> str | None:
        """Return the reason why there is no chunk to select at this capacity, or None."""
        if self.max_selected(capacity) > 0:
            return None
        return (
            f"{self.name} has nothing to select at capacity={capacity}: {self.max_chunks(capacity)} whole chunks, "
            f"outlier_chunks={self.outlier_chunks}; dense cache used"
        )

    def window_slots(self, capacity: int, shortest: int) -> int:
        """Return the number of slots of the window, at least one.

        The shortest prompt decides it, because it has the fewest chunks.
        """
        return max(1, capacity - self.chunk_size * self.max_chunks(min(shortest, capacity)))
