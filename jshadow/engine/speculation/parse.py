"""The drafters by name, and the parser of the command line's `--speculate`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jshadow.engine.speculation.compressed_draft import CompressedDraft
from jshadow.engine.speculation.draft_model import DraftModel
from jshadow.engine.speculation.drafter import Drafter
from jshadow.engine.speculation.prompt_lookup import PromptLookup
from jshadow.engine.speculation.self_draft import SelfDraft
from jshadow.errors import ConfigError
from jshadow.policies import WRAPPERS, Policy, parse_policy, parse_settings
from jshadow.policies.retrieval import RetrievalPolicy
from jshadow.policies.settings import with_settings
from jshadow.weights.params import load

DRAFTERS: dict[str, type[Drafter]] = {drafter.name: drafter for drafter in (PromptLookup, SelfDraft, CompressedDraft)}


def parse_drafter(text: str, dtype: str = "float32") -> Drafter:
    """Parse NAME or NAME:key=value:..., the value of `--speculate`.

    A directory with a checkpoint is a draft model. "self" and "compressed" may be followed by the name of a policy. All
    their settings but `tokens` are those of the policy.

    Args:
        text: the value.
        dtype: dtype of a draft model.

    Raises:
        ConfigError: the name or a setting is unknown, or a value is out of range.
        CheckpointError: the draft model cannot be loaded.
    """
    if Path(text).is_dir():
        return DraftModel(load(text, dtype))
    name, *settings = text.split(":")
    for drafter in (SelfDraft, CompressedDraft):
        if name == drafter.name:
            return parse_with_policy(drafter, settings)
    if name not in DRAFTERS:
        raise ConfigError(f"speculate must be one of {sorted(DRAFTERS)} or the directory of a model, got {text!r}")
    fields, values = {field.name for field in dataclasses.fields(DRAFTERS[name])}, {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in fields or not value.isdecimal():
            raise ConfigError(f"speculate must be {name}:KEY=NUMBER with a key of {sorted(fields)}, got {setting!r}")
        values[key] = int(value)
    return DRAFTERS[name](**values)


def parse_with_policy(drafter: type[SelfDraft] | type[CompressedDraft], settings: Sequence[str]) -> Drafter:
    """Parse the settings of a drafter that has a policy: the name of the policy, and key=value settings."""
    usual, named = drafter().policy, bool(settings) and "=" not in settings[0]
    own = [setting for setting in settings[named:] if setting.partition("=")[0] == "tokens"]
    others = [setting for setting in settings[named:] if setting not in own]
    policy: Policy
    if named:
        policy = parse_policy(settings[0], others)
    else:
        values = parse_settings(usual.name, others)
        policy = with_settings(usual, values.pop("", {}))
        for wrapper, options in values.items():
            policy = WRAPPERS[wrapper](**{"inner": policy, **options})
    if drafter is SelfDraft and not isinstance(policy, RetrievalPolicy):
        raise ConfigError(f"speculate must be self:POLICY with a policy such as quest, got {policy.name}")
    tokens = own[-1].partition("=")[2] if own else str(drafter.tokens)
    if not tokens.isdecimal():
        raise ConfigError(f"speculate must be {drafter.name}:tokens=NUMBER, got {own[-1]!r}")
    return drafter(policy=policy, tokens=int(tokens))  # type: ignore[arg-type]
