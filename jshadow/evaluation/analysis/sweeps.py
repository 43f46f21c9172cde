"""Compares many settings on the same texts by their agreement with full attention and their bytes (ShadowKV, 5.3)."""

from collections.abc import Sequence
from typing import Any

from jshadow.cache import offload
from jshadow.errors import ConfigError
from jshadow.evaluation.analysis.tensors import text_of
from jshadow.evaluation.cases import run_case
from jshadow.evaluation.rows import task_rows
from jshadow.evaluation.runner import Progress
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
    """Measure the distance of each policy from full attention, and its bytes (ShadowKV, figures 8 and 9, table 15).

    The paper reports task accuracy. This function prefills all but the last `steps` tokens of each text, and feeds the
    last ones as one turn. At each of these positions it compares the next-token distribution with that of full
    attention.

    Args:
        params: the model's Params.
        texts: the token ids of each text, int32 [S]. All texts have the same length.
        policies: the policies to compare. Full attention is always added.
        steps: number of tokens that are compared in each text.
        fetch: fetch mode. The rows have the bytes in this mode, and also the bytes with values offloaded.
        progress: called with (number of texts done, number of texts).

    Returns:
        Rows in the format of `jshadow.evaluation.runner.evaluate`: full attention first, then one for each policy in
        order. They have top1 (percent), kl (KL(full || policy) in nats), the standard errors of both over texts, the
        bytes, attended_tokens and hit_rate. `settings` has the resolved settings.

    Raises:
        PromptError: see `prompt_tensors`.
        ConfigError: there is no text or no policy, texts differ in length, or steps or a setting is out of range.
    """
    ids = [text_of(params, text) for text in texts]
    lengths = sorted(set(map(len, ids)))
    if len(lengths) != 1:
        raise ConfigError(f"texts must be at least one text, all of the same length, got lengths {lengths}")
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
        policy.resolve(params.config, total)  # raises the errors of settings before anything runs
    for index in range(len(cases)):
        table.append(dict(zip(run, run_case(setup, plan, index, run), strict=True)))
        if progress is not None:
            progress(index + 1, len(cases))
    return task_rows(setup, plan, table)
