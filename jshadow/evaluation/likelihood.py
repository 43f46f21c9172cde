"""Batched log-likelihoods of given continuations, and batched generations, under one policy.

The context of a request is prefilled and compressed. Then the tokens of its continuation attend through the policy one
by one, as in a generation. So the log-likelihood measures the policy. With full attention it is that of the model
itself.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshadow.cache import offload
from jshadow.cache.state import KVState, Reads, Writes
from jshadow.engine import decode
from jshadow.engine.checks import check_capacity, check_room
from jshadow.engine.prefill.job import prepared_attention
from jshadow.engine.sampling import Sampler, sample, seed_key
from jshadow.engine.text import TextStream, split_stops
from jshadow.errors import CapacityError, ConfigError, PromptError
from jshadow.models.config import ModelConfig, check_positive
from jshadow.ops.buckets import round_up, step_of
from jshadow.ops.layout import fit_tokens
from jshadow.planner.pieces import turn_piece
from jshadow.policies import Policy
from jshadow.policies.checks import check_fitted
from jshadow.policies.prefill_attention import PrefillAttention

Draw = Callable[[Array, int], np.ndarray]
Take = Callable[[int, int], bool]


def generate_rows(
    params: Any, logits: Array, state: KVState, most: int, draw: Draw, take: Take, rows: int | None = None
) -> KVState:
    """Draw tokens and feed them until every row has ended. This consumes the state and returns the last one.

    The last token of a row is never fed, whether it ends the row or is the last of `most` tokens.

    Args:
        params: the Params that the state was prefilled with.
        logits: float32 [B, V], the logits of each row's last token.
        state: the state after these tokens.
        most: maximum number of tokens of each row, at least 1.
        draw: called as draw(logits [B, V], number of tokens drawn before). It returns the next tokens, int32 [B].
        take: called with each new token as take(row, token). It returns whether the row continues.
        rows: only the first `rows` rows generate; the others are padding. None means all rows.
    """
    active = np.arange(state.batch) < (state.batch if rows is None else rows)
    for index in range(most):
        tokens = draw(logits, index)
        for row in np.flatnonzero(active):
            active[row] = take(int(row), int(tokens[row]))
        if not active.any() or index == most - 1:
            break
        logits, state = decode.decode_step(params, tokens, state, active=active)
    return state


def padded_rows(rows: Sequence[Sequence[int]], width: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids int32 [B, S] with zeros after each row, and the lengths int32 [B]. S is at least `width`."""
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), max(width, *lengths)), np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    return tokens, lengths


def greedy(logits: Array, index: int) -> np.ndarray:
    """Return the most likely token of each row of logits [B, V], int32 [B]. The lower id wins a tie.

    `index` is ignored. It is there because `generate_rows` passes it.
    """
    return np.asarray(logits).argmax(-1).astype(np.int32)


def _chosen(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Score targets [B, T] by logits [B, T, V]."""
    scores = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), targets[..., None], axis=-1)[..., 0]
    return scores, logits.argmax(-1) == targets


target_scores = jax.jit(_chosen)


@functools.partial(
    jax.jit, static_argnames=("config",), donate_argnames=("writes",), compiler_options=decode.COMPILER_OPTIONS
)
def forced_scores(
    weights: dict, tokens: Array, lengths: Array, targets: Array, reads: Reads, writes: Writes, *, config: ModelConfig
) -> tuple[Array, Array, Writes]:
    """Feed tokens int32 [B, T], padded on the right to `lengths` [B], and score the target that follows each.

    The loop runs only as many pieces as the longest row needs. So one program is efficient for short and long
    continuations. `reads` and `writes` are the halves of the state; `writes` is donated.

    Returns:
        Log-probabilities float32 [B, T], whether each target is the most likely token, bool [B, T], and the new
        `writes`.
    """
    size = turn_piece(reads, tokens.shape[1])
    tokens, targets = (fit_tokens(x, round_up(x.shape[1], size)) for x in (tokens, targets))

    def body(index: Array, carry: tuple[Writes, Array, Array]) -> tuple[Writes, Array, Array]:
        writes, scores, greedy = carry
        piece, following = (lax.dynamic_slice_in_dim(x, index * size, size, axis=1) for x in (tokens, targets))
        (score, top), state = decode.extend_steps(
            weights,
            config,
            piece,
            jnp.clip(lengths - index * size, 0, size),
            KVState.of(reads, writes),
            lambda logits: _chosen(logits, following),
        )
        scores = lax.dynamic_update_slice_in_dim(scores, score, index * size, axis=1)
        return state.split()[1], scores, lax.dynamic_update_slice_in_dim(greedy, top, index * size, axis=1)

    start = writes, jnp.zeros(tokens.shape, jnp.float32), jnp.zeros(tokens.shape, bool)
    writes, scores, greedy = lax.fori_loop(0, -(-jnp.max(lengths) // size), body, start)
    return scores, greedy, writes


@functools.partial(jax.jit, static_argnames=("sampler",))
def draw_tokens(logits: Array, keys: Array, index: Array, *, sampler: Sampler) -> Array:
    """Draw the next token of each row with the row's key, so that no row depends on another: int32 [B]."""

    def one(row: Array, key: Array) -> Array:
        return sample(sampler, row[None], jax.random.fold_in(key, index))[0]

    return jax.vmap(one)(logits, keys)


@jax.jit
def row_keys(key: Array, names: Array) -> Array:
    """Return the random key of each row, by the number that names it: int32 [B]."""
    return jax.vmap(functools.partial(jax.random.fold_in, key))(names)


_NARROWEST = 64  # the smallest width, in tokens
_WIDTHS = 4  # a width is a multiple of 1 / WIDTHS of the next power of two
Score = tuple[float, bool]


def width_of(tokens: int, limit: int, least: int = _NARROWEST) -> int:
    """Return the width that `tokens` tokens are padded to: 64, 96, 128, 192, 256, 384 and so on, at most `limit`.

    There are two widths between two powers of two, so a model with a context of 8,192 tokens has 15 widths. A single
    generation uses finer steps (`engine.generation.bucket`). Here there are many requests of different lengths, and
    each width needs one compiled program.
    """
    return min(max(least, round_up(tokens, step_of(tokens, _WIDTHS))), limit)


def below(width: int) -> int:
    """Return the next smaller width, or 0 for the narrowest. All rows of a batch have more tokens than that."""
    step = step_of(width, _WIDTHS)
    return 0 if width <= _NARROWEST else (width - 1) // step * step


@dataclasses.dataclass(frozen=True)
class Scorer:
    """Scores and generates with a model under a policy. Only `generate` needs a tokenizer.

    Attributes:
        params, policy, fetch, prefill, fitted: as for a generation. The prefill None is exact attention.
        capacity: maximum number of tokens of a row, for all requests. With None, the capacity follows from the width of
            the contexts: it is the next width that also holds the longest continuation, at most the model's context.
            Settings that depend on the capacity (a budget of None) then depend on that width.
        batch: maximum number of contexts that are prefilled together. All have the same width.

    Raises:
        ConfigError: a setting is out of range or does not suit the model.
        CapacityError: the capacity exceeds the model's context.
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
        offload.check_fetch(self.fetch)
        if not isinstance(self.policy, Policy):
            raise ConfigError(f"policy must be a Policy such as ShadowKV(), got {self.policy!r}")
        resolved = self.policy.resolve(config, self.limit)
        check_fitted(resolved, config, self.fitted)
        prepared_attention([resolved], self.prefill, config)

    @property
    def limit(self) -> int:
        """Maximum number of tokens of a request."""
        return int(self.capacity or self.params.config.context)

    def check(self, lengths: Sequence[int], new: Sequence[int]) -> None:
        """Check the lengths of all contexts and the number of their new tokens, before anything runs.

        Raises PromptError for an empty context, and CapacityError for a context that exceeds the limit with its new
        tokens.
        """
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
        """Prefill the contexts in batches of one width, with room for `grow` more tokens.

        The widest come first, so that a lack of memory shows at once. B is a power of two, or `batch`. Rows that are
        left over repeat the first row of the batch. Yields the indices of the contexts, the logits [B, V] of their last
        tokens, the state, and B.
        """
        widths = [width_of(len(one), self.limit) for one in contexts]
        for width in sorted(set(widths), reverse=True):
            rows = [index for index, own_width in enumerate(widths) if own_width == width]
            capacity = self.capacity or width_of(width + grow, self.limit)
            for start in range(0, len(rows), self.batch):
                some = rows[start : start + self.batch]
                count = min(self.batch, 1 << (len(some) - 1).bit_length())
                padded = [contexts[index] for index in some + some[:1] * (count - len(some))]
                tokens, lengths = padded_rows(padded, width)
                logits, state = decode.prefill_many(
                    self.params,
                    tokens,
                    lengths,
                    [self.policy],
                    capacity=capacity,
                    fetch=self.fetch,
                    fitted=self.fitted,
                    shortest=below(width),
                    attention=self.prefill,
                )[0]
                yield some, logits, state, count

    def score(
        self, contexts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
    ) -> Iterator[tuple[int, int, Score]]:
        """Compute log-likelihoods of continuations. Each context is prefilled once for all its continuations.

        Args:
            contexts: token ids, at least one in each context.
            continuations: for each context, a list of sequences of token ids, with at least one id in each.

        Yields:
            (index of the context, index of the continuation, score). The score is a pair: the sum of the natural
            logarithms of the probabilities, and whether every token was the most likely one.

        Raises:
            PromptError: a context or continuation is empty, or an id is out of range.
            CapacityError: a context and its continuation are too long. The last token of a continuation does not count,
                because it is only scored.
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
                scores, greedy = (np.asarray(x) for x in target_scores(logits[:, None], first))
                if any(len(one) > 1 for one in now):
                    more = self.follow(now, state if turn == rounds - 1 else state.fork(), longest)
                    scores, greedy = (np.concatenate(pair, axis=1) for pair in zip((scores, greedy), more, strict=True))
                for row, index in enumerate(indices):
                    if index in asked:
                        count = len(now[row])
                        total = float(scores[row, :count].sum(dtype=np.float64))
                        yield index, turn, (total, bool(greedy[row, :count].all()))

    def follow(self, rows: Sequence[Sequence[int]], state: KVState, longest: int) -> tuple[np.ndarray, np.ndarray]:
        """Score the tokens of each row after its first one. This consumes the state after the contexts.

        At most `longest` tokens are fed, which decides the width of the program. Returns log-probabilities [B, T], and
        whether each token was the most likely one, bool [B, T].
        """
        width = width_of(longest, self.limit, least=16)
        tokens, lengths = padded_rows([one[:-1] for one in rows], width)
        targets, _ = padded_rows([one[1:] for one in rows], width)
        check_room(state, lengths.astype(np.int64))
        reads, writes = state.split()
        scores, greedy, _ = forced_scores(
            self.params.weights,
            tokens,
            lengths,
            targets,
            reads,
            writes,
            config=self.params.config,
        )
        return np.asarray(scores), np.asarray(greedy)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampler: Sampler,
        *,
        stop: Any = None,
        seed: int = 0,
        names: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, str]]:
        """Generate a text after each prompt. Short prompts do not fall back to a dense cache.

        Yields (index of the prompt, text). `stop` has strings and token ids that end a generation, in addition to the
        model's end tokens; they are not part of the text. `names` has a number for each prompt that selects its random
        numbers, so that they do not depend on the batch. None means the index of the prompt.

        Raises:
            PromptError: a prompt is empty.
            CapacityError: a prompt leaves too little room for max_new_tokens.
            ConfigError: max_new_tokens is below 1, or stop is neither strings nor ids.
        """
        check_positive("generate", max_new_tokens=max_new_tokens)
        texts, ids = split_stops(stop, self.params.tokenizer)
        ends = frozenset(self.params.config.eos_ids) | set(ids)
        self.check([len(one) for one in prompts], [max_new_tokens] * len(prompts))
        names = range(len(prompts)) if names is None else names
        for indices, logits, state, rows in self.prefilled(prompts, max_new_tokens):
            numbers = np.array([names[index] for index in indices] + [0] * (rows - len(indices)), np.int32)
            keys = row_keys(seed_key(seed), numbers)
            streams = [TextStream(self.params.tokenizer, texts) for _ in indices]
            draw, take = functools.partial(_drawn, sampler, keys), functools.partial(_taken, streams, ends)
            generate_rows(self.params, logits, state, max_new_tokens, draw, take, len(indices))
            for index, stream in zip(indices, streams, strict=True):
                stream.finish()
                yield index, stream.text


def _drawn(sampler: Sampler, keys: Array, logits: Array, index: int) -> np.ndarray:
    """Draw the next token of each row with its random key, int32 [B]. `index` is the number of tokens drawn before."""
    return np.asarray(draw_tokens(logits, keys, np.int32(index), sampler=sampler))


def _taken(streams: Sequence[TextStream], ends: frozenset[int], row: int, token: int) -> bool:
    """Add a token to the text of its row, unless it is an end token. Returns whether the row continues."""
    if token in ends:
        return False
    streams[row].push(token)
    return not streams[row].stopped
