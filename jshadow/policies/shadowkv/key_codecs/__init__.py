"""Codes for a prompt's keys before RoPE: what ShadowKV keeps of them on the device, and rebuilds chunks from.

`lowrank` is the paper's; `transform` spends the same bits on more columns, `int4` on each channel alike, `exact` keeps
everything. To add one: a `KeyCodec` in a file of its own, a name in CODECS, a case in tests/test_key_codecs.py.
"""

from collections.abc import Callable
from typing import Any

from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.policies.shadowkv.key_codecs.base import KeyCode as KeyCode
from jshadow.policies.shadowkv.key_codecs.base import KeyCodec as KeyCodec
from jshadow.policies.shadowkv.key_codecs.base import Sizes as Sizes
from jshadow.policies.shadowkv.key_codecs.base import by_head as by_head
from jshadow.policies.shadowkv.key_codecs.base import by_token as by_token
from jshadow.policies.shadowkv.key_codecs.base import squared_error as squared_error
from jshadow.policies.shadowkv.key_codecs.exact import Exact as Exact
from jshadow.policies.shadowkv.key_codecs.int4 import Int4 as Int4
from jshadow.policies.shadowkv.key_codecs.lowrank import LowRank as LowRank
from jshadow.policies.shadowkv.key_codecs.lowrank import usual_rank as usual_rank
from jshadow.policies.shadowkv.key_codecs.midrise import Profile as Profile
from jshadow.policies.shadowkv.key_codecs.transform import Transform as Transform
from jshadow.policies.shadowkv.key_codecs.transform import usual_profile as usual_profile

CODECS: dict[str, Callable[..., KeyCodec]] = {
    "lowrank": lambda rank, profile: LowRank(rank),
    "transform": lambda rank, profile: Transform(profile),
    "int4": lambda rank, profile: Int4(),
    "exact": lambda rank, profile: Exact(),
}


def make_codec(name: str, rank: int | None, profile: Profile | None) -> KeyCodec:
    """The codec of resolved settings."""
    return CODECS[name](rank, profile)


def resolve_rank(policy: str, codec: str, rank: Any, config: ModelConfig) -> int | None:
    """The rank of `lowrank`, None for other codecs.

    Raises:
        ConfigError: out of range, or given to a codec that has none.
    """
    if codec != "lowrank":
        if rank is not None:
            raise ConfigError(f"{policy}.rank must be None with key_codec={codec!r}, which has none, got {rank!r}")
        return None
    columns = config.key_columns
    rank = usual_rank(columns) if rank is None else rank
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= columns:
        raise ConfigError(f"{policy}.rank must be an integer in [1, {columns}], got {rank!r}")
    return rank


def resolve_profile(policy: str, codec: str, profile: Any, config: ModelConfig) -> Profile | None:
    """The profile of `transform`, None for other codecs.

    Raises:
        ConfigError: not three counts of columns that there are and that fill whole bytes, or given to a codec that has
            none; `int4` of a head of odd width.
    """
    columns = config.key_columns
    if codec == "int4" and config.head_dim % 2:
        raise ConfigError(f"{policy}.key_codec='int4' must have an even head_dim, got {config.head_dim}")
    if codec != "transform":
        if profile is not None:
            raise ConfigError(
                f"{policy}.key_profile must be None with key_codec={codec!r}, which has none, got {profile!r}"
            )
        return None
    if profile is None:
        return usual_profile(columns)
    good = isinstance(profile, tuple) and len(profile) == 3
    good = good and all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in profile)
    if not good or profile[1] % 2 or profile[2] % 4 or not 1 <= sum(profile) <= columns:
        raise ConfigError(
            f"{policy}.key_profile must be three numbers of columns (8-bit, 4-bit, 2-bit), together 1 to {columns}, "
            f"the second a multiple of 2 and the third of 4, got {profile!r}"
        )
    return profile
