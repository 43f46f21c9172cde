"""Model families: how a family's `config.json` is read, and which tensor becomes which weight."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig, token_ids


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of a family's weight table.

    Attributes:
        pattern: regular expression that the whole Hugging Face tensor name must match; its group is the layer.
        path: "/"-joined path in the weight tree; `{0}` is the layer, `{1}` one of `parts`.
        transform: "copy", or "transpose" for a linear layer stored as [out, in].
        parts: of a tensor that holds several weights side by side, their names, in its order.
        interleaved: the two numbers that RoPE rotates together lie side by side, not half the rotated part apart.
    """

    pattern: str
    path: str
    transform: str = "copy"
    parts: tuple[str, ...] = ("",)
    interleaved: bool = False

    def match(self, name: str) -> tuple[str, ...]:
        """Paths in the weight tree that the tensor `name` fills; none where the rule is about another tensor."""
        matched = re.fullmatch(self.pattern, name)
        layer = matched.groups() or ("",) if matched else ("",)
        return tuple(self.path.format(*layer, part) for part in self.parts) if matched else ()

    def source(self, path: str) -> str | None:
        """Hugging Face name of the tensor that fills the weight at `path`: the rule read backwards."""
        parts = "|".join(map(re.escape, self.parts))
        pattern = re.escape(self.path).replace(r"\{0\}", r"(\d+)").replace(r"\{1\}", f"(?:{parts})")
        matched = re.fullmatch(pattern, path)
        if not matched:
            return None
        name = self.pattern.replace(r"(\d+)", "{0}").replace("\\", "")
        return name.format(*matched.groups())


def nothing(_: Any) -> dict[str, Any]:
    """No field differs from Llama's."""
    return {}


@dataclasses.dataclass(frozen=True)
class ModelFamily:
    """A kind of checkpoint.

    Attributes:
        model_type: as Hugging Face names it.
        architecture: the class that transformers loads it with.
        models: published models of that type, for the support matrix.
        rules: the weight table.
        differs: how it differs from Llama, for the support matrix.
        defaults: keys of `config.json` that may be missing and then mean this.
        read: `config.json` -> the fields of ModelConfig that Llama does not set.
        write: ModelConfig -> keys of `config.json` beyond Llama's.
        partial_rotary: a part of each head may be rotated.
        published_code: classes that checkpoints name in `auto_map` and that are this same model: they were written
            before transformers had it. They are not run.
    """

    model_type: str
    architecture: str
    models: str
    rules: tuple[Rule, ...]
    differs: str = ""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = nothing
    write: Callable[[ModelConfig], dict[str, Any]] = nothing
    partial_rotary: bool = False
    published_code: tuple[str, ...] = ()

    def config_from_hf(self, hf: Mapping[str, Any]) -> ModelConfig:
        """Read `config.json`. Raises ConfigError as `ModelConfig.from_hf`."""
        whole = {**self.defaults, **hf}
        if "eos_token_id" not in hf and max(token_ids(whole.get("eos_token_id")), default=0) >= hf.get("vocab_size", 0):
            whole["eos_token_id"] = None  # a cut-down vocabulary
        code = whole.get("auto_map")
        if isinstance(code, Mapping):  # a tokenizer's code is its own files' matter
            models = {value for key, value in code.items() if key.startswith(("AutoConfig", "AutoModel"))}
            if models <= set(self.published_code):
                whole["auto_map"] = None
        config = ModelConfig.from_hf(whole, **self.read(whole))
        if config.rope.rotary_share != 1 and not self.partial_rotary:
            share = config.rope.rotary_share
            raise ConfigError(
                f"config.json partial_rotary_factor must be 1.0 in a {self.model_type} model, got {share}"
            )
        return config
