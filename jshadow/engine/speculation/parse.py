"""The drafters by name, and the parser of the command line's `--speculate`."""

import dataclasses

from jshadow.engine.speculation.drafter import Drafter
from jshadow.engine.speculation.prompt_lookup import PromptLookup
from jshadow.errors import ConfigError

DRAFTERS: dict[str, type[Drafter]] = {drafter.name: drafter for drafter in (PromptLookup,)}


def parse_drafter(text: str) -> Drafter:
    """Parse NAME or NAME:key=value:..., the value of `--speculate`.

    Raises:
        ConfigError: the name or a setting is unknown, or a value is out of range.
    """
    name, *settings = text.split(":")
    if name not in DRAFTERS:
        raise ConfigError(f"speculate must be one of {sorted(DRAFTERS)}, got {text!r}")
    fields, values = {field.name for field in dataclasses.fields(DRAFTERS[name])}, {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in fields or not value.isdecimal():
            raise ConfigError(f"speculate must be {name}:KEY=NUMBER with a key of {sorted(fields)}, got {setting!r}")
        values[key] = int(value)
    return DRAFTERS[name](**values)
