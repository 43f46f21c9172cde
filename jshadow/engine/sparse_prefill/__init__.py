"""Sparse prefill: each query of a prompt attends to few keys, chosen for each prompt (MInference, arXiv 2407.02490).

`estimate` measures what the last queries attend to. By these estimates, `lines` chooses columns and diagonals. `lists`
names the chosen keys of each query block for the kernel of a GPU. `tiles` computes the attention over the chosen keys
elsewhere. `base` has what the attentions share. `vertical_slash` and `a_shape` have their settings.
"""

from jshadow.engine.sparse_prefill.a_shape import AShape as AShape
from jshadow.engine.sparse_prefill.base import SparsePrefill as SparsePrefill
from jshadow.engine.sparse_prefill.parse import PREFILLS as PREFILLS
from jshadow.engine.sparse_prefill.parse import parse_prefill as parse_prefill
from jshadow.engine.sparse_prefill.patterns import HeadPattern as HeadPattern
from jshadow.engine.sparse_prefill.patterns import Pattern as Pattern
from jshadow.engine.sparse_prefill.patterns import load_pattern as load_pattern
from jshadow.engine.sparse_prefill.vertical_slash import VerticalSlash as VerticalSlash
