"""Settings in records, and their names: `--set landmarks.tokens=2`.

A policy is a frozen dataclass of settings. Settings that belong together are a `Record`, a frozen dataclass that is one
field of the policy. A field can allow one type of record, as `landmarks: Landmarks` does, or several, as
`keys: LowRank | TransformCode` does; then the records' names tell them apart.

Every setting has a dotted name. The same names stand on the command line, in saved states and in result rows:

    ShadowKV(keys=TransformCode(bits=2), landmarks=Landmarks(tokens=2))
    {"keys": "transform", "keys.bits": 2, "landmarks.tokens": 2}
"""

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from jshadow.errors import ConfigError
from jshadow.policies.base import Policy

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Record:
    """Settings that belong together. Subclasses are frozen dataclasses whose fields all have defaults.

    Class attributes:
        name: what the record is called where a field allows several types; "" where it allows one.
    """

    name: ClassVar[str] = ""


def record_types(annotation: Any) -> dict[str, type[Record]]:
    """The types of record that a field's annotation allows, by name; empty for a plain setting."""
    types = typing.get_args(annotation) or (annotation,)
    return {kind.name: kind for kind in types if isinstance(kind, type) and issubclass(kind, Record)}


def setting_types(kind: type) -> dict[str, str]:
    """The dotted names of all settings of a policy or record type, with their types as text.

    Settings of every allowed record are listed. A wrapper's inner policy is not.
    """
    types: dict[str, str] = {}
    for field in dataclasses.fields(kind):
        records = record_types(field.type)
        if field.name == "inner":
            continue
        if not records or any(records):
            types[field.name] = str(field.type)
        for record in records.values():
            types |= {f"{field.name}.{name}": text for name, text in setting_types(record).items()}
    return types


def dotted_settings(value: Any) -> dict[str, Any]:
    """The settings of a policy or record by dotted name; a record that has a name stands as that name first."""
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        setting = getattr(value, field.name)
        if not isinstance(setting, Record):
            settings[field.name] = setting
            continue
        if setting.name:
            settings[field.name] = setting.name
        settings |= {f"{field.name}.{name}": inner for name, inner in dotted_settings(setting).items()}
    return settings


def policy_settings(policy: Policy) -> dict[str, Any]:
    """The settings of a policy by dotted name; those of a wrapper's inner policy in a dictionary with its name."""
    return {
        name: {"name": value.name, **policy_settings(value)} if isinstance(value, Policy) else value
        for name, value in dotted_settings(policy).items()
    }


def changed_settings(value: Any, usual: Any = None) -> dict[str, Any]:
    """The dotted settings in which a policy or record differs from `usual`; None: from the defaults of its type."""
    usual = type(value)() if usual is None else usual
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        setting, default = getattr(value, field.name), getattr(usual, field.name)
        if not isinstance(setting, Record):
            if setting != default:
                changed[field.name] = setting
            continue
        if type(setting) is not type(default):
            changed[field.name], default = setting.name, None
        changed |= {f"{field.name}.{name}": inner for name, inner in changed_settings(setting, default).items()}
    return changed


def with_settings(value: T, settings: Mapping[str, Any], path: str = "") -> T:
    """A policy or record with some settings replaced.

    Args:
        value: a policy or a record.
        settings: by dotted name. Where a field allows several records, their name chooses one, with default settings
            unless `value` has that type already.
        path: what errors call the value; by default its name.

    Raises:
        ConfigError: there is no such setting, which names the nearest ones, or no such record.
    """
    path = path or getattr(value, "name", "")
    fields = {field.name: field for field in dataclasses.fields(value)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for name, setting in settings.items():
        first, _, rest = name.partition(".")
        if first not in fields:
            raise unknown_setting(path, name, value)
        if rest:
            inner.setdefault(first, {})[rest] = setting
        else:
            changes[first] = named_record(fields[first], setting, getattr(value, first), path)
    for first, nested in inner.items():
        record = changes.get(first, getattr(value, first))
        if not isinstance(record, Record):
            raise unknown_setting(path, f"{first}.{next(iter(nested))}", value)
        changes[first] = with_settings(record, nested, f"{path}.{first}")
    return dataclasses.replace(value, **changes)  # type: ignore[type-var]


def named_record(field: dataclasses.Field[Any], setting: Any, current: Any, path: str) -> Any:
    """The record that a name stands for; a plain setting, or a record, as it is. Raises ConfigError."""
    records = record_types(field.type)
    if not records or isinstance(setting, Record):
        return setting
    if setting not in tuple(filter(None, records)):
        choices = tuple(filter(None, records)) or tuple(setting_types(type(current)))
        parts = "one of" if any(records) else "set by its parts"
        raise ConfigError(f"{path}.{field.name} must be {parts} {choices}, got {setting!r}")
    return current if current.name == setting else records[setting]()


def unknown_setting(path: str, name: str, value: Any) -> ConfigError:
    """The error of a setting that a policy or record does not have."""
    names = dotted_settings(value)
    shown = f"{path}={value.name!r}" if isinstance(value, Record) and value.name else path
    return ConfigError(f"{shown} has the settings {sorted(names)}, got {name!r}{nearest(name, names)}")


def nearest(name: str, names: Any) -> str:
    """The names most like one that does not exist, as the end of an error message; "" where none is like it."""
    similar = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f"; the nearest: {', '.join(similar)}" if similar else ""


def check_record(policy: str, name: str, value: Any, kinds: tuple[type[Record], ...]) -> None:
    """Raise ConfigError unless the value is a record of one of these types."""
    if not isinstance(value, kinds):
        choices = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"{policy}.{name} must be {choices}, got {value!r}")
