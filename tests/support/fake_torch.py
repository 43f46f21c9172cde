"""As much of torch and transformers as the benchmarks of rivals call, in NumPy, so that torch need not be there."""

import contextlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest


class Tensor(np.ndarray):
    """An array with the methods of a tensor."""

    def transpose(self, one: int, other: int) -> "Tensor":  # type: ignore[override]
        return self.swapaxes(one, other)

    def to(self, kind: Any) -> "Tensor":
        return self.astype(kind)

    def float(self) -> "Tensor":
        return self.astype(np.float32)


def tensor(values: Any) -> Tensor:
    return np.array(values).view(Tensor)


def softmax(x: Tensor, dim: int) -> Tensor:
    grown = np.exp(x - x.max(dim, keepdims=True))
    return grown / grown.sum(dim, keepdims=True)


class FakeTorch(ModuleType):
    """The module. `calls` are the attentions that it computed: name, arguments and result."""

    float32, bfloat16, Tensor = np.float32, ml_dtypes.bfloat16, Tensor

    def __init__(self) -> None:
        super().__init__("torch")
        self.__spec__ = ModuleSpec("torch", None)
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []
        self.nn = SimpleNamespace(functional=SimpleNamespace(scaled_dot_product_attention=self.sdpa))
        self.tensor, self.softmax, self.no_grad = tensor, softmax, contextlib.nullcontext

    def Generator(self) -> Any:
        return SimpleNamespace(manual_seed=np.random.default_rng)

    def randn(self, *shape: int, generator: np.random.Generator) -> Tensor:
        return generator.standard_normal(shape).view(Tensor)

    def bmm(self, one: Tensor, other: Tensor) -> Tensor:
        self.calls.append(("bmm", (one, other), out := one.float() @ other.float()))
        return out

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool) -> Tensor:
        """Attention of queries [B, h, T, d] over keys and values [B, h_kv, S, d]."""
        assert enable_gqa
        group = q.shape[1] // k.shape[1]
        queries, keys, values = q.float(), *(np.repeat(x.float(), group, axis=1) for x in (k, v))
        out = softmax(queries @ keys.swapaxes(2, 3) * q.shape[-1] ** -0.5, -1) @ values
        self.calls.append(("sdpa", (q, k, v), out))
        return out


class FakeModel:
    """A language model that adds one to the last token, with one layer of keys and values of 5 bytes a token."""

    config = SimpleNamespace(vocab_size=50)

    @classmethod
    def from_pretrained(cls, folder: str, dtype: Any) -> "FakeModel":
        cls.last = made = cls()
        made.folder, made.dtype, made.fed = folder, dtype, []
        return made

    def eval(self) -> "FakeModel":
        return self

    def __call__(self, tokens: Tensor, *, past_key_values: Any, use_cache: bool, logits_to_keep: int) -> Any:
        assert (use_cache, logits_to_keep) == (True, 1)
        self.fed.append(np.asarray(tokens))
        [layer] = past_key_values.layers
        layer.keys = layer.values = np.zeros((layer.keys.nbytes // 5 + tokens.size) * 5, np.int8)
        return SimpleNamespace(logits=np.eye(50)[(np.asarray(tokens)[:, -1:] + 1) % 50].view(Tensor))


def fake_cache(config: Any, offloading: bool) -> Any:
    """An empty cache of FakeModel; one that offloads needs a GPU, as torch's does."""
    if offloading:
        raise RuntimeError("no CUDA here")
    nothing = np.zeros(0, np.int8)
    return SimpleNamespace(layers=[SimpleNamespace(keys=nothing, values=nothing)])


def install_transformers(monkeypatch: pytest.MonkeyPatch) -> type[FakeModel]:
    """Let `from transformers import ...` give FakeModel and its cache, until the test ends."""
    module, utils = ModuleType("transformers"), ModuleType("transformers.utils")
    module.AutoModelForCausalLM, module.DynamicCache = FakeModel, fake_cache
    utils.logging = SimpleNamespace(disable_progress_bar=lambda: None)
    monkeypatch.setitem(sys.modules, "transformers", module)
    monkeypatch.setitem(sys.modules, "transformers.utils", utils)
    return FakeModel


def install(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    """Let `import torch` give the fake module, until the test ends."""
    monkeypatch.setitem(sys.modules, "torch", torch := FakeTorch())
    return torch
