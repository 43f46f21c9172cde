"""`jshadow policies`: the policies with their settings and sources, and the bytes that each takes."""

import dataclasses
import inspect
import json
import re
import textwrap
from typing import Any

from jshadow.cli.console import console, show_table
from jshadow.cli.fields import Command, option
from jshadow.errors import ConfigError

_ENTRY = re.compile(r"^(\w+(?:, \w+)*): (.*)$")  # a line "name: text" or "name, other: text" of Attributes

# ShadowKV with keys in the transform code, landmarks and host values in four bits. No paper has these settings.
_PACKED = "keys=transform:landmarks.order=2:landmarks.dtype=int4:values.dtype=int4"
# NAME:key=value:... and the fetch mode of each row: as the papers run the policies, then packed codes.
PAPERS_SETTINGS = (
    ("full", "resident"),
    ("streaming_llm:sinks=4:window=2000", "resident"),
    ("h2o", "resident"),
    ("less", "resident"),
    ("snapkv:max_capacity_prompt=2048", "resident"),
    ("snapkv:max_capacity_prompt=2048:granularity=q_head", "resident"),
    ("quest:budget=2048:dense_layers=0", "resident"),
    ("quest:budget=2048:dense_layers=0", "device_put"),
    ("loki", "resident"),
    ("loki", "device_put"),
    ("infinigen:columns=25", "device_put"),
    ("infinigen:columns=16", "device_put"),
    ("omnikv:budget=2048", "device_put"),
    ("quantized:dtype=fp8", "resident"),
    ("quantized:dtype=int4", "resident"),
    ("kivi:bits=2:group=32", "resident"),
    ("kivi:bits=2:group=64", "resident"),
    ("specache:bits=2:group=64", "device_put"),
    ("specache:bits=1:group=64", "device_put"),
    ("infllm", "device_put"),
    ("shadowkv:rank=160:budget=2048", "device_put"),
    ("shadowkv_plus:rank=160:budget=2048", "device_put"),
    (f"shadowkv:{_PACKED}:keys.bits=2:landmarks.tokens=2:landmarks.levels=2:budget=2048", "device_put"),
    (f"shadowkv:{_PACKED}:keys.bits=1.333:budget=2048", "device_put"),
)


@dataclasses.dataclass(kw_only=True)
class Policies(Command):
    """List the policies with their settings and sources, or explain each setting of one policy.

    With --model and --context, count the bytes of one request's keys and values on the device and on the host, and the
    bytes that a decode step moves from the host. Nothing is loaded or allocated.
    """

    name: str | None = option(
        "explain the settings of this policy (or of module:Class)", metavar="NAME", positional=True
    )
    model: str | None = option(
        "HF directory, .gguf file, hub id, path of a config.json, or a published model (llama-3.1-8b)"
    )
    context: int | None = option("prompt tokens of the request", metavar="TOKENS")
    policies: str | None = option("NAME or NAME:key=value:..., comma list (default: as the papers run them)")
    fetch: str | None = option("with --policies: resident, device_put or zero_copy (default: device_put)")
    dtype: str = option("of keys and values", "bfloat16")

    def run(self) -> int:
        """Return 0 when the table is printed."""
        given = {name: getattr(self, name) for name in ("model", "context", "policies", "fetch")}
        given = {name: value for name, value in given.items() if value is not None}
        if self.name is not None:
            for name, value in given.items():
                raise ConfigError(f"--{name} must be left out with the name of a policy, got {value!r}")
            return _show_settings(self.name, as_json=self.json)
        if (self.model is None) != (self.context is None):
            raise ConfigError(f"--model and --context must come together, got {self.model!r} and {self.context!r}")
        if self.model is not None:
            return self._show_bytes()
        for name, value in given.items():
            raise ConfigError(f"--{name} must come with --model and --context, got {value!r}")
        from jshadow.policies import POLICIES
        from jshadow.policies.settings import policy_settings

        found = {name: (policy.source, policy_settings(policy())) for name, policy in POLICIES.items()}
        if self.json:
            told = [{"name": name, "paper": paper, "settings": settings} for name, (paper, settings) in found.items()]
            print(json.dumps({"policies": told}))
            return 0
        rows = [
            (name, ", ".join(f"{key}={value}" for key, value in settings.items()) or "-", paper)
            for name, (paper, settings) in found.items()
        ]
        show_table(["policy", "settings", "source"], rows, wrap=True)
        return 0

    def _show_bytes(self) -> int:
        from jshadow.cli.plan import config_of
        from jshadow.weights.convert.safetensors_file import check_dtype

        assert self.model is not None
        assert self.context is not None
        check_dtype(self.dtype)
        if self.context < 1:
            raise ConfigError(f"--context must be at least 1, got {self.context}")
        config = config_of(self.model)
        asked = _rows_of_bytes()
        if self.policies is not None:
            asked = [(text, self.fetch or "device_put") for text in self.policies.split(",")]
        elif self.fetch is not None:
            raise ConfigError(f"--fetch must come with --policies, got {self.fetch!r}")
        rows = [_byte_row(config, text, fetch, self.context, self.dtype) for text, fetch in asked]
        if self.json:
            print(json.dumps({"context": self.context, "policies": rows}))
            return 0
        # Settings have no blanks to wrap at, and two may differ only at their ends. The table folds them.
        show_table(
            ["policy", "fetch", "device GiB", "of full", "moved MiB a step", "host GiB"],
            [
                (
                    row["setting"],
                    row["fetch"],
                    f"{row['bytes_device'] / 2**30:.3f}",
                    f"{row['bytes_device'] / row['bytes_full']:.3f}",
                    f"{row['bytes_moved'] / 2**20:.1f}",
                    f"{row['bytes_host'] / 2**30:.2f}",
                )
                for row in rows
            ],
        )
        return 0


def _rows_of_bytes() -> list[tuple[str, str]]:
    """Return the setting and the fetch mode of each row: PAPERS_SETTINGS, then other policies with their defaults."""
    from jshadow.policies import POLICIES

    listed = {text.partition(":")[0] for text, _ in PAPERS_SETTINGS}
    return [*PAPERS_SETTINGS, *((name, "device_put") for name in POLICIES if name not in listed)]


def _byte_row(config: Any, text: str, fetch: str, context: int, dtype: str) -> dict[str, Any]:
    """Return the bytes of one policy, whose prompt has `context` tokens. That is also the capacity."""
    from jshadow.planner.machine import footprint, step_footprint
    from jshadow.policies import parse_policy, split_policy

    name, settings = split_policy(text)
    policy = parse_policy(name, settings)
    sizes: dict[str, Any] = {"capacity": context, "prompt": context, "dtype": dtype, "fetch": fetch}
    used = footprint(config, policy, **sizes)
    return {
        "policy": name,
        "setting": text,
        "fetch": fetch,
        "bytes_device": used["device_bytes"],
        "bytes_host": used["host_bytes"],
        "bytes_full": used["full_bytes"],
        "bytes_moved": step_footprint(config, policy, **sizes)["bytes_moved"],
        "parts": {part: list(sizes) for part, sizes in used["parts"].items()},
    }


def _show_settings(name: str, *, as_json: bool) -> int:
    """Print the settings of a policy, or of module:Class, and return 0. Raises ConfigError if there is none."""
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

    Its values are the defaults. The dotted names begin with `prefix`, such as "keys.". The setting that chooses the
    record, such as "keys=transform", is the condition.

    Returns:
        {"name", "type", "default", "text", "with"} for each setting; "with" is the condition, or "".
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
            rows.append(row | {"type": _type_text(field.type), "default": current})
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


def _type_text(annotation: Any) -> str:
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
            if entry := _ENTRY.match(line):
                names = entry[1].split(", ")
                texts |= dict.fromkeys(names, entry[2])
            elif line.strip():
                texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
    return texts
