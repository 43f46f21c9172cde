"""The tensors of a model under the names of a checkpoint, and where they are read from."""

import dataclasses
import re
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.models.family import ModelFamily, Rule

Shape = tuple[int, ...]

# The names that the text model has in a model of texts and images.
_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}


def text_name(name: str) -> str:
    """Return the name of a tensor of the text model, without what a model of texts and images puts before it."""
    for prefix, own in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


@dataclasses.dataclass(frozen=True)
class Placement:
    """One tensor of a checkpoint and the weights that it becomes.

    Attributes:
        name: name of the tensor.
        paths: paths of the weights, in the order in which they lie in the tensor.
        rule: rule of the family that matches the tensor.
        expert: the index of the expert whose part of the weights the tensor has. None: it has all of them.
    """

    name: str
    paths: tuple[str, ...]
    rule: Rule
    expert: int | None = None

    def tensor_shape(self, weight_shapes: Mapping[str, Shape]) -> Shape:
        """Return the shape that the tensor must have. `weight_shapes` has the shape of each weight by path."""
        shapes = [weight_shapes[path][0 if self.expert is None else 1 :] for path in self.paths]
        whole = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
        if self.rule.transform == "flatten":
            return (1, *whole)
        if self.rule.transform == "taps":
            return (whole[1], 1, whole[0])
        return (*whole[:-2], whole[-1], whole[-2]) if self.rule.transform == "transpose" else whole

    def to_weights(
        self, value: np.ndarray, weight_shapes: Mapping[str, Shape], config: ModelConfig
    ) -> dict[str, np.ndarray]:
        """Return the weights of a tensor by path, or the parts of one expert. They are views where possible."""
        if self.rule.transform == "flatten":
            value = value.reshape(-1)
        if self.rule.transform == "taps":
            value = value[:, 0].T
        value = value.swapaxes(-1, -2) if self.rule.transform == "transpose" else value
        if self.rule.interleaved:
            value = value[..., _half_split_order(value.shape[-1], config)]
        if self.rule.transform == "alternate":
            return {path: value[..., index :: len(self.paths)] for index, path in enumerate(self.paths)}
        groups = self.rule.groups(config) if self.rule.groups else 1
        ends = np.cumsum([weight_shapes[path][-1] // groups for path in self.paths])
        parts = np.split(value.reshape(*value.shape[:-1], groups, -1) if groups > 1 else value, ends[:-1], axis=-1)
        if groups > 1:
            parts = [part.reshape(*value.shape[:-1], -1) for part in parts]
        return dict(zip(self.paths, parts, strict=True))

    def to_tensor(self, weights: Mapping[str, np.ndarray], config: ModelConfig) -> np.ndarray:
        """Undo `to_weights`: build the tensor from its weights."""
        parts = [weights[path] if self.expert is None else weights[path][self.expert] for path in self.paths]
        if self.rule.transform == "alternate":
            return np.stack(parts, axis=-1).reshape(*parts[0].shape[:-1], -1)
        if self.rule.groups:
            parts = [part.reshape(*part.shape[:-1], self.rule.groups(config), -1) for part in parts]
        value = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        if self.rule.groups:
            value = value.reshape(*value.shape[:-2], -1)
        if self.rule.interleaved:
            value = value[..., np.argsort(_half_split_order(value.shape[-1], config))]
        if self.rule.transform == "flatten":
            return value[None]
        if self.rule.transform == "taps":
            return value.T[:, None]
        return value.swapaxes(-1, -2) if self.rule.transform == "transpose" else value


def _half_split_order(columns: int, config: ModelConfig) -> np.ndarray:
    """Return the order that turns interleaved columns of q or k into the half-split layout, int [columns].

    Column i of the result is column order[i] of the source. The rotated part of each head takes its even columns first,
    and then its odd columns.
    """
    dim, rotated = config.head_dim, config.rope.rotary_dim(config.head_dim)
    order = np.concatenate([np.arange(0, rotated, 2), np.arange(1, rotated, 2), np.arange(rotated, dim)])
    return (np.arange(columns // dim)[:, None] * dim + order).reshape(-1)


def placements(
    family: ModelFamily, weight_shapes: Mapping[str, Shape], there: Container[str] = ()
) -> dict[str, Placement]:
    """Return all tensors that a checkpoint of a family must have, by name.

    Args:
        family: its first rule for a weight counts, unless only the tensors of a later rule are there.
        weight_shapes: the shape of each weight by path.
        there: the names of the tensors that the checkpoint has.

    Raises:
        ConfigError: no rule of the family has a weight, so the config has a setting that the family lacks.
    """
    result: dict[str, Placement] = {}
    theirs = _with_their_layers(weight_shapes) if family.layers_apart else {}
    ours = {their: path for path, their in theirs.items()}
    for path, shape in weight_shapes.items():
        ways = [(rule, names) for rule in family.rules if (names := rule.sources(theirs.get(path, path), shape))]
        if not ways:
            raise ConfigError(f"no tensor of a {family.model_type} checkpoint has the weight {path} of this config")
        rule, names = next((way for way in ways if all(name in there for name in way[1])), ways[0])
        for index, name in enumerate(names):
            if name not in result:
                paths = tuple(ours.get(their, their) for their in rule.match(name))
                result[name] = Placement(name, paths, rule, index if rule.stacked else None)
    return result


def _with_their_layers(paths: Iterable[str]) -> dict[str, str]:
    """Return paths with the layer's number in a checkpoint that counts each mixer and each MLP (`layers_apart`)."""
    found = {path: (int(layer), part) for path in paths for layer, part in re.findall(r"^layer_(\d+)/(.+)", path)}
    layers = sorted({(layer, part.startswith("mlp")) for layer, part in found.values()})
    return {
        path: f"layer_{layers.index((layer, part.startswith('mlp')))}/{part}" for path, (layer, part) in found.items()
    }


class Stacks:
    """Weights of which the tensors of a checkpoint have one expert each. They wait until all experts are read."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[int, np.ndarray]] = {}

    def whole(self, path: str, part: np.ndarray, expert: int | None, shape: Shape) -> np.ndarray | None:
        """Add a part of the weight at `path`, and return the weight of shape `shape` if it is complete."""
        if expert is None:
            return part
        parts = self._parts.setdefault(path, {})
        parts[expert] = part
        if len(parts) < shape[0]:
            return None
        del self._parts[path]
        return np.stack([parts[index] for index in range(shape[0])])


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint that is open for conversion.

    Attributes:
        hf: the parsed config.json.
        family: the model family.
        config: the ModelConfig that config.json describes.
        shapes: tensor name -> shape, in the order in which reading is fastest.
        read: function that returns the tensor with a given name. Tensors from GGUF and quantized ones are float32, or
            of a smaller dtype that holds all their numbers. Other tensors have their stored dtype.
        accompany: function that writes the tokenizer and generation files into a directory.
    """

    hf: dict[str, Any]
    family: ModelFamily
    config: ModelConfig
    shapes: dict[str, Shape]
    read: Callable[[str], np.ndarray]
    accompany: Callable[[Path], None]
