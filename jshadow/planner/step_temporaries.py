"""An upper bound on the device bytes that a decode step takes beside weights and state."""

from collections.abc import Sequence

from jshadow.cache.spec import CacheSpec
from jshadow.models.config import ModelConfig
from jshadow.policies.base import Policy
from jshadow.policies.capabilities import rows_of


def step_temporaries(config: ModelConfig, policy: Policy, specs: Sequence[CacheSpec]) -> dict[str, int]:
    """Return an upper bound, by part, on the device bytes of a decode step without weights and state.

    Layers run one after the other, so only the largest layer counts. Logits count twice, because a copy is made in
    which the logits of a bad row are NaN. The residual stream, the projections and the two halves of the MLP count with
    their float32 copies. On a mesh, a device has its part of the logits and all of them.

    Args:
        config: the model.
        policy: the resolved policy.
        specs: the spec of each layer on one device, for the rows of the step.
    """
    c, spec, rows = config, specs[0], specs[0].batch * rows_of(policy)
    tp = 1 if spec.shards is None else spec.shards.tp
    token = 6 * c.model_dim - 3 * (-c.ffn_dim // tp) + 3 * (spec.q_heads + 2 * spec.kv_heads) * c.head_dim
    return {
        "logits": 4 * rows * (2 * c.vocab_size - (-c.vocab_size // tp if tp > 1 else 0)),
        "activations": 4 * rows * token,
        "attention": max(spec.policy.step_temporaries(spec) for spec in specs),
    }
