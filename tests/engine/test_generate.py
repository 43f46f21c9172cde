"""generate and stream: batches, stops, states that go on, reports that add up, and no compilation between tokens."""

import dataclasses
import functools
import gc
import re
import typing
import weakref

import jax
import numpy as np
import pytest
from byte_models import BARE, CONFIG, PARAMS, SHADOW
from few import slow
from tokenizers_by_kind import sentencepiece

import jshadow
from jshadow.engine import decode, generation
from jshadow.engine.generation import GenerationLoop, TokenSteps, step_and_sample
from jshadow.engine.options import GenerateKeywords, GenerateOptions
from jshadow.engine.report import CompileClock
from jshadow.errors import CapacityError, ConfigError, NumericalError, PromptError, StateMismatch
from jshadow.serving import Request
from jshadow.weights.params import init_params
from jshadow.weights.tokenizer import encode as encode_text

# One world: a prompt of 203 tokens alone, or with two others, and one capacity. Prompts of 193 to 256 tokens share
# programs.
FULL, CAPACITY, LONG = jshadow.Full(), 256, 203
PROMPTS = [np.random.default_rng(row).integers(0, 256, size).tolist() for row, size in enumerate((LONG, 57, 120))]
TEXT = ("some text " * 21)[:LONG]
TURN = PROMPTS[2][:27]
WARM = jshadow.Sampler(temperature=1.0)
policies = pytest.mark.parametrize("policy", [FULL, SHADOW], ids=["full", "shadowkv"])
samplers = pytest.mark.parametrize("sampler", [None, slow(WARM)], ids=["greedy", "sampled"])


def generate(prompt, policy=SHADOW, count=8, params=BARE, **options):
    return jshadow.generate(params, prompt, policy, max_new_tokens=count, **{"capacity": CAPACITY} | options)


def test_generate_and_its_options_and_a_request_have_the_same_defaults():
    """So `stream`, `generate` and the command line agree, and so does the serving engine."""
    keywords, fields = (typing.get_type_hints(one) for one in (GenerateKeywords, GenerateOptions))
    assert fields.items() >= keywords.items()
    assert Request("a").max_new_tokens == GenerateOptions().max_new_tokens
    with pytest.raises(TypeError, match="most_tokens"):
        jshadow.generate(BARE, "a", FULL, most_tokens=3)


alone = functools.cache(lambda policy=FULL, count=8, params=BARE: generate(PROMPTS[0], policy, count, params))
batch = functools.cache(lambda: generate(PROMPTS))


def test_a_batch_of_unequal_prompts_equals_its_rows_alone():
    """Each row has a state of its own. A stop id ends a row and leaves the others."""
    assert batch()[0].tokens == generate(PROMPTS[0]).tokens
    assert [out.state.lengths.tolist() for out in batch()] == [[LONG + 8], [65], [128]]
    stop = batch()[0].tokens[3]
    for out, whole in zip(generate(PROMPTS, stop=[stop]), batch(), strict=True):
        end = whole.tokens.index(stop) + 1 if stop in whole.tokens else 8
        assert out.tokens == whole.tokens[:end]


def test_the_models_own_end_tokens_stop():
    free = alone(params=PARAMS)
    ending = dataclasses.replace(PARAMS, config=dataclasses.replace(CONFIG, eos_ids=(free.tokens[2], 5)))
    out = generate(PROMPTS[0], FULL, params=ending)
    first = free.tokens.index(free.tokens[2])
    assert out.tokens == free.tokens[: first + 1]
    assert out.text == PARAMS.tokenizer.decode(free.tokens[:first])


def test_a_sampler_repeats_with_its_seed_only():
    sampler = jshadow.Sampler(temperature=1.5, top_k=50, top_p=0.95, min_p=0.01)
    one, again, *others = (
        generate(PROMPTS[0], FULL, 12, sampler=sampler, seed=seed).tokens for seed in (1, 1, 2, 1 + 2**32)
    )
    assert one == again
    assert one not in others


@policies
def test_nothing_compiles_from_token_to_token_nor_within_a_bucket(policy):
    alone(policy)
    other, before = init_params(dataclasses.replace(CONFIG), seed=4), CompileClock.programs
    longer = generate(PROMPTS[0][:-9], policy, 20)
    generate(PROMPTS[0], policy, params=other)  # equal models share their programs
    assert CompileClock.programs == before
    assert longer.report.compile_seconds < 0.05  # looking a traced program up again is no compilation


@pytest.mark.parametrize("fetch", ["resident", "device_put"])
def test_the_report_adds_up(fetch):
    """The nominal budget is 64; really attended: selected, outliers, the end of the prompt, and what was generated."""
    steps, layers, heads, dim = 7, 2, 2, 16
    report, chunks = generate(PROMPTS[0], count=steps + 1, fetch=fetch).report, LONG // 8 - 4
    assert (report.prompt_tokens, report.generated_tokens, report.fetch) == (LONG, 8, fetch)
    assert report.policy == SHADOW.resolve(CONFIG, CAPACITY)
    window = np.mean([LONG + step - chunks * 8 for step in range(1, steps + 1)])
    assert report.attended_tokens == pytest.approx(window + 2 * 8 + 64)
    parts = {"selected": 64.0, "outliers": 16.0, "window": float(LONG - chunks * 8), "generated": 7.0}
    assert report.attended_parts == parts
    assert sum(report.attended_parts.values()) == report.attended_tokens + 3  # the mean is over seven steps
    assert 0 < report.hit_rate < 1
    host = (CAPACITY // 8 - 4) * 8 * heads * dim * 4 * layers
    assert report.host_bytes == (host if fetch == "device_put" else 0)
    assert report.bytes_fetched == (steps * layers * heads * 64 * dim * 4 if fetch == "device_put" else 0)
    assert report.full_bytes == 2 * CAPACITY * heads * dim * 4 * layers
    assert report.fallback is None
    assert report.prefill_seconds > 0
    assert report.decode_tokens_per_second > 0
    assert (report.device_kind, report.dtype) == (jax.devices()[0].device_kind, "float32")
    assert report.to_json()["policy"]["name"] == "shadowkv"


def test_the_report_of_full_attention_and_of_a_large_cache():
    """With a prompt of 57 tokens beside it, every row has a window of nearly the whole capacity."""
    report = alone().report
    assert report.device_bytes == report.full_bytes == 2 * CAPACITY * 2 * 16 * 4 * 2
    assert report.attended_tokens == LONG + 4  # the mean over seven steps
    assert report.hit_rate is report.large_cache is None
    report = batch()[0].report
    assert report.device_bytes > report.full_bytes
    times = f"{report.device_bytes / report.full_bytes:.2f} times the device bytes of full attention"
    start = f"shadowkv takes {times} at capacity=256; its largest parts are "
    part = r"[\w ]+ \([\d,]+ bytes\)"
    assert re.fullmatch(f"{re.escape(start)}{part} and {part}", report.large_cache)
    assert "rows that an offloading fetch mode keeps on the host" in report.large_cache


def test_a_capacity_with_nothing_to_select_falls_back_and_says_so(tmp_path):
    out = generate(PROMPTS[0], None)
    assert (out.report.policy, out.state.policy) == (FULL, FULL)
    assert "nothing to select at capacity=256" in out.report.fallback
    assert out.tokens == alone().tokens
    # A chat passes its policy every turn, also where the capacity leaves it nothing to do.
    one, other = (
        jshadow.generate(BARE, TURN, policy, max_new_tokens=2, state=out.state.fork()).tokens
        for policy in (None, jshadow.ShadowKV())
    )
    assert one == other
    jshadow.save_state(tmp_path / "state", out.state, BARE)
    assert jshadow.load_state(tmp_path / "state", BARE, jshadow.ShadowKV()).policy == FULL
    with pytest.raises(StateMismatch, match="policy must be the state's own"):
        jshadow.generate(BARE, TURN, jshadow.StreamingLLM(sinks=1, window=2), max_new_tokens=2, state=out.state)


# States that go on


@policies
def test_a_state_goes_on_where_the_answer_ended(policy):
    first = generate(PROMPTS[0], policy, 5)
    held = first.state
    assert held.lengths.tolist() == [208]
    kept = held.fork()
    second = jshadow.generate(BARE, TURN, state=held, max_new_tokens=6)
    logits, state = jshadow.extend(BARE, np.array([TURN + [0] * 5]), np.array([27]), kept)
    tokens = [int(np.asarray(logits).argmax())]
    for _ in range(5):
        logits, state = jshadow.decode_step(BARE, np.array(tokens[-1:]), state)
        tokens.append(int(np.asarray(logits).argmax()))
    assert second.tokens == tokens
    if policy == FULL:
        assert second.tokens == generate(PROMPTS[0] + first.tokens + TURN, policy, 6).tokens
    with pytest.raises(StateMismatch, match="consumed"):
        jshadow.generate(BARE, TURN, state=held, max_new_tokens=2)


@pytest.mark.parametrize("answer", ["fine", "fine\n"], ids=["open", "closed"])
def test_the_next_turn_of_a_chat_is_the_whole_chat(answer):
    """The end of the answer (a newline here) is added where the state lacks it, and only there."""
    ask, turn = [{"role": "user", "content": TEXT[:-18]}], [{"role": "user", "content": "and four?"}]
    first = generate(ask, FULL, 0, PARAMS)  # a prefill
    assert (first.tokens, first.report.generated_tokens, first.report.attended_parts) == ([], 0, {})
    ids = PARAMS.tokenizer.encode(answer)
    _, state = jshadow.extend(PARAMS, [ids + [0] * (32 - len(ids))], [len(ids)], first.state)
    second = jshadow.generate(PARAMS, turn, state=state, max_new_tokens=6)
    whole = generate([*ask, {"role": "assistant", "content": "fine"}, *turn], FULL, 6, PARAMS)
    assert second.tokens == whole.tokens
    assert first.report.prompt_tokens + len(ids) + second.report.prompt_tokens == whole.report.prompt_tokens


@pytest.mark.slow
def test_generate_continues_shared_rows():
    document = generate(PROMPTS[0], count=0, fetch="device_put").state
    turns = [[9, 8], [4]]
    both = jshadow.generate(BARE, turns, state=document.share(2), max_new_tokens=4)
    for turn, answer in zip(turns, both, strict=True):
        own = jshadow.generate(BARE, turn, state=document.fork(), max_new_tokens=4)
        assert answer.tokens == own.tokens
        assert answer.report.attended_parts == own.report.attended_parts


def test_a_closed_stream_frees_its_state():
    run = jshadow.stream(PARAMS, PROMPTS[0], SHADOW, max_new_tokens=40, capacity=CAPACITY)
    next(run)
    frame = run.gi_frame.f_locals["loop"]
    leaf = weakref.ref(frame.state.layers[0].frozen.landmarks)
    del frame
    run.close()
    gc.collect()
    assert leaf() is None


# Refused arguments

BAD = [
    ({"max_new_tokens": -1}, ConfigError, "max_new_tokens"),
    ({"max_new_tokens": 1.5}, ConfigError, "max_new_tokens"),
    ({"max_new_tokens": 310}, CapacityError, r"context=512 tokens, got 203 \+ 310"),
    ({"capacity": 210, "max_new_tokens": 8}, CapacityError, "capacity=210"),
    ({"capacity": 600}, CapacityError, "context=512"),
    ({"capacity": np.array([256, 300])}, CapacityError, "capacity must be an integer"),
    ({"sampler": "greedy"}, ConfigError, "sampler"),
    ({"fetch": "teleport"}, ConfigError, "fetch"),
    ({"fetch": np.ones(2)}, ConfigError, "fetch must be"),
    ({"seed": 1.5}, ConfigError, r"seed must be an integer .*got 1.5"),
    ({"seed": None}, ConfigError, "seed must be an integer"),
    ({"seed": 2**63}, ConfigError, r"seed must be an integer in \[-2\*\*63, 2\*\*63\)"),
    ({"stop": 1.5}, ConfigError, "stop must be"),
    ({"stop": ""}, ConfigError, "stop"),
    ({"state": "mine"}, StateMismatch, "state must be a KVState.*got 'mine'"),
    ({"policy": jshadow.ShadowKV(33)}, ConfigError, r"shadowkv.rank must be an integer in \[1, 32\], got 33"),
    *(
        ({"prefill": wrong}, ConfigError, "prefill must be a PrefillAttention")
        for wrong in ("vertical_slash", jshadow.VerticalSlash, 3)
    ),
]
FOREIGN = [
    (TURN, {"policy": SHADOW}, StateMismatch, "policy"),
    (TURN, {"capacity": 300}, StateMismatch, "capacity"),
    (TURN, {"fetch": "device_put"}, StateMismatch, "fetch must be the state's own 'resident'"),
    (TURN, {"verify": True}, ConfigError, "fetch must offload"),
    (PROMPTS[:2], {}, StateMismatch, "rows"),
    (PROMPTS[0], {}, CapacityError, "room"),
    (TURN, {"prefill": jshadow.VerticalSlash()}, ConfigError, "prefill must be None with a state"),
    (TURN, {"fitted": {}}, ConfigError, "fitted must be left out with a state"),
]


@pytest.mark.parametrize(("arguments", "error", "told"), BAD)
def test_bad_arguments_are_told_before_anything_runs(arguments, error, told):
    with pytest.raises(error, match=told):
        jshadow.generate(PARAMS, PROMPTS[0], **arguments)


@pytest.mark.parametrize(("prompt", "arguments", "error", "told"), FOREIGN)
def test_a_foreign_state_is_refused(prompt, arguments, error, told):
    with pytest.raises(error, match=told):
        jshadow.generate(BARE, prompt, state=alone().state, max_new_tokens=2, **arguments)


def test_what_cannot_be_streamed():
    for arguments, told in (((PARAMS, ["a", "b"]), "list of 2"), ((BARE, [1, 2, 3]), "no tokenizer")):
        with pytest.raises(PromptError, match=told):
            jshadow.stream(*arguments)


# Steps that the device runs before the host has read the tokens


def without_running_ahead(monkeypatch):
    """Make each step wait until the host has read the tokens of the step before."""
    step = TokenSteps.next
    monkeypatch.setattr(TokenSteps, "next", lambda steps, *args, ahead: step(steps, *args, ahead=False))


@samplers
def test_running_ahead_changes_nothing(monkeypatch, sampler):
    free = generate(PROMPTS, sampler=sampler)
    # The rows end in different steps: one at its first token, one at its fourth, and one at the limit or before.
    stop = [free[0].tokens[0], free[1].tokens[3]]
    ahead = generate(PROMPTS, sampler=sampler, stop=stop)
    assert len({len(out.tokens) for out in ahead}) > 1
    without_running_ahead(monkeypatch)
    for mine, want in zip(ahead, generate(PROMPTS, sampler=sampler, stop=stop), strict=True):
        assert mine.tokens == want.tokens
        for field in ("attended_tokens", "hit_rate"):
            assert getattr(mine.report, field) == getattr(want.report, field)
        for one, other in zip(jax.tree.leaves(mine.state), jax.tree.leaves(want.state), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_step_is_dispatched_before_the_token_is_read(monkeypatch):
    order = []

    def note(owner, function, name):
        real = getattr(owner, function)
        monkeypatch.setattr(owner, function, lambda *args: order.append(name) or real(*args))

    note(TokenSteps, "_dispatch", "dispatch")
    note(GenerationLoop, "read_tokens", "read")
    generate(PROMPTS[0], FULL, 4)
    assert order == ["read", "dispatch", "dispatch", "read", "dispatch", "read", "read"]
    order.clear()
    generate(TEXT, FULL, 3, PARAMS, stop="never")  # the host alone finds a stop string
    assert order == ["read", "dispatch", "read", "dispatch", "read"]


def test_the_state_of_an_answer_compiles_nothing():
    """Its last token, also one that ends the row, is fed by the program of the steps."""
    for stop in (None, generate(PROMPTS[0], FULL, 3).tokens[2]):
        out = generate(PROMPTS[0], FULL, 4, stop=stop)
        before = step_and_sample._cache_size(), decode._step._cache_size()
        assert out.state.lengths.tolist() == [len(PROMPTS[0]) + len(out.tokens)]
        assert (step_and_sample._cache_size(), decode._step._cache_size()) == before


# What the state holds where a text stopped


def scripted(monkeypatch, texts):
    """Make the model answer each row with the given text, whatever its logits are."""
    answers = [PARAMS.tokenizer.encode(text) if isinstance(text, str) else text for text in texts]
    sample = GenerationLoop.read_tokens

    def read(loop, values, index, active):
        sample(loop, values, index, active)
        return np.array([answer[min(index, len(answer) - 1)] for answer in answers], np.int32)

    monkeypatch.setattr(GenerationLoop, "read_tokens", read)
    without_running_ahead(monkeypatch)  # the device does not know the script


@pytest.mark.parametrize("blank", ["prepend", "first", "never"])
@pytest.mark.parametrize("answer", [" today", "the sea", "  s e a", " "])
def test_an_answer_keeps_the_blank_that_it_begins_with(monkeypatch, blank, answer):
    """A tokenizer of SentencePiece takes the first blank of a text away, and an answer is no whole text."""
    tokenizer = sentencepiece(blank, None, size=200)
    params = dataclasses.replace(PARAMS, tokenizer=tokenizer)
    ids = encode_text(tokenizer, answer)
    scripted(monkeypatch, [ids])
    assert generate(PROMPTS[0], FULL, len(ids), params).text == answer
    assert "".join(jshadow.stream(params, PROMPTS[0], FULL, max_new_tokens=len(ids), capacity=CAPACITY)) == answer
    assert tokenizer.decode(encode_text(tokenizer, "the sea is", begins=True) + ids) == "the sea is" + answer


@policies
def test_the_state_ends_where_the_text_ends(monkeypatch, policy):
    scripted(monkeypatch, ["ab\n\nEND and more"])
    out = generate(TEXT, policy, 16, PARAMS, stop="\nEND")
    assert out.text == PARAMS.tokenizer.decode(out.tokens) == "ab\n"
    assert out.report.generated_tokens == 7
    state = out.state
    assert state.lengths.tolist() == [LONG + 3]
    assert out.state is state
    monkeypatch.undo()
    held = generate(TEXT, policy, 0, PARAMS).state
    for token in out.tokens:
        _, held = jshadow.decode_step(PARAMS, [token], held)
    want = jshadow.generate(PARAMS, TURN, state=held, max_new_tokens=5)
    assert jshadow.generate(PARAMS, TURN, state=state, max_new_tokens=5).tokens == want.tokens


def test_each_row_of_a_batch_ends_where_its_text_ends(monkeypatch):
    prompts = [TEXT, TEXT[:57], TEXT[:120]]
    for answers, texts in (
        (["aENDxxxx", "ENENDxxx", "abcdefgh"], ["a", "EN", "abcdefgh"]),
        (["abcdefEN", "END.....", "xxxxxEND"], ["abcdefEN", "", "xxxxx"]),
    ):
        with monkeypatch.context() as patch:
            scripted(patch, answers)
            outs = generate(prompts, SHADOW, 8, PARAMS, stop="END")
        assert [out.text for out in outs] == texts
        for out, prompt in zip(outs, prompts, strict=True):
            assert PARAMS.tokenizer.decode(out.tokens) == out.text
            assert out.state.lengths.tolist() == [len(prompt) + len(out.tokens)]
            assert out.state.last.tolist() == (out.tokens or PARAMS.tokenizer.encode(prompt))[-1:]


def test_a_state_is_forked_only_while_a_stop_string_may_begin(monkeypatch):
    """A stream returns no state. A special token as a stop string is its id."""
    forks, fork = [], jshadow.KVState.fork
    monkeypatch.setattr(jshadow.KVState, "fork", lambda state: forks.append(1) or fork(state))
    scripted(monkeypatch, [[*PARAMS.tokenizer.encode("abEcdeENfgh"), 256, 99]])
    out = generate(TEXT, FULL, 13, PARAMS, stop=["END", "<|end|>"])
    assert (out.text, out.tokens[-1], out.state.lengths.tolist(), len(forks)) == ("abEcdeENfgh", 256, [LONG + 12], 2)
    stop = {"stop": "eENf", "capacity": CAPACITY}
    forks.clear()
    assert "".join(jshadow.stream(PARAMS, TEXT, FULL, max_new_tokens=11, **stop)) == "abEcd"
    generate(TEXT, FULL, 11, PARAMS)
    assert not forks
    assert generate(TEXT, FULL, 11, PARAMS, **stop).text == "abEcd"


# Logits that are not numbers


@samplers
def test_logits_that_are_nan_are_an_error(monkeypatch, sampler):
    once = generation.sample_once
    with monkeypatch.context() as patch:
        wrong = np.array([[0], [np.nan], [0]], np.float32)
        patch.setattr(
            generation, "sample_once", lambda logits, *args, **named: once(np.asarray(logits) + wrong, *args, **named)
        )
        with pytest.raises(NumericalError, match=r"NaN in row 1 at step 0, .* follow the prompt"):
            generate(PROMPTS, sampler=sampler)
    options = GenerateOptions(policy=SHADOW, sampler=sampler, max_new_tokens=8, capacity=CAPACITY)
    loop = GenerationLoop(BARE, PROMPTS, options)
    tokens = iter(loop)
    for _ in PROMPTS:
        next(tokens)
    broken = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), BARE.weights)
    loop.steps.params = dataclasses.replace(BARE, weights=broken)
    with pytest.raises(NumericalError, match=r"NaN in row 0 at step 1, .* follow 1 generated"):
        next(tokens)
