"""The policies by name. A policy listed here must have a row in tests/cases.py."""

from jshadow.policies.base import Policy as Policy
from jshadow.policies.full import Full as Full
from jshadow.policies.shadowkv import ShadowKV as ShadowKV
from jshadow.policies.streaming_llm import StreamingLLM as StreamingLLM

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (Full, StreamingLLM, ShadowKV)}
