"""The policies by name. A policy listed here must have a row in tests/cases.py."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from jshadow.errors import ConfigError
from jshadow.policies.base import Policy as Policy
from jshadow.policies.full import Full as Full
from jshadow.policies.h2o import H2O as H2O
from jshadow.policies.infinigen import InfiniGen as InfiniGen
from jshadow.policies.infllm import InfLLM as InfLLM
from jshadow.policies.kivi import KIVI as KIVI
from jshadow.policies.loki import Loki as Loki
from jshadow.policies.omnikv import OmniKV as OmniKV
from jshadow.policies.quest import Quest as Quest
from jshadow.policies.shadowkv import ShadowKV as ShadowKV
from jshadow.policies.shadowkv_plus import ShadowKVPlus as ShadowKVPlus
from jshadow.policies.snapkv import SnapKV as SnapKV
from jshadow.policies.specache import SpeCache as SpeCache
from jshadow.policies.streaming_llm import StreamingLLM as StreamingLLM
from jshadow.policies.wrappers import WRAPPERS as WRAPPERS
from jshadow.policies.wrappers import DenseFirst as DenseFirst
from jshadow.policies.wrappers import Pyramid as Pyramid
from jshadow.policies.wrappers import Wrapper as Wrapper

LISTED: tuple[type[Policy], ...] = (
    Full,
    StreamingLLM,
    H2O,
    SnapKV,
    Quest,
    Loki,
    InfiniGen,
    OmniKV,
    KIVI,
    SpeCache,
    InfLLM,
    ShadowKV,
    ShadowKVPlus,
)
POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in LISTED}


def parse_policy(name: str, settings: Sequence[str]) -> Policy:
    """The policy `name` with `key=value` settings, and `wrapper.key=value` for what is put around it, in that order.

    Raises:
        ConfigError: naming what is unknown.
    """
    if name not in POLICIES:
        raise ConfigError(f"policy must be one of {sorted(POLICIES)}, got {name!r}")
    keys = settings_of(POLICIES[name])
    around = [f"{one}.{key}" for one, wrapper in WRAPPERS.items() for key in settings_of(wrapper)]
    values: dict[str, dict[str, Any]] = {name: {}}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or key not in [*keys, *around]:
            raise ConfigError(
                f"--set must be KEY=VALUE with a key of {name} {sorted(keys)} or of a wrapper {around}, got {setting!r}"
            )
        target, _, field = key.rpartition(".")
        values.setdefault(target or name, {})[field] = parse_value(text)
    policy = POLICIES[name](**values.pop(name))
    for one, given in values.items():
        policy = WRAPPERS[one](inner=policy, **given)
    return policy


def settings_of(policy: type[Policy]) -> list[str]:
    """Names of a policy's settings."""
    return [field.name for field in dataclasses.fields(policy) if field.name != "inner"]  # type: ignore[arg-type]


def parse_value(text: str) -> Any:
    """A setting as JSON has it, a list as a tuple; what is no JSON is a text."""
    try:
        value = json.loads(text.lower() if text in ("True", "False") else text)
    except json.JSONDecodeError:
        return text
    return tuple(value) if isinstance(value, list) else value
