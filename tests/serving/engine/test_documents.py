"""Requests on stored documents: their rows share one prompt half, and answer as `generate(state=...)` does."""

import concurrent.futures
import dataclasses
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from byte_models import SHADOW
from serving_cases import CLASSES, OPTIONS, PARAMS, WARM, answers_of, engine_of, finish, offline, prompt_of, run

import jshadow
from jshadow import errors
from jshadow.engine.rows import RowSettings
from jshadow.engine.sampling import NO_TOKEN
from jshadow.errors import CheckpointError, ConfigError, DocumentError
from jshadow.policies import Full
from jshadow.serving import Request
from jshadow.serving.requests import DrawnToken

DOCUMENT = prompt_of(96, 5)
PIECE = OPTIONS.turn_chunk


def library_in(folder, params=PARAMS):
    return jshadow.Library(folder, params, SHADOW, capacity=CLASSES[1].capacity)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    with library_in(tmp_path_factory.mktemp("library")) as library:
        library.add(DOCUMENT)
        yield library


@pytest.fixture
def engine(library):
    """Its rows are those of the long class, so that all tests share their programs."""
    return engine_of(library=library, classes=CLASSES[1:])


def on_stored(library, request, count=96, room=CLASSES[1].room):
    """The tokens of `generate` on the stored state of the first `count` tokens of a prompt.

    A long question is read in other pieces than those of the engine.
    """
    key, question = library.longest(request.prompt[:count]).key, request.prompt[count:]
    new, settings, state = request.max_new_tokens, request.settings, library.load(key).with_room(room)
    if len(question) > PIECE:
        first = len(question) - PIECE
        padded = np.pad([question[:first]], ((0, 0), (0, PIECE - first)))
        state, question = jshadow.extend(PARAMS, padded, [first], state)[1], question[first:]
    draw = {"sampler": settings.sampler, "seed": settings.seed}
    return jshadow.generate(PARAMS, question, max_new_tokens=new, state=state, **draw).tokens


def answer_of(engine, *args, **settings):
    """The result of one request."""
    return answers_of(engine, [Request(*args, **settings)])[0]


def test_questions_on_a_document_share_its_prompt_half(library, engine):
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
    assert (report.rows_in_use, report.groups, report.counts.most_units) == (0, 1, OPTIONS.prompt_parts)


def test_rows_on_a_document_are_never_read_after_release_and_fail_alone(library, engine, poison_row_of):
    requests = [Request([*DOCUMENT, *prompt_of(2, row)], new) for row, new in enumerate((9, 3, 12, 5, 8, 4, 10, 7))]
    answers = [engine.submit(request) for request in requests]
    run(engine, answers[2], 2)
    poison_row_of(engine, answers[2])
    run(engine)
    with pytest.raises(errors.NumericalError, match="NaN"):
        answers.pop(2).result(0)
    for answer in answers:
        assert answer.result(0).tokens == on_stored(library, answer.request)


def test_a_prompt_whose_logits_are_nan_is_not_stored(library, engine):
    ids = prompt_of(40, 11)
    for new in (1, 5):
        with mock.patch("jshadow.serving.loop.read_drawn", return_value=[DrawnToken(NO_TOKEN)]):
            [answer] = [engine.submit(Request(ids, new, store=True, title="Harbor"))]
            run(engine)
        with pytest.raises(errors.NumericalError, match="prompt and 0 generated tokens"):
            answer.result(0)
        assert library.longest(ids) is None
    assert answer_of(engine, ids, 1, store=True).report.not_stored is None
    assert library.longest(ids).tokens == 40


def test_states_are_stored_when_asked(library, engine):
    """The state at the end of the answer, the last token included, is where the next turn begins."""
    first = prompt_of(70, 9)
    result = answer_of(engine, first, 5, store=True)
    assert result.report.not_stored is None
    held = [*first, *result.tokens]
    assert [library.longest(ids).tokens for ids in (first, held)] == [70, 75]
    turn = Request([*held, 7], 6, store=True)
    [follow] = answers_of(engine, [turn])
    assert follow.report.stored_tokens == 75
    # The four tokens that were fed after the prompt leave less room, and so the programs are those of other tests.
    assert follow.tokens == on_stored(library, turn, 75, CLASSES[1].room - 4)
    assert library.longest([*turn.prompt, *follow.tokens]).tokens == 75 + 1 + 6
    one = [*held, 5]
    tokens = answer_of(engine, one, 1, store=True).tokens  # its only token is the first one, which no step feeds
    assert library.longest([*one, *tokens]).tokens == 77
    # A request with a title stores its prompt alone.
    titled = prompt_of(91, 2)
    result = answer_of(engine, titled, 1, store=True, title="Harbor")
    new = library.longest([*titled, *result.tokens])
    assert new.key == result.report.stored.result(60)
    assert (new.title, new.ends, new.tokens) == ("Harbor", "document", 91)
    full = mock.Mock(side_effect=errors.CapacityError("the disk must have at most 1 byte, got 2"))
    with mock.patch.object(library, "start_store", full):
        report = answer_of(engine, prompt_of(80, 3), 2, store=True).report
    assert report.not_stored == "the disk must have at most 1 byte, got 2"


def test_a_damaged_state_fails_its_request_and_a_slow_one_holds_up_nobody(library, engine, monkeypatch):
    futures = [concurrent.futures.Future() for _ in range(2)]
    waiting = iter(futures)
    monkeypatch.setattr(library, "prepare", lambda key: next(waiting))
    damaged, slow = (engine.submit(Request([*DOCUMENT, token], 2)) for token in (5, 6))
    plain = Request(prompt_of(80, 8), 6)
    assert answers_of(engine, [plain])[0].tokens == offline(plain).tokens
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
    assert answers_of(engine, [request])[0].tokens == other.tokens
    assert [plan.document for plan in engine.plans] == [None, None]


def damage_file(path):
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def of_another_library(path):
    folder, doubled = path.parents[1] / "foreign", jax.tree.map(lambda leaf: 2 * np.asarray(leaf), PARAMS.weights)
    with library_in(folder, dataclasses.replace(PARAMS, weights=jax.device_put(doubled))) as foreign:
        foreign.add(DOCUMENT)
    [other] = [one for one in folder.rglob("*") if one.suffix == path.suffix]
    path.write_bytes(other.read_bytes())


LOST = [(Path.unlink, CheckpointError), (damage_file, CheckpointError), (of_another_library, errors.StateMismatch)]


@pytest.mark.parametrize(("lose", "error"), LOST, ids=["deleted", "damaged", "of another library"])
def test_a_file_that_is_lost_while_a_request_waits_fails_that_request(tmp_path, lose, error, monkeypatch):
    other = prompt_of(90, 6)  # its length is rounded up to that of DOCUMENT
    with library_in(tmp_path) as before:
        for document in (DOCUMENT, other):
            before.add(document)
    with library_in(tmp_path) as library:
        prepare, [path] = library.prepare, tmp_path.rglob(f"{library.longest(DOCUMENT).key}*")

        def prepare_later(key):
            """The file is lost after the request has found it."""
            if path.stem == key:
                lose(path)
            return prepare(key)

        monkeypatch.setattr(library, "prepare", prepare_later)
        engine = engine_of(library=library, classes=CLASSES[1:])
        requests = [Request([*DOCUMENT, 5], 3), Request([*other, 5], 3), Request(prompt_of(70, 4), 3)]
        lost, *good = [engine.submit(request) for request in requests]
        finish(engine)
        with pytest.raises(error):
            lost.result(0)
        assert good[0].result(0).tokens == on_stored(library, requests[1], 90)
        assert good[1].result(0).tokens == offline(requests[2]).tokens
        assert (engine.report().counts.failed, engine.report().rows_in_use) == (1, 0)


def test_a_read_that_failed_is_tried_again_and_a_damaged_file_is_read_anew(tmp_path):
    request = Request([*DOCUMENT, 5], 3)
    with library_in(tmp_path) as before:
        before.add(DOCUMENT)

    def outcome(engine):
        answer = engine.submit(request)
        finish(engine)
        return answer._error or (answer.result(0).tokens, answer.result(0).report.stored_tokens)

    with library_in(tmp_path) as library:
        engine, key = engine_of(library=library, classes=CLASSES[1:]), library.longest(DOCUMENT).key

        broken = CheckpointError("the file cannot be read: Input/output error")
        broken.__cause__ = OSError(5, "Input/output error")
        with mock.patch.object(library.files, "read", side_effect=broken):
            assert isinstance(outcome(engine), DocumentError)
        assert outcome(engine) == (on_stored(library, request), len(DOCUMENT))
    with library_in(tmp_path) as library:
        engine = engine_of(library=library)
        damage_file(library.files.directory.path(key))
        assert isinstance(outcome(engine), DocumentError)
        assert library.documents()[0].problem
        [whole] = answers_of(engine_of(), [request])
        assert outcome(engine) == (whole.tokens, 0)  # the whole prompt is read, and the damaged file is not


def test_only_rows_of_the_capacity_of_the_library_are_stored(library):
    """Of the classes that can hold a request, one with that capacity is picked, though a smaller one would do."""
    engine = engine_of(library=library)
    short = Request(prompt_of(9, 4), 2, store=True)
    [result] = answers_of(engine, [short])
    assert result.report.not_stored is None
    assert library.longest([*short.prompt, *result.tokens]).tokens == 11
    small = engine_of(library=library, classes=CLASSES[:1])
    other = engine_of(library=library, fetch="device_put")
    for call, error, match in (
        (lambda: small.submit(short), errors.CapacityError, r"capacity of the library, 384, got .* the capacity 48 "),
        (lambda: other.submit(short), ConfigError, "fetch mode of the library, 'resident', got 'device_put'"),
        (lambda: engine_of(params=dataclasses.replace(PARAMS), library=library), ConfigError, "params"),
        (lambda: engine_of(policy=Full(), library=library), ConfigError, "policy of the engine"),
    ):
        with pytest.raises(error, match=match):
            call()


def test_more_documents_than_are_read_ahead(tmp_path):
    """Four files are read at once, and here all of them are damaged. The engine sleeps until the next ones are read."""
    texts = [prompt_of(96, 50 + seed) for seed in range(6)]
    with library_in(tmp_path) as before:
        keys = [before.add(text).key for text in texts]
        for key in keys[:4]:
            damage_file(before.files.directory.path(key))
    with library_in(tmp_path) as library, engine_of(library=library, classes=CLASSES[1:], threaded=True) as engine:
        read = mock.Mock(side_effect=library.files.read)
        with mock.patch.object(library.files, "read", read):
            answers = engine.submit_all([Request([*text, 5], 3) for text in texts])
            assert [answer.result(60).report.stored_tokens for answer in answers[4:]] == [96, 96]
        for answer in answers[:4]:
            with pytest.raises(DocumentError):
                answer.result(60)
        assert [call.args[0] for call in read.call_args_list][4:] == keys[4:]


@pytest.mark.slow
def test_an_agent_session_of_twenty_turns_reads_each_token_once(tmp_path):
    """A turn has the session so far, with its answers, and a few new tokens. Each answer is stored."""
    with library_in(tmp_path) as library:
        engine, session, read = engine_of(library=library, classes=CLASSES[1:]), prompt_of(40), []
        for turn in range(20):
            asked = Request([*session, *prompt_of(1 + turn % 5, turn)], 4 + turn % 3, store=True)
            answer = engine.submit(asked)
            finish(engine)
            result = answer.result(0)
            assert result.report.not_stored is None
            result.report.stored.result()
            read.append(result.report.prompt_tokens - result.report.stored_tokens)
            session = [*asked.prompt, *result.tokens]
        assert read == [40 + 1, *(1 + turn % 5 for turn in range(1, 20))]
