"""The loop that generates text for a batch of prompts, its compiled steps, and what it returns.

A step and the draw of its token are one program. Where nothing on the host decides what a step feeds, the device starts
the next step before the host has read the token of this one. So the device does not wait for the host between two
tokens.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow.cache.state import KVState, Reads, Writes
from jshadow.engine import decode
from jshadow.engine.agree import run_together
from jshadow.engine.checks import check_policy, check_room, check_state, consuming, note_room
from jshadow.engine.options import GenerateOptions, workload_of
from jshadow.engine.placement import commit_arrays, fetch_for
from jshadow.engine.prefill.job import own_attention, prepared_attention
from jshadow.engine.report import PhaseClock, Report, attended_parts, explain_large_cache, measured_bytes, row_figures
from jshadow.engine.sampling import NO_TOKEN, Sampler, sample_checked, seed_key
from jshadow.engine.speculation.drafter import check_drafter, empty
from jshadow.engine.speculation.run import Drawing, SpeculativeRun, VerifiedRun
from jshadow.engine.step import COMPILER_OPTIONS, step_writes
from jshadow.engine.text import TextStream, encode, split_prompts, split_stops
from jshadow.engine.types import OnePrompt, Prompt
from jshadow.engine.verify import Verifier, resident_twin
from jshadow.errors import ConfigError, NumericalError, StateMismatch
from jshadow.models.config import ModelConfig
from jshadow.ops.buckets import round_up
from jshadow.planner.bytes import full_bytes
from jshadow.policies import ShadowKV
from jshadow.policies.checks import check_fitted
from jshadow.policies.full import or_full
from jshadow.weights.params import Params

_STOPS = 8  # the number of stop ids is rounded up to a multiple of this, so that generations share compiled programs
_NO_STOP = -2  # fills up the stop ids; neither a token nor NO_TOKEN


class _Draw(NamedTuple):
    """The randomness of one step: a PRNG key, and the number of the step, int32 [], which is folded into the key."""

    key: Array
    step_number: Array


class _Fed(NamedTuple):
    """The inputs of one step.

    Attributes:
        token: the token of each row, int32 [B].
        active: which rows have not ended before this token, bool [B].
        step_number: the number of the step, int32 [].
    """

    token: Array
    active: Array
    step_number: Array


class _Rule(NamedTuple):
    """The inputs that all steps of a generation share.

    Attributes:
        stop: the token ids that end a row, int32 [S].
    """

    key: Array
    stop: Array


@functools.partial(
    jax.jit, static_argnames=("config", "sampler"), donate_argnames=("writes",), compiler_options=COMPILER_OPTIONS
)
def step_and_sample(
    weights: dict, fed: _Fed, reads: Reads, writes: Writes, rule: _Rule, *, config: ModelConfig, sampler: Sampler
) -> tuple[_Fed, Writes]:
    """Feed a token to each active row, except a token that ends the row. Return what the next step feeds, and `writes`.

    A row whose logits contain a NaN gets NO_TOKEN. `decode_step` and `sample_once` do the same in two programs.
    """
    active = fed.active & (fed.token[:, None] != rule.stop).all(axis=1)
    logits, writes = step_writes(weights, config, fed.token[:, None], active.astype(jnp.int32), reads, writes)
    token = sample_checked(sampler, logits, jax.random.fold_in(rule.key, fed.step_number))
    return _Fed(token, active, fed.step_number + 1), writes


@functools.partial(jax.jit, static_argnames=("sampler",))
def sample_once(logits: Array, draw: _Draw, *, sampler: Sampler) -> Array:
    """Draw the next token of each row, int32 [B], from logits [B, V]. A row with a NaN gets NO_TOKEN."""
    return sample_checked(sampler, logits, jax.random.fold_in(*draw))


class TokenSteps:
    """The steps of one generation, which are dispatched in order.

    Attributes:
        flight: the results of dispatched steps whose tokens the host has not read yet.
    """

    def __init__(self, params: Params, sampler: Sampler, key: Array, stop: Iterable[int]) -> None:
        """Take the model, the sampler, the PRNG key and the token ids that end a row."""
        self.params, self.sampler = params, sampler
        ids = sorted(stop)
        ids += [_NO_STOP] * (round_up(max(1, len(ids)), _STOPS) - len(ids))
        self.rule = _Rule(key, jnp.array(ids, jnp.int32))
        self.flight: collections.deque[_Fed] = collections.deque()

    def next(
        self, state: KVState, values: np.ndarray, active: np.ndarray, index: int, *, ahead: bool
    ) -> tuple[Array, KVState]:
        """Return the tokens that step `index` draws, int32 [B], and the state after all dispatched steps.

        Args:
            state: the state after all dispatched steps. It is consumed.
            values: the tokens of the step before, int32 [B].
            active: rows that have not ended, bool [B].
            ahead: whether to dispatch the step after it, too.
        """
        if not self.flight:
            fed = _Fed(jnp.asarray(values), jnp.asarray(active), jnp.int32(index))
            # A step returns committed arrays. With uncommitted ones here, JAX would compile a second program.
            state = self._dispatch(state, commit_arrays(fed, state.specs[0].shards), self.rule)
        if ahead:
            state = self._dispatch(state, self.flight[-1], self.rule)
        return self.flight.popleft().token, state

    def feed(self, state: KVState, tokens: np.ndarray, active: np.ndarray) -> KVState:
        """Feed tokens, int32 [B], to the active rows, bool [B], also tokens that end a row. Return the state.

        It runs the program of `next`, so that nothing more is compiled. The state is the one after all dispatched
        steps. It is consumed. Tokens that were not read yet are dropped. Raises CapacityError if a row has no room for
        its token.
        """
        room = check_room(state, active.astype(np.int64))
        fed = commit_arrays(_Fed(jnp.asarray(tokens), jnp.asarray(active), jnp.int32(0)), state.specs[0].shards)
        no_stop = np.full(self.rule.stop.shape, _NO_STOP, np.int32)
        state = self._dispatch(state, fed, self.rule._replace(stop=jnp.asarray(no_stop)))
        self.flight.clear()
        return note_room(state, room)

    def _dispatch(self, state: KVState, fed: _Fed, rule: _Rule) -> KVState:
        with consuming(state):
            reads, writes = state.split()
            drawn, writes = run_together(
                step_and_sample,
                self.params.weights,
                fed,
                reads,
                writes,
                rule,
                config=self.params.config,
                sampler=self.sampler,
            )
        self.flight.append(drawn)
        return state.join(writes)


class _FinalStates:
    """The final states of the rows of a batch. A row's last sampled token is fed when its state is first asked for.

    A row that a stop string ended may have an older state than its neighbors. Rows with the same state share it.
    """

    def __init__(self, steps: TokenSteps, rows: list[tuple[KVState, list[int]]]) -> None:
        """Take for each row a state of the whole batch, and the tokens that are still to be fed to the row."""
        self.steps = steps
        self.states = {id(state): state for state, _ in rows}
        self.keys = [id(state) for state, _ in rows]
        self.unfed = [list(tokens) for _, tokens in rows]

    def of_row(self, row: int) -> KVState:
        """Return the state of the batch in which this row holds its prompt and all its tokens."""
        key = self.keys[row]
        sharing = [self.keys[other] == key for other in range(len(self.keys))]
        while any(active := [mine and bool(unfed) for mine, unfed in zip(sharing, self.unfed, strict=True)]):
            tokens = [unfed[0] if fed else 0 for fed, unfed in zip(active, self.unfed, strict=True)]
            self.states[key] = self.steps.feed(self.states[key], np.array(tokens, np.int32), np.array(active))
            self.unfed = [unfed[1:] if fed else unfed for fed, unfed in zip(active, self.unfed, strict=True)]
        return self.states[key]


@dataclasses.dataclass(frozen=True)
class Generation:
    """The answer to one prompt.

    Attributes:
        text: the new text without the stop token or the stop string; None without a tokenizer.
        tokens: the new token ids that `state` holds. A stop token is included. The tokens of a stop string are left
            out. If a stop string begins in the middle of a token, the whole token is left out.
        report: bytes, counts and seconds of this generation.
    """

    text: str | None
    tokens: list[int]
    report: Report
    _final: _FinalStates = dataclasses.field(repr=False)
    _row: int | None = dataclasses.field(repr=False, default=None)

    @property
    def state(self) -> KVState:
        """The KV state after the prompt and `tokens`. `generate(state=...)` continues it with the next turn.

        The last token is fed when the state is first asked for.
        """
        state = self._final.of_row(self._row or 0)
        return state if self._row is None else state.take([self._row])


class GenerationLoop:
    """One generation for a batch. Iterate over it to get (row, new text, token), and then call `results()`.

    Attributes:
        prompts: token ids of each row.
        bare: whether the call passed one prompt and not a list.
        state: the latest KV state; None before the prefill and after `close`.
        policy: the resolved policy, or Full if that policy has no effect at this capacity.
        fallback: the reason why Full runs in place of the requested policy, or None.
        marks: row -> (state, number of generated tokens of the row in it). The rows are those whose last tokens may
            begin a stop string, or began one. The state is from before these tokens.
    """

    def __init__(self, params: Params, prompt: Prompt, options: GenerateOptions) -> None:
        """Check all arguments, without running anything. Raises the errors of `generate` about arguments."""
        options.check(params)
        self.params, self.state = params, options.state
        # `options` must hold no state, or `close` could not free it.
        self.options = dataclasses.replace(options, state=None)
        self.sampler = options.sampler or Sampler()
        prompts, self.bare = split_prompts(prompt)
        self.prompts = self._encode(prompts)
        texts, ids = split_stops(options.stop, params.tokenizer)
        self.stop_ids, self.stops_at_text = frozenset(params.config.eos_ids) | set(ids), bool(texts)
        self.streams = [TextStream(params.tokenizer, texts) for _ in self.prompts]
        if options.fitted is not None and options.state is not None:
            raise ConfigError("fitted must be left out with a state, because the state has its own arrays")
        self.marks: dict[int, tuple[KVState, int]] = {}
        self.verifier: Verifier | None = None
        self.cycles: SpeculativeRun | None = None
        self.fallback: str | None = None
        self.prefill_label: str | None = None
        self.fetch_reason: str | None = None
        self.fetch = options.fetch_setting()
        if self.state is None:
            self._plan()
        else:
            self._continue(self.state)
        self.clock, self.decoded = PhaseClock(), 0

    def _encode(self, prompts: list[OnePrompt]) -> list[list[int]]:
        """Return the token ids of the prompts. If there is a state, they continue its rows."""
        params, state = self.params, self.state
        last = [None] * len(prompts)
        if state is not None:
            check_state(params, state, self.options.policy)
            if len(prompts) != state.batch:
                raise StateMismatch(f"prompt must have {state.batch} rows, like the state, got {len(prompts)}")
            last = np.asarray(state.last).tolist()
        vocab, plain = params.config.vocab_size, self.options.plain
        pairs = zip(prompts, last, strict=True)
        return [encode(params.tokenizer, one, vocab, after=before, plain=plain) for one, before in pairs]

    def _plan(self) -> None:
        """Choose the capacity and the policy. It is Full if the requested one has no effect at that capacity."""
        config, options = self.params.config, self.options
        longest = max(map(len, self.prompts))
        self.capacity = options.needed_capacity(self.params, longest)
        policy = ShadowKV() if options.policy is None else options.policy
        check_policy(policy)
        policy = policy.resolve(config, self.capacity)
        check_fitted(policy, config, options.fitted)
        self.policy, self.fallback = or_full(policy, config, self.capacity)
        prepared_attention([self.policy], options.prefill, config)  # raises before anything runs
        attention = own_attention([self.policy], options.prefill)
        self.prefill_label = "exact" if attention is None else attention.label(longest)
        lengths = list(map(len, self.prompts))
        self.workload = workload_of(lengths, self.capacity, str(self.params.dtype)).with_fetch(self.fetch)
        self.fetch, self.fetch_reason = fetch_for(self.params, self.policy, self.workload)
        if options.speculate is not None:
            self._check_drafter(empty(config, self.policy, self.capacity, len(self.prompts)))

    def _continue(self, state: KVState) -> None:
        """Continue a state: check that it has room for the prompts and the answers."""
        capacity = self.options.capacity
        if capacity is not None and capacity != state.capacity:
            raise StateMismatch(f"capacity must be the state's own {state.capacity}, got {capacity}")
        check_room(state, np.array([len(one) + self.options.max_new_tokens for one in self.prompts]))
        self.capacity, self.policy = state.capacity, state.policy
        if self.options.speculate is not None:
            self._check_drafter(state)

    def _check_drafter(self, state: KVState) -> None:
        """Raise ConfigError unless `speculate` is a drafter that suits a state, which may be abstract."""
        lengths, options = list(map(len, self.prompts)), self.options
        check_drafter(options.speculate, self.params, state, lengths, options.max_new_tokens)

    def _start(self) -> Array:
        """Prefill the prompts, or extend the given state. Return the logits [B, V] for the first new token."""
        lengths = np.array([len(one) for one in self.prompts], np.int32)
        width = self.workload.prompt_width if self.state is None else round_up(int(lengths.max()), 16)
        tokens = np.zeros((len(lengths), width), np.int32)
        for row, one in enumerate(self.prompts):
            tokens[row, : len(one)] = one
        return self._prefill(tokens, lengths) if self.state is None else self._extend(tokens, lengths, self.state)

    def _extend(self, tokens: np.ndarray, lengths: np.ndarray, state: KVState) -> Array:
        self.before = jax.tree.map(np.asarray, state.counters)
        if self.options.verify:
            self.verifier = Verifier(self.params, state, resident_twin(state))
            logits, self.state = self.verifier.extend(tokens, lengths, state)
        else:
            logits, self.state = decode.extend(self.params, tokens, lengths, state, progress=self.options.progress)
        return logits

    def _prefill(self, tokens: np.ndarray, lengths: np.ndarray) -> Array:
        options = self.options
        modes = [self.fetch, "resident"] if options.verify else [self.fetch]
        prefills = decode.prefill_many(
            self.params,
            tokens,
            lengths,
            [self.policy] * len(modes),
            capacity=self.capacity,
            fetch=modes,
            fitted=None if self.fallback else options.fitted,
            shortest=self.workload.context,
            progress=options.progress,
            attention=options.prefill,
        )
        logits, self.state = prefills[0]
        if options.verify:
            self.verifier = Verifier(self.params, self.state, prefills[1][1])
        self.before = jax.tree.map(np.asarray, self.state.counters)
        jax.block_until_ready((logits, self.state))
        return logits

    def __iter__(self) -> Iterator[tuple[int, str, int]]:
        key, active = seed_key(self.options.seed), np.ones(len(self.prompts), bool)
        self.steps = TokenSteps(self.params, self.sampler, key, self.stop_ids)
        with self.clock.phase("prefill"):
            logits = self._start()
            if self.options.max_new_tokens == 0:
                return
            tokens = run_together(sample_once, logits, _Draw(key, jnp.int32(0)), sampler=self.sampler)
            values = self.read_tokens(tokens, 0, active)
            cycles = self._speculation(key, values)
        drawn, counts, index = values[:, None], active.astype(np.int32), 0
        while True:
            yield from self._push(drawn, counts, active)
            if not active.any():
                break
            with self.clock.phase("decode"):
                self._mark(active)
                index += 1
                if cycles is None:
                    values = self.read_tokens(self._next(values, active, index), index, active)
                    drawn, counts = values[:, None], active.astype(np.int32)
                else:
                    drawn, counts = self._cycle(cycles, active, index)
            self.decoded += int(counts.sum())

    def _speculation(self, key: Array, first: np.ndarray) -> SpeculativeRun | None:
        """Return the cycles that draw the tokens after `first`, int32 [B], or None without `speculate`."""
        drafter = self.options.speculate
        if drafter is None:
            return None
        assert self.state is not None
        drawing = Drawing(self.sampler, key, tuple(sorted(self.stop_ids)))
        before = self.options.before or [()] * len(self.prompts)
        texts = [[*held, *prompt] for held, prompt in zip(before, self.prompts, strict=True)]
        if self.verifier is None:
            self.cycles = SpeculativeRun(self.params, drafter, drawing, texts)
        else:
            run = VerifiedRun(self.params, drafter, drawing, texts)
            self.cycles = run.watch(self.verifier, self.state.fork())
        self.cycles.begin(first, self.state)
        return self.cycles

    def read_tokens(self, tokens: Array | np.ndarray, step: int, active: np.ndarray) -> np.ndarray:
        """Copy the tokens that a step drew, int32 [B], to the host. Step 0 draws from the logits of the prompt.

        Raises:
            NumericalError: the logits of an active row contain a NaN.
        """
        values = np.asarray(tokens)
        if len(rows := np.flatnonzero(active & (values == NO_TOKEN))):
            place = "that follow the prompt" if step == 0 else f"that follow {step} generated tokens"
            raise NumericalError(
                f"logits must be numbers, got NaN in row {rows[0]} at step {step}, in the logits {place}; check the "
                f"weights, or run the model in a wider dtype than {self.params.dtype}"
            )
        return values

    def _mark(self, active: np.ndarray) -> None:
        """Keep a state for each active row whose newest tokens may begin a stop string, and drop those of the others.

        A cycle of speculation draws several tokens, and the state has read all but the last. Those from the first that
        may belong to a stop string on are given back.
        """
        assert self.state is not None
        held: dict[int, int] = {}
        last: dict[int, tuple[int, int]] = {}
        for row in np.flatnonzero(active).tolist() if self.options.returns_state else ():
            stream = self.streams[row]
            if not stream.held_back:
                self.marks.pop(row, None)
            elif row not in self.marks:
                fed = len(stream.tokens) - 1
                held[row] = min(fed, stream.released())
                if held[row] < fed:
                    last[row] = fed - held[row], [*self.prompts[row], *stream.tokens[: held[row]]][-1]
        if not held:
            return
        fork = self.state.fork()
        if last:
            lengths, tokens = np.array(fork.lengths), np.array(fork.last)
            for row, (back, token) in last.items():
                lengths[row], tokens[row] = lengths[row] - back, token
            fork = fork.rewind(lengths, tokens)
        self.marks |= {row: (fork, count) for row, count in held.items()}

    def _next(self, values: np.ndarray, active: np.ndarray, index: int) -> Array:
        """Feed a token to each active row, and return the tokens that step `index` draws, int32 [B].

        If the host need not see a token before it is fed, the next step is dispatched as well.
        """
        assert self.state is not None
        if self.verifier is not None:
            logits, self.state = self.verifier.step(values[:, None], active.astype(np.int32), self.state)
            draw = _Draw(self.steps.rule.key, jnp.int32(index))
            return run_together(sample_once, logits, draw, sampler=self.sampler)
        # The host alone finds stop strings. On a mesh, the processes take turns to compile.
        alone = not self.stops_at_text and self.state.specs[0].shards is None
        ahead = alone and index + 1 < self.options.max_new_tokens
        token, self.state = self.steps.next(self.state, values, active, index, ahead=ahead)
        return token

    def _cycle(self, cycles: SpeculativeRun, active: np.ndarray, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Run a cycle of speculation. Return the new tokens int32 [B, n], and how many of them are real, int32 [B]."""
        assert self.state is not None
        drawn = [len(stream.tokens) for stream in self.streams]
        left = np.where(active, self.options.max_new_tokens - np.array(drawn), 0)
        tokens, counts, self.state = cycles.cycle(self.state, left)
        for place in range(tokens.shape[1]):
            self.read_tokens(tokens[:, place], index, active & (place < counts))
        return tokens, counts

    def _push(self, drawn: np.ndarray, counts: np.ndarray, active: np.ndarray) -> Iterator[tuple[int, str, int]]:
        """Add new tokens to the active rows and yield their text. Set `active` to False for rows that end.

        The first `counts` [B] of `drawn`, int32 [B, n], are new tokens.
        """
        for row in np.flatnonzero(active).tolist():
            stream = self.streams[row]
            for token in drawn[row, : counts[row]].tolist():
                if token in self.stop_ids:
                    text, active[row] = stream.finish(), False
                    stream.tokens.append(token)  # after the text has ended: the token may have a text of its own
                else:
                    text = stream.push(token)
                    active[row] = not stream.stopped
                if len(stream.tokens) == self.options.max_new_tokens:
                    text, active[row] = text + stream.finish(), False
                yield row, text, token
                if not active[row]:
                    break

    def close(self) -> None:
        """Drop all references to the KV state."""
        self.state = self.verifier = None
        self.marks.clear()

    def results(self) -> list[Generation]:
        """Return one Generation for each row. The iteration must have ended."""
        assert self.state is not None
        fed = [max(0, len(stream.tokens) - 1) for stream in self.streams]  # the last token was never fed
        if self.cycles is not None:
            marked = self.marks if self.options.returns_state else range(len(fed))
            self.state, fed = self.cycles.ended(self.state, self.streams, marked)
        bases = []
        for row, stream in enumerate(self.streams):
            latest = self.state, fed[row]
            state, held = self.marks.get(row, latest) if stream.stopped else latest
            bases.append((state, stream.tokens[held : stream.kept()]))
        final, generations = _FinalStates(self.steps, bases), []
        for row, (stream, report) in enumerate(zip(self.streams, self._reports(self.state), strict=True)):
            text = stream.text if self.params.tokenizer is not None else None
            tokens = stream.tokens[: stream.kept()]
            generations.append(Generation(text, tokens, report, final, None if self.bare else row))
        return generations

    def _reports(self, state: KVState) -> list[Report]:
        """Return the report of each row, with its final state."""
        config, batch = self.params.config, len(self.prompts)
        counters, sizes = jax.tree.map(np.asarray, state.counters), measured_bytes(state)
        dense = full_bytes(config, self.capacity, jnp.dtype(self.params.dtype).itemsize)
        parts = attended_parts(state, np.array([max(0, len(stream.tokens) - 1) for stream in self.streams]))
        return [
            Report(
                policy=self.policy,
                fetch=state.fetch,
                fetch_reason=self.fetch_reason,
                prompt_tokens=len(self.prompts[row]),
                generated_tokens=len(self.streams[row].tokens),
                attended_parts=parts[row],
                device_bytes=sizes["device"] // batch,
                host_bytes=sizes["host"] // batch,
                full_bytes=dense,
                prefill_seconds=self.clock.seconds["prefill"],
                decode_seconds=self.clock.seconds["decode"],
                compile_seconds=self.clock.compile_seconds,
                decode_tokens_per_second=self.clock.rate(self.decoded),
                fallback=self.fallback,
                verified_steps=self.verifier.steps if self.verifier else None,
                prefill=self.prefill_label,
                device_kind=next(iter(state.lengths.devices())).device_kind,
                dtype=str(self.params.dtype),
                large_cache=explain_large_cache(state, sizes["device"] // batch, dense),
                **({} if self.cycles is None else self.cycles.figures(row)),
                **row_figures(self.before, counters, row, config),
            )
            for row in range(batch)
        ]
