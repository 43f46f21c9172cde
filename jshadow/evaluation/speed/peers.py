"""Answering the same request with transformers on torch, for comparison."""

import time
from typing import Any

from jshadow.evaluation.speed.request import Answer, Request

CACHES = ("DynamicCache", "OffloadedCache")


def answer_transformers(request: Request, cache: str) -> Answer:
    """Answer a request twice with one of transformers' caches, and return the second answer."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.utils import logging

    logging.disable_progress_bar()

    kind = getattr(torch, request.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(request.model, dtype=kind).eval()
    ids = torch.tensor(request.prompts(model.config.vocab_size).astype("int64"))

    def step(tokens: Any, kv_cache: Any) -> Any:
        logits = model(tokens, past_key_values=kv_cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1:].argmax(-1)

    def once() -> Answer:
        kv_cache: Any = DynamicCache(config=model.config, offloading=cache == "OffloadedCache")
        start = time.perf_counter()
        token = step(ids, kv_cache)
        middle = time.perf_counter()
        for _ in range(request.steps):
            token = step(token, kv_cache)
        end = time.perf_counter()
        size = sum(layer.keys.nbytes + layer.values.nbytes for layer in kv_cache.layers)
        return Answer(middle - start, end - middle, size, 0)

    with torch.no_grad():
        once()
        return once()
