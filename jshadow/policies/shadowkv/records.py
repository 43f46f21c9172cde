"""Records of ShadowKV's settings: how keys, landmarks and values are stored, and how chunks are chosen.

The settings that are changed most often (rank, chunk_size, budget, outlier_chunks, local_chunks) are fields of
`ShadowKV` itself. A record's `resolve` checks it and replaces every None by a number.
"""

import abc
import dataclasses
from typing import Any, Self

from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.ops.packing import ROW_BITS
from jshadow.policies.checks import check_choice, check_range
from jshadow.policies.settings import Record
from jshadow.policies.shadowkv.key_codecs import (
    ExactCodec,
    KeyCodec,
    LowRankCodec,
    Profile,
    TransformCodec,
    usual_profile,
    usual_rank,
)
from jshadow.policies.shadowkv.key_codecs.profiles import profile_of

WEIGHTS = ("none", "queries")
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

        Args:
            policy: the name of the policy, for messages.
            rank: the setting `ShadowKV.rank`.
            config: the model.

        Raises:
            ConfigError: a setting is out of range, or there is a rank and the code has none.
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
        """Check the weights and the rank. A rank of None becomes the paper's share of the key columns."""
        check_choice(f"{policy}.keys", "weights", self.weights, WEIGHTS)
        columns = config.key_columns
        rank = usual_rank(columns) if rank is None else rank
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= columns:
            raise ConfigError(f"{policy}.rank must be an integer in [1, {columns}], got {rank!r}")
        return self, rank

    def codec(self, rank: int | None) -> KeyCodec:
        """Return the codec with these settings."""
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
        """Check every setting. `bits` is replaced by a profile, and so is a profile of None."""
        self.check_no_rank(policy, rank)
        check_choice(f"{policy}.keys", "weights", self.weights, WEIGHTS)
        if self.bits is not None:
            profile = self.profile_of_bits(policy, config)
        elif self.profile is None:
            profile = usual_profile(config.key_columns)
        else:
            profile = self.profile
            check_profile(policy, profile, config.key_columns)
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
        """Return the codec with these settings."""
        return TransformCodec(self.profile)  # type: ignore[arg-type]  # None only before `resolve`


@dataclasses.dataclass(frozen=True)
class ExactKeys(Keys):
    """Keys stored exactly, before RoPE."""

    name = "exact"

    def resolve(self, policy: str, rank: Any, config: ModelConfig) -> tuple[Self, None]:
        """Check that no rank is given."""
        self.check_no_rank(policy, rank)
        return self, None

    def codec(self, rank: int | None) -> KeyCodec:
        """Return the codec with these settings."""
        return ExactCodec()


def check_profile(policy: str, profile: Any, columns: int) -> None:
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
        """Raise ConfigError if a setting is out of range, or if outlier_rule is "both" and the keys are exact."""
        where = f"{policy}.choice"
        check_choice(where, "outlier_rule", self.outlier_rule, ("landmark", "both"))
        if self.outlier_rule == "both" and isinstance(keys, ExactKeys):
            raise ConfigError(f"{where}.outlier_rule must be 'landmark' with keys='exact', got 'both'")
        check_range(where, "rounds", self.rounds, 1, 2)

    @property
    def wider(self) -> int:
        """Number of chunks that landmarks select for each chunk of the budget."""
        return 1 if self.rounds == 1 else WIDER

    @property
    def rebuilt(self) -> int:
        """Number of keys that a step rebuilds for each selected key."""
        return 1 if self.rounds == 1 else 1 + WIDER
