"""ShadowKV's settings, their ranges, and the counts that follow from them (Sun et al. 2024, arXiv 2410.21465)."""

import dataclasses
from collections.abc import Sequence
from typing import Self

import jax.numpy as jnp
from jax import Array

from jshadow.cache.spec import CacheSpec
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.ops.packing import ROW_BITS
from jshadow.policies.base import HookInputs
from jshadow.policies.checks import check_choice, check_range, check_share
from jshadow.policies.shadowkv.costs import ChunkCosts
from jshadow.policies.shadowkv.key_codecs import CODECS, KeyCodec, Profile, make_codec, resolve_profile, resolve_rank
from jshadow.policies.shadowkv.key_codecs.profiles import profile_of
from jshadow.policies.shadowkv.key_codecs.query_weights import TAIL
from jshadow.policies.shadowkv.landmark_levels import GROUP
from jshadow.policies.shadowkv.landmarks import MANTISSA
from jshadow.policies.shadowkv.second_round import WIDER
from jshadow.policies.shadowkv.shares import shadow_candidates


@dataclasses.dataclass(frozen=True)
class ShadowSettings(ChunkCosts):
    """What `ShadowKV` can be told, apart from what it does.

    Attributes:
        rank: columns of the factors; None: 160 of every 1024 key columns, in multiples of 8. Only of "lowrank".
        chunk_size: tokens in a chunk.
        budget: tokens selected in a step, outliers and window not counted; None: 1.56 % of the capacity, at least 256.
        outlier_chunks: chunks per KV head that are kept exactly, those least like their landmark; None: 24 per 1,024
            tokens of budget.
        outlier_rule: which those are: "landmark": all of them as said, the paper's rule; "both": of every two, one is
            among those whose keys the code loses most of, in squared distance.
        local_chunks: whole chunks at the end of the prompt that stay in the window.
        turn_selection: "each": every query of a turn selects for itself, so that a turn equals as many single steps;
            "shared": the queries of a piece select together.
        extend_piece: tokens of a turn that pass the model at once.
        score_dim: selection scores are divided by its root; None: the head width.
        score_dtype: to which the softmax over landmarks is rounded, "float32" or "bfloat16".
        exact_preload: chunks that the prompt's last query selects keep exact keys while every query selects them.
        chunk_multiple: the number of chunks of a prompt is rounded down to a multiple of it.
        top_p: share of the budget's scores that is enough: fewer chunks where few matter (extend_piece is then 1).
        selection_rounds: 2: landmarks choose twice the chunks, and of those their rebuilt keys the budget's.
        key_codec: what the keys are kept as: "lowrank", the paper's factors; "transform", the eigenbasis in 8, 4 and 2
            bits; "int4", each channel in four bits; "exact", the keys before RoPE themselves.
        key_profile: columns of "transform" in 8, 4 and 2 bits (n8, n4, n2), n4 even and n2 a multiple of 4; None: by
            key_bits.
        key_bits: bits of a key column of "transform" in the mean, in (0, 8], in place of key_profile
            (`key_codecs.profiles.profile_of`); None: those of the usual rank, (16, 64, 64) of 192 key columns.
        key_weights: what of the keys "lowrank" and "transform" lose least of: "none": of their squares, the paper's;
            "queries": of their products with queries like the prompt's last ones (`query_weights`).
        landmark_tokens: tokens of a landmark, a divisor of chunk_size; a chunk's score is the sum over its landmarks.
            None: chunk_size.
        landmark_levels: 2: all landmarks of a chunk are read only where their mean comes near to being selected
            (`landmark_levels`); their number in a chunk is a power of two. 1: all are read.
        landmark_order: moments of its keys by which a chunk's softmax mass is told: 1: their mean, the paper's rule; 2:
            also half the variance of their products with a query, by how far from the mean they lie in any direction.
        landmark_dtype: "model", or "int8" or "int4" with a scale for each landmark.
        value_dtype: of the values in host memory: "model", "int8" or "int4" with a scale for each token and head, or
            "fp8", float8_e4m3fn without one, for which there is no zero-copy kernel.
    """

    rank: int | None = None
    chunk_size: int = 8
    budget: int | None = None
    outlier_chunks: int | None = 48
    local_chunks: int = 4
    turn_selection: str = "each"
    extend_piece: int = 16
    score_dim: int | None = None
    score_dtype: str = "float32"
    exact_preload: bool = False
    chunk_multiple: int = 1
    top_p: float = 1.0
    selection_rounds: int = 1
    outlier_rule: str = "landmark"
    key_codec: str = "lowrank"
    key_profile: Profile | None = None
    key_bits: float | None = None
    key_weights: str = "none"
    landmark_tokens: int | None = None
    landmark_levels: int = 1
    landmark_order: int = 1
    landmark_dtype: str = "model"
    value_dtype: str = "model"

    name = "shadowkv"
    source = "arXiv 2410.21465, section 4"
    budget_fields = ("budget",)
    size_free = (
        "selection_rounds", "outlier_rule", "key_codec", "key_weights", "landmark_tokens", "landmark_levels",
        "landmark_order",
        "landmark_dtype", "value_dtype",
    )  # fmt: skip

    @classmethod
    def paper(cls) -> Self:
        """The paper's codes, whatever the defaults are: keys of low rank, a landmark a chunk, and 16 bits throughout.

        Of everything else the defaults, as the paper has it: rank 160 of 1,024 columns, chunks of 8, 1.56 % of the
        tokens, 48 outlier chunks (sections 4 and 5.1).
        """
        return cls(
            outlier_rule="landmark", key_codec="lowrank", key_weights="none", landmark_levels=1, landmark_order=1,
            landmark_dtype="model", value_dtype="model",
        )  # fmt: skip

    @classmethod
    def reference(cls) -> Self:
        """The choices of the published code's throughput class (github.com/ByteDance-Seed/ShadowKV, e51904c).

        A turn of at most 4,096 tokens selects once; scores are divided by sqrt(128) whatever the head, and rounded to
        bfloat16; chunks that the prompt's last query selects begin with exact keys; chunks come in eights, outliers
        by the budget. What it does not repeat: tokens dropped at a full window, ties broken at random, equal prompts.
        """
        return cls(
            outlier_chunks=None, turn_selection="shared", extend_piece=4096, score_dim=128, score_dtype="bfloat16",
            exact_preload=True, chunk_multiple=8,
        )  # fmt: skip

    @classmethod
    def packed(cls, *, small: bool = False) -> Self:
        """Transform-coded keys, landmarks and host values in four bits, at the paper's device bytes: not the paper's.

        With a landmark for every two tokens, in two levels; `small`: 4/3 bits of a key column and one landmark a chunk,
        two fifths of those bytes. Both tell the variance of a chunk's keys. So it is of long prompts: a basis takes 2.7
        and 2.5 times the bytes of the paper's, whatever the prompt (Llama-3.1-8B: 1.04 and 0.44 of all the paper's
        bytes at 131,072 tokens, 1.13 and 0.81 at 4,096). Host values take a good quarter of theirs. Half of the
        outliers are what the code holds worst. BENCHMARKS.md tells what both cost on SmolLM2.
        """
        return cls(
            outlier_rule="both", key_codec="transform", key_bits=4 / 3 if small else 2, key_weights="queries",
            landmark_tokens=None if small else 2, landmark_levels=1 if small else 2, landmark_order=2,
            landmark_dtype="int4", value_dtype="int4",
        )  # fmt: skip

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Fill in every None but that of another codec's setting, check every range; key_bits becomes a profile."""
        check_choice(self.name, "key_codec", self.key_codec, tuple(CODECS))
        rank = resolve_rank(self.name, self.key_codec, self.rank, config)
        profile = resolve_profile(self.name, self.key_codec, self.asked_profile(config), config)
        check_range(self.name, "chunk_size", self.chunk_size, 1)
        budget = self.budget
        if budget is None:
            budget = max(256, round(capacity * 0.0156), self.chunk_size)
        check_range(self.name, "budget", budget, self.chunk_size)
        outliers = 24 * (budget // 1024) if self.outlier_chunks is None else self.outlier_chunks
        check_range(self.name, "outlier_chunks", outliers, 0)
        self.check_outlier_rule()
        check_choice(self.name, "key_weights", self.key_weights, ("none", "queries"))
        if self.key_weights != "none" and not CODECS[self.key_codec](rank, profile).weighed:
            raise ConfigError(
                f"{self.name}.key_weights must be 'none' with key_codec={self.key_codec!r}, got {self.key_weights!r}"
            )
        check_range(self.name, "local_chunks", self.local_chunks, 0)
        check_choice(self.name, "turn_selection", self.turn_selection, ("each", "shared"))
        check_range(self.name, "extend_piece", self.extend_piece, 1)
        if self.score_dim is not None:
            check_range(self.name, "score_dim", self.score_dim, 1)
        check_choice(self.name, "score_dtype", self.score_dtype, tuple(MANTISSA))
        check_choice(self.name, "exact_preload", self.exact_preload, (False, True))
        check_range(self.name, "chunk_multiple", self.chunk_multiple, 1)
        check_share(self.name, "top_p", self.top_p)
        check_range(self.name, "selection_rounds", self.selection_rounds, 1, 2)
        landmark_tokens = self.resolve_rows(config)
        levels = self.resolve_levels(self.chunk_size // landmark_tokens)
        piece = self.extend_piece if self.top_p == 1 else 1  # what a query attends to is read off its own step
        return dataclasses.replace(
            self, rank=rank, key_profile=profile, key_bits=None, budget=budget, outlier_chunks=outliers,
            extend_piece=piece, landmark_tokens=landmark_tokens, landmark_levels=levels,
        )  # fmt: skip

    def check_outlier_rule(self) -> None:
        """Exact keys lose nothing to choose by."""
        check_choice(self.name, "outlier_rule", self.outlier_rule, ("landmark", "both"))
        if self.outlier_rule == "both" and self.key_codec == "exact":
            raise ConfigError(f"{self.name}.outlier_rule must be 'landmark' with key_codec='exact', got 'both'")

    def asked_profile(self, config: ModelConfig) -> Profile | None:
        """The profile that was given, or that of the bits that were."""
        bits = self.key_bits
        if bits is None:
            return self.key_profile
        if self.key_codec != "transform" or self.key_profile is not None:
            raise ConfigError(
                f"{self.name}.key_bits must be None but with key_codec='transform' and no key_profile, got {bits!r} "
                f"with {self.key_codec!r} and {self.key_profile!r}"
            )
        if isinstance(bits, bool) or not isinstance(bits, int | float) or not 0 < bits <= 8:
            raise ConfigError(f"{self.name}.key_bits must be a number in (0, 8], got {bits!r}")
        return profile_of(config.key_columns, max(8, bits * config.key_columns))

    def resolve_rows(self, config: ModelConfig) -> int:
        """Check how landmarks and values are kept; the tokens of a landmark."""
        tokens = self.chunk_size if self.landmark_tokens is None else self.landmark_tokens
        check_range(self.name, "landmark_tokens", tokens, 1, self.chunk_size)
        if self.chunk_size % tokens:
            raise ConfigError(f"{self.name}.landmark_tokens must divide chunk_size={self.chunk_size}, got {tokens}")
        for field in ("landmark_dtype", "value_dtype"):
            value = getattr(self, field)
            check_choice(self.name, field, value, ("model", *ROW_BITS, *(("fp8",) if field == "value_dtype" else ())))
            if value == "int4" and config.head_dim % 2:
                raise ConfigError(f"{self.name}.{field}='int4' must have an even head_dim, got {config.head_dim}")
        return tokens

    def resolve_levels(self, parts: int) -> int:
        """Check order and levels of so many landmarks a chunk; of a single one there is one level."""
        check_range(self.name, "landmark_order", self.landmark_order, 1, 2)
        check_range(self.name, "landmark_levels", self.landmark_levels, 1, 2)
        if self.landmark_levels == 2 and parts & (parts - 1):
            raise ConfigError(
                f"{self.name}.landmark_tokens must leave a power of two of landmarks a chunk with landmark_levels=2, "
                f"got {parts}"
            )
        return min(self.landmark_levels, parts)

    @property
    def reads(self) -> HookInputs:
        """The prompt's last query, where it selects; more, where they weigh the keys."""
        return HookInputs(
            last_queries=TAIL if self.key_weights == "queries" else int(self.exact_preload), piece=self.extend_piece
        )

    @property
    def budget_unit(self) -> int:
        """Budgets are whole chunks."""
        return self.chunk_size

    @property
    def codec(self) -> KeyCodec:
        """How keys are kept."""
        return make_codec(self.key_codec, self.rank, self.key_profile)

    @property
    def rebuilt_rounds(self) -> int:
        """How often as many keys are rebuilt in a step as are attended to."""
        return 1 if self.selection_rounds == 1 else 1 + WIDER

    @property
    def landmark_parts(self) -> int:
        """Landmarks of a chunk."""
        return self.chunk_size // (self.landmark_tokens or self.chunk_size)

    @property
    def read_parts(self) -> int:
        """Rows of a chunk's landmarks that every step reads."""
        return self.landmark_parts if self.landmark_levels == 1 else 1

    def max_near(self, capacity: int, later: int) -> int:
        """Chunks of which a step reads all landmarks, where it does not of every chunk; `later` follow the prompt's."""
        wanted = self.max_selected(capacity) * (1 if self.selection_rounds == 1 else WIDER)
        return GROUP * min(wanted, -(-self.max_chunks(capacity) // GROUP) - -later // GROUP)

    # Counts. Static ones are maxima that follow from the capacity; a row's own follow from its chunks.

    def max_chunks(self, capacity: int) -> int:
        """Chunks of the longest prompt that fits."""
        return max(0, capacity // self.chunk_size - self.local_chunks) // self.chunk_multiple * self.chunk_multiple

    def prompt_chunks(self, lengths: Array) -> Array:
        """Chunks of prompts of these lengths, int32 [B]; what follows them is the window."""
        chunks = jnp.maximum(0, lengths // self.chunk_size - self.local_chunks)
        return chunks // self.chunk_multiple * self.chunk_multiple

    def max_outliers(self, capacity: int) -> int:
        """Outlier chunks of the longest prompt that fits."""
        assert self.outlier_chunks is not None
        return min(self.outlier_chunks, self.max_chunks(capacity))

    def landmark_outliers(self, capacity: int) -> int:
        """Of these, those that are chosen by their landmark; they come first."""
        assert self.outlier_chunks is not None
        first = self.outlier_chunks if self.outlier_rule == "landmark" else -(-self.outlier_chunks // 2)
        return min(first, self.max_outliers(capacity))

    def max_selected(self, capacity: int) -> int:
        """Chunks selected in a step for the longest prompt that fits."""
        assert self.budget is not None
        return min(self.budget // self.chunk_size, self.max_chunks(capacity) - self.max_outliers(capacity))

    def row_outliers(self, chunks: Array) -> Array:
        """Outlier chunks of rows with that many chunks, int32 [B]."""
        assert self.outlier_chunks is not None
        return jnp.minimum(self.outlier_chunks, chunks)

    def score_scale(self, spec: CacheSpec) -> float:
        """Factor on the products of queries and landmarks."""
        return spec.scale if self.score_dim is None else float(self.score_dim**-0.5)

    def fallback(self, config: ModelConfig, capacity: int) -> str | None:
        """A capacity with nothing to select from."""
        if self.max_selected(capacity) > 0:
            return None
        return (
            f"{self.name} has nothing to select at capacity={capacity}: {self.max_chunks(capacity)} whole chunks, "
            f"outlier_chunks={self.outlier_chunks}; dense cache used"
        )

    def window_slots(self, capacity: int, shortest: int) -> int:
        """The shortest prompt leaves the most tokens to the window; one slot at least, for a step needs a place."""
        return max(1, capacity - self.chunk_size * self.max_chunks(min(shortest, capacity)))

    @classmethod
    def lossless(cls, num_tokens: int, config: ModelConfig) -> Self:
        """Full rank and a budget of everything."""
        return cls(rank=config.key_columns, budget=max(num_tokens, cls.chunk_size))

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """Outliers go before the keys fall below the bits of the usual rank: see `shares`."""
        for field in ("key_profile", "key_bits"):
            if (value := getattr(self, field)) is not None:
                raise ConfigError(f"{self.name}.{field} must be None where a share decides it, got {value!r}")
        kept = type(self)(**{name: getattr(self, name) for name in self.size_free})
        return shadow_candidates(kept, config)
