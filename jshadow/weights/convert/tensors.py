"""The tensors of a checkpoint's safetensors files, with each quantized weight as one floating tensor."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jshadow.errors import CheckpointError
from jshadow.weights.convert.quantized.base import Packing, Scheme, Stored
from jshadow.weights.convert.safetensors_file import READABLE_TAGS, TensorFile, same_tensor
from jshadow.weights.convert.source import Shape

_FLOAT32 = np.dtype(np.float32)
# Endings of the names of factors for activations and for a quantized cache. They are no part of a weight.
_OF_ACTIVATIONS = (
    *(f".{which}_{what}" for which in ("input", "output") for what in ("scale", "zero_point", "global_scale")),
    *(f".{which}_{what}" for which in "qkv" for what in ("scale", "zero_point", "global_scale")),
    ".activation_scale",
)


class _Weight(NamedTuple):
    """A weight that is quantized. The packing is None if its tensors do not fit."""

    packing: Packing | None
    found: dict[str, Stored]
    misfits: list[str]


class Tensors:
    """The tensors of a checkpoint.

    Attributes:
        directory: the checkpoint.
        shapes: name -> shape, in the order of the files: first the plain ones, then the quantized weights. The shape of
            a quantized weight whose tensors do not fit is None.
        repeated: one line for each tensor that occurs twice.

    Args:
        directory: the checkpoint.
        files: its files.
        scheme: how its weights are quantized, or None.
    """

    def __init__(self, directory: Path, files: list[TensorFile], scheme: Scheme | None) -> None:
        self.directory = directory
        self.repeated: list[str] = []
        self._plain: dict[str, Stored] = {}
        self._weights: dict[str, _Weight] = {}
        self._may_have_biases: set[str] = set()
        for file in files:
            for name in file.shapes:
                if name in self._plain:
                    self.repeated.append(f"{name}: occurs twice, again in {file.path.name}")
                self._plain[name] = Stored(file, name)
        if scheme is not None:
            self._join(scheme)
        self.shapes: dict[str, Shape | None] = {name: stored.shape for name, stored in self._plain.items()}
        for name, (packing, _, _) in self._weights.items():
            self.shapes[name] = None if packing is None else packing.result

    def _join(self, scheme: Scheme) -> None:
        """Move the tensors of quantized weights from the plain ones."""
        suffixes = sorted({*scheme.mains, *scheme.companions}, key=len, reverse=True)
        modules: dict[str, dict[str, Stored]] = {}
        for name in list(self._plain):
            if name.endswith(_OF_ACTIVATIONS):
                del self._plain[name]
                continue
            suffix = next((one for one in suffixes if name.endswith(one)), None)
            if suffix is not None:
                modules.setdefault(name.removesuffix(suffix), {})[suffix] = self._plain[name]
        for module, found in modules.items():
            if not self._is_quantized(scheme, found):
                continue
            for stored in found.values():
                del self._plain[stored.name]
            name = module + scheme.weight
            if name in self._plain:
                self.repeated.append(f"{name}: occurs twice, plain and quantized")
            try:
                packing = scheme.packing(module, found)
                misfits = packing.misfits(module, found)
            except CheckpointError as error:
                self._weights[name] = _Weight(None, found, [str(error)])
            else:
                self._weights[name] = _Weight(None if misfits else packing, found, misfits)
            if scheme.adds_biases:
                self._may_have_biases.add(f"{module}.bias")

    @staticmethod
    def _is_quantized(scheme: Scheme, found: dict[str, Stored]) -> bool:
        main = next((found[one] for one in scheme.mains if one in found), None)
        return main is not None and (len(found) > 1 or main.tag not in READABLE_TAGS)

    def misfits(self, name: str) -> list[str]:
        """Return one line for each tensor behind `name` whose dtype, shape or presence is wrong."""
        if name in self._weights:
            return self._weights[name].misfits
        tag = self._plain[name].tag
        return [] if tag in READABLE_TAGS else [f"{name}: dtype must be one of {READABLE_TAGS}, got {tag}"]

    def is_spare(self, name: str) -> bool:
        """Return whether a tensor is a bias of zeros, which a writer added to a module without a bias."""
        return name in self._may_have_biases and not self.misfits(name) and not np.any(self.read(name))

    def read(self, name: str, dtype: np.dtype[Any] = _FLOAT32) -> np.ndarray:
        """Read a tensor that has no `misfits`. A quantized one is decoded to `dtype`, or to a smaller one without loss.

        Raises:
            UnfitTensor: numbers of a quantized weight contradict each other, or are not finite.
            CheckpointError: a file cannot be read.
        """
        if name in self._plain:
            return self._plain[name].read()
        packing, found, _ = self._weights[name]
        assert packing is not None
        return packing.read(found, dtype)

    def same(self, one: str, other: str) -> bool:
        """Return whether two tensors have equal shapes, dtypes and bytes. Quantized ones are equal to no other."""
        if one in self._plain and other in self._plain:
            return same_tensor(self._plain[one], self._plain[other])
        return False
