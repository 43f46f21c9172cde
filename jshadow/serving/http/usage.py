"""The numbers of tokens of a response."""

from collections.abc import Sequence
from typing import Any

from jshadow.serving import AnswerReport


def usage_of(reports: Sequence[AnswerReport]) -> dict[str, Any]:
    """Return OpenAI's `usage` of the choices of one prompt. The tokens of the prompt count once."""
    first, new = reports[0], sum(report.generated_tokens for report in reports)
    return {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": new,
        "total_tokens": first.prompt_tokens + new,
        "prompt_tokens_details": {"cached_tokens": first.stored_tokens},
    }


def total_usage(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum of the `usage` of several prompts."""
    if len(usages) == 1:
        return usages[0]
    total: dict[str, Any] = {
        name: sum(usage[name] for usage in usages) for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    stored = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return total | {"prompt_tokens_details": {"cached_tokens": stored}}
