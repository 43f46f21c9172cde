"""generate and stream: batches, stops, states that go on, reports that add up, and no compilation between tokens."""

import dataclasses
import gc
import re
import weakref

import jax
import numpy as np
import pytest
from byte_models import BARE, CONFIG, PARAMS, SHADOW

import jshadow
from jshadow.engine.report import CompileClock
from jshadow.errors import CapacityError, ConfigError, PromptError, StateMismatch
from jshadow.weights.params import init_params

PROMPTS = [np.random.default_rng(row).integers(0, 256, size).tolist() for row, size in enumerate((203, 57, 120))]


def test_a_batch_of_unequal_prompts_equals_its_rows_alone():
    batch = jshadow.generate(BARE, PROMPTS, SHADOW, max_new_tokens=6)
    assert [out.tokens for out in batch] == [
        jshadow.generate(BARE, prompt, SHADOW, max_new_tokens=6).tokens for prompt in PROMPTS
    ]


def test_stop_ids_end_a_row_and_leave_the_others():
    free = jshadow.generate(BARE, PROMPTS, SHADOW, max_new_tokens=8)
    stop = free[0].tokens[3]
    outs = jshadow.generate(BARE, PROMPTS, SHADOW, max_new_tokens=8, stop=[stop])
    for out, whole in zip(outs, free, strict=True):
        end = whole.tokens.index(stop) + 1 if stop in whole.tokens else 8
        assert out.tokens == whole.tokens[:end]


def test_the_models_own_end_tokens_stop():
    free = jshadow.generate(PARAMS, PROMPTS[0], jshadow.Full(), max_new_tokens=8)
    ending = dataclasses.replace(PARAMS, config=dataclasses.replace(CONFIG, eos_ids=(free.tokens[2], 5)))
    out = jshadow.generate(ending, PROMPTS[0], jshadow.Full(), max_new_tokens=8)
    first = free.tokens.index(free.tokens[2])
    assert out.tokens == free.tokens[: first + 1]
    assert out.text == PARAMS.tokenizer.decode(free.tokens[:first])


def test_a_stop_string_cuts_text_and_stream():
    free = jshadow.generate(PARAMS, "some text", jshadow.Full(), max_new_tokens=24)
    stop = free.text[3:6]
    out = jshadow.generate(PARAMS, "some text", jshadow.Full(), max_new_tokens=24, stop=stop)
    assert out.text == free.text[: free.text.index(stop)]
    pieces = list(jshadow.stream(PARAMS, "some text", jshadow.Full(), max_new_tokens=24, stop=stop))
    assert "".join(pieces) == out.text


def test_a_sampler_repeats_with_its_seed_only():
    sampler = jshadow.Sampler(temperature=1.5, top_k=50, top_p=0.95, min_p=0.01)

    def run(seed):
        return jshadow.generate(BARE, PROMPTS[1], jshadow.Full(), max_new_tokens=12, sampler=sampler, seed=seed).tokens

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert run(1) != run(1 + 2**32)


@pytest.mark.parametrize("policy", [jshadow.Full(), SHADOW], ids=["full", "shadowkv"])
def test_nothing_compiles_from_token_to_token_nor_within_a_bucket(policy):
    jshadow.generate(BARE, PROMPTS[0], policy, max_new_tokens=2)
    before = CompileClock.programs
    longer = jshadow.generate(BARE, PROMPTS[0][:-9], policy, max_new_tokens=20)
    assert CompileClock.programs == before
    assert longer.report.compile_seconds < 0.05  # looking a traced program up again is no compilation


def test_equal_models_share_their_programs():
    jshadow.generate(BARE, PROMPTS[0], SHADOW, max_new_tokens=2)
    other = init_params(dataclasses.replace(CONFIG), seed=4)
    before = CompileClock.programs
    jshadow.generate(other, PROMPTS[0], SHADOW, max_new_tokens=2)
    assert CompileClock.programs == before


@pytest.mark.parametrize("fetch", ["resident", "device_put"])
def test_the_report_adds_up(fetch):
    steps, layers, heads, dim, capacity = 7, 2, 2, 16, 256
    out = jshadow.generate(BARE, PROMPTS[0], SHADOW, max_new_tokens=steps + 1, capacity=capacity, fetch=fetch)
    report, chunks = out.report, 203 // 8 - 4
    assert (report.prompt_tokens, report.generated_tokens, report.fetch) == (203, 8, fetch)
    assert report.policy == SHADOW.resolve(CONFIG, capacity)
    window = np.mean([203 + step - chunks * 8 for step in range(1, steps + 1)])
    assert report.attended_tokens == pytest.approx(window + 2 * 8 + 64)
    assert 0 < report.hit_rate < 1
    host = (capacity // 8 - 4) * 8 * heads * dim * 4 * layers
    assert report.host_bytes == (host if fetch == "device_put" else 0)
    assert report.bytes_fetched == (steps * layers * heads * 64 * dim * 4 if fetch == "device_put" else 0)
    assert report.full_bytes == 2 * capacity * heads * dim * 4 * layers
    dense = jshadow.generate(BARE, PROMPTS[0], jshadow.Full(), max_new_tokens=2, capacity=capacity).report
    assert dense.device_bytes == dense.full_bytes == report.full_bytes
    assert dense.hit_rate is None
    assert dense.attended_tokens == 204
    assert report.fallback is None
    assert report.prefill_seconds > 0
    assert report.decode_tokens_per_second > 0
    assert report.to_json()["policy"]["name"] == "shadowkv"


def test_a_short_prompt_falls_back_and_says_so():
    out = jshadow.generate(BARE, PROMPTS[1][:20], max_new_tokens=4)
    assert out.report.policy == jshadow.Full()
    assert "nothing to select at capacity=64" in out.report.fallback
    assert out.tokens == jshadow.generate(BARE, PROMPTS[1][:20], jshadow.Full(), max_new_tokens=4).tokens


@pytest.mark.parametrize("policy", [jshadow.Full(), SHADOW], ids=["full", "shadowkv"])
def test_a_state_goes_on_where_the_answer_ended(policy):
    first = jshadow.generate(BARE, PROMPTS[0], policy, max_new_tokens=5, capacity=320)
    held = first.state
    assert held.lengths.tolist() == [208]
    kept = held.fork()
    turn = PROMPTS[2][:13]
    second = jshadow.generate(BARE, turn, state=held, max_new_tokens=6)
    logits, state = jshadow.extend(BARE, np.array([turn]), np.array([13]), kept)
    tokens = [int(np.argmax(logits))]
    for _ in range(5):
        logits, state = jshadow.decode_step(BARE, np.array(tokens[-1:]), state)
        tokens.append(int(np.argmax(logits)))
    assert second.tokens == tokens
    if policy == jshadow.Full():
        whole = jshadow.generate(BARE, PROMPTS[0] + first.tokens + turn, policy, max_new_tokens=6)
        assert second.tokens == whole.tokens
    with pytest.raises(StateMismatch, match="consumed"):
        jshadow.generate(BARE, turn, state=held, max_new_tokens=2)


def test_no_new_tokens_is_a_prefill_to_be_asked():
    """One document, two questions: what a fork answers is what the document with the question answers."""
    out = jshadow.generate(BARE, PROMPTS[0], SHADOW, max_new_tokens=0, capacity=320)
    assert (out.tokens, out.report.generated_tokens, out.report.attended_parts) == ([], 0, {})
    state = out.state
    assert state.lengths.tolist() == [203]
    answers = [jshadow.generate(BARE, turn, state=state.fork(), max_new_tokens=4) for turn in (PROMPTS[1][:7], [5])]
    for turn, answer in zip((PROMPTS[1][:7], [5]), answers, strict=True):
        logits, held = jshadow.prefill(BARE, [PROMPTS[0]], [203], SHADOW, capacity=320)
        logits, held = jshadow.extend(BARE, [turn], [len(turn)], held)
        assert answer.tokens[0] == int(logits.argmax())


@pytest.mark.parametrize("answer", ["fine", "fine\n"], ids=["open", "closed"])
def test_the_next_turn_of_a_chat_is_the_whole_chat(answer):
    """The end of the answer (a newline here) is added where the state lacks it, and only there."""
    ask, turn = [{"role": "user", "content": "one two three " * 12}], [{"role": "user", "content": "and four?"}]
    first = jshadow.generate(PARAMS, ask, jshadow.Full(), max_new_tokens=0, capacity=400)
    ids = PARAMS.tokenizer.encode(answer)
    _, state = jshadow.extend(PARAMS, [ids], [len(ids)], first.state)
    second = jshadow.generate(PARAMS, turn, state=state, max_new_tokens=6)
    chat = [*ask, {"role": "assistant", "content": "fine"}, *turn]
    whole = jshadow.generate(PARAMS, chat, jshadow.Full(), max_new_tokens=6, capacity=400)
    assert second.tokens == whole.tokens
    assert first.report.prompt_tokens + len(ids) + second.report.prompt_tokens == whole.report.prompt_tokens


def test_the_report_says_what_a_budget_means():
    """Nominal budget 64; really attended: selected, outliers, the end of the prompt, and what was generated."""
    report = jshadow.generate(BARE, PROMPTS[0], SHADOW, max_new_tokens=5, capacity=320).report
    chunks = 203 // SHADOW.chunk_size - SHADOW.local_chunks
    assert report.attended_parts == {
        "selected": float(min(SHADOW.budget, (chunks - SHADOW.outlier_chunks) * SHADOW.chunk_size)),
        "outliers": float(SHADOW.outlier_chunks * SHADOW.chunk_size),
        "window": float(203 - chunks * SHADOW.chunk_size),
        "generated": 4.0,
    }
    assert sum(report.attended_parts.values()) == report.attended_tokens + 1.5  # the mean is over four steps


def test_the_report_names_the_device_and_says_why_a_cache_is_large():
    """At 256 tokens this policy has more device bytes than full attention."""
    policy = dataclasses.replace(SHADOW, rank=32, budget=8)
    large = jshadow.generate(BARE, PROMPTS[0], policy, max_new_tokens=2, capacity=256).report
    assert (large.device_kind, large.dtype) == (jax.devices()[0].device_kind, "float32")
    assert large.device_bytes > large.full_bytes
    times = large.device_bytes / large.full_bytes
    start = (
        f"shadowkv takes {times:.2f} times the device bytes of full attention at capacity=256; its largest parts are "
    )
    part = r"[\w ]+ \([\d,]+ bytes\)"
    assert re.fullmatch(f"{re.escape(start)}{part} and {part}", large.large_cache)
    assert "rows that an offloading fetch mode keeps on the host" in large.large_cache
    small = jshadow.generate(BARE, PROMPTS[0], jshadow.Full(), max_new_tokens=2, capacity=256).report
    assert small.large_cache is None


def test_rows_of_a_batch_have_states_of_their_own():
    outs = jshadow.generate(BARE, PROMPTS, SHADOW, max_new_tokens=4, capacity=256)
    assert [out.state.lengths.tolist() for out in outs] == [[207], [61], [124]]


def test_a_closed_stream_frees_its_state():
    run = jshadow.stream(PARAMS, PROMPTS[0], SHADOW, max_new_tokens=40)
    next(run)
    frame = run.gi_frame.f_locals["loop"]
    leaf = weakref.ref(frame.state.layers[0].frozen.landmarks)
    del frame
    run.close()
    gc.collect()
    assert leaf() is None


BAD = {
    "fewer_than_no_tokens": (ConfigError, "max_new_tokens", {"max_new_tokens": -1}),
    "half_a_token": (ConfigError, "max_new_tokens", {"max_new_tokens": 1.5}),
    "over_the_context": (CapacityError, r"context=512 tokens, got 203 \+ 310", {"max_new_tokens": 310}),
    "over_the_capacity": (CapacityError, "capacity=210", {"capacity": 210, "max_new_tokens": 8}),
    "capacity_over_the_context": (CapacityError, "context=512", {"capacity": 600}),
    "not_a_sampler": (ConfigError, "sampler", {"sampler": "greedy"}),
    "unknown_fetch": (ConfigError, "fetch", {"fetch": "teleport"}),
    "no_name_of_a_fetch": (ConfigError, "fetch must be", {"fetch": np.ones(2)}),
    "capacity_in_words": (CapacityError, "capacity must be an integer", {"capacity": "many"}),
    "capacity_of_many": (CapacityError, "capacity must be an integer", {"capacity": np.array([256, 300])}),
    "seed_in_halves": (ConfigError, r"seed must be an integer .*got 1.5", {"seed": 1.5}),
    "no_seed": (ConfigError, "seed must be an integer", {"seed": None}),
    "seed_of_many_bits": (ConfigError, r"seed must be an integer in \[-2\*\*63, 2\*\*63\)", {"seed": 2**63}),
    "stop_in_halves": (ConfigError, "stop must be", {"stop": 1.5}),
    "not_a_state": (StateMismatch, "state must be a KVState.*got 'mine'", {"state": "mine"}),
    "empty_stop": (ConfigError, "stop", {"stop": ""}),
    "rank": (ConfigError, r"shadowkv.rank must be an integer in \[1, 32\], got 33", {"policy": jshadow.ShadowKV(33)}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_told_before_anything_runs(case):
    error, told, arguments = BAD[case]
    with pytest.raises(error, match=told):
        jshadow.generate(PARAMS, PROMPTS[0], **arguments)


@pytest.mark.parametrize(
    "settings",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": -1}],
)
def test_bad_sampler_values(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        jshadow.Sampler(**settings)


def test_what_cannot_be_streamed():
    with pytest.raises(PromptError, match="list of 2"):
        jshadow.stream(PARAMS, ["a", "b"])
    with pytest.raises(PromptError, match="no tokenizer"):
        jshadow.stream(BARE, [1, 2, 3])


def test_a_foreign_state_is_refused():
    state = jshadow.generate(BARE, PROMPTS[1], jshadow.Full(), max_new_tokens=2).state
    with pytest.raises(StateMismatch, match="policy"):
        jshadow.generate(BARE, PROMPTS[1][:4], SHADOW, state=state, max_new_tokens=2)
    with pytest.raises(StateMismatch, match="capacity"):
        jshadow.generate(BARE, PROMPTS[1][:4], state=state, capacity=300, max_new_tokens=2)
    with pytest.raises(StateMismatch, match="fetch must be the state's own 'resident'"):
        jshadow.generate(BARE, PROMPTS[1][:4], state=state, fetch="device_put", max_new_tokens=2)
    with pytest.raises(ConfigError, match="fetch must offload"):
        jshadow.generate(BARE, PROMPTS[1][:4], state=state, verify=True, max_new_tokens=2)
    with pytest.raises(StateMismatch, match="rows"):
        jshadow.generate(BARE, PROMPTS[:2], state=state, max_new_tokens=2)
    with pytest.raises(CapacityError, match="room"):
        jshadow.generate(BARE, PROMPTS[0], state=state, max_new_tokens=2)
