"""Model families. A family defines how to read its `config.json` and which tensor becomes which weight."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from jshadow.errors import ConfigError
from jshadow.models.config import Experts, ModelConfig, Recurrent, token_ids


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of a family's weight table.

    Attributes:
        pattern: regular expression that must match the whole Hugging Face tensor name. Its group is the layer index.
        path: path in the weight tree, joined by "/". `{0}` stands for the layer index and `{1}` for one of `parts`.
        transform: "copy", "transpose" for a linear layer that is stored as [out, in] (all experts: [E, out, in]),
            "flatten" for a vector that is stored as [1, N], "taps" for the kernels of a convolution over tokens, which
            are stored as [channels, 1, taps], or "alternate" for a fused tensor [..., out] whose columns belong to its
            parts in turn.
        parts: names of the weights in a fused tensor, in the order in which they lie side by side.
        interleaved: whether the two numbers that RoPE rotates together are neighbors in the file. Otherwise they are
            half the rotated part apart.
        groups: the number of groups of columns of a fused tensor. Within each, the parts lie side by side. None: one.
        stacked: whether the tensors of all experts of a layer form one weight, whose first axis is the expert. Then the
            second group of `pattern` is its index.
    """

    pattern: str
    path: str
    transform: str = "copy"
    parts: tuple[str, ...] = ("",)
    interleaved: bool = False
    groups: Callable[[ModelConfig], int] | None = None
    stacked: bool = False

    def match(self, name: str) -> tuple[str, ...]:
        """Return the paths in the weight tree that tensor `name` fills, or () if the rule does not match it."""
        matched = re.fullmatch(self.pattern, name)
        layer = matched.groups() or ("",) if matched else ("",)
        return tuple(self.path.format(*layer, part) for part in self.parts) if matched else ()

    def sources(self, path: str, shape: tuple[int, ...]) -> list[str]:
        """Return the Hugging Face names of the tensors that fill the weight at `path`, which has the shape `shape`."""
        parts = "|".join(map(re.escape, self.parts))
        pattern = re.escape(self.path).replace(r"\{0\}", r"(\d+)").replace(r"\{1\}", f"(?:{parts})")
        matched = re.fullmatch(pattern, path)
        if not matched:
            return []
        name = self.pattern.replace(r"(\d+)", "{0}", 1).replace(r"(\d+)", "{1}").replace("\\", "")
        experts = range(shape[0]) if self.stacked else [""]
        return [name.format(*matched.groups() or [""], expert) for expert in experts]


LAYER = r"model\.layers\.(\d+)\."  # what the names of a decoder layer's tensors begin with


def of_layer(theirs: str, ours: str, transform: str = "copy", *parts: str, prefix: str = LAYER, **more: Any) -> Rule:
    """Return the row of a tensor of each layer: `theirs` behind `prefix`, and `ours` behind the layer's path."""
    return Rule(prefix + theirs, f"layer_{{0}}/{ours}", transform, parts or ("",), **more)


def linear(theirs: str, ours: str, *parts: str, **more: Any) -> Rule:
    """Return the row of the kernel of a linear layer. The arguments are those of `of_layer`."""
    return of_layer(theirs + r"\.weight", ours + "/kernel", "transpose", *parts, **more)


def read_part[Part: (Experts, Recurrent)](
    part: type[Part], keys: Mapping[str, str], hf: Mapping[str, Any], /, **fields: Any
) -> Part:
    """Return the experts or the recurrent layers of a config.json.

    Args:
        part: Experts or Recurrent.
        keys: the key of config.json that has a field.
        hf: the parsed config.json.
        fields: the other fields, and fields that are not read as their key says.
    """
    types: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(part)}
    for name in keys.keys() - fields.keys():
        value = hf[keys[name]]
        fields[name] = types[name](value) if types[name] in (bool, float) else value
    return part(**fields)


def write_part(part: Experts | Recurrent, keys: Mapping[str, str]) -> dict[str, Any]:
    """Undo `read_part`."""
    return {key: getattr(part, name) for name, key in keys.items()}


def nothing(_: Any) -> dict[str, Any]:
    """Return an empty dict. It is the default of `read` and `write`, for families with the same keys as Llama."""
    return {}


@dataclasses.dataclass(frozen=True)
class ModelFamily:
    """A model family: all checkpoints with the same `model_type`.

    Attributes:
        model_type: Hugging Face's name of the family.
        architecture: the transformers class that loads it.
        models: published models of the family, for the support matrix.
        rules: the weight table.
        differs: how the family differs from Llama, for the support matrix.
        defaults: values for keys that `config.json` may lack. They are those of transformers' config class.
        read: turns `config.json` into the fields of ModelConfig that Llama does not set.
        write: turns a ModelConfig into the keys of `config.json` beyond Llama's.
        attention_keys: keys of `config.json` about attention that `read` reads. Unknown ones are refused.
        layers_apart: whether the MLP of a block is a layer of its own in a checkpoint, with a number and a norm.
        partial_rotary: whether RoPE may rotate only a part of each head.
        published_code: classes that checkpoints name in `auto_map` although transformers has the model built in. A
            checkpoint that names only these is accepted, and the classes are never run.
    """

    model_type: str
    architecture: str
    models: str
    rules: tuple[Rule, ...]
    differs: str = ""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = nothing
    write: Callable[[ModelConfig], dict[str, Any]] = nothing
    attention_keys: tuple[str, ...] = ()
    layers_apart: bool = False
    partial_rotary: bool = False
    published_code: tuple[str, ...] = ()

    def config_from_hf(self, hf: Mapping[str, Any]) -> ModelConfig:
        """Return the ModelConfig of a parsed `config.json`.

        Raises:
            ConfigError: as in `ModelConfig.from_hf`, or RoPE rotates only a part of each head and the family does not
                support this.
        """
        whole = {**self.defaults, **hf}
        if "eos_token_id" not in hf and max(token_ids(whole.get("eos_token_id")), default=0) >= whole["vocab_size"]:
            whole["eos_token_id"] = None  # the vocabulary is too small for the family's default
        code = whole.get("auto_map")
        if isinstance(code, Mapping):  # entries for tokenizers are ignored, because jshadow never runs such code
            models = {value for key, value in code.items() if key.startswith(("AutoConfig", "AutoModel"))}
            if models <= set(self.published_code):
                whole["auto_map"] = None
        fields = self.read(whole)
        config = ModelConfig.from_hf({key: whole[key] for key in whole.keys() - {*self.attention_keys}}, **fields)
        if config.rope.rotary_share != 1 and not self.partial_rotary:
            share = config.rope.rotary_share
            raise ConfigError(
                f"config.json partial_rotary_factor must be 1.0 in a {self.model_type} model, got {share}"
            )
        return config
