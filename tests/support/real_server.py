"""`jshadow serve` over SmolLM2 as a process, and what it should answer: `generate` with the same split and capacity."""

import contextlib
import time
import urllib.error
import urllib.request
from pathlib import Path

import jshadow
from jshadow.cli.serve_model import classes_of

MODEL = Path(__file__).resolve().parents[2] / "checkpoints" / "smollm2-135m-instruct"
CONTEXT, ROOM, SLOTS = 2048, 128, 4
POLICY = jshadow.ShadowKV(rank=32, budget=256)
ARGUMENTS = (
    *("--dtype", "float32", "--policy", "shadowkv", "--set", "rank=32", "--set", "budget=256", "--fetch", "resident"),
    *("--max-context", str(CONTEXT), "--room", str(ROOM), "--slots", str(SLOTS)),
)
READY_SECONDS = 600


def wait_ready(process):
    """Wait until a server has compiled its programs."""
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, process.stderr.read()
        with contextlib.suppress(urllib.error.URLError):
            urllib.request.urlopen(f"{process.url}/ready", timeout=30).close()
            return
        time.sleep(0.5)
    raise AssertionError(f"the server is not ready after {READY_SECONDS} s")


class Truth:
    """The greedy answers of `generate`, with the documents of a server's library."""

    def __init__(self, folder):
        self.params = jshadow.load(MODEL, dtype="float32")
        settings = {"capacity": CONTEXT, "fetch": "resident"}
        self.library = jshadow.Library(folder, self.params, POLICY, **settings)

    def answer(self, ids, new):
        """The answer after a prompt that is read as a whole."""
        capacity = min(one.capacity for one in classes_of(CONTEXT, ROOM, SLOTS) if one.prompt >= len(ids))
        settings = {"fetch": "resident", "capacity": capacity}
        return jshadow.generate(self.params, ids, POLICY, max_new_tokens=new, **settings)

    def answer_stored(self, ids, new):
        """The answer after a prompt that begins with a stored document, and the number of its stored tokens."""
        stored = self.library.longest(ids[:-1])
        state = self.library.load(stored.key).with_room(ROOM)
        return jshadow.generate(self.params, ids[stored.tokens :], max_new_tokens=new, state=state), stored.tokens
