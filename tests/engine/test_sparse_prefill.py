"""Sparse prefill: the same as dense masks in NumPy, exact where it covers everything, and with less work."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_oracle as oracle
from cases import CAPACITY, LENGTHS, PROMPT, STEPS, TINY, model, policies_of, run_steps, setting
from sparse_runs import run_attention

from jshadow.cache.records import PromptKV
from jshadow.engine import decode
from jshadow.engine.sparse_prefill import (
    AShape,
    BlockSparse,
    HeadPattern,
    Pattern,
    VerticalSlash,
    base,
    parse_prefill,
    tiles,
)
from jshadow.errors import ConfigError
from jshadow.policies import Full
from jshadow.policies.prefill_attention import PrefillPiece

# Small settings, of which a prompt of some 100 tokens leaves most keys out.
SMALL = VerticalSlash(vertical=9, slash=11, last_queries=8, first_columns=3, local_diagonals=5, block=16)
MIXED = (
    HeadPattern("vertical_slash", (7, 9)),
    HeadPattern("a_shape", (4, 6)),
    HeadPattern("block_sparse", (2,)),
    HeadPattern("vertical_slash", (2, 20)),
)
ATTENTIONS = {
    "vertical_slash": SMALL,
    "large_blocks": dataclasses.replace(SMALL, block=64),
    "a_shape": AShape(initial=3, local=10, block=16),
    "block_sparse": BlockSparse(blocks=2, block=16),
    "pattern": dataclasses.replace(SMALL, pattern=Pattern((MIXED,), block=16)),
}
SHAPES = {"group1": (4, 4, 16), "group2": (4, 2, 16), "group4": (4, 1, 80), "group3": (6, 2, 32)}


def sized(q_heads, kv_heads, dim):
    return dataclasses.replace(TINY, num_layers=1, q_heads=q_heads, kv_heads=kv_heads, head_dim=dim)


def random_rows(config, lengths, tokens, dtype="float32", seed=0):
    """Queries and keys of which some stand out, values, zero padded; float32 of the dtype's own precision."""
    rng = np.random.default_rng(seed)
    shape = (len(lengths), tokens)
    q, k, v = (
        rng.normal(size=(*shape, heads, config.head_dim)).astype(np.float32)
        for heads in (config.q_heads, config.kv_heads, config.kv_heads)
    )
    k *= rng.uniform(0.5, 2.5, (*shape, config.kv_heads, 1)).astype(np.float32)
    real = (np.arange(tokens) < np.asarray(lengths)[:, None])[..., None, None]
    return tuple(jnp.asarray(np.where(real, x, 0), dtype) for x in (q, k, v))


def mask_of(attention, head, q, k, scale):
    """The oracle's mask of one head of one row: q, k [n, d]."""
    if isinstance(attention, AShape):
        return oracle.a_shape(len(q), attention.initial, attention.local)
    if isinstance(attention, BlockSparse):
        return oracle.block_sparse(q, k, attention.blocks, attention.block)
    sizes = (attention.vertical, attention.slash)
    if attention.pattern is not None:
        own = attention.pattern.heads[0][head]
        if own.kind == "a_shape":
            return oracle.a_shape(len(q), *own.sizes)
        if own.kind == "block_sparse":
            return oracle.block_sparse(q, k, *own.sizes, attention.block)
        sizes = own.sizes
    return oracle.vertical_slash(
        q, k, scale, *sizes, attention.last_queries, attention.first_columns, attention.local_diagonals
    )


def check_oracle(attention, config, lengths, tokens, dtype="float32", size=None, atol=1e-5):
    q, k, v = random_rows(config, lengths, tokens, dtype)
    out, aux = run_attention(attention, config, q, k, v, lengths, size)
    assert out.dtype == q.dtype
    q, k, v, out = (np.asarray(x, np.float64) for x in (q, k, v, out))
    scale, kept = config.attention_scale, 0
    for row, n in enumerate(lengths):
        for head in range(config.q_heads):
            its = q[row, :n, head], k[row, :n, head // config.group], v[row, :n, head // config.group]
            mask = mask_of(attention, head, *its[:2], scale)
            np.testing.assert_allclose(out[row, :n, head], oracle.attend(*its, mask, scale), atol=atol)
            kept += mask.sum() / (n * (n + 1) / 2) / len(lengths) / config.q_heads
    return kept, aux


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_oracle_agrees(name, shape):
    attention, config = ATTENTIONS[name], sized(*SHAPES[shape])
    if name == "pattern" and config.q_heads != 4:
        heads = (MIXED * 2)[: config.q_heads]
        attention = dataclasses.replace(attention, pattern=Pattern((heads,), block=16))
    tokens = 192 if attention.block == 64 else 144
    kept, _ = check_oracle(attention, config, (139, 77, 5, 16), tokens)
    assert kept < 0.9


@pytest.mark.parametrize("size", [16, 48])
@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name != "large_blocks"])
def test_every_piece_size_gives_the_same(name, size):
    check_oracle(ATTENTIONS[name], sized(4, 2, 16), (139, 77), 144, size=size)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_bfloat16(name):
    """The sets are chosen from float32 scores of the same bfloat16 numbers."""
    check_oracle(ATTENTIONS[name], sized(4, 2, 16), (139, 77), 192, dtype="bfloat16", atol=0.03)


# The lists of the kernel


@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_lists_of_the_kernel_give_the_same(name, monkeypatch):
    """So does the number of tiles. The kernel itself runs in `tests/kernels`."""
    config, tokens = sized(4, 2, 16), 192
    lengths, inputs = (139, 77), random_rows(sized(4, 2, 16), (139, 77), tokens)
    want, counts = run_attention(ATTENTIONS[name], config, *inputs, lengths, 64)
    monkeypatch.setattr(base, "Tiling", functools.partial(tiles.Tiling, implementation="interpret"))
    got, lists = run_attention(ATTENTIONS[name], config, *inputs, lengths, 64)
    for row, n in enumerate(lengths):
        np.testing.assert_allclose(got[row, :n], want[row, :n], atol=1e-5)
        assert not np.asarray(got[row, n:]).any()
    np.testing.assert_array_equal(lists.tiles, counts.tiles)
    assert (lists.ran <= counts.ran).all()


# Through the whole model


def logits_of(policy, attention, prompt=PROMPT, lengths=LENGTHS, **options):
    """All real logits of a prefill, and those of three steps on it."""
    options = {"capacity": CAPACITY, "logits": "all"} | options
    logits, state = decode.prefill(model(), prompt, lengths, policy, attention=attention, **options)
    steps, _ = run_steps(model(), state, STEPS[: len(lengths), :3])
    return [np.asarray(logits)[row, :n] for row, n in enumerate(lengths)], np.asarray(steps)


def close(mine, theirs, atol):
    return all(np.allclose(a, b, atol=atol) for a, b in zip([*mine[0], mine[1]], [*theirs[0], theirs[1]], strict=True))


# but for those that attend to a prompt in their own way, which refuse it
@pytest.mark.parametrize(
    "name", [name for name in policies_of("full", "h2o", "infinigen", "shadowkv") if not name.startswith("infllm")]
)
def test_every_policy_takes_it(name):
    """What covers everything changes nothing, through the tiles too; what does not, does.

    The prompt is padded to whole blocks, here to more tokens than a row may ever hold.
    """
    policy = setting(name, "restricted")
    want = logits_of(policy, None, capacity=66)
    assert close(logits_of(policy, dataclasses.replace(SMALL, vertical=62, block=96), capacity=66), want, 1e-4)
    assert not close(logits_of(policy, SMALL, capacity=66), want, 1e-2)


@pytest.mark.parametrize(
    "attention",
    [
        VerticalSlash(),
        dataclasses.replace(SMALL, slash=62),
        AShape(),
        AShape(initial=1, local=62, block=16),
        AShape(initial=62, local=1, block=16),
        BlockSparse(),
        dataclasses.replace(SMALL, pattern=Pattern(((HeadPattern("block_sparse", (4,)),) * 4,) * 3, block=16)),
    ],
)
def test_what_covers_everything_is_exact(attention):
    assert close(logits_of(Full(), attention), logits_of(Full(), None), 1e-5)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_row_alone_and_every_piece_through_the_model(name):
    attention = ATTENTIONS[name]
    if name == "pattern":
        attention = dataclasses.replace(attention, pattern=Pattern((MIXED, MIXED[::-1], MIXED), block=16))
    want = logits_of(Full(), attention)
    assert close(logits_of(Full(), attention, prefill_chunk=16), want, 1e-4)
    for row, n in enumerate(LENGTHS):
        own = PROMPT[row : row + 1, :n]
        logits, _ = decode.prefill(model(), own, [n], Full(), capacity=CAPACITY, logits="all", attention=attention)
        np.testing.assert_allclose(logits[0], want[0][row], atol=1e-4)


def test_sliding_layers_keep_their_window():
    """Only the others become sparse: with a window in all layers nothing changes."""
    config = dataclasses.replace(TINY, sliding_window=6, sliding_layers=(0, 1, 2))
    params = model(config)
    want, got = (
        decode.prefill(params, PROMPT, LENGTHS, Full(), capacity=CAPACITY, attention=attention)[0]
        for attention in (None, SMALL)
    )
    np.testing.assert_allclose(got, want, atol=1e-5)  # padded to another width


# Work


def counted(attention, tokens, seed=0):
    """Tiles that the heads of a random layer needed at most, and that were computed for each."""
    config = sized(4, 2, 16)
    q, k, v = random_rows(config, (tokens,), tokens, seed=seed)
    _, aux = run_attention(attention, config, q, k, v, (tokens,))
    return int(aux.tiles.max()), int(aux.ran.max())


@pytest.mark.parametrize(
    ("attention", "bound"),
    [
        # own block and the local diagonals': 2; each other diagonal crosses two blocks; the columns are one more tile
        (VerticalSlash(vertical=16, slash=7, last_queries=8, first_columns=3, local_diagonals=4, block=16), 2 + 6 + 1),
        (AShape(initial=16, local=33, block=16), 3 + 1),
        (BlockSparse(blocks=5, block=16), 5),
    ],
)
def test_work_follows_the_budget(attention, bound):
    """Twice the tokens are twice the tiles, not four times; and few of them."""
    blocks = [1024 // 16, 2048 // 16]
    needed, ran = zip(*(counted(attention, 16 * count) for count in blocks), strict=True)
    causal = [count * (count + 1) // 2 for count in blocks]
    assert all(tiles <= bound * count for tiles, count in zip(needed, blocks, strict=True))
    assert needed[1] < 2.2 * needed[0]
    # at most a turn of gathered keys more for each of the two loops
    assert all(tiles <= (bound + 64) * count for tiles, count in zip(ran, blocks, strict=True))
    assert needed[1] < 0.2 * causal[1]


def test_no_square_of_the_prompt():
    """Nothing in the compiled attention has as many numbers as a matrix of scores."""
    config, tokens = sized(2, 1, 16), 4096
    q, k, v = (jax.ShapeDtypeStruct((1, n, h, 16), jnp.float32) for n, h in ((tokens, 2), (tokens, 1), (tokens, 1)))
    attention = VerticalSlash(vertical=100, slash=200)

    def whole(q, k, v):
        lengths, kind = jnp.array([tokens]), config.attention_kind(0)
        prompt = PromptKV(k, k, v, lengths, jnp.arange(tokens)[None])
        aux = attention.begin(config, kind, prompt, q[:, -64:], None)
        return attention.attend(config, kind, PrefillPiece(q, q, jnp.int32(0), jnp.zeros(1)), prompt, aux)[0]

    program = jax.jit(whole).lower(q, k, v).compile()
    bound = attention.piece_bytes(config, 1, tokens, tokens)
    assert program.memory_analysis().temp_size_in_bytes < bound < 2 * tokens * tokens * 4


# Refusals


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: VerticalSlash(vertical=0), "vertical_slash.vertical must be an integer of at least 1"),
        (lambda: VerticalSlash(slash=True), "vertical_slash.slash"),
        (lambda: VerticalSlash(first_columns=-1), "vertical_slash.first_columns must be an integer of at least 0"),
        (lambda: VerticalSlash(pattern=3), "vertical_slash.pattern must be a Pattern"),
        (lambda: VerticalSlash(pattern="/nowhere.json"), "pattern: /nowhere.json must be a readable file"),
        (lambda: AShape(local=2.5), "a_shape.local"),
        (lambda: BlockSparse(block=0), "block_sparse.block"),
        (lambda: HeadPattern("dense", (1,)), "pattern: kind must be one of"),
        (lambda: HeadPattern("vertical_slash", (4, 0)), r"each at least 1, got \(4, 0\)"),  # no query sees a key
        (lambda: HeadPattern("a_shape", (1,)), r"pattern: sizes of a_shape must be \(initial, local\)"),
        (lambda: Pattern(()), "pattern: heads must not be empty"),
        (lambda: parse_prefill("dense"), "prefill must be one of"),
        (lambda: parse_prefill("a_shape:last=3"), "prefill must be a_shape:KEY=VALUE"),
        (lambda: parse_prefill("a_shape:local"), "prefill must be a_shape:KEY=VALUE"),
        (lambda: parse_prefill("a_shape:local=many"), "a_shape.local must be an integer"),
        (lambda: logits_of(Full(), "vertical_slash"), "prefill must be a PrefillAttention"),
        (lambda: logits_of(Full(), VerticalSlash(pattern=Pattern((MIXED,)))), "3 layers of 4 query heads, got 1 of 4"),
        (
            lambda: logits_of(Full(), VerticalSlash(pattern=Pattern((MIXED,) * 3, block=16))),
            "block must be the pattern's own 16, got 64",
        ),
    ],
)
def test_bad_settings_are_told(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_names_and_labels():
    for text in ("vertical_slash", "a_shape:local=10", "block_sparse:block=16:blocks=2"):
        assert parse_prefill(text).label() == text
    assert parse_prefill("exact") is None
    assert ATTENTIONS["pattern"].label().endswith(f"pattern={ATTENTIONS['pattern'].pattern.digest()}")
