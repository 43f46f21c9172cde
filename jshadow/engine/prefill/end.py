"""The two ends of a prefill: the embedding of the prompts, and the logits and states after the last layer."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow.cache.records import LayerState
from jshadow.cache.spec import Shards, gathered
from jshadow.cache.state import Counters, KVState, Reads, Writes
from jshadow.engine.mesh.agree import run_together
from jshadow.engine.placement import commit
from jshadow.engine.prefill.job import PrefillJob
from jshadow.engine.step import COMPILER_OPTIONS, step_writes
from jshadow.engine.turn import LOGITS_PIECE
from jshadow.engine.types import Logits
from jshadow.models.config import ModelConfig
from jshadow.models.transformer import embed
from jshadow.models.transformer import logits as model_logits
from jshadow.policies import Policy
from jshadow.policies.capabilities import Speculates, capability, first_shared
from jshadow.policies.checks import reads_fitted


def end_prefill(job: PrefillJob, x: Array, layers: Sequence[Sequence[LayerState]]) -> list[tuple[Any, KVState]]:
    """Return (logits, state) for each policy.

    Args:
        job: the prefill.
        x: hidden states [B, S, D] after the last layer.
        layers: for each layer, the state of each policy.
    """
    weights, config, row_lengths = job.params.weights, job.params.config, jnp.asarray(job.lengths)
    x = x[:, : job.tokens.shape[1]]
    out = run_together(
        prompt_logits, weights, x, row_lengths, config=config, want=job.options.logits, shards=job.shards
    )
    states = first_states(job, layers)
    if any(tries_a_step(policy) for policy in job.policies):
        final = run_together(prompt_logits, weights, x, row_lengths, config=config, want="last", shards=job.shards)
        token = final.argmax(-1).astype(jnp.int32)
        states = [foresee(weights, config, token, state) for state in states]
    return [(out, state) for state in states]


def first_states(job: PrefillJob, layers: Sequence[Sequence[LayerState]]) -> list[KVState]:
    """Return the state of each policy after the prompt, before any step."""
    batch, fitted = len(job.lengths), job.options.fitted
    last = job.tokens[np.arange(batch), job.lengths - 1]
    states = []
    for policy, plan, full_layers in zip(job.policies, job.plans, zip(*layers, strict=True), strict=True):
        state = KVState(
            layers=tuple(full_layers),
            shared=first_shared(policy, plan, fitted),
            lengths=jnp.array(job.lengths),
            last=jnp.array(last),
            counters=Counters.zeros(batch),
            fitted=fitted if reads_fitted(policy) else None,
            specs=plan,
            policy=policy,
        )
        states.append(commit(state))
    return states


@functools.partial(jax.jit, static_argnames=("config",))
def embed_prompt(weights: dict, tokens: Array, *, config: ModelConfig) -> Array:
    """Return the embeddings of the tokens."""
    return embed(weights, config, tokens)


@functools.partial(jax.jit, static_argnames=("config", "want", "shards"))
def prompt_logits(
    weights: dict, x: Array, lengths: Array, *, config: ModelConfig, want: Logits[Any], shards: Shards | None = None
) -> Any:
    """Return the logits of the hidden states x [B, S, D], as `want` tells, or the results of the callable.

    On a mesh, they lie on every device.
    """

    def logits(x: Array) -> Any:
        return gathered(model_logits(weights, config, x), shards)

    if want == "last":
        return logits(jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0])
    if want == "all":
        return logits(x)
    assert callable(want)
    pieces = [x[:, start : start + LOGITS_PIECE] for start in range(0, x.shape[1], LOGITS_PIECE)]
    results = [want(logits(piece)) for piece in pieces]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *results)


def tries_a_step(policy: Policy) -> bool:
    """Whether the policy needs a trial step at the end of a prompt."""
    speculation = capability(policy, Speculates)
    return speculation is not None and speculation.trial_step


def foresee(weights: dict, config: ModelConfig, token: Array, state: KVState) -> KVState:
    """Return the state after a trial step on `token`, int32 [B], if its policy needs one.

    The step is then undone. Only the parts that the policy adopts are kept.
    """
    if not tries_a_step(state.policy):
        return state
    reads, writes = state.split()
    shared, lives = _foresee(weights, token, reads, writes, config=config)
    layers = tuple((live, tail) for live, (_, tail) in zip(lives, writes.layers, strict=True))
    return commit(state.join(writes.replace(layers=layers, shared=shared)))


@functools.partial(jax.jit, static_argnames=("config",), compiler_options=COMPILER_OPTIONS)
def _foresee(weights: dict, token: Array, reads: Reads, writes: Writes, *, config: ModelConfig) -> tuple[Any, Any]:
    speculation = capability(reads.policy, Speculates)
    assert speculation is not None
    begun = writes.replace(shared=speculation.before_trial(writes.shared, token))
    _, after = step_writes(weights, config, token[:, None], jnp.ones_like(writes.lengths), reads, begun)
    lives = [
        spec.policy.adopt(before[0], now[0]) if isinstance(spec.policy, Speculates) else before[0]
        for spec, before, now in zip(reads.specs, writes.layers, after.layers, strict=True)
    ]
    return after.shared, lives
