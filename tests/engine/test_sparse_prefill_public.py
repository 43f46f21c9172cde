"""Sparse prefill as a user calls it: generate, stream, the commands; its bytes; and the real model's needles."""

import dataclasses
import json

import byte_models
import jax
import pytest
from cases import ALL, TINY, model, random_tokens
from layer_reading import memory_of_a_piece
from real_shapes import LLAMA_SHAPE, WIDE
from tiny_text import byte_tokenizer

import jshadow
from jshadow import AShape, BlockSparse, ShadowKV, VerticalSlash
from jshadow.cli.main import main
from jshadow.engine.prefill.layer import read_piece
from jshadow.engine.prefill.layer_run import LayerPlan
from jshadow.engine.sparse_prefill import load_pattern
from jshadow.engine.sparse_prefill.lines import HeadSizes
from jshadow.errors import ConfigError
from jshadow.evaluation.runner import evaluate
from jshadow.planner.bytes import prefill_peak
from jshadow.planner.prefill_pieces import pieces_of
from jshadow.policies import Full
from jshadow.weights.params import init_params

CONFIG = dataclasses.replace(byte_models.CONFIG, context=2048, eos_ids=(256,))
SMALL = VerticalSlash(vertical=9, slash=11, last_queries=8, first_columns=3, local_diagonals=5, block=16)
SMALL_TEXT = "vertical_slash:vertical=9:slash=11:last_queries=8:first_columns=3:local_diagonals=5:block=16"
TEXT = "a document of many words, " * 20
SHADOW = ShadowKV(rank=12, budget=64, outlier_chunks=2)


@pytest.fixture(scope="module")
def params():
    return dataclasses.replace(init_params(CONFIG, seed=3), tokenizer=byte_tokenizer())


@pytest.fixture(scope="module")
def checkpoint(params, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    jshadow.save(params, path)
    return str(path)


def test_generate_tells_what_it_applied(params):
    exact, covering, sparse = (
        jshadow.generate(params, TEXT, SHADOW, max_new_tokens=8, prefill=prefill)
        for prefill in (None, VerticalSlash(), SMALL)
    )
    assert covering.tokens == exact.tokens
    covered = f"vertical_slash (exact: it covers {len(TEXT)} tokens)"
    assert [made.report.prefill for made in (exact, covering, sparse)] == ["exact", covered, SMALL.label()]
    assert SMALL.label() in json.dumps(sparse.report.to_json())
    pieces = "".join(jshadow.stream(params, TEXT, SHADOW, max_new_tokens=8, prefill=SMALL))
    assert pieces == sparse.text


def test_verify_takes_it(params):
    made = jshadow.generate(params, TEXT, SHADOW, max_new_tokens=4, prefill=SMALL, verify=True)
    assert made.report.verified_steps == 3
    assert made.report.prefill == SMALL.label()


def test_a_state_has_its_prompt_already(params):
    read = jshadow.generate(params, TEXT, SHADOW, max_new_tokens=0, prefill=SMALL, capacity=1024)
    with pytest.raises(ConfigError, match="prefill must be None with a state"):
        jshadow.generate(params, "more", state=read.state, prefill=SMALL)
    more = jshadow.generate(params, "more", state=read.state, max_new_tokens=2)
    assert more.report.prefill is None


@pytest.mark.parametrize("prefill", ["vertical_slash", 3, VerticalSlash])
def test_what_is_no_attention_is_told(params, prefill):
    with pytest.raises(ConfigError, match="prefill must be a PrefillAttention"):
        jshadow.generate(params, TEXT, prefill=prefill)


# Commands


def run(capsys, *arguments, status=0):
    assert main([*arguments, "--json"]) == status
    out = capsys.readouterr()
    return out.err if status else json.loads(out.out)


def test_the_commands(checkpoint, capsys, tmp_path):
    """A pattern is searched, and applied by generate and eval; what they print says so."""
    (tmp_path / "text.txt").write_text(TEXT)
    pattern = str(tmp_path / "pattern.json")
    found = run(
        capsys,
        "prefill-patterns",
        checkpoint,
        "--text",
        str(tmp_path / "text.txt"),
        "--tokens",
        "512",
        "--out",
        pattern,
        "--share",
        "0.6",
        "--dtype",
        "float32",
    )
    assert found["candidates"][-1]["heads"] == 8
    digest = load_pattern(pattern).digest()
    assert found["digest"] == digest
    short = ["--prompt", TEXT, "--policy", "full", "--max-new-tokens", "3"]
    for text, label in (
        (SMALL_TEXT, SMALL.label()),
        (f"vertical_slash:pattern={pattern}", f"vertical_slash:pattern={digest}"),
    ):
        made = run(capsys, "generate", checkpoint, *short, "--prefill", text)
        assert made["results"][0]["report"]["prefill"] == label
    assert main(["generate", checkpoint, *short, "--prefill", "a_shape"]) == 0
    assert "a_shape" in capsys.readouterr().out
    tasks = ["--tasks", "needle_noise", "--lengths", "400", "--policies", "full", "--samples", "1"]
    for text in ("block_sparse:blocks=2", "exact"):
        rows = run(capsys, "eval", checkpoint, *tasks, "--prefill", text, "--out", str(tmp_path / "out"))["results"]
        assert rows[0]["prefill"] == text
    assert (
        len((tmp_path / "out" / "samples.jsonl").read_text().splitlines()) == 2
    )  # neither took the other's for its own


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prefill", "dense"], "prefill must be one of"),
        (["--prefill", "vertical_slash:vertical=0"], "vertical_slash.vertical"),
        (["--prefill", "vertical_slash:pattern=/nowhere"], "pattern: /nowhere"),
        (["--prefill", "a_shape", "--load-state", "some"], "--prefill must be left out with --load-state"),
    ],
)
def test_bad_options_are_told(checkpoint, arguments, words, capsys):
    assert words in run(capsys, "generate", checkpoint, "--prompt", TEXT, *arguments, status=2)


def test_a_pattern_of_another_model_is_refused(params, checkpoint, capsys, tmp_path):
    (tmp_path / "p.json").write_text(
        '{"format": "jshadow prefill pattern 1", "block": 64, "heads": [[["a_shape", 3, 4]]]}'
    )
    told = run(
        capsys,
        "generate",
        checkpoint,
        "--prompt",
        TEXT,
        "--prefill",
        f"vertical_slash:pattern={tmp_path}/p.json",
        status=2,
    )
    assert "pattern must be of this model, 2 layers of 4 query heads, got 1 of 1" in told
    for damaged in (
        '{"heads": []}',
        "[]",
        "no",
        '{"format": "jshadow prefill pattern 1"}',
        '{"format": "jshadow prefill pattern 1", "block": 64, "heads": [[["a_shape", 3, "4"]]]}',
        '{"format": "jshadow prefill pattern 1", "block": 64, "heads": [[7]]}',
    ):
        (tmp_path / "p.json").write_text(damaged)
        with pytest.raises(ConfigError, match="pattern"):
            load_pattern(tmp_path / "p.json")


def test_bad_searches_are_told(checkpoint, capsys, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    for text, tokens, words in (
        (tmp_path / "none", 64, "text must be readable"),
        (tmp_path / "text.txt", 9999, "tokens must lie in"),
    ):
        arguments = ["--text", str(text), "--tokens", str(tokens), "--out", str(tmp_path / "p.json")]
        assert words in run(capsys, "prefill-patterns", checkpoint, *arguments, status=2)
    assert not (tmp_path / "p.json").exists()


# One program, and its bytes


def test_one_program_serves_all_layers():
    """Sizes of a pattern are data: two patterns with the same largest sizes share a compiled layer too."""
    from jshadow.engine.sparse_prefill import HeadPattern, Pattern

    rows = [
        tuple(HeadPattern("vertical_slash", (size, 20)) for size in sizes) for sizes in ((9, 5, 3, 2), (2, 3, 7, 9))
    ]
    before = read_piece._cache_size()
    for heads in ((rows[0], rows[1], rows[0]), (rows[1], rows[1], rows[1])):
        attention = dataclasses.replace(SMALL, pattern=Pattern(heads, 16), local_diagonals=6)
        jshadow.prefill(model(TINY), random_tokens(1, 40), [40], Full(), capacity=64, attention=attention)
    assert read_piece._cache_size() == before + 1


@pytest.mark.parametrize(
    ("attention", "config", "tokens", "chunk"),
    [
        (VerticalSlash(vertical=500, slash=700), WIDE, 8192, 512),
        (VerticalSlash(), LLAMA_SHAPE, 16384, 1024),
        (AShape(initial=64, local=512), WIDE, 8192, 512),
        (BlockSparse(blocks=10), WIDE, 8192, 512),
        (VerticalSlash(vertical=500, slash=700, key_blocks=10), WIDE, 8192, 512),
    ],
    ids=["small", "llama", "a_shape", "block_sparse", "mixed"],
)
def test_the_compiled_layer_keeps_to_the_bound(attention, config, tokens, chunk):
    peak = prefill_peak(
        config,
        Full(),
        batch=1,
        tokens=tokens,
        capacity=tokens + 64,
        prefill_chunk=chunk,
        dtype="float32",
        fetch="resident",
        attention=attention,
    )
    count, size = pieces_of(tokens, chunk, attention.multiple)
    learned = jax.eval_shape(lambda: HeadSizes.equal(config.q_heads)) if attention.most_blocks else None
    plan = LayerPlan(config, config.attention_kind(0), needs_all=False, q_tail=0, size=size, attention=attention)
    memory = memory_of_a_piece(config, count * size, plan, learned)
    left = memory.output_size_in_bytes - peak["hidden"] - peak["keys_values"]  # positions, and what was chosen
    assert memory.temp_size_in_bytes + left <= peak["piece"]
    assert peak["piece"] < tokens * tokens * config.q_heads  # let alone four bytes of each score


# The real model


@pytest.mark.real
@pytest.mark.timeout(1800)
def test_needles_at_2k_with_a_sparse_prefill(smollm2_dir):
    """ShadowKV on a prompt taken in sparsely finds what it finds on one taken in exactly."""
    params = jshadow.load(smollm2_dir, dtype="float32")
    policy, found, samples = ShadowKV(rank=32, budget=256), [], 4 if ALL else 2
    for prefill in (None, VerticalSlash(vertical=500, slash=700)):
        rows = evaluate(
            params,
            ["needle_noise", "needle_docs"],
            [2048],
            [policy],
            samples=samples,
            fetch="resident",
            prefill=prefill,
        )
        own = [row for row in rows if row["name"] == "shadowkv"]
        found.append(sum(row["found"] for row in own))
        print([(row["task"], row["policy"], row["found"], row["asked"], row["prefill"]) for row in rows])
    assert found[0] >= 2 * samples * 0.75
    assert found[1] >= found[0] - 1
