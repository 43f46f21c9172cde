"""The sparse attentions by name, and the parser of the command line's `--prefill`."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from jshadow.engine.sparse_prefill.a_shape import AShape
from jshadow.engine.sparse_prefill.base import SparsePrefill
from jshadow.engine.sparse_prefill.vertical_slash import VerticalSlash
from jshadow.errors import ConfigError

PREFILLS: dict[str, type[SparsePrefill]] = {"vertical_slash": VerticalSlash, "a_shape": AShape}


def parse_prefill(text: str) -> SparsePrefill | None:
    """Parse NAME or NAME:key=value:..., the value of `--prefill`. Returns None for "exact".

    Raises:
        ConfigError: the name or a setting is unknown, or a value is out of range.
    """
    name, *settings = text.split(":")
    if name == "exact" and not settings:
        return None
    if name not in PREFILLS:
        raise ConfigError(f"prefill must be one of {['exact', *sorted(PREFILLS)]}, got {text!r}")
    return PREFILLS[name](**parse_settings(name, settings))


def parse_settings(name: str, settings: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` settings of the attention `name`. A value that is not JSON is a text.

    Raises:
        ConfigError: a key is unknown, or a setting has no "=".
    """
    fields = {field.name for field in dataclasses.fields(PREFILLS[name])}
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or key not in fields:
            raise ConfigError(f"prefill must be {name}:KEY=VALUE with a key of {sorted(fields)}, got {setting!r}")
        try:
            values[key] = text if key == "pattern" else json.loads(text)
        except json.JSONDecodeError:
            values[key] = text
    return values
