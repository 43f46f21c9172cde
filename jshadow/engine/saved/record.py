"""The record of a saved state: its model, policy and sizes as JSON, and a comparison with another model."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jshadow.cache import offload
from jshadow.cache.state import KVState
from jshadow.errors import CheckpointError, ConfigError, StateMismatch
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import abstract_of, cache_specs
from jshadow.policies import POLICIES, WRAPPERS, Full, Policy
from jshadow.policies.base import why_dense
from jshadow.policies.settings import dotted_settings, with_settings
from jshadow.weights.convert.safetensors_file import DTYPES_OF_TAGS, TAGS
from jshadow.weights.digest import canonical, tree_digest
from jshadow.weights.params import Params

_NOTHING = type("Nothing", (), {"__repr__": lambda self: "nothing"})()


@dataclasses.dataclass(frozen=True)
class StateRecord:
    """The metadata of a saved state. Each attribute is stored as a JSON text."""

    config: dict[str, Any]
    weights: str  # `Params.digest`
    tokenizer: str | None  # `Params.tokenizer_digest`
    policy: dict[str, Any]  # {"name", "settings"} of the resolved policy
    fitted: str | None  # digest of the policy's fitted arrays
    fitted_tree: Any  # the nested dict of these arrays, with [dtype, shape] in place of each, or None
    batch: int
    capacity: int
    dtype: str
    fetch: str
    windows: list[int]  # the window of each layer's CacheSpec

    @classmethod
    def of(cls, state: KVState, params: Params) -> "StateRecord":
        """Return the record of a state. Raises CheckpointError if a setting or an array cannot be stored."""
        return cls(
            config=plain(params.config),
            weights=params.digest,
            tokenizer=params.tokenizer_digest,
            policy=policy_record(state.policy),
            fitted=None if state.fitted is None else tree_digest(state.fitted),
            fitted_tree=_describe_tree(state.fitted),
            batch=state.batch,
            capacity=state.capacity,
            dtype=state.specs[0].dtype,
            fetch=state.fetch,
            windows=[spec.window for spec in state.specs],
        )

    def texts(self) -> dict[str, str]:
        """Return the JSON text of each field, by its name."""
        return {field.name: canonical(getattr(self, field.name)).decode() for field in dataclasses.fields(self)}

    @classmethod
    def read(cls, texts: Mapping[str, str]) -> "StateRecord":
        """Parse a record from its JSON texts. Raises ValueError if a field is missing or has the wrong type."""
        record = cls(**{field.name: read_json_text(texts, field.name) for field in dataclasses.fields(cls)})
        checks = {
            "config": isinstance(record.config, dict),
            "policy": isinstance(record.policy, dict)
            and isinstance(record.policy.get("name"), str)
            and isinstance(record.policy.get("settings"), dict),
            "batch, capacity": _is_size(record.batch, 1) and _is_size(record.capacity, 1),
            "dtype": isinstance(record.dtype, str) and record.dtype in TAGS,
            "fetch": isinstance(record.fetch, str) and record.fetch in offload.FETCH_MODES,
            "windows": isinstance(record.windows, list) and all(map(_is_size, record.windows)),
        }
        for name, good in checks.items():
            if not good:
                raise ValueError(f"{name} must be as jshadow writes it, got {texts.get(name)!r:.80}")
        return record

    def match(self, params: Params, policy: Policy | None) -> Policy:
        """Compare the record with `params`, and with `policy` if it is given. Return the state's resolved policy.

        Raises StateMismatch if something differs. The message has a line for each difference.
        """
        ours = {
            "config": plain(params.config),
            "dtype": str(params.dtype),
            "weights": params.digest,
            "tokenizer": params.tokenizer_digest,
        }
        lines = [line for name in ours for line in compare(name, getattr(self, name), ours[name], "params")]
        resolved, more = self._match_policy(params.config, policy)
        lines += more
        if lines or resolved is None:
            raise StateMismatch("{} difference(s):\n  {}".format(len(lines), "\n  ".join(lines)))
        return resolved

    def _match_policy(self, config: ModelConfig, policy: Policy | None) -> tuple[Policy | None, list[str]]:
        """Return the state's resolved policy, or None if it cannot be made, and its differences from the given one."""
        name, settings = self.policy["name"], self.policy["settings"]
        if policy is None and name not in POLICIES | WRAPPERS:
            return None, [f"policy.name: file has {name!r}, POLICIES has {sorted(POLICIES)}; pass policy="]
        try:
            if policy is None:
                policy = recorded_policy(name, settings)
            resolved = policy.resolve(config, self.capacity)
            if name == Full.name and why_dense(resolved, config, self.capacity):
                resolved = Full()  # `generate` falls back to it
            return resolved, compare("policy", self.policy, policy_record(resolved), "policy")
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            return None, [f"policy: file has {self.policy}, which is no policy of this model here: {error}"]

    def abstract(self, config: ModelConfig, policy: Policy, keep: bool | None = None) -> KVState:
        """Return the state of a resolved policy with ShapeDtypeStructs in place of arrays.

        `keep` is `CacheSpec.keep`. None: that of a state that is made on this machine. Raises ConfigError if this
        machine does not support the fetch mode for such a state, and ValueError if no state has these sizes.
        """
        if len(self.windows) != config.num_layers or self.capacity > config.context:
            raise ValueError(
                f"windows and capacity must fit {config.num_layers} layers and the model's context={config.context}, "
                f"got {len(self.windows)} windows and {self.capacity}"
            )
        try:
            specs = cache_specs(config, policy, self.batch, self.capacity, self.capacity, self.dtype, self.fetch)
            for spec, window in zip(specs, self.windows, strict=True):
                most = max(self.capacity + 1, spec.policy.window_slots(self.capacity, 1))
                if window > most:  # a short tensor in the file may stand for a long one
                    raise ValueError(f"windows must be at most {most} at capacity={self.capacity}, got {window}")
            specs = tuple(
                dataclasses.replace(spec, window=window, keep=spec.keep if keep is None else keep)
                for spec, window in zip(specs, self.windows, strict=True)
            )
            return abstract_of(specs, policy, _abstract_tree(self.fitted_tree))
        except ConfigError:
            raise
        except (TypeError, ValueError, OverflowError, AssertionError) as error:
            raise ValueError(f"no state has these sizes: {error}") from error


def read_json_text(texts: Mapping[str, str], name: str) -> Any:
    """Return the value of the JSON text `name`. Raises ValueError if it is missing or is not JSON."""
    if name not in texts:
        raise ValueError(f"{name} must be present, got nothing")
    try:
        return json.loads(texts[name])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be JSON, got {texts[name]!r:.80}") from error


def plain(value: Any) -> Any:
    """Return a setting as a JSON value. Raises CheckpointError if JSON cannot express it."""
    if isinstance(value, Policy):
        return policy_record(value)
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and np.isfinite(value)):
        return value
    raise CheckpointError(f"a saved state must have settings that are numbers, texts or tuples of them, got {value!r}")


def policy_record(policy: Policy) -> dict[str, Any]:
    """Return {"name", "settings"} of a policy, with the settings by dotted name."""
    return {"name": policy.name, "settings": {name: plain(value) for name, value in dotted_settings(policy).items()}}


def recorded_policy(name: str, settings: dict[str, Any]) -> Policy:
    """Undo `policy_record`: return the policy. Raises KeyError, TypeError or ConfigError if there is none."""
    return with_settings((POLICIES | WRAPPERS)[name](), {key: _hashable(value) for key, value in settings.items()})


def _hashable(value: Any) -> Any:
    """Turn a JSON value into a setting, which is hashable: a list becomes a tuple, a policy record a policy."""
    if isinstance(value, dict) and value.keys() == {"name", "settings"}:
        return recorded_policy(**value)
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _describe_tree(tree: Any) -> Any:
    """Return a nested dict of arrays with [dtype, shape] in place of each array, or None for None."""
    if tree is None:
        return None
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        return {key: _describe_tree(value) for key, value in tree.items()}
    if isinstance(tree, jax.Array | np.ndarray) and tree.dtype.name in TAGS:
        return [tree.dtype.name, list(tree.shape)]
    raise CheckpointError(
        f"state.fitted must be None or a nested dict of arrays (text keys, dtypes {sorted(TAGS)}), got {tree!r:.80}"
    )


def _abstract_tree(tree: Any) -> Any:
    """Turn a result of `_describe_tree` into ShapeDtypeStructs. Raises ValueError or TypeError for anything else."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {key: _abstract_tree(value) for key, value in tree.items()}
    return read_leaf(tree, "fitted_tree must hold [dtype, shape]")


def read_leaf(leaf: Any, told: str) -> jax.ShapeDtypeStruct:
    """Return the array that [dtype, shape] of JSON describes. Raises ValueError with what was `told`, or TypeError."""
    dtype, shape = leaf
    if dtype not in TAGS or not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise ValueError(f"{told}, got {leaf!r:.80}")
    return jax.ShapeDtypeStruct(tuple(shape), DTYPES_OF_TAGS[TAGS[dtype]])


def _is_size(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 2**31


def compare(field: str, theirs: Any, ours: Any, owner: str) -> list[str]:
    """Return a line for each difference between two values of a field. `owner` has ours: "params" or "policy"."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        keys = sorted(theirs.keys() | ours.keys())
        return [
            line
            for key in keys
            for line in compare(f"{field}.{key}", theirs.get(key, _NOTHING), ours.get(key, _NOTHING), owner)
        ]
    return [] if theirs == ours else [f"{field}: file has {theirs!r}, {owner} has {ours!r}"]
