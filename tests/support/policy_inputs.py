"""What a policy is planned on: a deep model, and Llama-3.1-8B's shape."""

import dataclasses
import functools

from cases import TINY

DEEP = dataclasses.replace(TINY, num_layers=8)


@functools.cache
def llama():
    """Llama-3.1-8B's shape."""
    sizes = {"num_layers": 32, "model_dim": 4096, "ffn_dim": 14336, "q_heads": 32, "kv_heads": 8, "head_dim": 128}
    return dataclasses.replace(TINY, **sizes, context=2**20)
