"""A smaller model of the same tokenizer proposes tokens (Leviathan et al. 2023, arXiv 2211.17192)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshadow.cache.state import KVState
from jshadow.engine.checks import check_policy
from jshadow.engine.prefill.whole import prefill
from jshadow.engine.sampling import sample_numbered
from jshadow.engine.speculation.checks import check_gives_back
from jshadow.engine.speculation.drafter import Drafter, Memory, Proposal, Target, Text
from jshadow.engine.step import step_state
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import cache_specs
from jshadow.policies import Full, Policy
from jshadow.weights.params import Params


@dataclasses.dataclass(frozen=True)
class ModelSteps(Drafter):
    """The steps of a draft model, without its weights: what programs are traced with.

    Attributes:
        config: the draft model.
    """

    config: ModelConfig | None = None

    name = "draft_model"
    source = "arXiv 2211.17192"
    cost = 0.3

    def begin(self, text: Text, state: KVState) -> Memory:
        """Not used: the weights are those of `DraftModel`."""
        raise NotImplementedError

    def ready(self, memory: Memory) -> Array:
        """Return `tokens` for every row."""
        return jnp.full_like(memory.live.lengths, self.tokens)

    def propose(self, memory: Memory, target: Target, width: int) -> Proposal:
        """Run a step for each token, and one more, which only stores the last proposed token."""
        (weights, reads), config = memory.fixed, self.config
        assert config is not None

        def body(carry: tuple[KVState, Array], place: Array) -> tuple[tuple[KVState, Array], Array]:
            state, token = carry
            feeds = ((place <= target.wanted) & (target.progress.left > 0)).astype(jnp.int32)
            logits, state = step_state(weights, config, token[:, None], feeds, state)
            drawn = sample_numbered(target.sampler, logits[:, None], target.key, target.progress.number + place)[:, 0]
            token = jnp.maximum(drawn, 0)  # NO_TOKEN would give logits that are not numbers
            return (state, token), token

        start = KVState.of(reads, memory.live), target.progress.token
        (drafted, _), tokens = lax.scan(body, start, jnp.arange(width + 1))
        return Proposal(tokens.T[:, :width], target.state, drafted.split()[1])

    def heard(self, memory: Memory, tokens: Array, counts: Array, state: KVState) -> Any:
        """Give back the tokens that were not accepted. The draft model then has read what the target has read."""
        own = KVState.of(memory.fixed[1], memory.live)
        return own.rewound(jnp.minimum(own.lengths, state.lengths), state.last).split()[1]


@dataclasses.dataclass(frozen=True)
class DraftModel(ModelSteps):
    """Propose what a smaller model of the same tokenizer draws. It reads the prompts too, in a state of its own.

    A state can be continued only if the tokens that it holds are known (`jshadow.Library`, `--load-state`).

    Attributes:
        tokens: the most tokens that are proposed at once.
        params: the draft model.
        policy: the policy of its state. It must be able to give all new tokens back.
    """

    config: ModelConfig | None = dataclasses.field(default=None, init=False, repr=False)
    params: Params = None  # type: ignore[assignment]
    policy: Policy = Full()  # noqa: RUF009, it is frozen

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.params, Params):
            raise ConfigError(f"draft_model.params must be Params, as `load` returns them, got {self.params!r:.80}")
        check_policy(self.policy)
        object.__setattr__(self, "config", self.params.config)

    @property
    def traced(self) -> Drafter:
        """The steps of the model, without its weights."""
        return ModelSteps(self.params.config, tokens=self.tokens)

    def check_target(self, config: ModelConfig, state: KVState) -> None:
        """Raise ConfigError unless the two models have the same token ids, and the policy can give tokens back."""
        if config.vocab_size != self.params.config.vocab_size:
            raise ConfigError(
                f"draft_model.params must have the tokenizer of the model, with vocab_size={config.vocab_size}, got "
                f"vocab_size={self.params.config.vocab_size}"
            )
        if self.params.config.context < state.capacity:
            raise ConfigError(
                f"draft_model.params must have a context of at least capacity={state.capacity} tokens, got "
                f"{self.params.config.context}"
            )
        policy, first = self.policy.resolve(self.params.config, state.capacity), state.specs[0]
        sizes = (state.batch, state.capacity, 1, str(self.params.dtype), first.fetch)
        check_gives_back(self, cache_specs(self.params.config, policy, *sizes), policy, state)

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raise ConfigError if both models have tokenizers, and their tokens differ."""
        own = self.params.tokenizer
        if own is not None and tokenizer is not None and own.get_vocab() != tokenizer.get_vocab():
            raise ConfigError("draft_model.params must have the tokenizer of the model, got one with other tokens")

    def begin(self, text: Text, state: KVState) -> Memory:
        """Let the draft model read the texts."""
        held = np.asarray(state.lengths)
        if (text.lengths != held).any():
            raise ConfigError(
                f"speculate needs the {held.tolist()} tokens that the state holds for a draft model, got "
                f"{text.lengths.tolist()}: a state does not have its tokens"
            )
        _, own = prefill(self.params, text.tokens, text.lengths, self.policy, capacity=state.capacity)
        reads, writes = own.split()
        return Memory((self.params.weights, reads), writes)
