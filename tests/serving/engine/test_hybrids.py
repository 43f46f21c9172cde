"""Rows of a model with a recurrent layer, whose state cannot be cut back: requests continue from whole stored ones."""

import dataclasses

import jax
import numpy as np
import pytest
from byte_models import SHADOW
from family_cases import family_config
from serving_cases import END, WARM, answers_of, engine_of, prompt_of, run
from tiny_text import byte_tokenizer

import jshadow
from jshadow import errors
from jshadow.cache.accounting import state_nbytes
from jshadow.cache.records import HostArray
from jshadow.engine.rows import RowSettings
from jshadow.library.tiers import size_of
from jshadow.planner.bytes import abstract_of
from jshadow.serving import Request, RowClass
from jshadow.serving.http.options import ServerOptions
from jshadow.serving.http.service import Service
from jshadow.weights.params import init_params

pytestmark = pytest.mark.slow
ONE, FETCH = RowClass(104, 24, 4), "device_put"
DOCUMENT = prompt_of(90, 5)


@pytest.fixture(scope="module")
def params():
    config = family_config("qwen3_5")
    sizes = {"num_layers": 2, "recurrent": dataclasses.replace(config.recurrent, layers=(0,))}
    config = dataclasses.replace(config, vocab_size=END + 1, eos_ids=(), **sizes)
    return dataclasses.replace(init_params(config, seed=3), tokenizer=byte_tokenizer())


@pytest.fixture(scope="module")
def library(params, tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    with jshadow.Library(folder, params, SHADOW, capacity=ONE.capacity, fetch=FETCH) as library:
        library.add(DOCUMENT)
        yield library


@pytest.fixture
def engine(params, library):
    return engine_of(params, classes=[ONE], library=library, fetch=FETCH)


def offline(params, request, state=None, read=0):
    """What `generate` answers to a prompt, of which a state may hold the first `read` tokens."""
    settings = request.settings
    options = {"sampler": settings.sampler, "seed": settings.seed, "stop": request.stop, "state": state}
    if state is None:
        options |= {"policy": SHADOW, "capacity": ONE.capacity, "fetch": FETCH}
    return jshadow.generate(params, request.prompt[read:], max_new_tokens=request.max_new_tokens, **options).tokens


def test_rows_come_and_go_and_a_prompt_that_several_ask_is_read_once(params, engine, poison_row_of):
    penal = RowSettings(WARM.sampler, seed=5, presence_penalty=1.5, repetition_penalty=1.3)
    first = Request(prompt_of(70, 1), 12)
    free = offline(params, first)
    stop = byte_tokenizer().decode(free[5:7])
    twins = [dataclasses.replace(first, settings=settings) for settings in (RowSettings(), WARM, penal)]
    requests = [*twins, dataclasses.replace(first, stop=stop), Request(prompt_of(60, 2), 20, penal)]
    requests += [Request(prompt_of(66 + row, row), 4 + 3 * row) for row in range(4)]
    answers = engine.submit_all(requests)
    run(engine, answers[2], 1)
    assert all(answer._pieces for answer in answers[:4])
    bad = engine.submit(Request(prompt_of(80, 9), 20))
    run(engine, bad, 2)
    poison_row_of(engine, bad)
    run(engine)
    with pytest.raises(errors.NumericalError, match="NaN"):
        bad.result(0)
    results = [answer.result(0) for answer in answers]
    for request, result in zip(requests, results, strict=True):
        [alone] = answers_of(engine, [request])
        assert result.tokens == alone.tokens
        if request.settings is not penal:
            assert result.tokens == offline(params, request)
    assert results[3].report.finish == "stop"
    assert len({tuple(result.tokens) for result in results[:4]}) == 4


def test_a_prompt_continues_from_the_longest_whole_state_at_its_beginning(params, engine, library):
    """A template may change an earlier turn. The report tells how many tokens were not read again."""
    first = Request([*DOCUMENT, *prompt_of(3, 7)], 6, store=True)
    [result] = answers_of(engine, [first])
    held, changed = [*first.prompt, *result.tokens], list(first.prompt) + result.tokens
    changed[-2] ^= 1
    for prompt, stored in (
        (held, len(first.prompt)),  # the last token of a prompt gives the first new one
        ([*held, 7], len(held)),
        ([*changed, 7], len(first.prompt)),
        ([*DOCUMENT, 1, *held[91:]], len(DOCUMENT)),
        ([*DOCUMENT[:-1], 1, *prompt_of(5, 2)], 0),
    ):
        request, state = Request(prompt, 5), None
        if stored:
            state = library.load(library.longest(prompt[:stored]).key).with_room(ONE.room - (stored - len(DOCUMENT)))
        [result] = answers_of(engine, [request])
        assert result.report.stored_tokens == stored
        assert result.tokens == offline(params, request, state, stored)


def test_the_bytes_of_recurrent_layers_are_admitted(params, engine, library):
    """Those of each row, and those of a stored document, are those of the arrays."""
    answers = [engine.submit(Request(prompt, 9)) for prompt in (prompt_of(70, 1), [*DOCUMENT, 7])]
    for answer in answers:
        run(engine, answer, 1)
    own, shared = sorted(engine._loop.groups, key=lambda group: group.base is not None)
    prompt = size_of(library.load(library.longest(DOCUMENT).key).reads())
    for group, more in ((own, (0, 0)), (shared, (prompt.device, prompt.host))):
        sizes, pool = group.plan.bytes, size_of(group.pool.state)
        settings = sum(leaf.nbytes for leaf in jax.tree.leaves(group.pool.rows))
        assert (sizes.rows.device + more[0], sizes.rows.host + more[1]) == (pool.device + settings, pool.host)
        assert sizes.shared == more
    run(engine)
    state = library.load(library.longest(DOCUMENT).key)
    sizes = state_nbytes(state)
    assert sizes == state_nbytes(abstract_of(state.specs, state.policy))
    r, k = params.config.recurrent, 4  # bytes of a float32
    heads = 2 * r.key_heads * r.key_dim + r.value_heads * r.value_dim
    ring = 32 * (r.key_heads * r.key_dim + r.value_heads * (r.value_dim + 1))
    numbers = r.value_heads * r.key_dim * r.value_dim + ring + (16 + r.taps - 1) * heads
    assert sizes["recurrent"] == (k * numbers + 4, 0)  # with the number of folded tokens
    assert not any(isinstance(leaf, HostArray) for leaf in jax.tree.leaves(state.layers[0]))
    assert np.asarray(state.layers[0].live.recurrent.folded).tolist() == [len(DOCUMENT)]
    gauge = Service(engine, library, ServerOptions("tiny")).gauge()  # one layer has keys and values
    assert gauge["full_attention_bytes"] == gauge["stored_tokens"] * 2 * params.config.key_columns * k
