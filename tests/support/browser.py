"""Headless Chromium for tests of the page, over the DevTools protocol in pipes: JSON messages that end with a zero."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Chromium reads from descriptor 3 and writes to 4. The pipes have other numbers here, so a process between sets them.
LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu"),
    *("--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"),
)
KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Space": (32, " "), "ArrowDown": (40, ""), "ArrowUp": (38, "")}


def chromium():
    """The path of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def tab(url, *, width=1200, height=800, dark=False):
    """A tab of a new browser without any profile. It has loaded `url`."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, contextlib.ExitStack() as stack:
        theirs, ours = [], []
        for end in (0, 1):
            sides = os.pipe()
            pipe = [fcntl.fcntl(side, fcntl.F_DUPFD, 10) for side in sides]
            for side in sides:
                os.close(side)
            theirs.append(pipe[end])
            ours.append(pipe[1 - end])
        arguments = [*FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *map(str, theirs), chromium(), *arguments],
            pass_fds=theirs,
            stderr=subprocess.DEVNULL,
        )
        for side in theirs:
            os.close(side)
        for side in ours:
            stack.callback(os.close, side)
        try:
            made = Tab(*ours)
            made.open(url, width, height, dark)
            yield made
            made.call("Browser.close", session=False)
            process.wait(20)
        finally:
            process.kill()
            process.wait()


class Tab:
    """A tab. `problems` has the exceptions and the errors of the console since it was opened."""

    def __init__(self, write, read):
        """Take the descriptors of the two pipes."""
        self.write, self.read, self.number, self.session = write, read, 0, None
        self.buffer, self.problems = b"", []

    def open(self, url, width, height, dark):
        target = self.call("Target.createTarget", url="about:blank", session=False)["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True, session=False)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM", "Accessibility"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=media)
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def call(self, method, *, session=True, **params):
        """The result of a method of the protocol."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self.number:
            self._note(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _next(self, seconds=60):
        while b"\0" not in self.buffer:
            assert select.select([self.read], [], [], seconds)[0], "Chromium does not answer"
            data = os.read(self.read, 2**16)
            assert data, "Chromium has ended"
            self.buffer += data
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event):
        details = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(details["exceptionDetails"])
        if event.get("method") == "Log.entryAdded" and details["entry"]["level"] == "error":
            self.problems.append(details["entry"])

    def resize(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def run(self, script):
        """The value of a script's last expression. A promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script, seconds=60.0):
        """Wait until a script's value is true, and return it."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, (script, self.run("document.body.innerText"))
            time.sleep(0.02)
        return value

    def text(self, selector):
        """The text of the first element of a CSS selector."""
        return self.run(f"document.querySelector({json.dumps(selector)})?.textContent.trim()")

    def click(self, selector):
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def press(self, key, modifiers=0):
        """Press a key. `modifiers` 8 is Shift."""
        code, text = KEYS[key]
        event = {"key": text if key == "Space" else key, "code": key, "windowsVirtualKeyCode": code}
        event["modifiers"] = modifiers
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text):
        self.call("Input.insertText", text=text)

    def choose_files(self, selector, *paths):
        """Choose files, as a person does in the dialog of a file input."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])

    def names(self):
        """The role and the accessible name of everything that takes the focus."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        named = []
        for node in nodes:
            focusable = any(one["name"] == "focusable" and one["value"]["value"] for one in node.get("properties", []))
            if focusable and not node["ignored"]:
                named.append((node["role"]["value"], node.get("name", {}).get("value", "")))
        return named

    def screenshot(self, path):
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=False)["data"]
        path.write_bytes(base64.b64decode(data))
