"""The drafters by name: prompt lookup, the model over a part of its own cache, a smaller model, and a compressed cache.

Prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding): the newest tokens stood in the text before,
so what followed them there may follow again. transformers (`prompt_lookup_num_tokens`) and vLLM (n-gram speculation)
have it too. Here the whole batch is searched on the device. Among all places whose tokens agree with the newest ones,
the one with the longest agreement is taken, and of equal ones the newest. If the text ends before enough tokens were
proposed, it is taken to repeat from that place on.

Self-drafting (MagicDec, arXiv 2408.11049; TriForce, arXiv 2404.11912, section 4): a draft step reads the keys and
values of the target, those of the units that a retrieval policy selects by small summaries, and those of the newest
tokens. So a second cache is not needed. The keys and values of drafted tokens lie behind the row's tokens, where the
check of these tokens overwrites them.

A compressed draft (VeriCache, arXiv 2605.17613): the target has exact keys and values of all tokens, on the device
(`Full`) or in host memory (`Offloaded`), so the prompt need not be read twice. The keys and values of accepted tokens
in the compressed cache are those of the draft steps, which attended to a part of the tokens.

B rows, H tokens of history, n units of `policy.unit` tokens, h_kv KV heads, d head width, w proposed tokens.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Int

from jshadow.cache import host_memory, offload
from jshadow.cache.accounting import ByteCount, leaf_bytes, state_nbytes, total
from jshadow.cache.records import HostWrite, LayerState, PromptKV, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.cache.state import Counters, KVState, with_room
from jshadow.engine.checks import check_policy
from jshadow.engine.placement import commit
from jshadow.engine.prefill.layer import compress_layer
from jshadow.engine.prefill.whole import prefill
from jshadow.engine.speculation.drafter import Drafter, Memory, Proposal, Target, Text, check_gives_back
from jshadow.engine.step import LayerWork, append_tokens, step_state
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import Piece, attend, group_queries
from jshadow.ops.layout import top_k
from jshadow.ops.rope import inverse_frequencies, rotate, rotation
from jshadow.planner.bytes import abstract_of, cache_specs
from jshadow.policies import WRAPPERS, Full, Policy, Quest, ShadowKV, parse_policy, parse_settings
from jshadow.policies.capabilities import HasAll, Speculates, attention_of, capability
from jshadow.policies.checks import check_sinks, reads_fitted
from jshadow.policies.full import or_full
from jshadow.policies.retrieval import RetrievalPolicy, put_units
from jshadow.policies.settings import with_settings
from jshadow.weights.params import Params, load

_LONGEST_MATCH = 16  # agreements of more tokens count as this many
_FOR_EACH_TOKEN = 2  # tokens that are proposed for the shortest agreement, and for each further token that agrees


class _History(NamedTuple):
    """The text so far, and the place whose continuation is proposed.

    Attributes:
        tokens: int32 [B, H].
        counts: number of tokens of each row, int32 [B].
        places: index of the token to propose first, int32 [B]. -1: no place agrees with the newest tokens.
        agreeing: number of tokens before this place that agree with the newest ones, int32 [B].
    """

    tokens: Array
    counts: Array
    places: Array
    agreeing: Array


@dataclasses.dataclass(frozen=True)
class PromptLookup(Drafter):
    """Propose what followed the newest tokens when they stood in the prompt or in the answer before.

    If `generate` continues a state, only the tokens of the new turn are searched, because a state does not have the
    tokens that it has read. `jshadow generate --load-state` and `jshadow.Library` know them.

    Attributes:
        tokens: the most tokens that are proposed at once.
        ngram: number of newest tokens that must have stood there.
    """

    ngram: int = 3

    name = "prompt_lookup"
    on_meshes = True
    in_engines = True
    source = "github.com/apoorvumang/prompt-lookup-decoding"

    def __post_init__(self) -> None:
        self.check_numbers(tokens=self.tokens, ngram=self.ngram)

    def begin(self, text: Text, state: KVState) -> Memory:
        """Store the texts, with space for as many tokens as a row can hold. `heard` searches them."""
        tokens = np.zeros((len(text.tokens), state.capacity + self.tokens + 1), np.int32)
        tokens[:, : text.tokens.shape[1]] = text.tokens
        none = jnp.full(len(tokens), -1, jnp.int32)
        return Memory(None, _History(jnp.asarray(tokens), jnp.asarray(text.lengths, jnp.int32), none, none))

    def row_bytes(self, config: ModelConfig, state: KVState) -> ByteCount:
        """Return the bytes of the text of a row, the number of its tokens, the place and the agreement."""
        return ByteCount(4 * (state.capacity + self.tokens + 1 + 3))

    def ready(self, memory: Memory) -> Array:
        """Return 0 for rows without such a place, and more tokens for others the more tokens agree there."""
        history: _History = memory.live
        sure = jnp.minimum(self.tokens, _FOR_EACH_TOKEN * (history.agreeing - self.ngram + 1))
        return jnp.where(history.places >= 0, sure, 0)

    def propose(self, memory: Memory, target: Target, width: int) -> Proposal:
        """Return the tokens from the place on. At the end of the text, go on at the place."""
        history: _History = memory.live
        period = jnp.maximum(history.counts - history.places, 1)[:, None]
        index = jnp.maximum(history.places[:, None] + jnp.arange(width) % period, 0)
        return Proposal(jnp.take_along_axis(history.tokens, index, axis=1, mode="clip"), target.state, history)

    def heard(self, memory: Memory, tokens: Array, counts: Array, state: KVState) -> _History:
        """Append the new tokens to the text, and search again."""
        history: _History = memory.live
        rows, count = jnp.arange(tokens.shape[0])[:, None], tokens.shape[1]
        index = jnp.where(jnp.arange(count) < counts[:, None], history.counts[:, None] + jnp.arange(count), -1)
        index = jnp.where(index < 0, history.tokens.shape[1], index)  # an index past the end is dropped
        text = history.tokens.at[rows, index].set(tokens, mode="drop")
        held = history.counts + counts
        return _History(text, held, *self.search(text, held))

    def search(self, tokens: Int[Array, "B H"], counts: Int[Array, " B"]) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
        """Return the index after the best agreement with the newest tokens, or -1, and how many tokens agree."""
        width, places = tokens.shape[1], jnp.arange(tokens.shape[1])
        agree, length = jnp.ones(tokens.shape, bool), jnp.zeros(tokens.shape, jnp.int32)
        for back in range(1, max(_LONGEST_MATCH, self.ngram) + 1):
            newest = jnp.take_along_axis(tokens, jnp.maximum(counts - back, 0)[:, None], axis=1)
            before = jnp.pad(tokens, ((0, 0), (back, 0)))[:, :width]
            agree = agree & (before == newest) & (places >= back)
            length = length + agree
        good = (length >= self.ngram) & (places < counts[:, None])
        score = jnp.where(good, length * width + places, -1)
        best = score.argmax(axis=1)
        agreeing = jnp.take_along_axis(length, best[:, None], axis=1)[:, 0]
        return jnp.where(score.max(axis=1) >= 0, best, -1).astype(jnp.int32), agreeing


@dataclasses.dataclass(frozen=True)
class SelfDraft(Drafter):
    """Propose tokens by steps of the model that attend to a part of its own cache. The model's policy must be `Full`.

    Attributes:
        tokens: the most tokens that are proposed at once.
        policy: how a draft step selects: by its `budget`, `unit`, `recent` and summaries. Its first `dense_layers`
            layers attend to all tokens.
    """

    policy: RetrievalPolicy = Quest(budget=512, unit=16, recent=64, dense_layers=0)  # noqa: RUF009, it is frozen

    name = "self"
    in_engines = True
    cost = 0.2
    source = "arXiv 2408.11049, arXiv 2404.11912"

    def check_target(self, config: ModelConfig, state: KVState) -> None:
        """Raise ConfigError unless the target has full attention on one device, and the policy reads no basis."""
        if state.policy != Full():
            raise ConfigError(f"policy must be full for speculate={self.name!r}, got {state.policy.name}")
        if state.shares_prompt:
            raise ConfigError(f"speculate={self.name!r} needs rows with prompts of their own")
        if not isinstance(self.policy, RetrievalPolicy) or self.policy.no_basis(state.specs[0]) is not None:
            raise ConfigError(
                f"self.policy must be a retrieval policy without a basis, such as Quest, got {self.policy}"
            )
        self.policy.resolve(config, state.capacity)

    def is_sparse(self, spec: CacheSpec, config: ModelConfig) -> bool:
        """Return whether a draft step selects units in a layer. Recurrent layers and those with a window do not."""
        assert spec.layer is not None
        return isinstance(spec.policy, Full) and not isinstance(self.policy.for_layer(spec.layer, config), Full)

    def begin(self, text: Text, state: KVState) -> Memory:
        """Return the summaries of all units of each layer, or None for a layer where a draft step selects none."""
        layers = tuple(self.is_sparse(spec, text.config) for spec in state.specs)
        return Memory(None, all_summaries(state, drafter=self, layers=layers))

    def row_bytes(self, config: ModelConfig, state: KVState) -> ByteCount:
        """Return the bytes of the summaries of a row."""
        layers = tuple(self.is_sparse(spec, config) for spec in state.specs)
        made = jax.eval_shape(functools.partial(all_summaries, drafter=self, layers=layers), state)
        return ByteCount(sum(map(leaf_bytes, jax.tree.leaves(made))) // state.batch)

    def ready(self, memory: Memory) -> Array:
        """Return `tokens` for every row."""
        return jnp.full(jax.tree.leaves(memory.live)[0].shape[0], self.tokens, jnp.int32)

    def propose(self, memory: Memory, target: Target, width: int) -> Proposal:
        """Run `width` steps. Each draws with the key of its token, so that a good guess is also a good draw."""
        config, held, summaries = target.config, target.state.lengths, memory.live

        def run_layer(
            spec: CacheSpec, state: LayerState, step: StepKV, everyone: Any
        ) -> tuple[Array, LayerState, LayerWork]:
            assert spec.layer is not None
            state, step = append_tokens(spec, state, step)
            if summaries[spec.layer] is None:
                out, state = spec.policy.attend(spec, state, step, None)
            else:
                out = self.attend(spec, state, step, summaries[spec.layer], held)
            return out, state, LayerWork()

        def body(carry: tuple[KVState, Array], place: Array) -> tuple[tuple[KVState, Array], Array]:
            state, token = carry
            active = (place < target.wanted).astype(jnp.int32)
            logits, state = step_state(target.weights, config, token[:, None], active, state, run_layer=run_layer)
            token = jnp.maximum(target.draw(logits, place), 0)  # NO_TOKEN would give logits that are not numbers
            return (state, token), token

        (drafted, _), tokens = lax.scan(body, (target.state, target.progress.token), jnp.arange(width))
        return Proposal(tokens.T, target.state.replace(layers=drafted.layers), summaries)

    def attend(self, spec: CacheSpec, state: LayerState, step: StepKV, summaries: Any, held: Array) -> Array:
        """Return the attention of a draft step's query [B, 1, h_q, d]. The arguments are those of `pieces`."""
        return attend(step.q_post, self.pieces(spec, state, step, summaries, held), spec.scale, step.sinks)

    def pieces(self, spec: CacheSpec, state: LayerState, step: StepKV, summaries: Any, held: Array) -> list[Piece]:
        """Return the newest tokens and the selected units as pieces for attention.

        Args:
            held: number of tokens before the drafts, int32 [B]. Units after them have no valid summary.
        """
        cache, unit = state.live.cache, self.policy.unit
        count = jax.tree.leaves(summaries)[0].shape[2]
        first = jnp.maximum(held + 1 - self.policy.recent, 0) // unit * unit
        index = first[:, None] + jnp.arange(self.policy.recent + unit + self.tokens)
        seen = index <= step.positions
        pieces = [Piece(*_taken(cache, index[:, None]), seen[:, None, None])]
        most = min(self.policy.budget // unit, count)
        if most:
            scores = self.policy.score(spec, summaries, group_queries(step.q_post, spec.kv_heads), None)[:, :, 0]
            old = (jnp.arange(count) + 1) * unit <= first[:, None]
            ids = top_k(jnp.where(old[:, None], scores, -jnp.inf), most)
            there = ids * unit < first[:, None, None]
            tokens = (ids[..., None] * unit + jnp.arange(unit)).reshape(*ids.shape[:2], -1)
            pieces.append(Piece(*_taken(cache, tokens), there[:, :, None]))
        return pieces

    def heard(self, memory: Memory, tokens: Array, counts: Array, state: KVState) -> tuple[Any, ...]:
        """Summarize the units of the newest tokens again."""
        unit = self.policy.unit
        touched = (tokens.shape[1] - 1) // unit + 2
        units = (state.lengths - counts)[:, None] // unit + jnp.arange(touched)
        index = (units[..., None] * unit + jnp.arange(unit)).reshape(len(counts), -1)
        there = (index < state.lengths[:, None]).reshape(*units.shape, unit)
        fresh = []
        for summaries, layer, spec in zip(memory.live, state.layers, state.specs, strict=True):
            if summaries is not None:
                rows = _taken(layer.live.cache, index[:, None])[0]
                keys = rows.reshape(*rows.shape[:2], touched, unit, spec.head_dim)
                new = self.policy.summarize(spec, keys, there, None)
                put = functools.partial(put_units, place=units, valid=there.any(axis=2))
                summaries = jax.tree.map(put, summaries, new)
            fresh.append(summaries)
        return tuple(fresh)


def _taken(cache: Any, index: Array) -> tuple[Array, Array]:
    """Gather keys and values [B, h_kv, m, d] of a `KeyValues` at the positions `index`, int32 [B, h_kv or 1, m].

    Positions past the end give the last token.
    """
    at = jnp.broadcast_to(index, (*cache.k.shape[:2], index.shape[2]))[..., None]
    k, v = (jnp.take_along_axis(x, at, axis=2, mode="clip") for x in (cache.k, cache.v))
    return k, v


@functools.partial(jax.jit, static_argnames=("drafter", "layers"))
def all_summaries(state: KVState, *, drafter: SelfDraft, layers: tuple[bool, ...]) -> tuple[Any, ...]:
    """Return the summaries of all units of each layer, or None where `layers` is False."""
    unit: int = drafter.policy.unit
    found: list[Any] = []
    for spec, layer, is_sparse in zip(state.specs, state.layers, layers, strict=True):
        if not is_sparse:
            found.append(None)
            continue
        count = spec.capacity // unit
        keys = layer.live.cache.k[:, :, : count * unit].reshape(spec.batch, spec.kv_heads, count, unit, spec.head_dim)
        there = (jnp.arange(count * unit) < state.lengths[:, None]).reshape(-1, count, unit)
        found.append(drafter.policy.summarize(spec, keys, there, None))
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class _ModelSteps(Drafter):
    """The steps of a draft model, without its weights: what programs are traced with.

    Attributes:
        config: the draft model.
    """

    config: ModelConfig | None = None

    name = "draft_model"
    source = "arXiv 2211.17192"
    cost = 0.3
    in_engines = True

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
            token = jnp.maximum(target.draw(logits, place), 0)  # NO_TOKEN would give logits that are not numbers
            return (state, token), token

        start = KVState.of(reads, memory.live), target.progress.token
        (drafted, _), tokens = lax.scan(body, start, jnp.arange(width + 1))
        return Proposal(tokens.T[:, :width], target.state, drafted.split()[1])

    def heard(self, memory: Memory, tokens: Array, counts: Array, state: KVState) -> Any:
        """Give back the tokens that were not accepted. The draft model then has read what the target has read."""
        own = KVState.of(memory.fixed[1], memory.live)
        return own.rewound(jnp.minimum(own.lengths, state.lengths), state.last).split()[1]

    def repeated(self, memory: Memory, rows: int) -> Memory:
        """Return the memory of `rows` rows, each as the only row of `memory`."""
        return _with_state(memory, KVState.of(memory.fixed[1], memory.live).take([0] * rows))

    def inserted(self, memory: Memory, row: int, one: Memory) -> Memory:
        """Return a memory in which row `row` is the only row of `one`. This consumes `memory`."""
        own, other = (KVState.of(part.fixed[1], part.live) for part in (memory, one))
        return _with_state(memory, own.insert(row, other, consume=True))


def _with_state(memory: Memory, own: KVState) -> Memory:
    """Return a memory of `_ModelSteps` with another state of the draft model."""
    reads, writes = commit(own).split()
    return Memory((memory.fixed[0], reads), writes)


@dataclasses.dataclass(frozen=True)
class DraftModel(_ModelSteps):
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
        return _ModelSteps(self.params.config, tokens=self.tokens)

    @property
    def reader(self) -> tuple[Params, Policy]:
        """The draft model, and its policy."""
        return self.params, self.policy

    def check_target(self, config: ModelConfig, state: KVState) -> None:
        """Raise ConfigError unless the draft model has the context, and its policy can give tokens back."""
        if self.params.config.context < state.capacity:
            raise ConfigError(
                f"draft_model.params must have a context of at least capacity={state.capacity} tokens, got "
                f"{self.params.config.context}"
            )
        policy, first = self.policy.resolve(self.params.config, state.capacity), state.specs[0]
        sizes = (state.batch, state.capacity, 1, str(self.params.dtype), first.fetch)
        check_gives_back(self, cache_specs(self.params.config, policy, *sizes), policy, state)

    def check_model(self, params: Params) -> None:
        """Raise ConfigError unless the two models have the same number of tokens, and the same tokenizer if both do."""
        if params.config.vocab_size != self.params.config.vocab_size:
            raise ConfigError(
                f"draft_model.params must have the tokenizer of the model, with vocab_size={params.config.vocab_size}, "
                f"got vocab_size={self.params.config.vocab_size}"
            )
        own, its = self.params.tokenizer, params.tokenizer
        if own is not None and its is not None and own.get_vocab() != its.get_vocab():
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
        return self.begun(own)

    def row_bytes(self, config: ModelConfig, state: KVState) -> ByteCount:
        """Return the bytes of the draft model's state of a row."""
        own = self.params
        policy = self.policy.resolve(own.config, state.capacity)
        specs = cache_specs(own.config, policy, 1, state.capacity, 1, str(own.dtype), "resident")
        return total(state_nbytes(abstract_of(specs, policy)).values())

    def begun(self, own: KVState) -> Memory:
        """Return the memory after the draft model has read the texts. `own` is its state."""
        reads, writes = own.split()
        return Memory((self.params.weights, reads), writes)


@dataclasses.dataclass(frozen=True)
class CompressedDraft(_ModelSteps):
    """Propose tokens by steps of the model over a compressed cache. The model's policy must be `Offloaded` or `Full`.

    Attributes:
        tokens: the most tokens that are proposed at once.
        policy: the policy of the compressed cache. It must be able to give all new tokens back, and must not read the
            queries of the prompt.
    """

    config: ModelConfig | None = dataclasses.field(default=None, init=False, repr=False)
    policy: Policy = ShadowKV()  # noqa: RUF009, it is frozen

    name = "compressed"
    source = "arXiv 2605.17613"
    cost = 0.1
    in_engines = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_policy(self.policy)

    def check_target(self, config: ModelConfig, state: KVState) -> None:
        """Raise ConfigError unless the compressed cache can be made from the target's, and can give tokens back."""
        specs, policy = self.specs(config, state, 1), self.chosen(config, state)
        if state.shares_prompt:
            raise ConfigError(f"speculate={self.name!r} needs rows with prompts of their own")
        for own, spec in zip(specs, state.specs, strict=True):
            if not isinstance(spec.policy, HasAll) and own.policy != spec.policy:
                raise ConfigError(
                    f"policy must keep all keys and values for speculate={self.name!r}, as full and offloaded do, got "
                    f"{state.policy.name}"
                )
            reads = own.policy.reads
            queries = reads.all_queries or reads.last_queries or reads.second_pass
            if queries or attention_of(own.policy) or reads_fitted(own.policy):
                raise ConfigError(
                    f"{self.name}.policy must be made from keys and values alone, got {policy}, which reads the "
                    "queries of the prompt, has its own attention among them, or was fitted to a text"
                )
        check_sinks(config, (spec.policy for spec in specs), None)
        if capability(policy, Speculates) is not None:
            raise ConfigError(f"{self.name}.policy must compute one query for each token, got {policy}")
        check_gives_back(self, specs, policy, state)

    def chosen(self, config: ModelConfig, state: KVState) -> Policy:
        """Return the policy for the capacity of the target: full attention if the policy has no effect there."""
        return or_full(self.policy.resolve(config, state.capacity), config, state.capacity)[0]

    def specs(self, config: ModelConfig, state: KVState, shortest: int) -> tuple[CacheSpec, ...]:
        """Return the specs of the compressed cache, for rows of at least `shortest` tokens."""
        first = state.specs[0]
        return cache_specs(
            config, self.chosen(config, state), state.batch, state.capacity, shortest, first.dtype, first.fetch
        )

    def begin(self, text: Text, state: KVState) -> Memory:
        """Compress the keys and values of the target, layer by layer."""
        shortest, room = max(int(state.lengths.min()), 1), int(np.asarray(state.room()).max())
        specs = self.specs(text.config, state, shortest)
        if room < state.capacity - shortest:  # the window of the target ends before its capacity
            specs = with_room(specs, room)
        host_memory.check_host_memory([specs])
        own = KVState(
            layers=tuple(_compressed_layers(specs, state)),
            shared=None,
            lengths=jnp.array(state.lengths),
            last=jnp.array(state.last),
            counters=Counters.zeros(state.batch),
            fitted=None,
            specs=specs,
            policy=self.chosen(text.config, state),
        )
        reads, writes = own.split()
        return Memory((None, reads), writes)

    def propose(self, memory: Memory, target: Target, width: int) -> Proposal:
        """Run the steps with the weights of the target."""
        own = memory._replace(fixed=(target.weights, memory.fixed[1]))
        return _ModelSteps(target.config, tokens=self.tokens).propose(own, target, width)


def _compressed_layers(specs: tuple[CacheSpec, ...], state: KVState) -> Iterator[LayerState]:
    """Yield the layers of the compressed cache. A layer whose cache is that of the target is copied."""
    for own, spec, layer in zip(specs, state.specs, state.layers, strict=True):
        if own.policy == spec.policy and not isinstance(spec.policy, HasAll):
            yield layer.replace(live=jax.tree.map(jnp.copy, layer.live))
            continue
        write: HostWrite | None
        prompt = as_prompt(layer, state.lengths, spec=dataclasses.replace(spec, layer=None))
        made, write = compress_layer(prompt, None, spec=dataclasses.replace(own, layer=None))
        with host_memory.placing([specs]):
            yield made.replace(host=offload.place(own.policy.host_layout(own), own, write))


@functools.partial(jax.jit, static_argnames=("spec",))
def as_prompt(layer: LayerState, lengths: Array, *, spec: CacheSpec) -> PromptKV:
    """Return the tokens of a layer that has all of them as a prompt. Keys before RoPE are rotated back."""
    rows = spec.policy.all_tokens(spec, layer)
    there = (jnp.arange(spec.capacity) < lengths[:, None])[:, :, None, None]
    k, v = (jnp.where(there, x.swapaxes(1, 2), 0) for x in (rows.k, rows.v))
    positions = jnp.broadcast_to(jnp.arange(spec.capacity, dtype=jnp.int32), k.shape[:2])
    turn = rotation(spec.rope, jnp.asarray(inverse_frequencies(spec.rope, spec.head_dim, spec.capacity)), positions[:1])
    return PromptKV(k_pre=rotate(k, turn.cos, -turn.sin), k_post=k, v=v, lengths=lengths, positions=positions)


_DRAFTERS: dict[str, type[Drafter]] = {drafter.name: drafter for drafter in (PromptLookup, SelfDraft, CompressedDraft)}


def parse_drafter(text: str, dtype: str = "float32") -> Drafter:
    """Parse NAME or NAME:key=value:..., the value of `--speculate`.

    A directory with a checkpoint is a draft model. "self" and "compressed" may be followed by the name of a policy. All
    their settings but `tokens` are those of the policy.
    """
    if Path(text).is_dir():
        return DraftModel(load(text, dtype))
    name, *settings = text.split(":")
    for drafter in (SelfDraft, CompressedDraft):
        if name == drafter.name:
            return _parse_with_policy(drafter, settings)
    if name not in _DRAFTERS:
        raise ConfigError(f"speculate must be one of {sorted(_DRAFTERS)} or the directory of a model, got {text!r}")
    fields, values = {field.name for field in dataclasses.fields(_DRAFTERS[name])}, {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in fields or not value.isdecimal():
            raise ConfigError(f"speculate must be {name}:KEY=NUMBER with a key of {sorted(fields)}, got {setting!r}")
        values[key] = int(value)
    return _DRAFTERS[name](**values)


def _parse_with_policy(drafter: type[SelfDraft] | type[CompressedDraft], settings: Sequence[str]) -> Drafter:
    """Parse the settings of a drafter that has a policy: the name of the policy, and key=value settings."""
    usual, named = drafter().policy, bool(settings) and "=" not in settings[0]
    own = [setting for setting in settings[named:] if setting.partition("=")[0] == "tokens"]
    others = [setting for setting in settings[named:] if setting not in own]
    policy: Policy
    if named:
        policy = parse_policy(settings[0], others)
    else:
        values = parse_settings(usual.name, others)
        policy = with_settings(usual, values.pop("", {}))
        for wrapper, options in values.items():
            policy = WRAPPERS[wrapper](**{"inner": policy, **options})
    if drafter is SelfDraft and not isinstance(policy, RetrievalPolicy):
        raise ConfigError(f"speculate must be self:POLICY with a policy such as quest, got {policy.name}")
    tokens = own[-1].partition("=")[2] if own else str(drafter.tokens)
    if not tokens.isdecimal():
        raise ConfigError(f"speculate must be {drafter.name}:tokens=NUMBER, got {own[-1]!r}")
    return drafter(policy=policy, tokens=int(tokens))  # type: ignore[arg-type]
