"""Sparse prefill: each query of a prompt attends to few keys, chosen for each prompt (MInference, arXiv 2407.02490).

`lines` measures what the last queries attend to, and chooses columns and diagonals by it. `attention` has the
attentions with their settings, and computes them.
"""

from jshadow.engine.sparse_prefill.attention import PREFILLS as PREFILLS
from jshadow.engine.sparse_prefill.attention import AShape as AShape
from jshadow.engine.sparse_prefill.attention import SparsePrefill as SparsePrefill
from jshadow.engine.sparse_prefill.attention import VerticalSlash as VerticalSlash
from jshadow.engine.sparse_prefill.attention import parse_prefill as parse_prefill
from jshadow.engine.sparse_prefill.lines import HeadPattern as HeadPattern
from jshadow.engine.sparse_prefill.lines import Pattern as Pattern
from jshadow.engine.sparse_prefill.lines import load_pattern as load_pattern
