"""LESS: H2O with a low-rank state of the evicted tokens (arXiv 2402.09398)."""

from jshadow.policies.less.policy import LESS as LESS
