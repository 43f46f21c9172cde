"""GPU ops for sparse attention over a prompt or an offloaded KV cache, and for a step of a recurrent layer.

Each exists in plain jax.numpy and as a Pallas kernel. `recurrent_step` alone is only a kernel, because the library has
the same step for any number of tokens. The package imports only JAX, NumPy and the standard library. It
does not depend on jshadow. The public interface is the names below and two modules. `bits` defines the layout of packed
numbers in bytes, and `rotation` computes the cosines and sines of RoPE.
"""

import jax

try:
    import jax.experimental.pallas.triton
except ImportError as error:
    raise ImportError(
        f"pallas_kernels needs a jax below 0.13, whose Pallas has a Triton backend, got jax {jax.__version__}"
    ) from error

from pallas_kernels.append_rows import NewTokens as NewTokens
from pallas_kernels.append_rows import append_rows as append_rows
from pallas_kernels.attend_chunks import attend_chunks as attend_chunks
from pallas_kernels.choose import IMPLEMENTATIONS as IMPLEMENTATIONS
from pallas_kernels.choose import in_host_memory as in_host_memory
from pallas_kernels.choose import on_host as on_host
from pallas_kernels.chunk_scores import chunk_scores as chunk_scores
from pallas_kernels.fetch_reconstruct import HostRows as HostRows
from pallas_kernels.fetch_reconstruct import KeptRows as KeptRows
from pallas_kernels.fetch_reconstruct import fetch_reconstruct as fetch_reconstruct
from pallas_kernels.fetch_reconstruct import put_missed as put_missed
from pallas_kernels.level_scores import TwoLevels as TwoLevels
from pallas_kernels.level_scores import level_logits as level_logits
from pallas_kernels.level_scores import level_scores as level_scores
from pallas_kernels.products import CACHED_ROWS as CACHED_ROWS
from pallas_kernels.products import coded_products as coded_products
from pallas_kernels.products import hadamard as hadamard
from pallas_kernels.products import half_variance as half_variance
from pallas_kernels.products import landmark_products as landmark_products
from pallas_kernels.products import whole_products as whole_products
from pallas_kernels.reconstruct_keys import ChosenKeys as ChosenKeys
from pallas_kernels.reconstruct_keys import reconstruct_keys as reconstruct_keys
from pallas_kernels.recurrent_step import HeldRows as HeldRows
from pallas_kernels.recurrent_step import NextToken as NextToken
from pallas_kernels.recurrent_step import recurrent_step as recurrent_step
from pallas_kernels.select_chunks import MOST_AGE as MOST_AGE
from pallas_kernels.select_chunks import MOST_PLACES as MOST_PLACES
from pallas_kernels.select_chunks import Chosen as Chosen
from pallas_kernels.select_chunks import places_of as places_of
from pallas_kernels.select_chunks import select_chunks as select_chunks
from pallas_kernels.sparse_attention import sparse_attention as sparse_attention
from pallas_kernels.sparse_prefill import KeyLists as KeyLists
from pallas_kernels.sparse_prefill import Keys as Keys
from pallas_kernels.sparse_prefill import sparse_prefill as sparse_prefill
from pallas_kernels.tile_products import Stack as Stack
from pallas_kernels.tile_products import Tiles as Tiles
from pallas_kernels.tile_products import tile_products as tile_products
