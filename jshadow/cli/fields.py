"""Commands as dataclasses: each field is an option of the command line and a key of a settings file."""

import abc
import argparse
import collections
import dataclasses
import inspect
import json
import re
import tomllib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

from jshadow.errors import ConfigError
from jshadow.weights.tokenizer import read_text

_TYPES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def option(
    text: str,
    default: Any = None,
    *,
    metavar: str | None = None,
    positional: bool = False,
    required: bool = False,
    together: bool = False,
) -> Any:
    """Return the field of an option. The annotation of the field gives the type.

    Args:
        text: the help. The default value is added to it, unless the text has the word "default".
        default: the value of an option that is left out. () is for an option that may be repeated. A flag has False, or
            True for the name --no-NAME.
        metavar: the name of the value in the help. None: N for an integer, X for a number, else the name of the option.
        positional: whether the value stands on the command line without the name of the option.
        required: whether the option must be given.
        together: whether several values follow the name of the option, which is then given once.
    """
    about = {"help": text, "metavar": metavar, "positional": positional, "required": required, "together": together}
    return dataclasses.field(default=default, metadata=about)


@dataclasses.dataclass(kw_only=True)
class Command(abc.ABC):
    """A command. Its docstring is its description, and its fields are its options.

    A command inherits fields from dataclasses. Those of a dataclass with an attribute `title` are a group in the help,
    or stand at the end of the others if the title is empty.
    """

    title: ClassVar[str] = ""
    command_line = cast(Sequence[str], ())  # as the shell has it, for a report
    json: bool = option("print one JSON object instead of text", False)
    settings: str | None = option(
        "read options from a TOML or JSON file; those of the command line win", metavar="FILE"
    )

    @abc.abstractmethod
    def run(self) -> int:
        """Run the command, and return its exit status."""


def add_command(commands: Any, name: str, kind: type[Command], text: str) -> None:
    """Add a command to what `add_subparsers` returned. `text` is its help in the list of commands."""
    add = commands.add_parser(name, help=text, description=inspect.getdoc(kind), epilog=getattr(kind, "epilog", None))
    add.set_defaults(kind=kind)
    add_options(add, kind)


def command_of(given: argparse.Namespace) -> Command:
    """Return the command of parsed arguments: the command line first, then the settings file, then the defaults."""
    values = {name: value for name, value in vars(given).items() if value is not None}
    kind, from_file = values.pop("kind"), values.pop("from_file", {})
    return cast(Command, kind(**from_file | values))


def add_options(add: argparse.ArgumentParser, kind: type) -> None:
    """Add the fields of a dataclass as options. An option that is left out is absent from the parsed arguments."""
    left = {field.name: field for field in dataclasses.fields(kind)}
    hints, places = typing.get_type_hints(kind), kind.__mro__[::-1]
    names = [name for place in places for name in inspect.get_annotations(place) if name in left]
    for name in dict.fromkeys(names):
        if left[name].metadata["positional"]:
            _add(add, left.pop(name), hints[name])
    for title in dict.fromkeys([None, "", *(vars(place).get("title") for place in kind.__mro__)]):
        own = [place for place in places if vars(place).get("title") == title]
        names = [name for place in own for name in inspect.get_annotations(place) if name in left]
        group = add.add_argument_group(title) if title and names else add
        for name in dict.fromkeys(names):
            _add(group, left.pop(name), hints[name])


def _add(add: argparse._ActionsContainer, field: dataclasses.Field[Any], hint: Any) -> None:
    about, (kind, many, choices) = field.metadata, _kind_of(hint)
    text, default = about["help"], cast(Any, field.default)
    if "default" not in text and default is not None and kind is not bool and not many:
        text += " (default: %(default)s)"
    text = text.replace("%(default)s", f"{default:g}" if isinstance(default, float) else str(default))
    how: dict[str, Any] = {"help": text.replace("%", "%%")}
    if about["positional"]:  # its default is None, because argparse checks the default value
        how["nargs"] = "+" if many else None if about["required"] else "?"
    else:
        how |= {"dest": field.name, "required": about["required"], "default": argparse.SUPPRESS}
    if kind is bool:
        how["action"] = "store_false" if default else "store_true"
    elif field.name == "settings":
        how |= {"action": _ReadSettings, "metavar": about["metavar"]}
    else:
        metavar = about["metavar"] or {int: "N", float: "X"}.get(kind)
        how |= {"type": kind, "choices": choices, "metavar": metavar}
        if about["together"]:
            how["nargs"] = "+"
        elif many and not about["positional"]:
            how["action"] = "append"
    add.add_argument(field.name if about["positional"] else f"--{_name_of(field)}", **how)


def _name_of(field: dataclasses.Field[Any]) -> str:
    """Return the name of an option without the dashes before it: --no-NAME turns off what is on by default."""
    return ("no-" if field.default is True else "") + field.name.replace("_", "-")


def _kind_of(hint: Any) -> tuple[type, bool, list[Any] | None]:
    """Return the type of one value, whether there may be several, and the only values that there may be."""
    if types.NoneType in typing.get_args(hint):
        [hint] = [part for part in typing.get_args(hint) if part is not types.NoneType]
    if typing.get_origin(hint) is typing.Literal:
        choices = list(typing.get_args(hint))
        return type(choices[0]), False, choices
    if typing.get_origin(hint) in (list, Sequence):
        return typing.get_args(hint)[0], True, None
    return hint, False, None


class _ReadSettings(argparse.Action):
    """The action of --settings: the options in the file are no longer required on the command line."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        path = str(values)
        if hasattr(namespace, "settings"):
            raise ConfigError(f"--settings must be given once, got {namespace.settings} and {path}")
        namespace.settings, namespace.from_file = path, _read_settings(path, parser.get_default("kind"))
        for action in parser._actions:
            action.required = action.required and action.dest not in namespace.from_file


def _read_settings(path: str, kind: type[Command]) -> dict[str, Any]:
    """Return the values of a settings file, by the names of the fields."""
    fields = {_name_of(field): field for field in dataclasses.fields(kind)}
    fields = {name: field for name, field in fields.items() if name == "model" or not field.metadata["positional"]}
    del fields["settings"]
    hints, values = typing.get_type_hints(kind), dict[str, Any]()
    for key, value in _table_of(path).items():
        field = fields.get(key.replace("_", "-"))
        if field is None:
            raise ConfigError(
                f"{path}: each key must be an option of the command ({', '.join(sorted(fields))}), got "
                f"{key} = {value!r:.80}"
            )
        if field.name in values:
            raise ConfigError(f"{path}: {key} must be given once, got it as {_name_of(field)} and as {field.name}")
        if field.metadata["metavar"] == "KEY=VALUE" and isinstance(value, dict):
            value = [f"{name}={json.dumps(one)}" for name, one in _flat(value)]
        value = _value_of(f"{path}: {key}", hints[field.name], value)
        values[field.name] = not value if field.default is True else value
    return values


def _table_of(path: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = collections.Counter(key for key, _ in pairs)
        for key, count in counts.items():
            if count > 1:
                came = " and ".join(repr(value) for name, value in pairs if name == key)
                raise ConfigError(f"{path}: {key} must be given once, got {came:.160}")
        return dict(pairs)

    language = "JSON" if path.endswith(".json") else "TOML"
    text = ""
    try:
        text = read_text(Path(path).expanduser())
        table = json.loads(text, object_pairs_hook=once) if language == "JSON" else tomllib.loads(f"{text}\n")
    except (OSError, ValueError) as error:  # both parsers, and a text that is no UTF-8, raise kinds of ValueError
        place = re.search(r"line (\d+)", str(error))
        line = text.splitlines()[int(place[1]) - 1 :][:1] if place else []
        came = f", got the line {line[0].strip()!r:.80}" if line else ""
        raise ConfigError(f"--settings must be a readable {language} file, {path} is not: {error}{came}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: the settings must be keys with values, got {table!r:.80}")
    return table


def _value_of(name: str, hint: Any, value: Any) -> Any:
    """Return the value of an option as the command line would give it. Raises ConfigError for a wrong type."""
    kind, many, _ = _kind_of(hint)
    if many:
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ConfigError(f"{name} must be a list of strings, got {value!r:.80}")
        return value
    allowed = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name} must be {_TYPES[kind]}, got {value!r:.80}")
    return kind(value)


def _flat(table: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Return the values of a table by their dotted names."""
    found: list[tuple[str, Any]] = []
    for key, value in table.items():
        found += _flat(value, f"{before}{key}.") if isinstance(value, dict) else [(f"{before}{key}", value)]
    return found
