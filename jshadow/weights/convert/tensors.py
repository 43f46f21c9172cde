"""One tensor of a checkpoint and the weights that it becomes: transposed, reordered or split; and exactly back."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jshadow.models.config import ModelConfig
from jshadow.models.family import ModelFamily, Rule

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Attributes: name: of the tensor; paths: of the weights that it becomes, in its order; rule: of the family."""

    name: str
    paths: tuple[str, ...]
    rule: Rule

    def tensor_shape(self, weight_shapes: Mapping[str, Shape]) -> Shape:
        """The shape that the tensor must have, from those of the weights by path."""
        shapes = [weight_shapes[path] for path in self.paths]
        whole = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
        return whole[::-1] if self.rule.transform == "transpose" else whole

    def to_weights(
        self, value: np.ndarray, weight_shapes: Mapping[str, Shape], config: ModelConfig
    ) -> dict[str, np.ndarray]:
        """The weights of a tensor by path; views where possible."""
        value = value.T if self.rule.transform == "transpose" else value
        if self.rule.interleaved:
            value = value[..., half_split_order(value.shape[-1], config)]
        ends = np.cumsum([weight_shapes[path][-1] for path in self.paths])
        return dict(zip(self.paths, np.split(value, ends[:-1], axis=-1), strict=True))

    def to_tensor(self, weights: Mapping[str, np.ndarray], config: ModelConfig) -> np.ndarray:
        """The tensor as the checkpoint has it: `to_weights` backwards."""
        parts = [weights[path] for path in self.paths]
        value = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        if self.rule.interleaved:
            value = value[..., np.argsort(half_split_order(value.shape[-1], config))]
        return value.T if self.rule.transform == "transpose" else value


def half_split_order(columns: int, config: ModelConfig) -> np.ndarray:
    """The source column of each column of q or k: of each head's rotated part the even ones, then the odd ones."""
    dim, rotated = config.head_dim, config.rope.rotary_dim(config.head_dim)
    order = np.concatenate([np.arange(0, rotated, 2), np.arange(1, rotated, 2), np.arange(rotated, dim)])
    return (np.arange(columns // dim)[:, None] * dim + order).reshape(-1)


def placements(family: ModelFamily, weight_shapes: Mapping[str, Shape]) -> dict[str, Placement]:
    """Every tensor that a checkpoint of a family has, by name, from the paths of the weights."""
    result: dict[str, Placement] = {}
    for path in weight_shapes:
        for rule in family.rules:
            name = rule.source(path)
            if name is not None and name not in result:
                result[name] = Placement(name, rule.match(name), rule)
    return result
