"""Many requests under one policy: log-likelihoods of given continuations, and generations, in batches of one width.

The context of a request is prefilled and compressed. Its continuation then attends through the policy, token by token,
as in a generation. So a log-likelihood measures the policy; with full attention it is that of the plain model.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow.cache import offload
from jshadow.cache.state import KVState
from jshadow.engine import decode
from jshadow.engine.checks import check_capacity, check_room
from jshadow.engine.prefill_job import prepared_attention
from jshadow.engine.sampling import Sampler, seed_key
from jshadow.engine.text import TextStream, split_stops
from jshadow.errors import CapacityError, ConfigError, PromptError
from jshadow.evaluation.likelihood_steps import draw_tokens, forced_scores, target_scores
from jshadow.evaluation.replies import generate_rows
from jshadow.models.config import check_positive
from jshadow.ops.buckets import round_up, step_of
from jshadow.policies import Policy
from jshadow.policies.checks import check_fitted
from jshadow.policies.prefill_attention import PrefillAttention

NARROWEST = 64  # tokens
WIDTHS = 4  # a width is a multiple of so many parts of the next power of two
Score = tuple[float, bool]


def width_of(tokens: int, limit: int, least: int = NARROWEST) -> int:
    """The width to which so many tokens are padded: 64, 96, 128, 192, 256, 384 and so on, at most `limit`.

    There are two widths from one power of two to the next: a model of 8,192 tokens has 15. A generation rounds up to
    finer steps (`engine.generation.bucket`). Here many requests of many lengths come together, and each width is a
    program to compile.
    """
    return min(max(least, round_up(tokens, step_of(tokens, WIDTHS))), limit)


def below(width: int) -> int:
    """The next smaller width; 0 below the narrowest. All rows of a batch are longer than that."""
    step = step_of(width, WIDTHS)
    return 0 if width <= NARROWEST else (width - 1) // step * step


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
        """Scores of each row's tokens behind its first, [B, T] and bool [B, T]. Consumes the state."""
        width = width_of(longest, self.limit, least=16)
        tokens, lengths = right_padded([one[:-1] for one in rows], width)
        targets, _ = right_padded([one[1:] for one in rows], width)
        check_room(state, lengths.astype(np.int64))
        reads, writes = state.split()
        scores, greedy, _ = forced_scores(
            self.params.weights,
            jnp.asarray(tokens),
            jnp.asarray(lengths),
            jnp.asarray(targets),
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
            keys = jax.vmap(functools.partial(jax.random.fold_in, seed_key(seed)))(numbers)
            streams = [TextStream(self.params.tokenizer, texts) for _ in indices]
            draw, take = functools.partial(drawn, sampler, keys), functools.partial(taken, streams, ends)
            generate_rows(self.params, logits, state, max_new_tokens, draw, take, len(indices))
            for index, stream in zip(indices, streams, strict=True):
                stream.finish()
                yield index, stream.text


def right_padded(rows: Sequence[Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32 [B, width], zeros behind each row's own, and the rows' lengths int32 [B]."""
    tokens = np.zeros((len(rows), width), np.int32)
    for row, one in enumerate(rows):
        tokens[row, : len(one)] = one
    return tokens, np.array([len(one) for one in rows], np.int32)


def drawn(sampler: Sampler, keys: Array, logits: Array, index: int) -> np.ndarray:
    """The next token of each row, int32 [B], by its own key [B] and the number of tokens before it."""
    return np.asarray(draw_tokens(logits, keys, jnp.int32(index), sampler=sampler))


def taken(streams: Sequence[TextStream], ends: frozenset[int], row: int, token: int) -> bool:
    """Add a token to its row's text, unless it is one that ends a text. Returns whether the row goes on."""
    if token in ends:
        return False
    streams[row].push(token)
    return not streams[row].stopped
