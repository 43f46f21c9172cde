"""InfiniGen: tokens are chosen by predicted queries (arXiv 2406.19707)."""

from jshadow.policies.infinigen.policy import InfiniGen as InfiniGen
