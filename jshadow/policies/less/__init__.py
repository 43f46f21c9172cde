"""LESS (arXiv 2402.09398)."""

from jshadow.policies.less.policy import LESS as LESS
