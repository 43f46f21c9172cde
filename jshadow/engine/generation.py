"""The loop that generates text for a batch of prompts. It runs the compiled steps and makes a report at the end."""

import dataclasses
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow.cache.state import KVState
from jshadow.engine import decode
from jshadow.engine.checks import check_policy, check_room, check_state
from jshadow.engine.decode import Draw
from jshadow.engine.fetch_mode import fetch_for
from jshadow.engine.host_notes import consuming
from jshadow.engine.mesh.agree import run_together
from jshadow.engine.options import GenerateOptions, batch_of
from jshadow.engine.prefill.job import own_attention, prepared_attention
from jshadow.engine.report import (
    CompileClock,
    Report,
    attended_parts,
    explain_large_cache,
    measured_bytes,
    row_figures,
)
from jshadow.engine.result import FinalStates, Generation
from jshadow.engine.sampling import NO_TOKEN, Sampler, seed_key
from jshadow.engine.text import TextStream, encode, split_prompts, split_stops
from jshadow.engine.types import OnePrompt, Prompt
from jshadow.engine.verify import Verifier, resident_twin
from jshadow.errors import ConfigError, NumericalError, StateMismatch
from jshadow.ops.buckets import round_up
from jshadow.planner.bytes import full_bytes
from jshadow.policies import ShadowKV
from jshadow.policies.checks import check_fitted
from jshadow.policies.full import or_full
from jshadow.weights.params import Params


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
        self.stop_ids = frozenset(params.config.eos_ids) | set(ids)
        self.streams = [TextStream(params.tokenizer, texts) for _ in self.prompts]
        if options.fitted is not None and options.state is not None:
            raise ConfigError("fitted must be left out with a state, because the state has its own arrays")
        self.marks: dict[int, tuple[KVState, int]] = {}
        self.verifier: Verifier | None = None
        self.fallback: str | None = None
        self.prefill_label: str | None = None
        self.fetch_reason: str | None = None
        self.fetch = options.fetch_setting()
        if self.state is None:
            self._plan()
        else:
            self._continue(self.state)
        self.prefill_seconds = self.decode_seconds = self.compile_seconds = 0.0
        self.decoded = 0

    def _encode(self, prompts: list[OnePrompt]) -> list[list[int]]:
        """Return the token ids of the prompts. If there is a state, they continue its rows."""
        params, state = self.params, self.state
        last = [None] * len(prompts)
        if state is not None:
            check_state(params, state, self.options.policy)
            if len(prompts) != state.batch:
                raise StateMismatch(f"prompt must have {state.batch} rows, like the state, got {len(prompts)}")
            last = np.asarray(state.last).tolist()
        vocab = params.config.vocab_size
        return [encode(params.tokenizer, one, vocab, after=before) for one, before in zip(prompts, last, strict=True)]

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
        self.batch = batch_of(list(map(len, self.prompts)), self.capacity, str(self.params.dtype))
        self.fetch, self.fetch_reason = fetch_for(self.fetch, self.params, self.policy, self.batch)

    def _continue(self, state: KVState) -> None:
        """Continue a state: check that it has room for the prompts and the answers."""
        capacity = self.options.capacity
        if capacity is not None and capacity != state.capacity:
            raise StateMismatch(f"capacity must be the state's own {state.capacity}, got {capacity}")
        check_room(state, np.array([len(one) + self.options.max_new_tokens for one in self.prompts]))
        self.capacity, self.policy = state.capacity, state.policy

    def _timed(self) -> Callable[[], float]:
        """Start a clock, and return a function that stops it.

        The function returns the seconds that did not go into compilation. It adds the others to `compile_seconds`.
        """
        start, compiled = time.perf_counter(), CompileClock.seconds

        def stop() -> float:
            spent = CompileClock.seconds - compiled
            self.compile_seconds += spent
            return max(0.0, time.perf_counter() - start - spent)

        return stop

    def _start(self) -> Array:
        """Prefill the prompts, or extend the given state. Return the logits [B, V] for the first new token."""
        lengths = np.array([len(one) for one in self.prompts], np.int32)
        width = self.batch.width if self.state is None else round_up(int(lengths.max()), 16)
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
            shortest=self.batch.shortest,
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
        count, key = self.options.max_new_tokens, seed_key(self.options.seed)
        stop = self._timed()
        logits = self._start()
        if count == 0:
            self.prefill_seconds = stop()
            return
        active = np.ones(len(self.prompts), bool)
        tokens = run_together(decode.sample_once, logits, Draw(key, jnp.int32(0)), sampler=self.sampler)
        values = self.read_tokens(tokens, 0, active)
        self.prefill_seconds = stop()
        for index in range(1, count + 1):
            yield from self._push(values, active, last=index == count)
            if not active.any() or index == count:
                break
            stop = self._timed()
            self._mark(active)
            values = self.read_tokens(self._next(values, active, Draw(key, jnp.int32(index))), index, active)
            self.decode_seconds += stop()
            self.decoded += int(active.sum())

    def read_tokens(self, tokens: Array, step: int, active: np.ndarray) -> np.ndarray:
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
        """Keep a state for each active row whose newest token may begin a stop string, and drop those of the others."""
        assert self.state is not None
        fork = None
        for row in np.flatnonzero(active).tolist() if self.options.returns_state else ():
            if not self.streams[row].held_back:
                self.marks.pop(row, None)
            elif row not in self.marks:
                fork = self.state.fork() if fork is None else fork
                self.marks[row] = fork, len(self.streams[row].tokens) - 1

    def _next(self, values: np.ndarray, active: np.ndarray, draw: Draw) -> Array:
        """Feed a token to each active row, and return the next tokens, int32 [B]."""
        assert self.state is not None
        if self.verifier is not None:
            logits, self.state = self.verifier.step(values[:, None], active.astype(np.int32), self.state)
            return run_together(decode.sample_once, logits, draw, sampler=self.sampler)
        weights, config = self.params.weights, self.params.config
        fed = jnp.asarray(values), jnp.asarray(active)
        with consuming(self.state):
            reads, writes = self.state.split()
            token, writes = run_together(
                decode.step_and_sample, weights, fed, reads, writes, draw, config=config, sampler=self.sampler
            )
        self.state = self.state.join(writes)
        return token

    def _push(self, values: np.ndarray, active: np.ndarray, *, last: bool) -> Iterator[tuple[int, str, int]]:
        """Add new tokens to the active rows and yield their text. Set `active` to False for rows that stop."""
        for row in np.flatnonzero(active):
            stream, token = self.streams[row], int(values[row])
            if token in self.stop_ids:
                text, active[row] = stream.finish(), False
                stream.tokens.append(token)  # after the text has ended: the token may have a text of its own
            else:
                text = stream.push(token)
                active[row] = not stream.stopped
            if last:
                text += stream.finish()
            yield int(row), text, token

    def close(self) -> None:
        """Drop all references to the KV state."""
        self.state = self.verifier = None
        self.marks.clear()

    def results(self) -> list[Generation]:
        """Return one Generation for each row. The iteration must have ended."""
        assert self.state is not None
        bases = []
        for row, stream in enumerate(self.streams):
            latest = self.state, max(0, len(stream.tokens) - 1)  # its last token was never fed
            state, held = self.marks.get(row, latest) if stream.stopped else latest
            bases.append((state, stream.tokens[held : stream.kept()]))
        final, generations = FinalStates(self.params, bases), []
        for row, (stream, report) in enumerate(zip(self.streams, self._reports(self.state), strict=True)):
            text = stream.text if self.params.tokenizer is not None else None
            tokens = stream.tokens[: stream.kept()]
            generations.append(Generation(text, tokens, report, final, None if self.bare else row))
        return generations

    def _reports(self, state: KVState) -> list[Report]:
        """Return the report of each row."""
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
                prefill_seconds=self.prefill_seconds,
                decode_seconds=self.decode_seconds,
                compile_seconds=self.compile_seconds,
                decode_tokens_per_second=self.decoded / self.decode_seconds if self.decode_seconds else None,
                fallback=self.fallback,
                verified_steps=self.verifier.steps if self.verifier else None,
                prefill=self.prefill_label,
                device_kind=next(iter(state.lengths.devices())).device_kind,
                dtype=str(self.params.dtype),
                large_cache=explain_large_cache(state, sizes["device"] // batch, dense),
                **row_figures(self.before, counters, row, config.num_layers),
            )
            for row in range(batch)
        ]
