"""`jshadow.generate` on a prompt: the time to read and compress the prompt, and the time of a token afterwards."""

import functools
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np

import jshadow
from gpu.room import Room
from gpu.runner import Task
from gpu.sizes import Sizes
from gpu.synthetic import free, weights
from jshadow.policies import Full, Policy
from jshadow.weights.params import Params


def measured(sizes: Sizes, room: Room, policy: Policy, fetch: str, params: Params) -> dict[str, Any]:
    """Answer the same prompt twice. The first call compiles, the second is measured."""
    prompt = np.random.default_rng(0).integers(0, sizes.config.vocab_size, sizes.generate_prompt).tolist()
    for _ in range(2):
        out = jshadow.generate(params, prompt, policy, max_new_tokens=sizes.generate_tokens, fetch=fetch)
        report, tokens = out.report, out.tokens
        del out
        gc.collect()  # the state is freed
    return room.peak() | {
        "ok": 0 < len(tokens) <= sizes.generate_tokens,
        "prompt_tokens": report.prompt_tokens,
        "generated_tokens": report.generated_tokens,
        "prefill_seconds": report.prefill_seconds,
        "decode_tokens_per_second": report.decode_tokens_per_second,
        "device_kv_bytes": report.device_bytes,
        "host_kv_bytes": report.host_bytes,
        "full_kv_bytes": report.full_bytes,
        "hit_rate": report.hit_rate,
    }


def tasks(sizes: Sizes, room: Room) -> Iterator[Task]:
    """Yield one task for full attention, and one for each code of ShadowKV that matters most."""
    ways = {
        "full": (Full(), "resident"),
        "packed small": (sizes.policies["packed small"], "resident"),
        "packed": (sizes.policies["packed"], "zero_copy"),
    }
    params = Params(weights(sizes.config), sizes.config)
    try:
        for name, (policy, fetch) in ways.items():
            run = functools.partial(measured, sizes, room, policy, fetch, params)
            label = f"generate, {name}, {fetch}, {sizes.generate_prompt:,} tokens"
            yield Task(label, 0 if sizes.dry else 40, run)
    finally:
        free(params.weights)
