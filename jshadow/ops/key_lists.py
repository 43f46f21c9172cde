"""Attention of a prompt's queries over lists of key blocks and single keys; see `pallas_kernels.sparse_prefill`."""

from pallas_kernels import KeyLists as KeyLists
from pallas_kernels import Keys as Keys
from pallas_kernels import sparse_prefill as attend_over
from pallas_kernels.choose import run as run

__all__ = ("KeyLists", "Keys", "attend_over", "run")
