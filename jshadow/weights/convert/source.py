"""A checkpoint of any format, read tensor by tensor under Hugging Face's names and shapes."""

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
    """What a conversion reads.

    Attributes:
        hf: config.json.
        family: its family.
        config: what it says.
        shapes: tensor name -> shape, in the order in which reading is cheap.
        read: tensor name -> its value, in the dtype that it is stored in; only one is asked for at a time.
        accompany: writes the files beside config and weights (tokenizer files) into a directory.
    """

    hf: dict[str, Any]
    family: ModelFamily
    config: ModelConfig
    shapes: dict[str, Shape]
    read: Callable[[str], np.ndarray]
    accompany: Callable[[Path], None]
