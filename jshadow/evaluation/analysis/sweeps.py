"""Agreement with full attention against device bytes, for many settings on the same texts (ShadowKV, section 5.3)."""

from collections.abc import Sequence
from typing import Any

from jshadow.cache import offload
from jshadow.errors import ConfigError
from jshadow.evaluation.analysis.tensors import text_of
from jshadow.evaluation.runner import Progress, run_case, task_rows
from jshadow.evaluation.settings import Entry, Setup, TaskPlan
from jshadow.evaluation.tasks import Case, Sample
from jshadow.policies import Full, Policy
from jshadow.policies.checks import check_range


def sweep(
    params: Any,
    texts: Sequence[Any],
    policies: Sequence[Policy],
    *,
    steps: int = 64,
    fetch: str = "resident",
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """How far settings are from full attention on given texts, and what they take (figures 8 and 9, table 15).

    The paper reports task accuracy. Here the last `steps` tokens of each text are fed after the others, and the
    distribution at each position is compared with that of full attention.

    Args:
        params: Params.
        texts: int32 [S] each, all as long.
        policies: the settings; full attention is always run.
        steps: tokens that are compared in each text.
        fetch: fetch mode that runs; the rows also have the bytes with values offloaded, whatever ran.
        progress: called with (texts done, texts).

    Returns:
        Rows as `jshadow.evaluation.runner.evaluate` returns them, full attention's first, then one a policy in order:
        top1 (percent), kl (nats, full against this), their standard errors over texts, the bytes, attended_tokens and
        hit_rate; `settings` has the resolved numbers that were swept.

    Raises:
        PromptError: as `prompt_tensors`.
        ConfigError: no text, texts of several lengths, no policy, steps out of range, a setting out of range.
    """
    ids = [text_of(params, text) for text in texts]
    lengths = sorted(set(map(len, ids)))
    if len(lengths) != 1:
        raise ConfigError(f"texts must be one or more, and all as long, got lengths {lengths}")
    if not policies or any(not isinstance(policy, Policy) for policy in policies):
        raise ConfigError(f"policies must be a non-empty list of policies, got {policies!r}")
    [total] = lengths
    check_range("sweep", "steps", steps, 1, total - 1)
    prompt = total - steps
    entries = tuple(Entry(policy) for policy in dict.fromkeys([Full(), *policies]))
    cases = tuple(
        Case((Sample("", "", "", "", steps),), tuple(text[:prompt].tolist()), forced=tuple(text[prompt:].tolist()))
        for text in ids
    )
    setup = Setup(params, offload.resolve_fetch(fetch), None, {})
    plan = TaskPlan("agreement", prompt, total, cases, entries)
    table, run = [], [entry.policy for entry in entries if entry.policy is not None]
    for policy in run:
        policy.resolve(params.config, total)  # before anything runs
    for index in range(len(cases)):
        table.append(dict(zip(run, run_case(setup, plan, index, run), strict=True)))
        if progress is not None:
            progress(index + 1, len(cases))
    return task_rows(setup, plan, table)
