"""ShadowKV's settings, and the counts that follow from them (Sun et al. 2024, arXiv 2410.21465)."""

import dataclasses
from collections.abc import Sequence
from typing import Self

import jax.numpy as jnp
from jax import Array

from jshadow.cache.spec import CacheSpec
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.policies.base import HookInputs, UniformPolicy
from jshadow.policies.capabilities import Budgeted, Sized
from jshadow.policies.checks import check_range
from jshadow.policies.settings import check_record
from jshadow.policies.shadowkv import sizes
from jshadow.policies.shadowkv.key_codecs import KeyCodec
from jshadow.policies.shadowkv.key_codecs.query_weights import TAIL
from jshadow.policies.shadowkv.landmark_levels import GROUP
from jshadow.policies.shadowkv.records import (
    Choice,
    ExactKeys,
    Landmarks,
    LowRank,
    TransformCode,
    Values,
    weights_of,
)
from jshadow.policies.shadowkv.reference import Quirks
from jshadow.policies.shadowkv.selection import Scoring


@dataclasses.dataclass(frozen=True)
class ShadowSettings(UniformPolicy, Budgeted, Sized):
    """What the user of `ShadowKV` chooses, apart from how a layer then behaves.

    Attributes:
        rank: columns of the low-rank keys; None: 160 of every 1,024 key columns, in multiples of 8.
        chunk_size: tokens in a chunk.
        budget: tokens selected in a step, beside outliers and window; None: 1.56 % of the capacity, at least 256.
        outlier_chunks: chunks per KV head that are kept exactly; None: 24 per 1,024 tokens of budget.
        local_chunks: whole chunks at the end of the prompt that stay in the window.
        keys: the code of the keys: `LowRank` (the paper's), `TransformCode` or `ExactKeys`.
        landmarks: what a chunk is chosen by.
        values: how values are stored in host memory.
        choice: how chunks are chosen beyond the paper's rule.
        extend_piece: tokens of a turn that pass the model at once.
        quirks: where to do as the published code does, and not as the paper says.
    """

    rank: int | None = None
    chunk_size: int = 8
    budget: int | None = None
    outlier_chunks: int | None = 48
    local_chunks: int = 4
    keys: LowRank | TransformCode | ExactKeys = dataclasses.field(default_factory=LowRank)
    landmarks: Landmarks = dataclasses.field(default_factory=Landmarks)
    values: Values = dataclasses.field(default_factory=Values)
    choice: Choice = dataclasses.field(default_factory=Choice)
    extend_piece: int = 16
    quirks: Quirks = dataclasses.field(default_factory=Quirks)

    name = "shadowkv"
    source = "arXiv 2410.21465, section 4"
    budget_fields = ("budget",)
    size_free = ("keys", "landmarks", "values", "choice")

    @classmethod
    def paper(cls) -> Self:
        """The paper's settings, whatever the defaults are.

        Keys of low rank with 160 of 1,024 columns, one landmark for a chunk of 8 tokens, 1.56 % of the tokens, 48
        outlier chunks, and 16 bits throughout (sections 4 and 5.1).
        """
        return cls(keys=LowRank(), landmarks=Landmarks(), values=Values(), choice=Choice())

    @classmethod
    def reference(cls) -> Self:
        """The choices of the published code's throughput class (github.com/ByteDance-Seed/ShadowKV, e51904c).

        A turn of at most 4,096 tokens selects once. Scores are divided by sqrt(128) whatever the head width, and
        rounded to bfloat16. Chunks that the prompt's last query selects begin with exact keys. Chunks come in eights,
        and the budget gives the number of outliers. Not repeated are: tokens dropped at a full window, ties broken at
        random, and prompts of equal length.
        """
        return cls(outlier_chunks=None, extend_piece=4096, quirks=Quirks.published())

    @classmethod
    def packed(cls, *, small: bool = False) -> Self:
        """Packed codes at about the paper's device bytes; this project's own, not the paper's.

        Keys are in the transform code, landmarks and host values in four bits. There is a landmark for every two
        tokens, in two levels. With `small`, keys have 4/3 bits a column and a chunk has one landmark; that takes two
        fifths of the bytes. Landmarks know the variance of their keys, and half of the outliers are the chunks that the
        code holds worst. Host values take a good quarter of the paper's bytes.

        Both are for long prompts, because a basis takes 2.3 (small: 2.5) times the bytes of the paper's, whatever the
        prompt. Of all the paper's bytes they take 1.04 (0.44) on Llama-3.1-8B at 131,072 tokens, and 1.11 (0.81) at
        4,096. docs/benchmarks/key_codes.md has their quality on SmolLM2.
        """
        if small:
            keys, landmarks = TransformCode(bits=4 / 3, weights="queries"), Landmarks(order=2, dtype="int4")
        else:
            keys = TransformCode(bits=2, weights="queries")
            landmarks = Landmarks(tokens=2, levels=2, order=2, dtype="int4")
        return cls(keys=keys, landmarks=landmarks, values=Values("int4"), choice=Choice(outlier_rule="both"))

    @classmethod
    def lossless(cls, num_tokens: int, config: ModelConfig) -> Self:
        """Full rank, and a budget of all tokens."""
        return cls(rank=config.key_columns, budget=max(num_tokens, cls.chunk_size))

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """Outliers go before the keys fall below the bits of the usual rank: see `sizes.shadow_candidates`.

        The codes are those of these settings. With the transform code, the size also decides the landmarks' tokens
        unless they are given.

        Raises:
            ConfigError: the bits of the keys are given, which the size decides.
        """
        if isinstance(self.keys, TransformCode):
            for field in ("profile", "bits"):
                if (value := getattr(self.keys, field)) is not None:
                    raise ConfigError(f"{self.name}.keys.{field} must be None where a share decides it, got {value!r}")
        codes = type(self)(keys=self.keys, landmarks=self.landmarks, values=self.values, choice=self.choice)
        return sizes.shadow_candidates(codes, config)

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Check every range and replace every None by a number; only codes other than low rank have no rank."""
        check_record(self.name, "keys", self.keys, (LowRank, TransformCode, ExactKeys))
        for name, kind in (("landmarks", Landmarks), ("values", Values), ("choice", Choice), ("quirks", Quirks)):
            check_record(self.name, name, getattr(self, name), (kind,))
        keys, rank = self.keys.resolve(self.name, self.rank, config)
        check_range(self.name, "chunk_size", self.chunk_size, 1)
        budget = self.budget
        if budget is None:
            budget = max(256, round(capacity * 0.0156), self.chunk_size)
        check_range(self.name, "budget", budget, self.chunk_size)
        outliers = 24 * (budget // 1024) if self.outlier_chunks is None else self.outlier_chunks
        check_range(self.name, "outlier_chunks", outliers, 0)
        self.choice.check(self.name, keys)
        check_range(self.name, "local_chunks", self.local_chunks, 0)
        check_range(self.name, "extend_piece", self.extend_piece, 1)
        self.quirks.check(self.name)
        landmarks = self.landmarks.resolve(self.name, self.chunk_size, config)
        self.values.check(self.name, config)
        return dataclasses.replace(
            self, rank=rank, keys=keys, budget=budget, outlier_chunks=outliers, landmarks=landmarks
        )

    # What follows from the settings. Counts of a capacity are maxima; a row's own follow from its chunks.

    @property
    def reads(self) -> HookInputs:
        """The prompt's last queries: to weigh the keys, or the one that selects."""
        last = TAIL if weights_of(self.keys) == "queries" else int(self.quirks.exact_preload)
        return HookInputs(last_queries=last, piece=self.extend_piece)

    @property
    def budget_unit(self) -> int:
        """Budgets are whole chunks."""
        return self.chunk_size

    @property
    def codec(self) -> KeyCodec:
        """The code of the keys."""
        return self.keys.codec(self.rank)

    @property
    def landmark_parts(self) -> int:
        """Landmarks of a chunk."""
        return self.chunk_size // (self.landmarks.tokens or self.chunk_size)

    @property
    def read_parts(self) -> int:
        """Rows of a chunk's landmarks that every step reads."""
        return self.landmark_parts if self.landmarks.levels == 1 else 1

    def scoring(self, spec: CacheSpec) -> Scoring:
        """How queries score chunks."""
        return self.quirks.scoring(spec.scale)

    def max_near(self, capacity: int, later: int) -> int:
        """Chunks whose second level of landmarks a step reads; `later` chunks follow the prompt's."""
        named = self.max_selected(capacity) * self.choice.wider
        return GROUP * min(named, -(-self.max_chunks(capacity) // GROUP) - -later // GROUP)

    def max_chunks(self, capacity: int) -> int:
        """Chunks of the longest prompt that fits."""
        return self.quirks.rounded(max(0, capacity // self.chunk_size - self.local_chunks))

    def prompt_chunks(self, lengths: Array) -> Array:
        """Chunks of prompts of these lengths, int32 [B]; what follows them is the window."""
        return self.quirks.rounded(jnp.maximum(0, lengths // self.chunk_size - self.local_chunks))

    def max_outliers(self, capacity: int) -> int:
        """Outlier chunks of the longest prompt that fits."""
        assert self.outlier_chunks is not None
        return min(self.outlier_chunks, self.max_chunks(capacity))

    def landmark_outliers(self, capacity: int) -> int:
        """How many outliers are chosen by their landmark; they come first."""
        assert self.outlier_chunks is not None
        first = self.outlier_chunks if self.choice.outlier_rule == "landmark" else -(-self.outlier_chunks // 2)
        return min(first, self.max_outliers(capacity))

    def row_outliers(self, chunks: Array) -> Array:
        """Outlier chunks of rows with that many chunks, int32 [B]."""
        assert self.outlier_chunks is not None
        return jnp.minimum(self.outlier_chunks, chunks)

    def max_selected(self, capacity: int) -> int:
        """Chunks selected in a step for the longest prompt that fits."""
        assert self.budget is not None
        return min(self.budget // self.chunk_size, self.max_chunks(capacity) - self.max_outliers(capacity))

    def fallback(self, config: ModelConfig, capacity: int) -> str | None:
        """Why a cache of this capacity has nothing to select from, or None."""
        if self.max_selected(capacity) > 0:
            return None
        return (
            f"{self.name} has nothing to select at capacity={capacity}: {self.max_chunks(capacity)} whole chunks, "
            f"outlier_chunks={self.outlier_chunks}; dense cache used"
        )

    def window_slots(self, capacity: int, shortest: int) -> int:
        """The shortest prompt leaves the most tokens to the window. There is at least one slot for a step's token."""
        return max(1, capacity - self.chunk_size * self.max_chunks(min(shortest, capacity)))
