"""Four GPU ops of sparse attention over an offloaded KV cache, each in plain jax.numpy and as Pallas kernels.

This package imports JAX and NumPy alone and knows nothing of jshadow.
"""

from pallas_kernels.choose import IMPLEMENTATIONS as IMPLEMENTATIONS
from pallas_kernels.choose import in_host_memory as in_host_memory
from pallas_kernels.choose import on_host as on_host
from pallas_kernels.chunk_scores import chunk_scores as chunk_scores
from pallas_kernels.fetch_reconstruct import fetch_reconstruct as fetch_reconstruct
from pallas_kernels.reconstruct_keys import reconstruct_keys as reconstruct_keys
from pallas_kernels.sparse_attention import sparse_attention as sparse_attention
