"""`jshadow policies NAME`: the settings of one policy, each with its type, its default and an explanation."""

import dataclasses
import inspect
import json
import re
import textwrap
from typing import Any

ENTRY = re.compile(r"^(\w+(?:, \w+)*): (.*)$")  # a line "name: text" or "name, other: text" of Attributes


def show_settings(name: str, *, as_json: bool) -> int:
    """Print the settings of a policy, and return 0.

    Args:
        name: a policy's name, or module:Class.
        as_json: print one JSON object instead of text.

    Raises:
        ConfigError: there is no such policy.
    """
    from jshadow.cli.console import console
    from jshadow.policies import find_policy

    policy = find_policy(name)
    summary = (inspect.getdoc(policy) or "").split("\n\n")[0].replace("\n", " ")
    rows = setting_rows(policy())
    if as_json:
        print(json.dumps({"name": policy.name, "paper": policy.source, "summary": summary, "settings": rows}))
        return 0
    width = min(console(100).width, 100)
    print(textwrap.fill(f"{policy.name}: {summary}", width))
    print(policy.source)
    for row in rows:
        only = f" (with {row['with']})" if row["with"] else ""
        print(f"\n  {row['name']}: {row['type']} = {row['default']}{only}")
        print(textwrap.fill(row["text"] or "-", width, initial_indent="    ", subsequent_indent="    "))
    if not rows:
        print("\n  no settings")
    return 0


def setting_rows(value: Any, prefix: str = "", condition: str = "") -> list[dict[str, Any]]:
    """Return the settings of a policy or record, in the order of its fields.

    Args:
        value: the policy or record, whose values are the defaults.
        prefix: the beginning of the dotted names, for example "keys.".
        condition: the setting that chooses the record, for example "keys=transform". It is "" if there is no choice.

    Returns:
        {"name", "type", "default", "text", "with"} for each setting; "with" is the condition.
    """
    from jshadow.policies.settings import Record, record_types

    texts, rows = attribute_texts(type(value)), []
    for field in dataclasses.fields(value):
        if not field.init or field.name == "inner":
            continue
        current = getattr(value, field.name)
        records = record_types(field.type)
        row = {"name": prefix + field.name, "text": texts.get(field.name, ""), "with": condition}
        if not records:
            rows.append(row | {"type": type_text(field.type), "default": current})
            continue
        choices = [name for name in records if name]
        if choices:
            default = current.name if isinstance(current, Record) else current
            rows.append(row | {"type": " or ".join(choices), "default": default})
        for name, record in records.items():
            chosen = current if type(current) is record else record()
            chooses = f"{prefix}{field.name}={name}" if name else condition
            rows += setting_rows(chosen, f"{prefix}{field.name}.", chooses)
    return rows


def type_text(annotation: Any) -> str:
    """Format a field's type for a reader."""
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def attribute_texts(kind: type) -> dict[str, str]:
    """Return the text of each attribute in the "Attributes:" of a class's docstring and of its base classes.

    If several classes describe an attribute, the text of the most derived class is returned.
    """
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        doc = inspect.cleandoc(vars(base).get("__doc__") or "")
        _, found, after = doc.partition("\nAttributes:\n")
        block = re.split(r"\n(?=\S)", after)[0] if found else ""
        names: list[str] = []
        for line in textwrap.dedent(block).splitlines():
            if entry := ENTRY.match(line):
                names = entry[1].split(", ")
                texts |= dict.fromkeys(names, entry[2])
            elif line.strip():
                texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
    return texts
