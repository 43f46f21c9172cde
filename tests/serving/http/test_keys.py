"""API keys: their file, which is read again, and the limits of each."""

import os
import random

import pytest
from server_cases import CHAT, COMPLETION, NAME, client_of, error_of

from jshadow.errors import CheckpointError
from jshadow.serving.http.keys import ApiKeys, KeyLimits, digest_of, read_keys

MODELS = "/v1/models"


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def test_keys_and_limits_are_read_from_a_file(tmp_path):
    path = tmp_path / "keys"
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        path.write_text("# ours\n\n first \nsecond requests=60\ttokens=9\nthird open=1\n", encoding=encoding)
        want = {"first": KeyLimits(), "second": KeyLimits(requests=60, tokens=9), "third": KeyLimits(open=1)}
        assert read_keys(path) == want


WRONG = {
    "# none\n": "at least one API key",
    "a\nb jobs=1\n": "line 2 of .* must have a key and limits, each once .requests=NUMBER.* got 'jobs=1'",
    "a open=1 open=2\n": "each once .* got 'open=2'",
    "a open=-1\n": "got 'open=-1'",
    "a open\n": "got 'open'",
    "a open=0\n": "line 1 of .*: open must be an integer of at least 1, got 0",
    "a\n\na open=1\n": "line 3 of .* must have another key than each line before it",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_is_refused_and_the_keys_stay(tmp_path, text, caplog):
    path, clock = tmp_path / "keys", Clock()
    path.write_text("first\n")
    keys = ApiKeys(read_keys(path), path, clock)
    path.write_text(text)
    with pytest.raises(CheckpointError, match=WRONG[text]):
        read_keys(path)
    clock.now += 2
    keys.look()
    assert keys.knows(b"bearer", digest_of(b"first"))
    assert "the API keys stay as they were" in caplog.text
    assert "first" not in caplog.text


def test_a_changed_file_is_read_again(tmp_path):
    path, clock = tmp_path / "keys", Clock()
    path.write_text("first open=1\n")
    keys = ApiKeys(read_keys(path), path, clock)
    first, second = digest_of(b"first"), digest_of(b"second")
    assert keys.begin(first) is None
    path.write_text("second\n")
    keys.look()  # too early
    assert keys.knows(b"bearer", first)
    clock.now += 2
    keys.look()
    assert [keys.knows(b"bearer", one) for one in (first, second)] == [False, True]
    keys.end(first)  # the open request ends as it began
    path.write_text("first open=2\n")
    os.utime(path, (1, 1))
    clock.now += 2
    keys.look()
    assert keys.limits == {first: KeyLimits(open=2)}
    path.unlink()
    clock.now += 2
    keys.look()
    assert keys.knows(b"bearer", first)


def test_limits_hold_at_random():
    """Beside a plain count of the last minute, in 4,000 events of two keys."""
    rng, clock = random.Random(3), Clock()
    limits = {"a": KeyLimits(requests=5, open=3, tokens=40), "b": KeyLimits(requests=9)}
    keys = ApiKeys(limits, None, clock)
    begun = {name: [] for name in limits}
    spent = {name: [] for name in limits}
    held = dict.fromkeys(limits, 0)
    refused = dict.fromkeys(("open", "requests", "tokens"), 0)
    for _ in range(4000):
        name = rng.choice("ab")
        most, digest, clock.now = limits[name], digest_of(name.encode()), clock.now + rng.choice((0, 0, 0.5, 9))
        if held[name] and rng.random() < 0.5:
            keys.end(digest)
            keys.spend(digest, count := rng.randrange(15))
            held[name] -= 1
            spent[name].append((clock.now, count))
            continue
        last = clock.now - 60
        used = {
            "open": held[name],
            "requests": sum(at > last for at in begun[name]),
            "tokens": sum(count for at, count in spent[name] if at > last),
        }
        over = [one for one, value in used.items() if getattr(most, one) is not None and value >= getattr(most, one)]
        error = keys.begin(digest)
        assert (error is not None) == bool(over)
        if error is None:
            begun[name].append(clock.now)
            held[name] += 1
            continue
        assert f"{over[0]}={getattr(most, over[0])}" in str(error)
        refused[over[0]] += 1
        if over[0] == "tokens":  # after the seconds that the client is told, it may ask
            later = clock.now + error.retry - 60
            assert sum(count for at, count in spent[name] if at > later) < most.tokens
            assert error.retry <= 60
    assert min(refused.values()) > 20


@pytest.fixture
def limited(service, monkeypatch):
    """A client of a server with two keys, the limits of the first, and the clock."""
    clock = Clock()

    def make(**limits):
        monkeypatch.setattr(service, "keys", ApiKeys({"one": KeyLimits(**limits), "other": KeyLimits()}, None, clock))
        return client_of(service)

    return make, clock


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def test_a_key_beyond_its_requests_waits_and_others_do_not(limited):
    make, clock = limited
    with make(requests=2) as client:
        codes = [client.get(MODELS, headers=bearer("one")).status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        clock.now += 20
        answer = client.get(MODELS, headers=bearer("one"))
        assert error_of(answer) == (429, "rate_limit_exceeded")
        assert answer.headers["retry-after"] == "40"
        assert "requests=2 a minute, 2 have begun" in answer.json()["error"]["message"]
        assert client.get("/health", headers=bearer("one")).status_code == 200
        assert client.get(MODELS, headers=bearer("other")).status_code == 200
        clock.now += 40
        assert client.get(MODELS, headers=bearer("one")).status_code == 200


def test_tokens_of_answers_and_of_documents_count(limited):
    make, clock = limited
    with make(tokens=30) as client:
        body = {"model": NAME, "prompt": [5] * 10, "max_tokens": 6, "temperature": 0, "logit_bias": {"256": -100}}
        for held in (16, 32):
            assert client.post(COMPLETION, json=body, headers=bearer("one")).status_code == 200, held
        refused = client.post(COMPLETION, json=body, headers=bearer("one"))
        assert "tokens=30 a minute, 32 were used" in refused.json()["error"]["message"]
        clock.now += 61
        upload = {"files": {"file": ("a.txt", b"The lamp of the harbor burns.")}, "data": {"purpose": "user_data"}}
        assert client.post("/v1/files", headers=bearer("one"), **upload).status_code == 200
        chat = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        assert client.post(CHAT, json=chat, headers=bearer("one")).status_code == 429
        assert client.post(CHAT, json=chat, headers=bearer("other")).status_code == 200
