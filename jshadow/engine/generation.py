"""One generation of a batch: from prompts to text over the compiled steps, with a report of what was done."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow.cache.offload import resolve_fetch
from jshadow.cache.state import KVState, Reads, Writes
from jshadow.engine import decode
from jshadow.engine.checks import check_capacity, check_policy, check_room, check_sampling, check_state
from jshadow.engine.prefill_job import own_attention, prepared_attention
from jshadow.engine.report import CompileClock, Report, attended_parts, measured_bytes, row_figures
from jshadow.engine.sampling import Sampler, sample
from jshadow.engine.step import step_writes
from jshadow.engine.text import TextStream, encode, split_prompts, split_stops
from jshadow.engine.verify import Verifier, resident_twin
from jshadow.errors import CapacityError, ConfigError, StateMismatch
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import full_bytes
from jshadow.policies import Full, Policy, ShadowKV
from jshadow.policies.base import check_fitted, why_dense
from jshadow.policies.prefill_attention import PrefillAttention

Progress = Callable[[int, int], None]


@functools.partial(jax.jit, static_argnames=("config", "sampler"), donate_argnames=("writes",))
def _next_token(
    weights: dict, token: Array, reads: Reads, writes: Writes, active: Array, key: Array, index: Array, *,
    config: ModelConfig, sampler: Sampler,
) -> tuple[Array, Writes]:  # fmt: skip
    """Feed a token to each row and sample the next: one program a step."""
    logits, writes = step_writes(weights, config, token[:, None], active.astype(jnp.int32), reads, writes)
    return sample(sampler, logits, jax.random.fold_in(key, index)), writes


@functools.partial(jax.jit, static_argnames=("sampler",))
def _sample(logits: Array, key: Array, index: Array, *, sampler: Sampler) -> Array:
    return sample(sampler, logits, jax.random.fold_in(key, index))


def bucket(tokens: int) -> int:
    """Granularity in tokens to which lengths are rounded, so that near lengths share a compiled program.

    A 32nd of the next power of two, at least 64: 64 up to 2,048 tokens, 128 up to 4,096.
    """
    return max(64, 1 << max(0, (tokens - 1).bit_length() - 5))


def round_up(tokens: int, limit: int) -> int:
    """tokens rounded up to their bucket, at most limit."""
    size = bucket(tokens)
    return min(limit, -(-tokens // size) * size)


class Run:
    """One generation of a batch: iterate it for (row, new text, token), then read `results()`."""

    def __init__(
        self, params: Any, prompt: Any, policy: Policy | None = None, *, max_new_tokens: int = 128,
        sampler: Sampler | None = None, seed: int = 0, fetch: str = "auto", capacity: int | None = None,
        state: KVState | None = None, stop: Any = None, prefill: PrefillAttention | None = None, verify: bool = False,
        fitted: Any = None,
        progress: Progress | None = None, spare: int = 0,
    ) -> None:  # fmt: skip
        """Arguments of `generate`, and two more.

        Args:
            progress: called with (layers done, layers) while the prompt is taken in.
            spare: tokens by which the capacity should exceed what this call needs, if the context allows.
        """
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 0:
            raise ConfigError(f"max_new_tokens must be an integer of at least 0, got {max_new_tokens!r}")
        check_sampling(sampler, seed)
        if capacity is not None:
            check_capacity(params.config, capacity, 1)
        if prefill is not None and state is not None:
            raise ConfigError(f"prefill must be None where a state is continued: its prompt is in it, got {prefill!r}")
        self.params, self.max_new_tokens, self.progress = params, max_new_tokens, progress
        self.sampler, self.seed = sampler or Sampler(), seed
        prompts, self.bare = split_prompts(prompt)
        vocab = params.config.vocab_size
        last = [None] * len(prompts)
        if state is not None:
            check_state(params, state, policy)
            if len(prompts) != state.batch:
                raise StateMismatch(f"prompt must have {state.batch} rows, as the state, got {len(prompts)}")
            last = np.asarray(state.last).tolist()
        self.prompts = [
            encode(params.tokenizer, one, vocab, after=before) for one, before in zip(prompts, last, strict=True)
        ]  # fmt: skip
        texts, ids = split_stops(stop, params.tokenizer)
        self.stop_ids = frozenset(params.config.eos_ids) | set(ids)
        self.streams = [TextStream(params.tokenizer, texts) for _ in self.prompts]
        if fitted is not None and state is not None:
            raise ConfigError("fitted must be left out with a state, which keeps those that it was made with")
        self.fallback: str | None = None
        self.fitted = fitted
        self.verify = verify
        self.verifier: Verifier | None = None
        self.prefill = prefill
        self.prefill_label: str | None = None
        self.fetch, self.state = self._fetch_mode(fetch, state), state
        if state is None:
            self._plan(ShadowKV() if policy is None else policy, capacity, spare)
            prepared_attention([self.policy], prefill, params.config)  # raises before anything runs
            attention = own_attention([self.policy], prefill)
            self.prefill_label = "exact" if attention is None else attention.label(max(map(len, self.prompts)))
        else:
            self._continue(state, capacity)
        self.prefill_seconds = self.decode_seconds = self.compile_seconds = 0.0
        self.decoded = 0

    def _plan(self, policy: Policy, capacity: int | None, spare: int) -> None:
        """Decide the capacity, and whether the policy can do anything within it."""
        context = self.params.config.context
        longest = max(map(len, self.prompts))
        needed = longest + self.max_new_tokens
        limit = context if capacity is None else capacity
        name = "the model's context" if capacity is None else "capacity"
        if needed > limit:
            raise CapacityError(
                f"prompt + max_new_tokens must be at most {name}={limit} tokens, got {longest} + {self.max_new_tokens}"
            )
        self.capacity = round_up(needed + spare, context) if capacity is None else capacity
        check_capacity(self.params.config, self.capacity, longest)
        check_policy(policy)
        policy = policy.resolve(self.params.config, self.capacity)
        check_fitted(policy, self.params.config, self.fitted)
        self.fallback = why_dense(policy, self.params.config, self.capacity)
        self.policy: Policy = Full() if self.fallback else policy

    def _fetch_mode(self, fetch: str, state: KVState | None) -> str:
        """The resolved fetch mode, a state's own; verifying means offloading."""
        mode = resolve_fetch(fetch)
        if self.verify and fetch == "auto":
            mode = "device_put"
        if state is not None:
            if fetch not in ("auto", state.fetch):
                raise StateMismatch(f"fetch must be the state's own {state.fetch!r}, got {fetch!r}")
            mode = state.fetch
        if self.verify and mode == "resident":
            raise ConfigError("fetch must offload where verify=True, got 'resident'")
        return mode

    def _continue(self, state: KVState, capacity: int | None) -> None:
        """Check that a state has room for these prompts and answers."""
        if capacity is not None and capacity != state.capacity:
            raise StateMismatch(f"capacity must be the state's own {state.capacity}, got {capacity}")
        check_room(state, np.array([len(one) + self.max_new_tokens for one in self.prompts]))
        self.capacity, self.policy = state.capacity, state.policy

    def _timed(self) -> Callable[[], float]:
        """A clock that leaves compilation out and adds it to compile_seconds."""
        start, compiled = time.perf_counter(), CompileClock.seconds

        def stop() -> float:
            spent = CompileClock.seconds - compiled
            self.compile_seconds += spent
            return max(0.0, time.perf_counter() - start - spent)

        return stop

    def _start(self) -> Array:
        """Prefill, or extend the given state: the logits of the first new token."""
        lengths = np.array([len(one) for one in self.prompts], np.int32)
        width = int(lengths.max())
        width = round_up(width, self.capacity) if self.state is None else -(-width // 16) * 16
        tokens = np.zeros((len(lengths), width), np.int32)
        for row, one in enumerate(self.prompts):
            tokens[row, : len(one)] = one
        if self.state is not None:
            self.before = jax.tree.map(np.asarray, self.state.counters)
            if self.verify:
                self.verifier = Verifier(self.params, self.state, resident_twin(self.state))
                logits, self.state = self.verifier.extend(tokens, lengths, self.state)
            else:
                logits, self.state = decode.extend(self.params, tokens, lengths, self.state)
            return logits
        shortest = int(lengths.min())
        modes = [self.fetch, "resident"] if self.verify else [self.fetch]
        made = decode.prefill_many(
            self.params, tokens, lengths, [self.policy] * len(modes), capacity=self.capacity, fetch=modes,
            fitted=None if self.fallback else self.fitted, shortest=shortest - shortest % bucket(shortest),
            progress=self.progress, attention=self.prefill,
        )  # fmt: skip
        logits, self.state = made[0]
        if self.verify:
            self.verifier = Verifier(self.params, self.state, made[1][1])
        self.before = jax.tree.map(np.asarray, self.state.counters)
        jax.block_until_ready((logits, self.state))
        return logits

    def __iter__(self) -> Iterator[tuple[int, str, int]]:
        key = jax.random.key(self.seed)
        stop = self._timed()
        logits = self._start()
        if self.max_new_tokens == 0:
            self.prefill_seconds = stop()
            return
        values = np.asarray(_sample(logits, key, jnp.int32(0), sampler=self.sampler))
        self.prefill_seconds = stop()
        active = np.ones(len(self.prompts), bool)
        for index in range(1, self.max_new_tokens + 1):
            yield from self._push(values, active, last=index == self.max_new_tokens)
            if not active.any() or index == self.max_new_tokens:
                break
            assert self.state is not None
            stop = self._timed()
            values = np.asarray(self._next(values, active, key, jnp.int32(index)))
            self.decode_seconds += stop()
            self.decoded += int(active.sum())

    def _next(self, values: np.ndarray, active: np.ndarray, key: Array, index: Array) -> Array:
        """Feed a token to each active row, sample the next."""
        assert self.state is not None
        if self.verifier is not None:
            logits, self.state = self.verifier.step(values[:, None], active.astype(np.int32), self.state)
            return _sample(logits, key, index, sampler=self.sampler)
        reads, writes = self.state.split()
        token, writes = _next_token(
            self.params.weights, jnp.asarray(values), reads, writes, jnp.asarray(active), key, index,
            config=self.params.config, sampler=self.sampler,
        )  # fmt: skip
        self.state = self.state.join(writes)
        return token

    def _push(self, values: np.ndarray, active: np.ndarray, *, last: bool) -> Iterator[tuple[int, str, int]]:
        """Hand new tokens to the rows that still run; clear `active` where one stops."""
        for row in np.flatnonzero(active):
            stream, token = self.streams[row], int(values[row])
            if token in self.stop_ids:
                text, active[row] = stream.finish(), False
                stream.tokens.append(token)  # after the text ended: an end token need not be a special one
            else:
                text = stream.push(token)
                active[row] = not stream.stopped
            if last:
                text += stream.finish()
            yield int(row), text, token

    def close(self) -> None:
        """Let the KV state go."""
        self.state = self.verifier = None

    def results(self) -> "list[Generation]":
        """One Generation a row, once the iteration has ended."""
        assert self.state is not None
        counters = jax.tree.map(np.asarray, self.state.counters)
        sizes = measured_bytes(self.state)
        config, batch = self.params.config, len(self.prompts)
        dense = full_bytes(config, self.capacity, jnp.dtype(self.params.dtype).itemsize)
        shared = Feed(self.params, self.state, [stream.tokens[-1:] for stream in self.streams])
        fed = np.array([max(0, len(stream.tokens) - 1) for stream in self.streams])
        parts, made = attended_parts(self.state, fed), []
        for row, stream in enumerate(self.streams):
            report = Report(
                policy=self.policy, fetch=self.state.fetch, prompt_tokens=len(self.prompts[row]),
                generated_tokens=len(stream.tokens), attended_parts=parts[row], device_bytes=sizes["device"] // batch,
                host_bytes=sizes["host"] // batch, full_bytes=dense, prefill_seconds=self.prefill_seconds,
                decode_seconds=self.decode_seconds, compile_seconds=self.compile_seconds,
                decode_tokens_per_second=self.decoded / self.decode_seconds if self.decode_seconds else None,
                fallback=self.fallback, verified_steps=self.verifier.steps if self.verifier else None,
                prefill=self.prefill_label,
                **row_figures(self.before, counters, row, config.num_layers),
            )  # fmt: skip
            text = stream.text if self.params.tokenizer is not None else None
            made.append(Generation(text, list(stream.tokens), report, shared, None if self.bare else row))
        return made


class Feed:
    """A batch's final state, with each row's last sampled token fed on first use."""

    def __init__(self, params: Any, state: KVState, last: list[list[int]]) -> None:
        self.params, self.made = params, state
        self.last = [token for tokens in last for token in tokens]
        self.fed = not self.last  # nothing was sampled

    def state(self) -> KVState:
        """The state that holds prompt and generated tokens, all of them."""
        if not self.fed:
            _, self.made = decode.decode_step(self.params, np.array(self.last, np.int32), self.made)
            self.fed = True
        return self.made


@dataclasses.dataclass(frozen=True)
class Generation:
    """What a prompt led to.

    Attributes:
        text: the new text without stop token or stop string; None without a tokenizer.
        tokens: the new token ids; a stop token that ended them is included.
        report: what it took.
    """

    text: str | None
    tokens: list[int]
    report: Report
    _feed: Feed = dataclasses.field(repr=False)
    _row: int | None = dataclasses.field(repr=False, default=None)

    @property
    def state(self) -> KVState:
        """The KV state after prompt and answer, for the next turn (`generate(state=...)`, which consumes it).

        The last token was sampled but never fed; asking for the state feeds it.
        """
        made = self._feed.state()
        return made if self._row is None else made.take([self._row])
