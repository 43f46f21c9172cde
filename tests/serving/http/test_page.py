"""The page at /, in headless Chromium."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest
import uvicorn
from browser import NAMES, chromium, tab
from server_cases import tiny_service

from jshadow.serving.http.chat import Chat
from jshadow.serving.http.run import config_of

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


@contextlib.contextmanager
def running(service):
    """The URL of a server over a service, in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(config_of(service, "127.0.0.1", 0))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join(30)


@pytest.fixture(scope="module")
def url(service):
    with running(service) as url:
        yield url


def ask(page, text):
    page.run("document.getElementById('question').focus()")
    page.type(text)
    page.press("Enter")


def test_upload_ask_watch_reload(url, tmp_path):
    path = tmp_path / "lighthouse <i>.txt"
    path.write_text(DOCUMENT)
    with tab(url) as page:
        page.wait("document.getElementById('headline').textContent.includes('Nothing held yet')")
        page.choose_files("#file", path)
        page.wait("document.querySelectorAll('.document').length === 2")
        page.wait("document.getElementById('talk-title').textContent === 'lighthouse <i>.txt'")  # it is chosen
        page.wait("/^1 document, 1[0-9][0-9] tokens/.test(document.getElementById('held-note').textContent)")
        page.run(GROWTH)
        ask(page, "How fast?")
        page.wait(f"document.querySelector('.note') && {DONE}")
        assert page.run("lengths.size") > 3  # the answer grew in steps
        cached = page.text("#cached")
        assert int(cached.split(" of ")[0]) >= len(DOCUMENT), cached
        assert page.text("#first") != "–"
        assert page.text("#rate") != "–"
        ask(page, "And who?")
        page.wait(f"document.querySelectorAll('article .note')[1]?.textContent.includes('cached') && {DONE}")
        both = int(page.text("#cached").split(" of ")[1])
        assert both > int(cached.split(" of ")[1])  # the second prompt has the first answer in it
        page.call("Page.reload")
        page.wait("document.querySelectorAll('.document').length === 2")
        assert not page.problems
        assert all(name for _, name in page.names())
        page.run("document.querySelector('.document button').click()")
        assert page.text(".document button .word") == "Really remove?"
        page.run("document.querySelector('.document button').click()")
        page.wait("document.querySelectorAll('.document').length === 1")


def test_errors_are_told_in_words(url, tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("a" * 900)
    with tab(url, width=360, dark=True) as page:
        page.choose_files("#file", path)
        page.wait("document.querySelector('#uploads .wrong .state')?.textContent.includes('got 906')")
        page.click("#uploads button")
        assert page.run("document.getElementById('uploads').childElementCount") == 0
        ask(page, "b" * 700)
        page.wait("document.getElementById('problem').textContent.includes('got 7')")
        assert page.run("document.getElementById('question').value") == "b" * 700
        assert page.run("document.querySelectorAll('article').length") == 0
        assert page.run("document.documentElement.scrollWidth") == 360
        assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 23)"


def test_stop_keeps_what_was_said_and_markup_stays_text(service, url, monkeypatch):
    whole = Chat.events

    async def held(self):
        async for chunk in whole(self):
            if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                chunk["choices"][0]["delta"]["content"] = "<i id='made'>said</i>"
                yield chunk
                await asyncio.sleep(60)
            yield chunk

    monkeypatch.setattr(Chat, "events", held)
    with tab(url) as page:
        ask(page, "Well?")
        page.wait("document.querySelector('.answer')?.textContent")
        page.click("#stop")
        page.wait(f"{DONE} && document.querySelector('.note').textContent.startsWith('stopped')")
        assert page.text(".answer") == "<i id='made'>said</i>"
        assert page.run("document.getElementById('made')") is None
        end = time.monotonic() + 20
        while service.open:  # the server has noticed it
            assert time.monotonic() < end
            time.sleep(0.02)


def test_a_key_is_asked_for_and_kept_and_a_large_file_refused(tmp_path):
    path = tmp_path / "large.txt"
    path.write_text("a" * 200)
    with (
        tiny_service(tmp_path / "library", api_keys=("right",), upload_bytes=100) as service,
        running(service) as url,
        tab(url) as page,
    ):
        page.wait("!document.getElementById('key').hidden")
        for key in ("wrong", "right"):
            page.run("document.getElementById('key-text').focus()")
            page.type(key)
            page.press("Enter")
            if key == "wrong":
                page.wait("document.getElementById('state').textContent.includes('refuses')")
        page.wait("document.getElementById('key').hidden && document.getElementById('model').textContent")
        page.call("Page.reload")
        page.wait("document.readyState === 'complete' && document.getElementById('model').textContent")
        assert page.run("document.getElementById('key').hidden")
        page.wait("document.getElementById('headline').textContent.includes('Nothing held yet')")
        page.choose_files("#file", path)
        page.wait("document.querySelector('#uploads .wrong .state')?.textContent.includes('at most 100 B')")
