"""The page at /, in headless Chromium."""

import asyncio
import contextlib

import pytest
from browser import NAMES, chromium, tab
from server_cases import listening, tiny_service, until

from jshadow.serving.http.answers import Chat
from jshadow.serving.http.keys import KeyLimits

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason=f"none of {NAMES} is installed"),
    pytest.mark.xdist_group("page"),
]
DOCUMENT = "The lighthouse of Eddy stands on a rock. Its lamp turns once in nine seconds. " * 2
GROWTH = """lengths = new Set();
new MutationObserver(() => lengths.add(document.querySelector('.answer').textContent.length))
  .observe(document.getElementById('talks'), {subtree: true, childList: true, characterData: true}); 0"""
DONE = "document.getElementById('stop').hidden"
EMPTY = "document.getElementById('headline').textContent.includes('Nothing held yet')"


def documents(count):
    """Whether so many documents are listed. The first of them is none."""
    return f"document.querySelectorAll('.document').length === {count + 1}"


@contextlib.contextmanager
def page_of(service, **settings):
    with listening(service) as server, tab(f"http://127.0.0.1:{server.address[1]}/", **settings) as page:
        yield page


def test_upload_ask_watch_reload(service, tmp_path):
    path = tmp_path / "lighthouse <i>.txt"
    path.write_text(DOCUMENT)
    with page_of(service) as page:
        page.wait(EMPTY)
        page.choose_file("#file", path)
        page.wait(documents(1))
        page.wait("document.getElementById('talk-title').textContent === 'lighthouse <i>.txt'")  # it is chosen
        page.wait("/^1 document, 1[0-9][0-9] tokens/.test(document.getElementById('held-note').textContent)")
        page.run(GROWTH)
        page.enter("question", "How fast?")
        page.wait(f"document.querySelector('.note') && {DONE}")
        assert page.run("lengths.size") > 3  # the answer grew in steps
        cached, prompt = map(int, page.text("#cached").split(" of "))
        assert cached >= len(DOCUMENT)
        assert "–" not in (page.text("#first"), page.text("#rate"))
        page.enter("question", "And who?")
        page.wait(f"document.querySelectorAll('article .note')[1]?.textContent.includes('cached') && {DONE}")
        assert int(page.text("#cached").split(" of ")[1]) > prompt  # the second prompt has the first answer in it
        page.call("Page.reload")
        page.wait(documents(1))
        assert not page.problems
        assert all(page.names())
        page.click(".document button")
        assert page.text(".document button .word") == "Really remove?"
        page.click(".document button")
        page.wait(documents(0))


def test_errors_are_told_in_words(service, tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("a" * 900)
    with page_of(service, width=360, dark=True) as page:
        page.choose_file("#file", path)
        page.wait("document.querySelector('#uploads .wrong .state')?.textContent.includes('got 906')")
        page.click("#uploads button")
        assert page.of("uploads", "childElementCount") == 0
        page.enter("question", "b" * 700)
        page.wait("document.getElementById('problem').textContent.includes('got 7')")
        assert page.of("question", "value") == "b" * 700
        assert page.run("document.querySelectorAll('article').length") == 0
        assert page.run("document.documentElement.scrollWidth") == 360
        assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 23)"


def test_stop_keeps_what_was_said_and_markup_stays_text(service, monkeypatch):
    whole = Chat.events

    async def held(self):
        async for chunk in whole(self):
            if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                chunk["choices"][0]["delta"]["content"] = "<i id='made'>said</i>"
                yield chunk
                await asyncio.sleep(60)
            yield chunk

    monkeypatch.setattr(Chat, "events", held)
    with page_of(service) as page:
        page.enter("question", "Well?")
        page.wait("document.querySelector('.answer')?.textContent")
        page.click("#stop")
        page.wait(f"{DONE} && document.querySelector('.note').textContent.startsWith('stopped')")
        assert page.text(".answer") == "<i id='made'>said</i>"
        assert page.run("document.getElementById('made')") is None
        until(lambda: not service.open)  # the server has noticed it


def test_a_key_is_asked_for_and_kept_and_a_large_file_refused(tmp_path):
    path = tmp_path / "large.txt"
    path.write_text("a" * 200)
    with (
        tiny_service(tmp_path / "library", api_keys={"right": KeyLimits()}, upload_bytes=100) as service,
        page_of(service) as page,
    ):
        page.wait("!document.getElementById('key').hidden")
        page.enter("key-text", "wrong")
        page.wait("document.getElementById('state').textContent.includes('refuses')")
        page.enter("key-text", "right")
        page.wait("document.getElementById('key').hidden && document.getElementById('model').textContent")
        page.call("Page.reload")
        page.wait("document.readyState === 'complete' && document.getElementById('model').textContent")
        assert page.of("key", "hidden")
        page.wait(EMPTY)
        page.choose_file("#file", path)
        page.wait("document.querySelector('#uploads .wrong .state')?.textContent.includes('at most 100 B')")
