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

    transpose, to = np.ndarray.swapaxes, np.ndarray.astype

    def float(self) -> "Tensor":
        return self.astype(np.float32)


def softmax(x: Tensor, dim: int) -> Tensor:
    grown = np.exp(x - x.max(dim, keepdims=True))
    return grown / grown.sum(dim, keepdims=True)


def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let `import torch` give a fake module, until the test ends. `calls` are its attentions: (name, result)."""
    calls: list[tuple[str, Tensor]] = []

    def bmm(one: Tensor, other: Tensor) -> Tensor:
        calls.append(("bmm", out := one.float() @ other.float()))
        return out

    def sdpa(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool) -> Tensor:
        """Attention of queries [B, h, T, d] over keys and values [B, h_kv, S, d]."""
        assert enable_gqa
        group = q.shape[1] // k.shape[1]
        queries, keys, values = q.float(), *(np.repeat(x.float(), group, axis=1) for x in (k, v))
        calls.append(("sdpa", out := softmax(queries @ keys.swapaxes(2, 3) * q.shape[-1] ** -0.5, -1) @ values))
        return out

    torch = ModuleType("torch")
    torch.__spec__ = ModuleSpec("torch", None)
    torch.calls, torch.bmm, torch.softmax = calls, bmm, softmax
    torch.float32, torch.bfloat16, torch.Tensor = np.float32, ml_dtypes.bfloat16, Tensor
    torch.nn = SimpleNamespace(functional=SimpleNamespace(scaled_dot_product_attention=sdpa))
    torch.no_grad, torch.tensor = contextlib.nullcontext, lambda values: np.array(values).view(Tensor)
    torch.Generator = lambda: SimpleNamespace(manual_seed=np.random.default_rng)
    torch.randn = lambda *shape, generator: generator.standard_normal(shape).view(Tensor)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


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
