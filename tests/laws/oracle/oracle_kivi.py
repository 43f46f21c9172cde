"""The NumPy oracle of KIVI: every query sees all tokens, but old keys and values are quantized."""

import dataclasses
from typing import Any

import numpy as np
from oracle_maths import Array
from oracle_sisters import SetPolicy


@dataclasses.dataclass(frozen=True)
class KIVI(SetPolicy):
    """Every query sees all tokens, but old keys and values are quantized.

    Attributes:
        bits: bits of a code.
        group: numbers that share a step.
        residual: newest tokens that stay exact.
        near_tie: a number that is this near to the middle between two codes, in steps, gets the farther code instead of
            the nearer one. In float32 such a number may get either code.
    """

    bits: int
    group: int
    residual: int
    near_tie: float = dataclasses.field(default=0.0, kw_only=True)

    def see(self, memory: Any, q: Array, k: Array) -> tuple[list[list[int]], float]:
        """All positions for every query head. Nothing is cut, so the gap is infinite."""
        return [list(range(len(k)))] * len(q), np.inf

    def rounded(self, x: Array) -> Array:
        """Quantize the groups of the last axis, and return the values of the codes."""
        least, most = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
        step = (most - least) / (2**self.bits - 1)
        place = (x - least) / np.where(step > 0, step, 1)
        lower = np.floor(place)
        code = np.where(place >= 0.5, 1.0, 0.0) if self.bits == 1 else np.round(place)
        code = np.where(np.abs(place - lower - 0.5) < self.near_tie, 2 * lower + 1 - code, code)
        if self.bits == 1:
            return np.where(code == 1, (least + 3 * most) / 4, (3 * least + most) / 4)
        return least + code * step

    def distort(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Quantize keys of whole blocks by channel and old values by token; k and v are [held, h_kv, d]."""
        held, heads, dim = k.shape
        blocks, old = (held - 1) // self.residual * self.residual, max(held - self.residual, 0)
        keys = k[:blocks].reshape(blocks // self.group, self.group, heads, dim).transpose(0, 2, 3, 1)
        keys = self.rounded(keys).transpose(0, 3, 1, 2).reshape(blocks, heads, dim)
        values = self.rounded(v[:old].reshape(old, heads, dim // self.group, self.group)).reshape(old, heads, dim)
        return np.concatenate([keys, k[blocks:]]), np.concatenate([values, v[old:]])
