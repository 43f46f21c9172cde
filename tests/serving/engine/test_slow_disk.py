"""A slow disk: the thread of the engine never waits for it, and answers go on meanwhile."""

import concurrent.futures
import contextlib
import threading
import time

import pytest
from disk_calls import before_disk_calls
from serving_cases import CLASSES, PARAMS, SHADOW, engine_of, offline, prompt_of

import jshadow
from jshadow.errors import CapacityError
from jshadow.library import TierLimits
from jshadow.serving import Request

DOCUMENT, OTHER = prompt_of(96, 5), prompt_of(96, 15)
NOTHING = {"device": 0, "host": 0}
TURNS = 4  # of the engine, which each call of the slow disk takes
WAIT = 20  # seconds after which a test fails


class SlowDisk:
    """A folder of which each call takes some turns of an engine, whose thread is that of the test."""

    def __init__(self, engine, folder):
        self.engine, self.folder = engine, folder
        self.turns, self.changed = 0, threading.Condition()
        self.on = False
        self.slow, self.faults = [], []  # names of calls

    @contextlib.contextmanager
    def block(self):
        with before_disk_calls(self.folder, self.call):
            try:
                yield self
            finally:
                self.on = False

    def call(self, name):
        if threading.current_thread() is threading.main_thread():
            self.faults += [f"{name} in the thread of the engine"] if self.on else []
        elif self.on:
            self.slow.append(name)
            end = self.turns + TURNS
            with self.changed:
                if not self.changed.wait_for(lambda: self.turns >= end or not self.on, WAIT):
                    self.faults.append(f"{name}: the engine stands still")

    def run(self, condition):
        """Run the engine until a condition holds."""
        end = time.monotonic() + WAIT
        while not condition():
            assert time.monotonic() < end, "the condition must hold in time"
            if not self.engine.run_once():
                time.sleep(0.001)
            with self.changed:
                self.turns += 1
                self.changed.notify_all()


@pytest.fixture
def slow(tmp_path):
    """Returns an engine with a library of two documents, and a disk that can become slow."""
    with contextlib.ExitStack() as stack:

        def slow(place=tmp_path, **limits):
            opened = [
                stack.enter_context(
                    jshadow.Library(place, PARAMS, SHADOW, capacity=CLASSES[1].capacity, limits=TierLimits(**more))
                )
                for more in ({}, limits)
            ]
            for document in (DOCUMENT, OTHER):
                opened[0].add(document)
            opened[1].look()
            engine = engine_of(library=opened[1], classes=CLASSES[1:])
            return engine, opened[1], stack.enter_context(SlowDisk(engine, tmp_path).block())

        yield slow


def test_answers_go_on_while_the_disk_is_slow(slow):
    """A document is read from the disk, and states are stored."""
    engine, library, disk = slow(**NOTHING)
    running = Request(prompt_of(80, 8), 40)
    plain, asked, stored = (
        engine.submit(one) for one in (running, Request([*DOCUMENT, 5], 3), Request(prompt_of(70, 9), 5, store=True))
    )
    disk.on = True
    disk.run(lambda: asked.done and stored.done)
    report = stored.result(0).report
    disk.run(lambda: plain.done and report.stored.done())
    disk.on = False
    assert disk.faults == []
    assert len(disk.slow) > 10
    assert plain.result(0).tokens == offline(running).tokens
    assert asked.result(0).report.stored_tokens == len(DOCUMENT)
    assert library.longest([*prompt_of(70, 9), *stored.result(0).tokens]).tokens == 75


@pytest.mark.parametrize("call", ["remove", "documents", "tier_bytes", "longest", "store"])
def test_calls_of_other_threads_do_not_hold_up_the_engine(slow, call):
    """They hold no lock while the disk works: the engine loads, stores, and moves states between tiers meanwhile."""
    engine, library, disk = slow()
    key = library.longest(OTHER).key
    arguments = {"remove": [key], "longest": [OTHER], "store": [OTHER, library.load(key)]}
    if call == "store":
        library.remove(key)
    plain = engine.submit(Request(prompt_of(80, 8), 40))
    asked, stored = (
        engine.submit(one) for one in (Request([*DOCUMENT, 5], 3), Request(prompt_of(70, 9), 5, store=True))
    )
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        disk.on = True
        other = pool.submit(getattr(library, call), *arguments.get(call, ()))
        disk.run(lambda: asked.done and stored.done and plain.done and other.done())
        disk.on = False
        other.result()
    assert disk.faults == []
    assert asked.result(0).report.stored_tokens == len(DOCUMENT)
    stored.result(0).report.stored.result(WAIT)


def test_an_object_store_with_a_slow_disk_for_copies(slow, tmp_path):
    pytest.importorskip("obstore")
    engine, library, disk = slow((tmp_path / "store").as_uri(), **NOTHING, disk=0, disk_folder=tmp_path / "copies")
    asked, stored = (
        engine.submit(one) for one in (Request([*DOCUMENT, 5], 3), Request(prompt_of(70, 9), 5, store=True))
    )
    disk.on = True
    disk.run(lambda: asked.done and stored.done)
    report = stored.result(0).report
    disk.run(lambda: report.stored.done())
    assert disk.faults == []
    assert asked.result(0).report.stored_tokens == len(DOCUMENT)
    assert {found.tier for found in library.documents()} == {"remote"}


def test_more_bytes_than_may_wait_for_the_disk_are_not_stored_and_the_report_says_why(slow):
    engine, library, disk = slow(writing=1)
    first, second = (engine.submit(Request(prompt_of(70, seed), 2, store=True, title="a")) for seed in (9, 10))
    disk.on = True
    disk.run(lambda: first.done and second.done)
    disk.on = False
    assert disk.faults == []
    assert first.result(0).report.stored.result(WAIT)
    report = second.result(0).report
    assert "limits.writing=1 bytes must hold" in report.not_stored
    with pytest.raises(CapacityError, match=r"limits\.writing=1"):
        report.stored.result(WAIT)
    assert library.longest(prompt_of(70, 10)) is None
    again = engine.submit(Request(prompt_of(70, 10), 2, store=True, title="a"))
    disk.run(lambda: again.done)
    assert again.result(0).report.stored.result(WAIT)
