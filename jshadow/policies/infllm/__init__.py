"""InfLLM: a sliding window and a memory of earlier blocks (arXiv 2402.04617)."""

from jshadow.policies.infllm.policy import InfLLM as InfLLM
