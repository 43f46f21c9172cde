"""The policies by name. A policy listed here must have a row in tests/cases.py."""

import dataclasses
import json
from collections.abc import Sequence

from jshadow.errors import ConfigError
from jshadow.policies.base import Policy as Policy
from jshadow.policies.full import Full as Full
from jshadow.policies.h2o import H2O as H2O
from jshadow.policies.infinigen import InfiniGen as InfiniGen
from jshadow.policies.kivi import KIVI as KIVI
from jshadow.policies.less import LESS as LESS
from jshadow.policies.loki import Loki as Loki
from jshadow.policies.omnikv import OmniKV as OmniKV
from jshadow.policies.quest import Quest as Quest
from jshadow.policies.shadowkv import ShadowKV as ShadowKV
from jshadow.policies.shadowkv_plus import ShadowKVPlus as ShadowKVPlus
from jshadow.policies.snapkv import SnapKV as SnapKV
from jshadow.policies.specache import SpeCache as SpeCache
from jshadow.policies.streaming_llm import StreamingLLM as StreamingLLM

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
    LESS,
    ShadowKV,
    ShadowKVPlus,
)
POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in LISTED}


def parse_policy(name: str, settings: Sequence[str]) -> Policy:
    """The policy `name` with `key=value` settings. Raises ConfigError naming what is unknown."""
    if name not in POLICIES:
        raise ConfigError(f"policy must be one of {sorted(POLICIES)}, got {name!r}")
    fields = {field.name for field in dataclasses.fields(POLICIES[name])}  # type: ignore[arg-type]
    values = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or key not in fields:
            raise ConfigError(f"--set must be KEY=VALUE with a key of {name} {sorted(fields)}, got {setting!r}")
        try:
            values[key] = json.loads(text.lower() if text in ("True", "False") else text)
        except json.JSONDecodeError:
            values[key] = text
    return POLICIES[name](**values)
