"""InfiniGen (arXiv 2406.19707)."""

from jshadow.policies.infinigen.policy import InfiniGen as InfiniGen
