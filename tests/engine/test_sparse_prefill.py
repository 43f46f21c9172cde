"""Sparse prefill: the same as dense masks in NumPy, exact where it covers everything, and with less work."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_oracle as oracle
from byte_models import BARE, PARAMS, SHADOW
from cases import CAPACITY, LENGTHS, PROMPT, STEPS, TINY, model, random_tokens, run_steps, setting
from few import slow
from sparse_runs import run_attention

import jshadow
from jshadow.cache.records import PromptKV
from jshadow.cli.main import main
from jshadow.engine import decode
from jshadow.engine.prefill.layer import read_piece
from jshadow.engine.sparse_prefill import AShape, HeadPattern, Pattern, VerticalSlash, load_pattern, parse_prefill
from jshadow.engine.sparse_prefill import attention as base
from jshadow.engine.sparse_prefill import attention as tiles
from jshadow.errors import ConfigError
from jshadow.evaluation.runner import evaluate
from jshadow.policies import Full, ShadowKV

# Small settings, of which a prompt of some 100 tokens leaves most keys out.
SMALL = VerticalSlash(vertical=9, slash=11, last_queries=8, first_columns=3, local_diagonals=5, block=16)
SMALL_TEXT = "vertical_slash:vertical=9:slash=11:last_queries=8:first_columns=3:local_diagonals=5:block=16"
KINDS = {"vertical_slash": ("vertical", "slash"), "a_shape": ("initial", "local")}
HEADS = [("vertical_slash", (7, 9)), ("a_shape", (4, 6)), ("a_shape", (1, 30)), ("vertical_slash", (2, 20))]
MIXED = tuple(HeadPattern(*head) for head in HEADS)
NAMES = {"vertical_slash": "vertical_and_slash", "a_shape": "stream_llm"}  # in the files of MInference
PUBLISHED = {str(number): [NAMES[kind], *sizes, 0.61] for number, (kind, sizes) in enumerate(HEADS)}
ATTENTIONS = {
    "vertical_slash": SMALL,
    "large_blocks": dataclasses.replace(SMALL, block=64),
    "a_shape": AShape(initial=3, local=10, block=16),
    "pattern": dataclasses.replace(SMALL, pattern=Pattern((MIXED,))),
}
SHAPES = {"group1": (4, 4, 16), "group2": (4, 2, 16), "group4": (4, 1, 80), "group3": (6, 2, 32)}


def sized(q_heads, kv_heads, dim):
    return dataclasses.replace(TINY, num_layers=1, q_heads=q_heads, kv_heads=kv_heads, head_dim=dim)


def random_rows(config, lengths, tokens, dtype="float32", seed=0):
    """Queries and keys of which some stand out, values, zero padded."""
    rng = np.random.default_rng(seed)
    shape = (len(lengths), tokens)
    q, k, v = (
        rng.normal(size=(*shape, heads, config.head_dim)).astype(np.float32)
        for heads in (config.q_heads, config.kv_heads, config.kv_heads)
    )
    k *= rng.uniform(0.5, 2.5, (*shape, config.kv_heads, 1)).astype(np.float32)
    real = (np.arange(tokens) < np.asarray(lengths)[:, None])[..., None, None]
    return tuple(np.where(real, x, 0).astype(jnp.dtype(dtype)) for x in (q, k, v))


def mask_of(attention, head, q, k, scale):
    """The oracle's mask of one head of one row: q, k [n, d]."""
    own = attention.pattern.heads[0][head] if getattr(attention, "pattern", None) else None
    kind = own.kind if own else attention.name
    sizes = own.sizes if own else [getattr(attention, name) for name in KINDS[kind]]
    if kind == "a_shape":
        return oracle.a_shape(len(q), *sizes)
    protected = attention.last_queries, attention.first_columns, attention.local_diagonals
    return oracle.vertical_slash(q, k, scale, *sizes, *protected)


ROWS, TOKENS = (139, 77, 5, 16), 192
CASES = [(name, "group2", 48, "float32") for name in ("vertical_slash", "pattern")]
MORE = [("a_shape", "group4", None), ("large_blocks", "group1", 64), ("pattern", "group3", 16)]
MORE += [("vertical_slash", "group4", None)]
CASES += [slow((*case, "float32")) for case in MORE]
CASES.append(slow(("pattern", "group2", None, "bfloat16")))


@pytest.mark.parametrize(("name", "shape", "size", "dtype"), CASES)
def test_the_oracle_agrees(name, shape, size, dtype):
    """Whatever the piece is, and whatever lies behind it. Sets are chosen from float32 scores of the same numbers."""
    attention, config = ATTENTIONS[name], sized(*SHAPES[shape])
    if name == "pattern" and config.q_heads != 4:
        heads = (MIXED * 2)[: config.q_heads]
        attention = dataclasses.replace(attention, pattern=Pattern((heads,)))
    q, k, v = random_rows(config, ROWS, TOKENS, dtype)
    out, _ = run_attention(attention, config, q, k, v, ROWS, size)
    assert out.dtype == q.dtype
    q, k, v, out = (np.asarray(x, np.float64) for x in (q, k, v, out))
    scale, kept = config.attention_scale, 0
    for row, n in enumerate(ROWS):
        for head in range(config.q_heads):
            its = q[row, :n, head], k[row, :n, head // config.group], v[row, :n, head // config.group]
            mask, atol = mask_of(attention, head, *its[:2], scale), 1e-5 if dtype == "float32" else 0.03
            np.testing.assert_allclose(out[row, :n, head], oracle.attend(*its, mask, scale), atol=atol)
            kept += mask.sum() / (n * (n + 1) / 2) / len(ROWS) / config.q_heads
    assert kept < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pattern", "large_blocks"])
def test_the_lists_of_the_kernel_give_the_same(name, monkeypatch):
    """So does the number of tiles. The kernel itself runs in `tests/kernels`."""
    config, lengths = sized(4, 2, 16), ROWS[:2]
    inputs = random_rows(config, lengths, TOKENS)
    want, counts = run_attention(ATTENTIONS[name], config, *inputs, lengths, 64)
    monkeypatch.setattr(base, "Tiling", functools.partial(tiles.Tiling, implementation="interpret"))
    fresh = dataclasses.replace(config, vocab_size=7)  # so that nothing compiled without the kernel is used
    got, lists = run_attention(ATTENTIONS[name], fresh, *inputs, lengths, 64)
    for row, n in enumerate(lengths):
        np.testing.assert_allclose(got[row, :n], want[row, :n], atol=1e-5)
        assert not got[row, n:].any()
    np.testing.assert_array_equal(lists.tiles, counts.tiles)
    assert (np.asarray(lists.ran) <= np.asarray(counts.ran)).all()


# Through the whole model


def logits_of(policy, attention, prompt=PROMPT, lengths=LENGTHS, **options):
    """All real logits of a prefill, and those of three steps on it."""
    options = {"capacity": CAPACITY, "logits": "all"} | options
    logits, state = decode.prefill(model(), prompt, lengths, policy, attention=attention, **options)
    steps, _ = run_steps(model(), state, STEPS[: len(lengths), :3])
    return [np.asarray(logits)[row, :n] for row, n in enumerate(lengths)], np.asarray(steps)


def close(mine, theirs, atol):
    return all(np.allclose(a, b, atol=atol) for a, b in zip([*mine[0], mine[1]], [*theirs[0], theirs[1]], strict=True))


# Every policy but those that attend to a prompt in their own way, which refuse it.
@pytest.mark.parametrize("name", ["full", *map(slow, ("h2o", "shadowkv"))])
def test_every_policy_takes_it(name):
    """What covers everything changes nothing, through the tiles too; what does not, does.

    The prompt is padded to whole blocks, here to more tokens than a row may ever hold.
    """
    policy = setting(name, "restricted")
    want = logits_of(policy, None)
    assert close(logits_of(policy, dataclasses.replace(SMALL, vertical=62, block=128)), want, 1e-4)
    assert not close(logits_of(policy, SMALL), want, 1e-2)


COVERING = [dataclasses.replace(SMALL, slash=62), AShape(initial=1, local=62, block=16)]
COVERING.append(dataclasses.replace(SMALL, pattern=Pattern(((HeadPattern("a_shape", (62, 1)),) * 4,) * 3)))


@pytest.mark.slow
@pytest.mark.parametrize("attention", COVERING)
def test_what_covers_everything_is_exact(attention):
    assert close(logits_of(Full(), attention), logits_of(Full(), None), 1e-5)


@pytest.mark.slow
def test_a_row_alone_and_every_piece_through_the_model():
    attention = dataclasses.replace(ATTENTIONS["pattern"], pattern=Pattern((MIXED, MIXED[::-1], MIXED)))
    want = logits_of(Full(), attention)
    assert close(logits_of(Full(), attention, prefill_chunk=16), want, 1e-4)
    for row, n in enumerate(LENGTHS):
        own = PROMPT[row : row + 1, :n]
        logits, _ = decode.prefill(model(), own, [n], Full(), capacity=CAPACITY, logits="all", attention=attention)
        np.testing.assert_allclose(logits[0], want[0][row], atol=1e-4)


@pytest.mark.slow
def test_sliding_layers_keep_their_window():
    """Only the others become sparse, and have a pattern. With a window in all layers nothing changes."""

    def logits_with(attention):
        return np.asarray(decode.prefill(params, PROMPT, LENGTHS, Full(), capacity=CAPACITY, attention=attention)[0])

    params = model(dataclasses.replace(TINY, sliding_window=6, sliding_layers=(0, 1, 2)))
    np.testing.assert_allclose(logits_with(SMALL), logits_with(None), atol=1e-5)  # padded to another width
    params = model(dataclasses.replace(TINY, sliding_window=6, sliding_layers=(0, 2)))
    assert np.isfinite(logits_with(dataclasses.replace(SMALL, pattern=Pattern((MIXED,) * 3)))).all()


# As a user calls it


TEXT = ("a document of many words, " * 9)[:203]  # the sizes of the tests of generate
OPTIONS = {"max_new_tokens": 8, "capacity": 256}


@pytest.mark.slow
def test_generate_tells_what_it_applied():
    prefills = (None, VerticalSlash(), SMALL)
    exact, covering, sparse = (jshadow.generate(PARAMS, TEXT, SHADOW, prefill=one, **OPTIONS) for one in prefills)
    assert covering.tokens == exact.tokens
    covered = f"vertical_slash (exact: it covers {len(TEXT)} tokens)"
    assert [made.report.prefill for made in (exact, covering, sparse)] == ["exact", covered, SMALL.label()]
    assert SMALL.label() in json.dumps(sparse.report.to_json())
    assert "".join(jshadow.stream(PARAMS, TEXT, SHADOW, prefill=SMALL, **OPTIONS)) == sparse.text
    checked = jshadow.generate(PARAMS, TEXT, SHADOW, prefill=SMALL, verify=True, **OPTIONS)
    assert (checked.report.verified_steps, checked.report.prefill) == (7, SMALL.label())
    more = jshadow.generate(PARAMS, "more", state=sparse.state, max_new_tokens=2)
    assert more.report.prefill is None  # the prompt was read before


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    jshadow.save(PARAMS, path)
    return str(path)


def run(capsys, *arguments, status=0):
    assert main([*map(str, arguments), "--json"]) == status
    out = capsys.readouterr()
    return out.err if status else json.loads(out.out)


@pytest.mark.slow
def test_the_commands(checkpoint, capsys, tmp_path):
    """A published pattern is applied by generate and eval; what they print says so."""
    pattern = tmp_path / "pattern.json"
    pattern.write_text(json.dumps([PUBLISHED] * PARAMS.config.num_layers))
    digest = load_pattern(pattern).digest()
    short = ["--prompt", TEXT, "--policy", "full", "--max-new-tokens", "3"]
    labels = {SMALL_TEXT: SMALL.label(), f"vertical_slash:pattern={pattern}": f"vertical_slash:pattern={digest}"}
    for setting_text, label in labels.items():
        made = run(capsys, "generate", checkpoint, *short, "--prefill", setting_text)
        assert made["results"][0]["report"]["prefill"] == label
    assert main(["generate", checkpoint, *short, "--prefill", "a_shape"]) == 0
    assert "a_shape" in capsys.readouterr().out
    tasks = ["--tasks", "needle_noise", "--lengths", "400", "--policies", "full", "--samples", "1"]
    out = tmp_path / "out"
    for setting_text in ("a_shape:initial=9:local=20", "exact"):
        rows = run(capsys, "eval", checkpoint, *tasks, "--prefill", setting_text, "--out", out)["results"]
        assert rows[0]["prefill"] == setting_text
    assert len((out / "samples.jsonl").read_text().splitlines()) == 2  # neither took the other's for its own


GENERATE = ["generate", "--prompt", TEXT, "--prefill"]


def test_bad_options_of_a_command_are_told(checkpoint, capsys):
    for arguments, words in (
        ([*GENERATE, "vertical_slash:vertical=0"], "vertical_slash.vertical"),
        ([*GENERATE, "a_shape", "--load-state", "some"], "--prefill must be left out with --load-state"),
    ):
        assert words in run(capsys, arguments[0], checkpoint, *arguments[1:], status=2)


# Work


def counted(attention, tokens):
    """Tiles that the heads of a random layer needed at most, and that were computed for each."""
    config = sized(4, 2, 16)
    _, aux = run_attention(attention, config, *random_rows(config, (tokens,), tokens), (tokens,))
    return int(np.max(aux.tiles)), int(np.max(aux.ran))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "bound"),
    [
        # own block and the local diagonals': 2; each other diagonal crosses two blocks; the columns are one more tile
        (VerticalSlash(vertical=16, slash=7, last_queries=8, first_columns=3, local_diagonals=4, block=16), 2 + 6 + 1),
        (AShape(initial=16, local=33, block=16), 3 + 1),
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


def operations(jaxpr, times=1):
    """Multiplications and additions of all matrix products. A loop counts as often as it runs."""
    total = 0
    for one in jaxpr.eqns:
        runs = times
        if one.primitive.name == "dot_general":
            (contracted, _), _ = one.params["dimension_numbers"]
            left = one.invars[0].aval.shape
            total += times * 2 * one.outvars[0].aval.size * math.prod(left[axis] for axis in contracted)
        elif one.primitive.name == "scan":
            runs = times * one.params["length"]
        for inner in jax.tree.leaves(one.params, is_leaf=lambda x: hasattr(x, "jaxpr")):
            found = operations(getattr(inner, "jaxpr", inner), runs) if hasattr(inner, "jaxpr") else 0
            assert not (found and one.primitive.name == "while"), "how often this loop runs is not known"
            total += found
    return total


def test_the_estimate_is_below_three_hundredths_of_exact_attention():
    """The last 64 queries by 8,192 keys, twice. Exact attention has half as many pairs as the square, and two products.

    The share halves with each doubling of the prompt.
    """
    config, attention, tokens = sized(4, 2, 64), VerticalSlash(), 8192
    rows = jax.ShapeDtypeStruct((1, tokens, 2, 64), jnp.float32)
    whole = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1,), (1, tokens)))
    tail = jax.ShapeDtypeStruct((1, attention.tail, 4, 64), jnp.float32)

    def begin(prompt, tail):
        return attention.begin(config, config.attention_kind(0), prompt, tail, None)

    found = operations(jax.make_jaxpr(begin)(PromptKV(rows, rows, rows, *whole), tail).jaxpr)
    assert found == 2 * 4 * 2 * 64 * tokens * 64
    assert found < 0.03 * 4 * 4 * 64 * tokens * (tokens + 1) / 2


@pytest.mark.slow
def test_one_program_serves_all_layers():
    """Sizes of a pattern are data: two patterns with the same largest sizes share a compiled layer too."""
    rows = [tuple(HeadPattern("vertical_slash", (size, 20)) for size in row) for row in ((9, 5, 3, 2), (2, 3, 7, 9))]
    before = read_piece._cache_size()
    for heads in ((rows[0], rows[1]), (rows[1], rows[1])):
        attention = dataclasses.replace(SMALL, pattern=Pattern(heads), local_diagonals=6)
        jshadow.prefill(BARE, random_tokens(1, 40), [40], Full(), capacity=64, attention=attention)
    assert read_piece._cache_size() == before + 1


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
        (lambda: AShape(block=0), "a_shape.block"),
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
    ],
)
def test_bad_settings_are_told(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_damaged_pattern_is_refused(tmp_path):
    heads = ('["stream_llm", 3, "4", 1]', "7", '["block_sparse", 100, 1, 1]', '["stream_llm", 3]', '["stream_llm"]')
    layers = [f'[{{"0": {head}}}]' for head in heads]
    gap, uneven = [{"0": ["stream_llm", 1, 1, 1], "2": ["stream_llm", 1, 1, 1]}], [PUBLISHED, {"0": PUBLISHED["0"]}]
    for damaged in ("{}", "[]", "no", "[[]]", "[{}]", "[3]", json.dumps(gap), json.dumps(uneven), *layers):
        (tmp_path / "p.json").write_text(damaged)
        with pytest.raises(ConfigError, match=r"pattern.*p\.json"):
            load_pattern(tmp_path / "p.json")


def test_a_published_pattern_is_read(tmp_path):
    """Heads come in any order of their numbers. The score of a head is not read."""
    (tmp_path / "p.json").write_text(json.dumps([dict(reversed(PUBLISHED.items())), PUBLISHED]))
    assert load_pattern(tmp_path / "p.json") == Pattern((MIXED, MIXED))
    sizes = load_pattern(tmp_path / "p.json").arrays()
    assert sizes.columns.tolist() == [[7, 4, 1, 2]] * 2
    assert sizes.diagonals.tolist() == [[9, 6, 30, 20]] * 2
    assert sizes.by_position.tolist() == [[0, 1, 1, 0]] * 2


def test_names_and_labels():
    for text in ("vertical_slash", "a_shape:local=10", "vertical_slash:block=16:vertical=2"):
        assert parse_prefill(text).label() == text
    assert parse_prefill("exact") is None
    assert ATTENTIONS["pattern"].label().endswith(f"pattern={ATTENTIONS['pattern'].pattern.digest()}")


# The real model


@pytest.mark.real
@pytest.mark.timeout(1800)
def test_needles_at_2k_with_a_sparse_prefill(smollm2_dir):
    """ShadowKV on a prompt taken in sparsely finds what it finds on one taken in exactly."""
    params = jshadow.load(smollm2_dir, dtype="float32")
    policy, found, samples = ShadowKV(rank=32, budget=256), [], 2
    for prefill in (None, VerticalSlash(vertical=500, slash=700)):
        options = {"prefill": prefill, "samples": samples, "fetch": "resident"}
        rows = evaluate(params, ["needle_noise", "needle_docs"], [2048], [policy], **options)
        own = [row for row in rows if row["name"] == "shadowkv"]
        found.append(sum(row["found"] for row in own))
    assert found[0] >= 2 * samples * 0.75
    assert found[1] >= found[0] - 1
