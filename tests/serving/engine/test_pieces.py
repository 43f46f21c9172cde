"""Answers while they arrive: pieces of text, and the threads that read them."""

import threading

import pytest
from serving_cases import THREADED, WARM, answers_of, engine_of, offline, prompt_of, random_requests, run

from jshadow.engine.rows.settings import RowSettings
from jshadow.errors import ConfigError, ServingError
from jshadow.serving import Request


def test_stop_strings_and_pieces_of_text():
    engine = engine_of()
    free = offline(Request(prompt_of(70, 4), 16, WARM))
    stop = free.text[3:5]
    request = Request(prompt_of(70, 4), 16, WARM, stop=stop)
    answer, heard = engine.submit(request), []
    answer.listen(lambda: heard.append((len(answer.since(0)[0]), answer.complete)))
    busy = engine.report().counts.busy_seconds
    run(engine)
    got, want = answer.result(0), offline(request)
    assert (got.tokens, got.text) == (want.tokens, want.text)
    count = got.report.generated_tokens
    assert heard == [(place, False) for place in range(1, count + 1)] + [(count, True)]
    assert answer.since(count - 1) == (list(answer)[-1:], True)
    assert engine.report().counts.busy_seconds > busy
    assert engine.failure is None
    assert got.report.finish == "stop"
    assert "".join(piece.text for piece in answer) == got.text == free.text[: free.text.index(stop)]
    end = Request(prompt_of(70, 4), 16, WARM, stop=free.tokens[2])
    assert answers_of(engine, [end])[0].tokens == offline(end).tokens


def test_threads_submit_and_read_at_once():
    """The engine runs in its own thread; four others submit, stream and cancel."""
    requests, got = random_requests(12, seed=2), {}
    with engine_of(options=THREADED) as threaded:

        def client(part):
            for place in part:
                answer = threaded.submit(requests[place])
                pieces = [piece.token for piece in answer]
                got[place] = answer.result(60).tokens
                assert pieces == got[place]

        clients = [threading.Thread(target=client, args=(range(start, 12, 4),)) for start in range(4)]
        for one in clients:
            one.start()
        for one in clients:
            one.join()
        late = [threaded.submit(Request(prompt_of(100, seed), 16)) for seed in range(2)]
        with pytest.raises(TimeoutError):
            late[1].result(0)
    assert all(len(answer.result(0).tokens) == 16 for answer in late)  # they were drained
    engine = engine_of()
    assert got == {place: answers_of(engine, [request])[0].tokens for place, request in enumerate(requests)}
    with pytest.raises(ServingError, match="closed"):
        threaded.submit(Request([3], 1))
    with pytest.raises(ConfigError, match=r"options\.threaded"):
        threaded.run_once()


def test_requests_with_one_prompt_read_it_once():
    engine, prompt = engine_of(), prompt_of(70, 4)
    settings = [RowSettings(WARM.sampler, seed) for seed in range(5)]
    requests = [Request(prompt, new, one) for new, one in zip((25, 19, 1, 25, 18), settings, strict=True)]
    longer, other = Request(prompt, 28, settings[1]), Request(prompt_of(70, 5), 5)
    parts = engine.report().counts.units
    answers = [engine.submit(request) for request in (*requests, longer, other)]
    run(engine)
    assert [answer.result(0).tokens for answer in answers] == [offline(answer.request).tokens for answer in answers]
    # Four rows are enough for five answers: that of one token is complete at once. The longer one reads for itself.
    assert engine.report().counts.units - parts == 3 * units_of(engine, prompt)


def units_of(engine, prompt):
    """The number of turns that the reading of a prompt takes."""
    before = engine.report().counts.units
    engine.submit(Request(prompt, 1))
    run(engine)
    return engine.report().counts.units - before
