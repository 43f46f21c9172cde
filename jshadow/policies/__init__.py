"""The methods, one file or folder each. `POLICIES` maps their names to their classes; base.py defines the contract."""

import dataclasses
import importlib
import json
import pkgutil
from collections.abc import Sequence
from typing import Any

from jshadow.cache.records import PromptKV as PromptKV
from jshadow.cache.records import StepKV as StepKV
from jshadow.cache.spec import CacheSpec as CacheSpec
from jshadow.errors import ConfigError
from jshadow.policies.adakv import AdaKV as AdaKV
from jshadow.policies.base import HookInputs as HookInputs
from jshadow.policies.base import LayerCache as LayerCache
from jshadow.policies.base import Policy as Policy
from jshadow.policies.base import UniformPolicy as UniformPolicy
from jshadow.policies.base import Wrapper as Wrapper
from jshadow.policies.capabilities import Budgeted as Budgeted
from jshadow.policies.capabilities import Sized as Sized
from jshadow.policies.checks import check_choice as check_choice
from jshadow.policies.checks import check_range as check_range
from jshadow.policies.checks import check_share as check_share
from jshadow.policies.eviction import EvictingPolicy as EvictingPolicy
from jshadow.policies.eviction import KeepsBest as KeepsBest
from jshadow.policies.expected_attention import ExpectedAttention as ExpectedAttention
from jshadow.policies.full import Full as Full
from jshadow.policies.h2o import H2O as H2O
from jshadow.policies.infinigen import InfiniGen as InfiniGen
from jshadow.policies.infllm import InfLLM as InfLLM
from jshadow.policies.keydiff import KeyDiff as KeyDiff
from jshadow.policies.kivi import KIVI as KIVI
from jshadow.policies.kvzip import KVzip as KVzip
from jshadow.policies.less import LESS as LESS
from jshadow.policies.loki import Loki as Loki
from jshadow.policies.offloaded import Offloaded as Offloaded
from jshadow.policies.omnikv import OmniKV as OmniKV
from jshadow.policies.quantized import Quantized as Quantized
from jshadow.policies.quest import Quest as Quest
from jshadow.policies.registry import POLICIES as POLICIES
from jshadow.policies.registry import find_policy as find_policy
from jshadow.policies.registry import register as register
from jshadow.policies.retrieval import RetrievalPolicy as RetrievalPolicy
from jshadow.policies.rocketkv import RocketKV as RocketKV
from jshadow.policies.settings import import_record, nearest, setting_types, with_settings
from jshadow.policies.shadowkv.plus import ShadowKVPlus as ShadowKVPlus
from jshadow.policies.shadowkv.policy import ShadowKV as ShadowKV
from jshadow.policies.sizing import Falling as Falling
from jshadow.policies.snapkv import SnapKV as SnapKV
from jshadow.policies.specache import SpeCache as SpeCache
from jshadow.policies.streaming_llm import StreamingLLM as StreamingLLM
from jshadow.policies.tova import TOVA as TOVA
from jshadow.policies.wrappers import WRAPPERS as WRAPPERS
from jshadow.policies.wrappers import DenseFirst as DenseFirst
from jshadow.policies.wrappers import Pyramid as Pyramid

# Import every file of this package, so that a new method is registered without a line here.
for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
# Sort by name, because the order of imports varies. Policies of other packages follow in order of registration.
for _name in sorted(POLICIES):
    POLICIES[_name] = POLICIES.pop(_name)

_PRESET = "preset="


def parse_policy(name: str, settings: Sequence[str]) -> Policy:
    """Return the policy called `name`, with settings from the command line.

    A setting is `key=value`. A key is the dotted name of a setting (`jshadow.policies.settings`): `keys=transform`
    chooses a record, and `keys.bits=2` sets one of its settings. The order of the settings does not matter. A setting
    `wrapper.key=value` puts the wrapper of that name around the policy. The first that is named is the innermost.
    `preset=packed` replaces the default settings by those of `ShadowKV.packed()`; see `ShadowKV.preset`.

    Raises:
        ConfigError: there is no such policy, key, record or preset. The message names the nearest keys.
    """
    policy_class = find_policy(name)
    presets = [setting.removeprefix(_PRESET) for setting in settings if setting.startswith(_PRESET)]
    if presets and not hasattr(policy_class, "preset"):
        raise ConfigError(f"--set preset must be left out for {name}, which has none, got {presets[0]!r}")
    usual: Policy = policy_class.preset(presets[-1]) if presets else policy_class()  # type: ignore[attr-defined]
    values = parse_settings(name, [setting for setting in settings if not setting.startswith(_PRESET)])
    policy = with_settings(usual, values.pop("", {}))
    for wrapper, options in values.items():
        policy = WRAPPERS[wrapper](**{"inner": policy, **options})
    return policy


def parse_settings(name: str, settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parse `key=value` settings for the policy called `name`.

    Return one dictionary of values by key for the policy, under the name "", and one for each wrapper, under its name.
    Raises ConfigError as `parse_policy` does.
    """
    kind = find_policy(name)
    annotations = {field.name: field.type for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for setting in settings:
        key, _, text = setting.partition("=")
        import_record(annotations.get(key), text)  # its settings are known from here on
    types = setting_types(kind)
    around = {f"{one}.{key}": kind for one, wrapper in WRAPPERS.items() for key, kind in setting_types(wrapper).items()}
    values: dict[str, dict[str, Any]] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        type_name = (types | around).get(key)
        if not equals or type_name is None:
            raise ConfigError(
                f"--set must be KEY=VALUE with a key of {name} {sorted(types)} or of a wrapper {sorted(around)}, "
                f"got {setting!r}{nearest(key, types | around)}"
            )
        value = parse_tuple(text) if type_name.startswith("tuple") else parse_value(text)
        wrapper, _, field = key.partition(".")
        if key in around:
            values.setdefault(wrapper, {})[field] = value
        else:
            values.setdefault("", {})[key] = value
    return values


def split_policy(text: str) -> tuple[str, list[str]]:
    """Split a text NAME:key=value:... into the name and the settings. NAME may be module:Class."""
    name, *settings = text.split(":")
    named = POLICIES.get(name)
    # The text begins with module:Class if no policy is called `name`, or if `name` is also the module of that policy.
    if settings and settings[0].isidentifier() and (named is None or named.__module__ == name):
        name = f"{name}:{settings.pop(0)}"
    return name, settings


def parse_value(text: str) -> Any:
    """Return the JSON value of a text, with a list as a tuple, or the text itself if it is not JSON."""
    try:
        value = json.loads(text.lower() if text in ("True", "False") else text)
    except json.JSONDecodeError:
        return text
    return tuple(value) if isinstance(value, list) else value  # settings must be hashable


def parse_tuple(text: str) -> Any:
    """Return the tuple that a text such as "2,8,18", "(2, 8, 18)" or "[2,8,18]" stands for.

    A plus also separates numbers, as in "2+8+18", because a list of policies is split at commas.
    """
    if text in ("null", "None"):
        return None
    inside = text.strip().strip("[]()")
    return tuple(parse_value(part.strip()) for part in inside.replace("+", ",").split(",") if part.strip())
