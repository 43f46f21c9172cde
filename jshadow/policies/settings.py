"""Records of settings, and the dotted names of settings, as in `--set landmarks.tokens=2`.

A policy is a frozen dataclass of settings. Settings that belong together are a `Record`, a frozen dataclass that is one
field of the policy. A field can allow one type of record, as `landmarks: Landmarks` does. It can also allow all
subclasses of one, as `keys: Keys` does; then each has a name. A subclass of another package is chosen by its place, as
in `keys=module.Class`, or by its name once its module is imported.

Every setting has a dotted name. The command line, saved states and result rows use the same names:

    ShadowKV(keys=TransformCode(bits=2), landmarks=Landmarks(tokens=2))
    {"keys": "transform", "keys.bits": 2, "landmarks.tokens": 2}
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, ClassVar

from jshadow.errors import ConfigError
from jshadow.policies.base import Policy
from jshadow.policies.registry import import_named


@dataclasses.dataclass(frozen=True)
class Record:
    """Settings that belong together. Subclasses are frozen dataclasses whose fields all have defaults.

    Class attributes:
        name: the name of the record type if a field allows several types; "" if it allows only one, or for the base of
            several.
    """

    name: ClassVar[str] = ""


def record_types(annotation: Any) -> dict[str, type[Record]]:
    """Return the record types that a field's annotation allows, by name. The dict is empty for a plain setting."""
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return _named(annotation) or {annotation.name: annotation}
    return {}


def _named(base: type[Record]) -> dict[str, type[Record]]:
    """Return all subclasses that have a name, by name, in the order of their definition."""
    found: dict[str, type[Record]] = {}
    for kind in base.__subclasses__():
        found |= ({kind.name: kind} if kind.name else {}) | _named(kind)
    return found


def import_record(annotation: Any, place: Any) -> Any:
    """Return the name of the record type at `module.Class`, which is imported, for a field of several types.

    Any other value is returned as it is. Raises ConfigError if there is no such module or record type.
    """
    if not isinstance(place, str) or "." not in place or not any(record_types(annotation)):
        return place
    module, _, name = place.rpartition(".")
    form = f"a record of {annotation.__name__} must be module.Class"
    kind: Any = getattr(import_named(module, place, form), name, None)
    is_record = isinstance(kind, type) and issubclass(kind, annotation)
    if not (is_record and kind.name):
        raise ConfigError(f"{place} must be a subclass of {annotation.__name__} with a name, got {kind!r}")
    return kind.name


def setting_types(kind: type) -> dict[str, str]:
    """Return the dotted names of all settings of a policy or record type, with their types as text.

    The settings of every allowed record type are listed. Those of a wrapper's inner policy are not.
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
    """Return the settings of a policy or record by dotted name.

    A field whose record has a name is listed with that name, as in {"keys": "transform"}.
    """
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
    """Return the settings of a policy by dotted name. For a wrapper, the inner policy is a nested dictionary."""
    return {
        name: {"name": value.name, **policy_settings(value)} if isinstance(value, Policy) else value
        for name, value in dotted_settings(policy).items()
    }


def changed_settings(value: Any, usual: Any = None) -> dict[str, Any]:
    """Return the dotted settings in which a policy or record differs from `usual`.

    If `usual` is None, they are compared with the defaults of the type.
    """
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


def with_settings[T](value: T, settings: Mapping[str, Any], path: str = "") -> T:
    """Return a policy or record with some settings replaced, given by dotted name.

    If a field allows several record types, a name chooses one of them. The record has default settings unless `value`
    already has a record of that type. `path` is the name of the value in error messages; by default its `name`.

    Raises:
        ConfigError: there is no such setting or no such record. The message names the nearest settings.
    """
    path = path or getattr(value, "name", "")
    fields = {field.name: field for field in dataclasses.fields(value)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for name, setting in settings.items():
        first, _, rest = name.partition(".")
        if first not in fields:
            raise _unknown_setting(path, name, value)
        if rest:
            inner.setdefault(first, {})[rest] = setting
        else:
            changes[first] = _named_record(fields[first], setting, getattr(value, first), path)
    for first, nested in inner.items():
        record = changes.get(first, getattr(value, first))
        if not isinstance(record, Record):
            raise _unknown_setting(path, f"{first}.{next(iter(nested))}", value)
        changes[first] = with_settings(record, nested, f"{path}.{first}")
    return dataclasses.replace(value, **changes)  # type: ignore[type-var]


def _named_record(field: dataclasses.Field[Any], setting: Any, current: Any, path: str) -> Any:
    """Return the record that the name `setting` chooses for a field. A plain setting or a record is returned unchanged.

    Raises:
        ConfigError: the field allows no record of that name.
    """
    setting, records = import_record(field.type, setting), record_types(field.type)
    if not records or isinstance(setting, Record):
        return setting
    if setting not in tuple(filter(None, records)):
        choices = tuple(filter(None, records)) or tuple(setting_types(type(current)))
        parts = "one of" if any(records) else "set by its parts"
        raise ConfigError(f"{path}.{field.name} must be {parts} {choices}, got {setting!r}")
    return current if current.name == setting else record_types(field.type)[setting]()


def _unknown_setting(path: str, name: str, value: Any) -> ConfigError:
    """Return the error for a setting that a policy or record does not have."""
    names = dotted_settings(value)
    shown = f"{path}={value.name!r}" if isinstance(value, Record) and value.name else path
    return ConfigError(f"{shown} has the settings {sorted(names)}, got {name!r}{nearest(name, names)}")


def nearest(name: str, names: Any) -> str:
    """Return the names most similar to `name`, as the end of an error message, or "" if none is similar."""
    similar = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f"; the nearest: {', '.join(similar)}" if similar else ""


def check_record(policy: str, name: str, value: Any, kind: type[Record]) -> None:
    """Raise ConfigError unless the value is a record of this type."""
    if not isinstance(value, kind):
        choices = " or ".join(one.__name__ for one in record_types(kind).values())
        raise ConfigError(f"{policy}.{name} must be {choices}, got {value!r}")
