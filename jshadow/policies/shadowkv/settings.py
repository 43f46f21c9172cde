"""ShadowKV's settings, and the counts that follow from them (Sun et al. 2024, arXiv 2410.21465)."""

import abc
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import jax.numpy as jnp
from jax import Array

from jshadow.cache.spec import CacheSpec
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.ops.packing import ROW_BITS
from jshadow.policies.base import HookInputs, UniformPolicy
from jshadow.policies.capabilities import Budgeted, Sized
from jshadow.policies.checks import check_choice, check_number, check_range
from jshadow.policies.settings import Record, check_record
from jshadow.policies.shadowkv.key_codecs import (
    ExactCodec,
    KeyCodec,
    LowRankCodec,
    Profile,
    TransformCodec,
    ValueCodec,
    usual_profile,
    usual_rank,
)
from jshadow.policies.shadowkv.key_codecs.base import Parts
from jshadow.policies.shadowkv.key_codecs.lowrank import TAIL
from jshadow.policies.shadowkv.key_codecs.transform import profile_of, unit_of
from pallas_kernels import MOST_AGE, MOST_PLACES

_WEIGHTS = ("none", "queries")
_OUTLIERS = (48, 24, 8, 4, 1, 0)  # numbers of outlier chunks to try for a share of bytes
WIDER = 2  # with two rounds, the first selects this many chunks for each chunk of the budget


@dataclasses.dataclass(frozen=True)
class Keys(Record, abc.ABC):
    """How keys are stored. A subclass with a name is a choice for `ShadowKV.keys`, also one from outside the library.

    Class attributes:
        weights: the error that the code minimizes, "none" or "queries"; a field where it can be chosen.
    """

    weights = "none"

    @abc.abstractmethod
    def resolve(self, policy: str, rank: Any, config: ModelConfig) -> tuple[Self, int | None]:
        """Return these settings with every None replaced by a number, and the rank, or None for a code without one.

        `policy` is the name of the policy, for messages, and `rank` is the setting `ShadowKV.rank`. Raises ConfigError
        if a
        setting is out of range, or if there is a rank and the code has none.
        """

    @abc.abstractmethod
    def codec(self, rank: int | None) -> KeyCodec:
        """Return the codec of resolved settings."""

    def check_no_rank(self, policy: str, rank: Any) -> None:
        """Raise ConfigError if a rank is given. Only low-rank keys have one."""
        if rank is not None:
            raise ConfigError(f"{policy}.rank must be None with keys={self.name!r}, which has none, got {rank!r}")


@dataclasses.dataclass(frozen=True)
class LowRank(Keys):
    """Keys stored as low-rank factors, as in the paper. Their rank is `ShadowKV.rank`.

    Attributes:
        weights: the error that the code minimizes. "none": the error of the keys (the paper). "queries": the error of
            the products of keys and queries, estimated from the prompt's last queries.
    """

    weights: str = "none"

    name = "lowrank"

    def resolve(self, policy: str, rank: Any, config: ModelConfig) -> tuple[Self, int | None]:
        check_choice(f"{policy}.keys", "weights", self.weights, _WEIGHTS)
        columns = config.key_columns
        rank = usual_rank(columns) if rank is None else rank
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= columns:
            raise ConfigError(f"{policy}.rank must be an integer in [1, {columns}], got {rank!r}")
        return self, rank

    def codec(self, rank: int | None) -> KeyCodec:
        return LowRankCodec(rank)  # type: ignore[arg-type]  # None only before `resolve`


@dataclasses.dataclass(frozen=True)
class TransformCode(Keys):
    """Keys stored in their eigenbasis, with 8, 4, 2 or 0 bits for each column.

    Attributes:
        bits: mean bits of a key column, in (0, 8]. `resolve` replaces them by a profile. None: `profile` is used. If
            that is also None, there are as many bits as low-rank keys of the usual rank take.
        profile: numbers of columns with 8, 4 and 2 bits (n8, n4, n2). n4 is a multiple of 2 and n2 a multiple of 4.
        weights: the error that the code minimizes, "none" or "queries", as for low-rank keys (`LowRank`).
    """

    bits: float | None = None
    profile: Profile | None = None
    weights: str = "none"

    name = "transform"

    def resolve(self, policy: str, rank: Any, config: ModelConfig) -> tuple[Self, None]:
        self.check_no_rank(policy, rank)
        check_choice(f"{policy}.keys", "weights", self.weights, _WEIGHTS)
        if self.bits is not None:
            profile = self.profile_of_bits(policy, config)
        elif self.profile is None:
            profile = usual_profile(config.key_columns)
        else:
            profile = self.profile
            _check_profile(policy, profile, config.key_columns)
        return dataclasses.replace(self, bits=None, profile=profile), None

    def profile_of_bits(self, policy: str, config: ModelConfig) -> Profile:
        """Return the default profile with `bits` bits for each column on average."""
        bits, columns = self.bits, config.key_columns
        if self.profile is not None:
            raise ConfigError(f"{policy}.keys.bits must be None with keys.profile={self.profile!r}, got {bits!r}")
        if isinstance(bits, bool) or not isinstance(bits, int | float) or not 0 < bits <= 8:
            raise ConfigError(f"{policy}.keys.bits must be a number in (0, 8], got {bits!r}")
        return profile_of(columns, max(8, bits * columns))

    def codec(self, rank: int | None) -> KeyCodec:
        return TransformCodec(self.profile)  # type: ignore[arg-type]  # None only before `resolve`


@dataclasses.dataclass(frozen=True)
class ExactKeys(Keys):
    """Keys stored exactly, before RoPE."""

    name = "exact"

    def resolve(self, policy: str, rank: Any, config: ModelConfig) -> tuple[Self, None]:
        self.check_no_rank(policy, rank)
        return self, None

    def codec(self, rank: int | None) -> KeyCodec:
        return ExactCodec()


@dataclasses.dataclass(frozen=True)
class FromValues(Keys):
    """Keys made from the fetched values, in models whose values are the keys before their norm (Gemma 4 31B, 26B-A4B).

    The device then holds no code of the keys.
    """

    name = "from_values"

    def resolve(self, policy: str, rank: Any, config: ModelConfig) -> tuple[Self, None]:
        self.check_no_rank(policy, rank)
        if not config.keys_follow:
            raise ConfigError(
                f"{policy}.keys='from_values' must have a model whose values are its keys, got {config.model_type}"
            )
        return self, None

    def codec(self, rank: int | None) -> KeyCodec:
        return ValueCodec()


def _check_profile(policy: str, profile: Any, columns: int) -> None:
    """Raise ConfigError unless a profile is three counts that fill whole bytes and sum to at most `columns`."""
    good = isinstance(profile, tuple) and len(profile) == 3
    good = good and all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in profile)
    if not good or profile[1] % 2 or profile[2] % 4 or not 1 <= sum(profile) <= columns:
        raise ConfigError(
            f"{policy}.keys.profile must be three numbers of columns (8-bit, 4-bit, 2-bit), together 1 to {columns}, "
            f"the second a multiple of 2 and the third of 4, got {profile!r}"
        )


@dataclasses.dataclass(frozen=True)
class Landmarks(Record):
    """The landmarks: summaries of keys by which chunks are selected.

    Attributes:
        tokens: number of consecutive tokens that a landmark summarizes, a divisor of chunk_size. A chunk's score is the
            sum over its landmarks. None: chunk_size, so a chunk has one landmark (the paper).
        levels: 1: each step reads all landmarks. 2: each step reads the mean of every chunk, and the landmarks of those
            chunks that are among the best by their means. A chunk must then have a power of two of landmarks.
        order: 1: a landmark is scored by the mean of its keys (the paper). 2: half the variance of the products of its
            keys and the query is added to the logit.
        dtype: "model", or "int8" or "int4" with a scale for each landmark.
    """

    tokens: int | None = None
    levels: int = 1
    order: int = 1
    dtype: str = "model"

    def resolve(self, policy: str, chunk_size: int, config: ModelConfig) -> Self:
        """Check every setting, and replace None in `tokens`. If a chunk has one landmark, levels becomes 1."""
        where = f"{policy}.landmarks"
        tokens = chunk_size if self.tokens is None else self.tokens
        check_range(where, "tokens", tokens, 1, chunk_size)
        if chunk_size % tokens:
            raise ConfigError(f"{where}.tokens must divide chunk_size={chunk_size}, got {tokens}")
        check_dtype(where, self.dtype, config)
        check_range(where, "order", self.order, 1, 2)
        check_range(where, "levels", self.levels, 1, 2)
        parts = chunk_size // tokens
        if self.levels == 2 and parts & (parts - 1):
            raise ConfigError(
                f"{where}.tokens must leave a power of two of landmarks a chunk with landmarks.levels=2, got {parts}"
            )
        return dataclasses.replace(self, tokens=tokens, levels=min(self.levels, parts))


@dataclasses.dataclass(frozen=True)
class Values(Record):
    """How values are stored in host memory.

    Attributes:
        dtype: "model", or "int8" or "int4" with a scale for each token and head.
    """

    dtype: str = "model"

    @property
    def least_budget(self) -> int:
        """The least default budget in tokens. 512 tokens in four bits are a little over half the bytes of 256 in 16."""
        return 512 if self.dtype == "int4" else 256

    def check(self, policy: str, config: ModelConfig) -> None:
        """Raise ConfigError if the dtype is unknown or does not fit the model."""
        check_dtype(f"{policy}.values", self.dtype, config)


def check_dtype(where: str, dtype: Any, config: ModelConfig) -> None:
    """Raise ConfigError unless rows of the model's head width can be stored in this dtype."""
    check_choice(where, "dtype", dtype, ("model", *ROW_BITS))
    if dtype == "int4" and config.head_dim % 2:
        raise ConfigError(f"{where}.dtype='int4' must have an even head_dim, got {config.head_dim}")


@dataclasses.dataclass(frozen=True)
class Choice(Record):
    """Extensions of the paper's rules for choosing chunks.

    Attributes:
        rounds: 1: chunks are selected by their landmarks (the paper). 2: landmarks select twice as many chunks, their
            keys are rebuilt, and the best of these chunks are selected by the rebuilt keys.
        outlier_rule: how the chunks that stay exact are chosen. "landmark": those whose keys differ most from their
            landmark (the paper). "both": half of them by that rule, and half by the largest error of the key code.
    """

    rounds: int = 1
    outlier_rule: str = "landmark"

    def check(self, policy: str, keys: Keys) -> None:
        """Raise ConfigError if a setting is out of range, or does not go with the keys.

        outlier_rule="both" needs keys with an error. rounds=2 needs keys that are known before the values.
        """
        where = f"{policy}.choice"
        check_choice(where, "outlier_rule", self.outlier_rule, ("landmark", "both"))
        if self.outlier_rule == "both" and isinstance(keys, ExactKeys | FromValues):
            raise ConfigError(f"{where}.outlier_rule must be 'landmark' with keys={keys.name!r}, got 'both'")
        check_range(where, "rounds", self.rounds, 1, 1 if isinstance(keys, FromValues) else 2)

    @property
    def wider(self) -> int:
        """Number of chunks that landmarks select for each chunk of the budget."""
        return 1 if self.rounds == 1 else WIDER

    @property
    def rebuilt(self) -> int:
        """Number of keys that a step rebuilds for each selected key."""
        return 1 if self.rounds == 1 else 1 + WIDER


MANTISSA = {"float32": (8, 23), "bfloat16": (8, 7)}  # exponent and mantissa bits of the dtypes of scores


class Scoring(NamedTuple):
    """How queries score chunks.

    Attributes:
        scale: factor on products of queries and keys.
        shared: whether the queries of a step choose together.
        dtype: dtype that the softmax is rounded to, a key of MANTISSA.
    """

    scale: float
    shared: bool = False
    dtype: str = "float32"


_N = TypeVar("_N", int, Array)


@dataclasses.dataclass(frozen=True)
class Quirks(Record):
    """The published code's choices that differ from the paper. The defaults are the paper's choices.

    Attributes:
        score_dim: products are divided by the square root of this number for selection. None: by the square root of the
            head width.
        score_dtype: dtype that the softmax over landmarks is rounded to, "float32" or "bfloat16".
        exact_preload: whether the chunks that the prompt's last query selects begin with exact keys. A chunk loses its
            exact keys when a query does not select it.
        chunk_multiple: the number of a prompt's chunks is rounded down to a multiple of this.
        turn_selection: "each": every query of a turn selects its own chunks, so that a turn equals single steps.
            "shared": all queries of a piece select the same chunks.
    """

    score_dim: int | None = None
    score_dtype: str = "float32"
    exact_preload: bool = False
    chunk_multiple: int = 1
    turn_selection: str = "each"

    @classmethod
    def published(cls) -> "Quirks":
        """Return the published code's choices."""
        return cls(128, "bfloat16", exact_preload=True, chunk_multiple=8, turn_selection="shared")

    def check(self, policy: str) -> None:
        """Raise ConfigError if a setting is out of range."""
        where = f"{policy}.quirks"
        check_choice(where, "turn_selection", self.turn_selection, ("each", "shared"))
        if self.score_dim is not None:
            check_range(where, "score_dim", self.score_dim, 1)
        check_choice(where, "score_dtype", self.score_dtype, tuple(MANTISSA))
        check_choice(where, "exact_preload", self.exact_preload, (False, True))
        check_range(where, "chunk_multiple", self.chunk_multiple, 1)

    def scoring(self, scale: float) -> Scoring:
        """Return how queries score chunks. `scale` is the attention's factor on products, used if score_dim is None."""
        scale = scale if self.score_dim is None else float(self.score_dim**-0.5)
        return Scoring(scale, shared=self.turn_selection == "shared", dtype=self.score_dtype)

    def rounded(self, chunks: _N) -> _N:
        """Return the number of chunks, rounded down to a multiple of `chunk_multiple`."""
        return chunks // self.chunk_multiple * self.chunk_multiple


@dataclasses.dataclass(frozen=True)
class ShadowSettings(UniformPolicy, Budgeted, Sized):
    """The settings of `ShadowKV`, and the counts that follow from them. A count for a capacity is the maximum.

    Attributes:
        rank: rank of the low-rank keys. None: 160 of every 1,024 key columns, in multiples of 8.
        chunk_size: tokens in a chunk.
        budget: number of tokens selected for a query, in addition to outliers and window. None: 1.56 % of the capacity,
            at least 256, or at least 512 if values have four bits.
        outlier_chunks: number of chunks that each KV head keeps exactly. None: 24 for every 1,024 tokens of budget.
        local_chunks: number of whole chunks at the end of the prompt that stay in the window.
        keys: how keys are stored: `LowRank` (the paper), `TransformCode`, `ExactKeys`, `FromValues`, or another
            subclass of `Keys`.
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
    def preset(cls, name: str) -> Self:
        """Return the settings that have a name on the command line: paper, reference, packed or packed_small.

        Raises:
            ConfigError: there is no such name.
        """
        known = {"paper": cls.paper, "reference": cls.reference, "packed": cls.packed}
        check_choice(cls.name, "preset", name, (*known, "packed_small"))
        return cls.packed(small=True) if name == "packed_small" else known[name]()

    @classmethod
    def lossless(cls, num_tokens: int, config: ModelConfig) -> Self:
        """Return settings that equal full attention for up to num_tokens: full rank, and a budget of all tokens."""
        return cls(rank=config.key_columns, budget=max(num_tokens, cls.chunk_size))

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """Return groups of policies with fewer and fewer outliers. Within a group, the bits of the key code fall.

        They have the key code, landmarks, values and choice of this policy. With the transform code, the size also
        decides `landmarks.tokens`, unless they are given. Outliers are given up before the keys get fewer bits than the
        usual rank has. 48 outlier chunks are a small share of 128K tokens, but a fifth of 2K tokens. There, a lower
        rank costs more quality than these outliers gain.

        Raises:
            ConfigError: the key code's bits or profile are given, although the size decides them.
        """
        if isinstance(self.keys, TransformCode):
            for field in ("profile", "bits"):
                if (value := getattr(self.keys, field)) is not None:
                    raise ConfigError(f"{self.name}.keys.{field} must be None where a share decides it, got {value!r}")
        codes = type(self)(**{name: getattr(self, name) for name in self.size_free})
        rich, poor = codes._code_sizes(config)
        groups = (*itertools.product(_OUTLIERS, [rich]), (0, poor))
        return [[dataclasses.replace(codes, outlier_chunks=count, **code) for code in every] for count, every in groups]

    def _code_sizes(self, config: ModelConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return two lists of settings of the key code: with at least the bits of the usual rank, and with fewer.

        The bits fall within each list. With the transform code, more bits come with finer landmarks.
        """
        columns, usual = config.key_columns, usual_rank(config.key_columns)
        if isinstance(self.keys, LowRank):
            ranks = [{"rank": rank} for rank in range(columns // 8 * 8 or columns, 0, -8)]
            return [one for one in ranks if one["rank"] >= usual], [one for one in ranks if one["rank"] < usual]
        if not isinstance(self.keys, TransformCode):
            return [{}], []
        enough = min(2 * usual, columns)
        rich: list[dict[str, Any]] = []
        poor: list[dict[str, Any]] = []
        for size in range(columns, 0, -max(unit_of(columns), columns // 128)):
            tokens = self.landmarks.tokens
            if tokens is None and size > columns / 6:  # `packed(small=True)` has fewer bits, and one landmark a chunk
                most = 2 if size >= enough else 4
                tokens = max(count for count in range(1, most + 1) if self.chunk_size % count == 0)
            keys = dataclasses.replace(self.keys, bits=None, profile=profile_of(columns, 8 * size))
            landmarks = dataclasses.replace(self.landmarks, tokens=tokens)
            (rich if size >= enough else poor).append({"keys": keys, "landmarks": landmarks})
        return rich, poor

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
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
        if isinstance(keys, FromValues) and self.values.dtype != "model":
            raise ConfigError(
                f"{self.name}.values.dtype must be 'model' with keys='from_values', got {self.values.dtype!r}"
            )
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
        last = TAIL if self.keys.weights == "queries" else int(self.quirks.exact_preload)
        return HookInputs(last_queries=last, piece=self.extend_piece)

    @property
    def budget_unit(self) -> int:
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
