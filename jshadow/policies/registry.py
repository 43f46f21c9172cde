"""The registry of policies: it makes a method known by name to the command line, the evaluation and the law tests.

The class decorator `register` registers a method. `jshadow.policies` imports the methods of this package. A method of
another package is given as `module:Class`. It can also be given by its name, if its package declares an entry point in
the group `jshadow.policies`.
"""

import dataclasses
import difflib
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.policies.base import Policy

_ENTRY_POINTS = "jshadow.policies"
POLICIES: dict[str, type[Policy]] = {}
LAW_SETTINGS: dict[str, "LawSettings"] = {}
_T = TypeVar("_T", bound=type[Policy])


@dataclasses.dataclass(frozen=True)
class LawSettings:
    """Settings for the law tests, which check every policy on a tiny model.

    The model has 3 layers and 2 KV heads of width 16. The prompts have 61, 27 and 5 tokens.

    Attributes:
        small: settings so small that the policy drops or approximates some of these tokens.
        lossless: maps (tokens, model config) to settings that give the result of full attention for up to that many
            tokens. None: the policy has no such settings.
    """

    small: Mapping[str, Any]
    lossless: Callable[[int, ModelConfig], Mapping[str, Any]] | None


def register(
    small: Mapping[str, Any] | None = None,
    lossless: Callable[[int, ModelConfig], Mapping[str, Any]] | None = None,
) -> Callable[[_T], _T]:
    """Return a class decorator that registers a policy under its `name`.

    A class that is defined again in the same place, as in a notebook's cell, replaces the earlier one.

    Args:
        small: settings for the law tests; None: the defaults. See `LawSettings`.
        lossless: maps (tokens, model config) to settings for the law tests. See `LawSettings`.

    Raises:
        ConfigError: the class is not a concrete policy, it has no name, or another class has the same name.
    """

    def add(policy: _T) -> _T:
        check_policy_class(policy)
        if not isinstance(policy.name, str) or not policy.name.isidentifier():
            raise ConfigError(f"a policy's name must be an identifier, got {policy.name!r} of {policy.__qualname__}")
        before = POLICIES.get(policy.name)
        if before is not None and place_of(before) != place_of(policy):
            raise ConfigError(
                f"a policy's name must be unique, got {policy.name!r} of {place_of(policy)} and {place_of(before)}"
            )
        POLICIES[policy.name] = policy
        LAW_SETTINGS[policy.name] = LawSettings(small or {}, lossless)
        return policy

    return add


def place_of(policy: type[Policy]) -> str:
    """Return the place where a class is defined, as `module:Class`."""
    return f"{policy.__module__}:{policy.__qualname__}"


def find_policy(name: str) -> type[Policy]:
    """Return the policy class with this name: a registered name, the name of an entry point, or `module:Class`.

    Raises:
        ConfigError: there is no such class, or it is not a policy.
    """
    if ":" in name:
        return import_policy(name)
    if name not in POLICIES:
        for point in importlib.metadata.entry_points(group=_ENTRY_POINTS):
            if point.name == name:
                return import_policy(point.value)
    if name not in POLICIES:
        raise ConfigError(
            f"policy must be one of {sorted(POLICIES)} or module:Class, got {name!r}{hint(name, POLICIES)}"
        )
    return POLICIES[name]


def import_policy(place: str) -> type[Policy]:
    """Import the policy class at `module:Class`, and register it if it is new. The working directory is also searched.

    Raises ConfigError if the module cannot be imported, or if it has no such class or none that is a concrete policy.
    """
    module_name, _, class_name = place.partition(":")
    module = import_named(module_name, place)
    policy: Any = getattr(module, class_name, None)
    if policy is None:
        classes = [
            name for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, Policy)
        ]
        raise ConfigError(f"policy must name a class of {module_name}, got {class_name!r}{hint(class_name, classes)}")
    check_policy_class(policy)
    assert issubclass(policy, Policy)
    if POLICIES.get(policy.name) is not policy:
        register()(policy)
    return policy


def import_named(module_name: str, place: str, form: str = "policy must be module:Class") -> ModuleType:
    """Import a module. Raises ConfigError if that is not possible.

    The message has the whole `place`, and `form`, which tells what a place must be.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(module_name)
    except ConfigError:
        raise  # `register` in that module found an invalid policy
    except Exception as error:
        near = hint(module_name, [path.stem for path in Path.cwd().glob("*.py")])
        near = near if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(
            f"{form} with a module that can be imported, got {place!r}: {type(error).__name__}: {error}{near}"
        ) from error


def check_policy_class(policy: Any) -> None:
    """Raise ConfigError unless a class is a concrete policy whose settings all have defaults."""
    if not isinstance(policy, type) or not issubclass(policy, Policy):
        raise ConfigError(f"policy must be a subclass of jshadow.policies.Policy, got {policy!r}")
    place = place_of(policy)
    if missing := sorted(getattr(policy, "__abstractmethods__", ())):
        raise ConfigError(f"policy must define {', '.join(missing)}, got {place!r} without them")
    # A subclass of a dataclass must also be decorated as a dataclass. Otherwise its new settings are ignored.
    parameters = vars(policy).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        raise ConfigError(f"policy must be a frozen dataclass, got {place!r}")
    none = dataclasses.MISSING
    bare = [
        field.name
        for field in dataclasses.fields(policy)  # type: ignore[arg-type]
        if field.init and field.default is none and field.default_factory is none
    ]
    if bare:
        raise ConfigError(f"policy must have defaults for all settings, got {place!r} with none for {', '.join(bare)}")


def hint(name: str, names: Iterable[str]) -> str:
    """Return the end of an error message that suggests the names nearest to `name`, or "" if there are none."""
    near = difflib.get_close_matches(name, list(names), n=3)
    return f" (did you mean {' or '.join(near)}?)" if near else ""
