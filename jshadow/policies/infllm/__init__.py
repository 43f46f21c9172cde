"""InfLLM (arXiv 2402.04617)."""

from jshadow.policies.infllm.policy import InfLLM as InfLLM
