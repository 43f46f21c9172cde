"""The gated delta rule in chunks and in steps, compared with a loop over tokens in NumPy in float64."""

import functools

import jax
import numpy as np
import pytest
from few import quick
from random_arrays import wide

from jshadow.errors import CapacityError
from jshadow.ops.delta_rule import CHUNK, Recent, Tokens, folded_all, masked, normalized, scan_chunks, step

ROWS, SLOTS, MOST, TURN = 4, 16, 8, 20
HEADS = {1: (2, 2, 8, 8), 3: (2, 6, 16, 5)}  # value heads of a key head: n_k, n_v, d_k, d_v


def random_tokens(rng, length, heads):
    """Tokens as a model has them. The rows have no decay, weak ones, strong ones, and weak ones after strong ones.

    In the last row, differences of cumulative sums of -3200 would have errors of 1e-4.
    """
    n_k, n_v, d_k, d_v = heads
    shape = ROWS, length, n_v
    q, k = (rng.standard_normal((ROWS, length, n_k, d_k)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    decay = -rng.random(shape) * np.array([0, 1, 50, 1])[:, None, None]
    decay[3] = np.where(np.arange(length)[:, None] % 64 < 50, -64.3, 0.01 * decay[3])
    fields = q * d_k**-0.5, k, rng.standard_normal((*shape, d_v)), decay, rng.random(shape)
    return Tokens(*(x.astype(np.float32) for x in fields))


def random_state(rng, heads):
    return rng.standard_normal((ROWS, heads[1], *heads[2:])).astype(np.float32)


def expected(state, tokens, corrects=True):
    """Outputs [T, n_v, d_v] and the state of one row, by the rule's definition."""
    q, k, v, log_decay, beta = map(wide, tokens)
    state, out, group = wide(state), [], v.shape[1] // k.shape[1]
    for t in range(len(v)):
        query, key = (np.repeat(x[t], group, axis=0) for x in (q, k))
        state = state * np.exp(log_decay[t])[:, None, None]
        u = beta[t][:, None] * (v[t] - corrects * np.einsum("hde,hd->he", state, key))
        state = state + np.einsum("hd,he->hde", key, u)
        out.append(np.einsum("hde,hd->he", state, query))
    return np.array(out).reshape(v.shape), state


def of_row(tokens, row, count=None):
    return Tokens(*(np.asarray(x)[row, :count] for x in tokens))


def assert_close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * max(1, np.abs(want).max(initial=0)))


def same_bits(one, other):
    return np.asarray(one).tobytes() == np.asarray(other).tobytes()


@functools.partial(jax.jit, static_argnums=3)
def chunks(state, tokens, counts, chunk=CHUNK):
    return scan_chunks(state, masked(tokens, np.arange(tokens.v.shape[1]) < counts[:, None]), chunk)


@pytest.mark.parametrize(
    ("group", "length", "chunk"), [(3, 1, 64), (3, 63, 16), (3, 64, 64), (3, 65, 64), (1, 129, 64)]
)
def test_chunks_equal_the_loop(group, length, chunk):
    """Rows have any number of tokens. A row without any keeps the bits of its state."""
    rng, heads = np.random.default_rng(1), HEADS[group]
    for case in range(6):
        state, tokens = random_state(rng, heads), random_tokens(rng, length, heads)
        state[:, :, :2] = -0.0  # adding a zero would change its sign
        counts = rng.integers(0, length + 1, ROWS) if case else np.full(ROWS, length)
        counts[rng.integers(ROWS)] = 0 if case else length
        out, after = map(np.asarray, chunks(state, tokens, counts, chunk))
        assert np.isfinite(out).all()
        for row, count in enumerate(counts):
            want = expected(state[row], of_row(tokens, row, count))
            assert_close(out[row, :count], want[0])
            assert_close(after[row], want[1])
            if count == 0:
                assert same_bits(after[row], state[row])


def test_without_the_correction_it_is_the_rule_of_mamba_2():
    """In chunks, and then in steps of up to six tokens, of which some are given back."""
    rng, heads = np.random.default_rng(3), HEADS[3]
    n_k, n_v, d_k, d_v = heads
    state, tokens, counts = random_state(rng, heads), random_tokens(rng, 65, heads), np.array([65, 64, 3, 40])
    run = jax.jit(lambda *args: scan_chunks(*args, corrects=False))
    out, after = map(np.asarray, run(state, masked(tokens, np.arange(65) < counts[:, None])))
    for row, count in enumerate(counts):
        want = expected(state[row], of_row(tokens, row, count), corrects=False)
        assert_close(out[row, :count], want[0])
        assert_close(after[row], want[1])
    shapes = (n_k, d_k), (n_v, d_v), (n_v,)
    recent = Recent(*(np.zeros((ROWS, SLOTS, *shape), np.float32) for shape in shapes))
    folded = lengths = counts
    stepped, kept = jax.jit(functools.partial(step, corrects=False)), [of_row(tokens, row, 0) for row in range(ROWS)]
    start = after
    for _ in range(8):
        new, valid = random_tokens(rng, 6, heads), np.arange(6) < rng.integers(0, 7, ROWS)[:, None]
        out, after, recent, folded = stepped(after, recent, folded, lengths, new, valid)
        for row, count in enumerate(valid.sum(axis=1)):
            both = Tokens(*map(np.concatenate, zip(kept[row], of_row(new, row, count), strict=True)))
            want = expected(start[row], both, corrects=False)[0]
            assert_close(np.asarray(out)[row, :count], want[len(want) - count :])
            back = rng.integers(0, count + 1) // 2
            kept[row] = Tokens(*(x[: len(want) - back] for x in both))
        lengths = counts + np.array([len(one.v) for one in kept])


def test_pieces_and_padding_change_no_bit():
    """A piece is a number of whole chunks. XLA compiles a program for each length."""
    rng, heads = np.random.default_rng(2), HEADS[3]
    state, tokens = random_state(rng, heads), random_tokens(rng, 129, heads)
    first, second = (jax.tree.map(lambda x, at=at: x[:, at], tokens) for at in (slice(64), slice(64, None)))
    every = np.full(ROWS, 129)
    out, after = chunks(state, tokens, every)
    one, middle = chunks(state, first, every)
    two, end = chunks(middle, second, every)
    np.testing.assert_array_equal(np.concatenate([one, two], axis=1), out)
    assert same_bits(end, after)
    assert same_bits(chunks(state, tokens, np.full(ROWS, 64))[1], middle)


class Simulation:
    """A batch, and of each row all tokens that it holds, for the loop in NumPy."""

    def __init__(self, rng, heads):
        n_k, n_v, d_k, d_v = heads
        self.start = random_state(rng, heads)
        self.start[:, :, :1] = -0.0  # adding a zero would change its sign
        shapes = (n_k, d_k), (n_v, d_v), (n_v,)
        self.state, self.recent = self.start, Recent(*(np.zeros((ROWS, SLOTS, *shape), np.float32) for shape in shapes))
        self.folded, self.lengths = (np.zeros(ROWS, np.int32) for _ in range(2))
        self.held = [jax.tree.map(lambda x: x[0], random_tokens(rng, 0, heads)) for _ in range(ROWS)]

    def extend(self, tokens, counts):
        """Return the outputs that are due in each row."""
        outs = []
        for row in range(ROWS):
            new = of_row(tokens, row, counts[row])
            self.held[row] = Tokens(*map(np.concatenate, zip(self.held[row], new, strict=True)))
            outs.append(expected(self.start[row], self.held[row])[0][self.lengths[row] :])
        self.lengths = self.lengths + counts.astype(np.int32)
        return outs

    def rewind(self, counts):
        self.lengths = self.lengths - counts.astype(np.int32)
        for row in range(ROWS):
            self.held[row] = Tokens(*(x[: self.lengths[row]] for x in self.held[row]))

    def keep(self, made):
        """Check what a step returned for the rows, and hold it."""
        _, state, recent, folded = made
        assert (folded >= self.folded).all()
        assert (folded <= self.lengths).all()
        assert (self.lengths - folded < SLOTS).all()
        self.state, self.recent, self.folded = state, recent, folded


compiled_step = jax.jit(step)


@jax.jit
def turn(state, recent, folded, lengths, tokens, valid):
    return scan_chunks(folded_all(state, recent, folded, lengths), masked(tokens, valid))


@pytest.mark.parametrize("group", quick([3], HEADS))
def test_steps_turns_and_rewinds_equal_the_loop(group):
    """A rewind changes only the length. The loop has never seen the tokens that were taken back."""
    rng, heads = np.random.default_rng(3), HEADS[group]
    batch, rewinds = Simulation(rng, heads), 0
    for number in range(60):
        kind = rng.choice(["step", "several", "turn"], p=[0.5, 0.4, 0.1])
        width = {"step": 1, "several": MOST, "turn": TURN}[kind]
        tokens = random_tokens(rng, width, heads)
        counts = np.minimum(rng.integers(0, 2 * width + 1, ROWS), width)
        arrays = batch.state, batch.recent, batch.folded, batch.lengths, tokens, np.arange(width) < counts[:, None]
        if kind == "turn":
            wants = batch.extend(tokens, counts)
            out, state = jax.tree.map(np.asarray, turn(*arrays))
            batch.state, batch.folded = state, batch.lengths
        else:
            before, made = arrays[:3], jax.tree.map(np.asarray, compiled_step(*arrays))
            wants, (out, state, recent, folded) = batch.extend(tokens, counts), made
            for row in range(ROWS):
                if counts[row] == 0:
                    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(made[1:]), strict=True):
                        assert same_bits(old[row], new[row])
                if folded[row] == before[2][row]:
                    assert same_bits(state[row], before[0][row])
                slots = np.delete(np.arange(SLOTS), (batch.lengths[row] - 1 - np.arange(counts[row])) % SLOTS)
                for old, new in zip(before[1], recent, strict=True):
                    assert same_bits(old[row, slots], new[row, slots])
            batch.keep(made)
        assert np.isfinite(out).all()
        for row in range(ROWS):
            assert_close(out[row, : counts[row]], wants[row])
        if number % 3 == 2:
            back = rng.integers(0, batch.lengths - batch.folded + 1)
            rewinds += np.count_nonzero(back)
            batch.rewind(back)
    assert rewinds > 30
    nothing = random_tokens(rng, TURN, heads), np.zeros((ROWS, TURN), bool)
    ends = jax.tree.map(np.asarray, turn(batch.state, batch.recent, batch.folded, batch.lengths, *nothing))
    for row in range(ROWS):
        assert_close(ends[1][row], expected(batch.start[row], batch.held[row])[1])


def test_a_step_folds_only_when_the_ring_would_be_full():
    """It then leaves half the ring."""
    rng, heads = np.random.default_rng(4), HEADS[3]
    batch, folded = Simulation(rng, heads), np.zeros(ROWS, int)
    for counts in ([1, 8, 5, 0], [7, 7, 3, 8], [7, 0, 8, 8], [1, 1, 0, 8], [8, 8, 8, 8], [1, 1, 0, 0]):
        tokens, counts = random_tokens(rng, MOST, heads), np.array(counts)
        valid = np.arange(MOST) < counts[:, None]
        made = compiled_step(batch.state, batch.recent, batch.folded, batch.lengths, tokens, valid)
        batch.extend(tokens, counts)
        batch.keep(jax.tree.map(np.asarray, made))
        folded = np.where(batch.lengths - folded >= SLOTS, batch.lengths - MOST, folded)
        np.testing.assert_array_equal(batch.folded, folded)
    assert len(set(folded)) > 1


def test_normalized():
    x = np.random.default_rng(5).standard_normal((3, 2, 8)).astype(np.float32)
    x[0, 0] = 0
    want = wide(x) / np.sqrt((wide(x) ** 2).sum(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(jax.jit(normalized)(x), want, rtol=1e-6)


def test_more_tokens_than_half_the_slots_are_refused():
    rng, heads = np.random.default_rng(6), HEADS[1]
    batch, tokens = Simulation(rng, heads), random_tokens(rng, MOST + 1, heads)
    valid = np.ones((ROWS, MOST + 1), bool)
    with pytest.raises(CapacityError, match="tokens must be at most 8, half the slots of recent, got 9"):
        step(batch.state, batch.recent, batch.folded, batch.lengths, tokens, valid)
