"""The common interface of checkpoints of all formats: tensors by Hugging Face's names and shapes."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jshadow.models.config import ModelConfig
from jshadow.models.family import ModelFamily
from jshadow.weights.convert.tensors import Shape


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint that is open for conversion.

    Attributes:
        hf: the parsed config.json.
        family: the model family.
        config: the ModelConfig that config.json describes.
        shapes: tensor name -> shape, in the order in which reading is fastest.
        read: function that returns the tensor with a given name. Tensors from GGUF are float32. Other tensors have
            their stored dtype.
        accompany: function that writes the tokenizer and generation files into a directory.
    """

    hf: dict[str, Any]
    family: ModelFamily
    config: ModelConfig
    shapes: dict[str, Shape]
    read: Callable[[str], np.ndarray]
    accompany: Callable[[Path], None]
