"""Many requests under one policy: log-likelihoods of given continuations, and generations, batched by length.

A request's context is prefilled and compressed; its continuation then attends through the policy, token by token, as a
generation would. So a log-likelihood measures the policy, and with full attention it is that of the plain model.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshadow.cache import offload
from jshadow.cache.state import KVState, Reads, Writes
from jshadow.engine import decode
from jshadow.engine.checks import check_capacity, check_room
from jshadow.engine.prefill_job import prepared_attention
from jshadow.engine.sampling import Sampler, sample
from jshadow.engine.step import turn_piece
from jshadow.engine.text import TextStream, split_stops
from jshadow.errors import CapacityError, ConfigError, PromptError
from jshadow.models.config import ModelConfig, check_positive
from jshadow.ops.layout import fit_tokens
from jshadow.policies import Policy
from jshadow.policies.base import check_fitted
from jshadow.policies.prefill_attention import PrefillAttention

NARROWEST = 64  # tokens
Score = tuple[float, bool]


def width_of(tokens: int, limit: int, least: int = NARROWEST) -> int:
    """The width to which so many tokens are padded: 64, 96, 128, 192, 256, 384 and so on, at most limit.

    Two widths an octave: a model of 8,192 tokens has 15, and padding adds a third at most half of the time.
    """
    width = least
    while width < tokens:
        width = width * 3 // 2 if width & (width - 1) == 0 else width // 3 * 4
    return min(width, limit)


def below(width: int) -> int:
    """The largest width that is smaller; 0 below the narrowest. All rows of a batch are longer than that."""
    smaller, narrow = 0, NARROWEST
    while narrow < width:
        smaller, narrow = narrow, width_of(narrow + 1, narrow * 2)
    return smaller


# Compiled parts


def chosen(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Log-probabilities of targets [B, T] under logits [B, T, V], and whether each is the most likely token."""
    scores = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), targets[..., None], axis=-1)[..., 0]
    return scores, logits.argmax(-1) == targets


_chosen = jax.jit(chosen)


@functools.partial(
    jax.jit, static_argnames=("config",), donate_argnames=("writes",), compiler_options=decode.COMPILER_OPTIONS
)
def _forced(
    weights: dict, tokens: Array, lengths: Array, targets: Array, reads: Reads, writes: Writes, *, config: ModelConfig
) -> tuple[Array, Array, Writes]:
    """Feed tokens [B, T] and score what should follow each: log-probabilities [B, T], whether it was greedy, the state.

    As many pieces run as the longest row needs, whatever T: one program serves short and long continuations.
    """
    size = turn_piece(reads, tokens.shape[1])
    tokens, targets = (fit_tokens(x, -(-x.shape[1] // size) * size) for x in (tokens, targets))

    def body(index: Array, carry: tuple[Writes, Array, Array]) -> tuple[Writes, Array, Array]:
        writes, scores, greedy = carry
        piece, wanted = (lax.dynamic_slice_in_dim(x, index * size, size, axis=1) for x in (tokens, targets))
        (score, top), state = decode.extend_steps(
            weights, config, piece, jnp.clip(lengths - index * size, 0, size), KVState.of(reads, writes),
            lambda logits: chosen(logits, wanted),
        )  # fmt: skip
        scores = lax.dynamic_update_slice_in_dim(scores, score, index * size, axis=1)
        return state.split()[1], scores, lax.dynamic_update_slice_in_dim(greedy, top, index * size, axis=1)

    start = writes, jnp.zeros(tokens.shape, jnp.float32), jnp.zeros(tokens.shape, bool)
    writes, scores, greedy = lax.fori_loop(0, -(-jnp.max(lengths) // size), body, start)
    return scores, greedy, writes


@functools.partial(jax.jit, static_argnames=("sampler",))
def _draw(logits: Array, keys: Array, index: Array, *, sampler: Sampler) -> Array:
    """The next token of each row, int32 [B]: with a key of its own, so that no row depends on its batch."""

    def one(row: Array, key: Array) -> Array:
        return sample(sampler, row[None], jax.random.fold_in(key, index))[0]

    return jax.vmap(one)(logits, keys)


# Requests


@dataclasses.dataclass(frozen=True)
class Scorer:
    """A model under a policy.

    Attributes:
        params: Params; a tokenizer is needed by `generate` alone.
        policy: what compresses the contexts.
        fetch: "auto", "resident", "device_put" or "zero_copy".
        capacity: tokens that a row may ever hold, for all requests. None: for each width of contexts the next width
            that holds them and the longest continuation, up to the model's context; a setting that follows the
            capacity (a budget of None) then follows that.
        batch: contexts that are prefilled together; only such of one width are.
        prefill: how a context's tokens attend to each other; None: exactly.
        fitted: arrays that the policy learned.

    Raises:
        ConfigError, CapacityError: a setting is out of range, or not one for this model.
    """

    params: Any
    policy: Policy
    fetch: str = "auto"
    capacity: int | None = None
    batch: int = 1
    prefill: PrefillAttention | None = None
    fitted: Any = None

    def __post_init__(self) -> None:
        config = self.params.config
        check_positive("scorer", batch=self.batch)
        if self.capacity is not None:
            check_capacity(config, self.capacity, 1)
        offload.resolve_fetch(self.fetch)
        if not isinstance(self.policy, Policy):
            raise ConfigError(f"policy must be a Policy such as ShadowKV(), got {self.policy!r}")
        resolved = self.policy.resolve(config, self.limit)
        check_fitted(resolved, config, self.fitted)
        prepared_attention([resolved], self.prefill, config)

    @property
    def limit(self) -> int:
        """Tokens that a request may hold."""
        return int(self.capacity or self.params.config.context)

    def check(self, lengths: Sequence[int], new: Sequence[int]) -> None:
        """Raise PromptError or CapacityError, before anything runs, where a context or its new tokens do not fit."""
        for index, (context, more) in enumerate(zip(lengths, new, strict=True)):
            if context < 1:
                raise PromptError(f"context of request {index} must have at least 1 token, got none")
            if context + more > self.limit:
                raise CapacityError(
                    f"request {index} must have at most {self.limit} tokens (capacity, or the model's context), "
                    f"got a context of {context} and {more} more"
                )

    def prefilled(
        self, contexts: Sequence[Sequence[int]], grow: int
    ) -> Iterator[tuple[list[int], Array, KVState, int]]:
        """Batches of contexts of one width, the longest first, so that what does not fit in memory fails at once.

        Args:
            contexts: token ids of each.
            grow: tokens by which any of them may yet grow.

        Yields:
            Indices of the contexts; logits [B, V] of their last tokens and the state, where B is a power of two (or
            `batch`) that holds them: the rows behind them repeat the first one; and B.
        """
        widths = [width_of(len(one), self.limit) for one in contexts]
        for width in sorted(set(widths), reverse=True):
            rows = [index for index, its in enumerate(widths) if its == width]
            capacity = self.capacity or width_of(width + grow, self.limit)
            for start in range(0, len(rows), self.batch):
                some = rows[start : start + self.batch]
                count = min(self.batch, 1 << (len(some) - 1).bit_length())
                padded = [contexts[index] for index in some + some[:1] * (count - len(some))]
                tokens, lengths = right_padded(padded, width)
                logits, state = decode.prefill_many(
                    self.params, tokens, lengths, [self.policy], capacity=capacity, fetch=self.fetch,
                    fitted=self.fitted, shortest=below(width), attention=self.prefill,
                )[0]  # fmt: skip
                yield some, logits, state, count

    def score(
        self, contexts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
    ) -> Iterator[tuple[int, int, Score]]:
        """Log-likelihoods of continuations; each context is prefilled once for all of its own.

        Args:
            contexts: token ids, at least one each.
            continuations: for each context some sequences of token ids, at least one id each.

        Yields:
            (context, continuation, (sum of natural-log probabilities, whether every token was the most likely one)).

        Raises:
            PromptError: an empty context or continuation, or an id out of range.
            CapacityError: a context and a continuation but its last token, which is only scored, are too long.
        """
        if any(not one for some in continuations for one in some):
            raise PromptError("a continuation must have at least 1 token, got none")
        fed = [max((len(one) - 1 for one in some), default=0) for some in continuations]
        self.check([len(one) for one in contexts], fed)
        longest = max(fed, default=0)
        for indices, logits, state, rows in self.prefilled(contexts, longest):
            rounds = max(len(continuations[index]) for index in indices)
            for turn in range(rounds):
                asked = [index for index in indices if turn < len(continuations[index])]
                now = [list(continuations[i][turn]) if i in asked else [0] for i in indices]
                now += [[0]] * (rows - len(now))
                first = np.array([[one[0]] for one in now], np.int32)
                scores, greedy = (np.asarray(x) for x in _chosen(logits[:, None], first))
                if any(len(one) > 1 for one in now):
                    more = self.follow(now, state if turn == rounds - 1 else state.fork(), longest)
                    scores, greedy = (np.concatenate(pair, axis=1) for pair in zip((scores, greedy), more, strict=True))
                for row, index in enumerate(indices):
                    if index in asked:
                        count = len(now[row])
                        total = float(scores[row, :count].sum(dtype=np.float64))
                        yield index, turn, (total, bool(greedy[row, :count].all()))

    def follow(self, rows: Sequence[Sequence[int]], state: KVState, longest: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores of each row's tokens behind its first, [B, T] and bool [B, T]. Consumes the state."""
        width = width_of(longest, self.limit, least=16)
        tokens, lengths = right_padded([one[:-1] for one in rows], width)
        targets, _ = right_padded([one[1:] for one in rows], width)
        check_room(state, lengths.astype(np.int64))
        reads, writes = state.split()
        scores, greedy, _ = _forced(
            self.params.weights, jnp.asarray(tokens), jnp.asarray(lengths), jnp.asarray(targets), reads, writes,
            config=self.params.config,
        )  # fmt: skip
        return np.asarray(scores), np.asarray(greedy)

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampler: Sampler, *, stop: Any = None,
        seed: int = 0, names: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, str]]:  # fmt: skip
        """Generate after each prompt. There is no fall-back to a dense cache.

        Args:
            prompts: token ids, at least one each.
            max_new_tokens: at least 1.
            sampler: how tokens are drawn.
            stop: strings and token ids that end a generation and are cut off, as the model's own end tokens do.
            seed: of the sampler.
            names: a number of each prompt by which it draws, whatever is batched with it; None: its index.

        Yields:
            (index of the prompt, text).

        Raises:
            PromptError, CapacityError: an empty prompt, or one with too little room for max_new_tokens.
            ConfigError: max_new_tokens below 1, or a stop that is none.
        """
        check_positive("generate", max_new_tokens=max_new_tokens)
        texts, ids = split_stops(stop, self.params.tokenizer)
        ends = frozenset(self.params.config.eos_ids) | set(ids)
        self.check([len(one) for one in prompts], [max_new_tokens] * len(prompts))
        names = range(len(prompts)) if names is None else names
        for indices, logits, state, rows in self.prefilled(prompts, max_new_tokens):
            numbers = jnp.array([names[index] for index in indices] + [0] * (rows - len(indices)))
            keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(numbers)
            streams = [TextStream(self.params.tokenizer, texts) for _ in indices]
            active = np.arange(rows) < len(indices)
            for step in range(max_new_tokens):
                token = np.asarray(_draw(logits, keys, jnp.int32(step), sampler=sampler))
                for row in np.flatnonzero(active):
                    if token[row] in ends:
                        active[row] = False
                    else:
                        streams[row].push(int(token[row]))
                        active[row] = not streams[row].stopped
                if not active.any() or step == max_new_tokens - 1:
                    break
                logits, state = decode.decode_step(self.params, token, state, active=active)
            for index, stream in zip(indices, streams, strict=True):
                stream.finish()
                yield index, stream.text


def right_padded(rows: Sequence[Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32 [B, width], zeros behind each row's own, and the rows' lengths int32 [B]."""
    tokens = np.zeros((len(rows), width), np.int32)
    for row, one in enumerate(rows):
        tokens[row, : len(one)] = one
    return tokens, np.array([len(one) for one in rows], np.int32)
