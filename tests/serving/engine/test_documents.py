"""Requests on stored documents: their rows share one prompt half, and answer as `generate(state=...)` does."""

import concurrent.futures
import dataclasses
import time

import jax
import numpy as np
import pytest
from serving_cases import CLASSES, PARAMS, SHADOW, SYNC, WARM, answers_of, engine_of, offline, poison, prompt_of, run

import jshadow
from jshadow.engine.rows.settings import RowSettings
from jshadow.errors import CapacityError, CheckpointError, ConfigError, DocumentError, NumericalError, StateMismatch
from jshadow.policies import Full
from jshadow.serving import Engine, Request
from jshadow.serving.groups import Group

DOCUMENT = prompt_of(96, 5)
PIECE = SYNC.turn_chunk


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    with jshadow.Library(tmp_path_factory.mktemp("library"), PARAMS, SHADOW, capacity=CLASSES[1].capacity) as library:
        library.add(DOCUMENT)
        yield library


def on_stored(library, request, count=96):
    """The tokens of `generate` on the stored state of the first `count` tokens of a prompt.

    A long question is read in other pieces than those of the engine.
    """
    key, question = library.longest(request.prompt[:count]).key, request.prompt[count:]
    settings, state = request.settings, library.load(key).with_room(CLASSES[1].room)
    if len(question) > PIECE:
        first = len(question) - PIECE
        padded = np.pad([question[:first]], ((0, 0), (0, PIECE - first)))
        state, question = jshadow.extend(PARAMS, padded, [first], state)[1], question[first:]
    return jshadow.generate(
        PARAMS,
        question,
        max_new_tokens=request.max_new_tokens,
        sampler=settings.sampler,
        seed=settings.seed,
        state=state,
    ).tokens


def test_questions_on_a_document_share_its_prompt_half(library):
    engine = engine_of(library=library)
    warm = RowSettings(WARM.sampler, seed=3)
    questions = [
        Request([*DOCUMENT, *prompt_of(length, 7)], 30 - length, settings)
        for length, settings in [(1, RowSettings()), (20, RowSettings()), (4, warm), (5, RowSettings()), (4, warm)]
    ]
    plain = Request(prompt_of(80, 8), 6)
    answers = [engine.submit(request) for request in [*questions, plain]]
    shared = set()
    while engine.run_once():
        for group in engine._loop.groups:
            if group.base is not None and group.pool is not None:
                assert group.pool.state.shares_prompt
                shared |= {id(leaf) for leaf in jax.tree.leaves(group.pool.state.reads())}
    stored = jax.tree.leaves(library.load(library.longest(DOCUMENT).key).reads())
    assert shared == {id(leaf) for leaf in stored}  # held once, by the library
    for request, answer in zip(questions, answers, strict=False):
        assert answer.result(0).tokens == on_stored(library, request)
        assert answer.result(0).report.stored_tokens == len(DOCUMENT)
    assert answers[-1].result(0).tokens == offline(plain).tokens
    report = engine.report()
    assert (report.rows_in_use, report.groups, report.counts.most_units) == (0, 1, 1)


def test_rows_on_a_document_are_never_read_after_release_and_fail_alone(library, monkeypatch):
    """All free rows are filled with NaN whenever one is freed, and one active row is."""
    engine, release = engine_of(library=library), Group.release

    def release_and_poison(group, slot):
        release(group, slot)
        for free in np.flatnonzero([job is None for job in group.jobs]):
            poison(group, free)

    monkeypatch.setattr(Group, "release", release_and_poison)
    news = (9, 3, 12, 5, 8, 4, 10, 7)
    requests = [Request([*DOCUMENT, *prompt_of(2, row)], new) for row, new in enumerate(news)]
    answers = [engine.submit(request) for request in requests]
    bad = answers[2]
    while len(bad._pieces) < 2:
        assert engine.run_once()
    group = next(one for one in engine._loop.groups if any(job and job.answer is bad for job in one.jobs))
    poison(group, [job and job.answer for job in group.jobs].index(bad))
    run(engine)
    with pytest.raises(NumericalError, match="NaN"):
        bad.result(0)
    for request, answer in zip(requests, answers, strict=True):
        assert answer is bad or answer.result(0).tokens == on_stored(library, request)


def test_states_are_stored_when_asked(library):
    """The state at the end of the answer, the last token included, is where the next turn begins."""
    engine = engine_of(library=library)
    first = Request(prompt_of(70, 9), 5, store=True)
    answer = engine.submit(first)
    run(engine)
    result = answer.result(0)
    assert result.report.not_stored is None
    held = [*first.prompt, *result.tokens]
    assert [library.longest(ids).tokens for ids in (first.prompt, held)] == [70, 75]
    turn = Request([*held, *prompt_of(3, 1)], 6, store=True)
    follow = engine.submit(turn)
    run(engine)
    assert follow.result(0).report.stored_tokens == 75
    assert follow.result(0).tokens == on_stored(library, turn, 75)
    assert library.longest([*turn.prompt, *follow.result(0).tokens]).tokens == 75 + 3 + 6
    one = Request([*held, 5], 1, store=True)  # its only token is the first one, which no step feeds
    tokens = answers(engine, one)
    assert library.longest([*one.prompt, *tokens]).tokens == 77


def test_a_titled_request_stores_its_prompt_alone(library):
    engine = engine_of(library=library)
    before = {stored.key for stored in library.documents()}
    answer = engine.submit(Request(prompt_of(61, 2), 1, store=True, title="Harbor"))
    run(engine)
    key = answer.result(0).report.stored.result(60)
    [new] = [stored for stored in library.documents() if stored.key not in before]
    assert (new.key, new.title, new.ends, new.tokens) == (key, "Harbor", "document", 61)
    with pytest.raises(ConfigError, match="title must be None without store"):
        Request([3], title="Harbor")


def answers(engine, request):
    answer = engine.submit(request)
    run(engine)
    return answer.result(0).tokens


def test_a_state_that_cannot_be_stored_is_told(library, monkeypatch):
    engine = engine_of(library=library)

    def refuse(*_):
        raise CapacityError("the disk must have at most 1 byte, got 2")

    monkeypatch.setattr(library, "start_store", refuse)
    answer = engine.submit(Request(prompt_of(80, 3), 2, store=True))
    run(engine)
    assert answer.result(0).report.not_stored == "the disk must have at most 1 byte, got 2"


def test_a_damaged_state_fails_its_request_and_a_slow_one_holds_up_nobody(library, monkeypatch):
    engine = engine_of(library=library)
    futures = [concurrent.futures.Future() for _ in range(2)]
    waiting = iter(futures)
    monkeypatch.setattr(library, "prepare", lambda key: next(waiting))
    damaged, slow = (engine.submit(Request([*DOCUMENT, token], 2)) for token in (5, 6))
    plain = Request(prompt_of(80, 8), 6)
    assert answers(engine, plain) == offline(plain).tokens
    assert not slow.done
    futures[0].set_exception(CheckpointError("the file must have its digest, got another"))
    futures[1].set_result(None)
    run(engine)
    with pytest.raises(CheckpointError, match="digest"):
        damaged.result(0)
    assert slow.result(0).tokens == on_stored(library, slow.request)


def test_a_document_without_room_for_the_answer_is_read_anew(library):
    """The prompt and its answer fit no row of the document, but a row of a class."""
    engine = engine_of(library=library)
    request = Request([*DOCUMENT, *prompt_of(60, 2)], 10)
    [other] = answers_of(engine_of(), [request])
    assert answers(engine, request) == other.tokens
    assert np.all([plan.document is None for plan in engine.plans])


def finish(engine):
    """Run an engine to its end. A turn without work waits for the threads that read files."""
    while engine.run_once() or engine.report().waiting:
        time.sleep(0)


@pytest.mark.parametrize("damage", ["deleted", "damaged", "of another library"])
def test_a_file_that_is_lost_while_a_request_waits_fails_that_request(tmp_path, damage, monkeypatch):
    settings = {"params": PARAMS, "policy": SHADOW, "capacity": CLASSES[1].capacity}
    other = prompt_of(90, 6)  # its length is rounded up to that of DOCUMENT
    with jshadow.Library(tmp_path, **settings) as before:
        for document in (DOCUMENT, other):
            before.add(document)
    with jshadow.Library(tmp_path, **settings) as library:
        prepare = library.prepare

        def prepare_later(key):
            """The file is lost after the request has found it."""
            [path] = tmp_path.rglob(f"{library.longest(DOCUMENT).key}*")
            if damage == "deleted":
                path.unlink()
            elif damage == "damaged":
                path.write_bytes(path.read_bytes()[:-1] + b"!")
            else:
                with jshadow.Library(tmp_path / "foreign", PARAMS, Full(), capacity=CLASSES[1].capacity) as foreign:
                    foreign.add(DOCUMENT)
                [foreign_path] = [one for one in (tmp_path / "foreign").rglob("*") if one.suffix == path.suffix]
                path.write_bytes(foreign_path.read_bytes())
            monkeypatch.undo()
            return prepare(key)

        monkeypatch.setattr(library, "prepare", prepare_later)
        engine = engine_of(library=library)
        requests = [Request([*DOCUMENT, 5], 3), Request([*other, 5], 3), Request(prompt_of(70, 4), 3)]
        lost, *good = [engine.submit(request) for request in requests]
        finish(engine)
        with pytest.raises(StateMismatch if damage == "of another library" else CheckpointError):
            lost.result(0)
        assert good[0].result(0).tokens == on_stored(library, good[0].request, 90)
        assert good[1].result(0).tokens == offline(good[1].request).tokens
        report = engine.report()
        assert (report.counts.failed, report.rows_in_use) == (1, 0)


def test_a_read_that_failed_is_tried_again_and_a_damaged_file_is_read_anew(tmp_path, monkeypatch):
    settings = {"params": PARAMS, "policy": SHADOW, "capacity": CLASSES[1].capacity}
    request = Request([*DOCUMENT, 5], 3)
    with jshadow.Library(tmp_path, **settings) as before:
        before.add(DOCUMENT)

    def outcome(engine):
        answer = engine.submit(request)
        finish(engine)
        return answer._error or (answer.result(0).tokens, answer.result(0).report.stored_tokens)

    with jshadow.Library(tmp_path, **settings) as library:
        engine, key = engine_of(library=library), library.longest(DOCUMENT).key

        def broken(*_):
            raise CheckpointError("the file cannot be read: Input/output error") from OSError(5, "Input/output error")

        with monkeypatch.context() as disk:
            disk.setattr(library.files, "read", broken)
            assert isinstance(outcome(engine), DocumentError)
        again = outcome(engine)
        assert again == (on_stored(library, request), len(DOCUMENT))
    with jshadow.Library(tmp_path, **settings) as library:
        engine, path = engine_of(library=library), library.files.directory.path(key)
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        assert isinstance(outcome(engine), DocumentError)
        assert library.documents()[0].problem
        [whole] = answers_of(engine_of(), [request])
        assert outcome(engine) == (whole.tokens, 0)  # the whole prompt is read, and the damaged file is not


def test_only_rows_of_the_capacity_of_the_library_are_stored(library):
    """Of the classes that can hold a request, one with that capacity is picked, though a smaller one would do."""
    engine = engine_of(library=library)
    short = Request(prompt_of(9, 4), 2, store=True)
    result = engine.submit(short)
    run(engine)
    assert result.result(0).report.not_stored is None
    assert library.longest([*short.prompt, *result.result(0).tokens]).tokens == 11
    small = engine_of(library=library, classes=CLASSES[:1])
    with pytest.raises(CapacityError, match=r"capacity of the library, 384, got .* the capacity 48 "):
        small.submit(short)
    other = engine_of(library=library, options=dataclasses.replace(SYNC, fetch="device_put"))
    with pytest.raises(ConfigError, match="fetch mode of the library, 'resident', got 'device_put'"):
        other.submit(short)


def test_a_library_must_be_of_the_engine(library):
    other = dataclasses.replace(PARAMS)
    for params, policy, match in ((other, SHADOW, "params"), (PARAMS, Full(), "policy of the engine")):
        with pytest.raises(ConfigError, match=match):
            Engine(params, policy, classes=CLASSES, library=library)
