"""What a model family is: how its `config.json` reads, and which tensor becomes which weight."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from jshadow.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of a family's weight table.

    Attributes:
        pattern: regular expression that the whole Hugging Face tensor name must match; its group is the layer.
        path: "/"-joined path in the weight tree; `{0}` is the layer.
        transform: "copy", or "transpose" for a linear layer stored as [out, in].
    """

    pattern: str
    path: str
    transform: str = "copy"

    def match(self, name: str) -> str | None:
        """Path in the weight tree of the tensor `name`, or None where the rule is about another tensor."""
        found = re.fullmatch(self.pattern, name)
        return self.path.format(*found.groups()) if found else None

    def source(self, path: str) -> str | None:
        """Hugging Face name of the weight at `path`: the rule read backwards."""
        found = re.fullmatch(re.escape(self.path).replace(r"\{0\}", r"(\d+)"), path)
        if not found:
            return None
        name = self.pattern.replace(r"(\d+)", "{0}").replace("\\", "")
        return name.format(*found.groups())


@dataclasses.dataclass(frozen=True)
class ModelFamily:
    """Attributes: the Hugging Face `model_type`, the reader of its config, its weight table."""

    model_type: str
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    rules: tuple[Rule, ...]
