"""Headless Chromium for tests of the page, over the DevTools protocol in pipes: JSON messages that end with a zero."""

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile

from server_cases import until

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Chromium reads from descriptor 3 and writes to 4. The pipes have other numbers here, so a process between sets them.
LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
FLAGS = ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-first-run", "hide-scrollbars")


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
            stack.callback(os.close, pipe[1 - end])
        arguments = [f"--{flag}" for flag in (*FLAGS, "remote-debugging-pipe", f"user-data-dir={profile}")]
        command = [sys.executable, "-c", LAUNCH, *map(str, theirs), chromium(), *arguments]
        process = subprocess.Popen(command, pass_fds=theirs, stderr=subprocess.DEVNULL)
        for side in theirs:
            os.close(side)
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
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **sizes)
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
            details = answer.get("params", {})
            if answer.get("method") == "Runtime.exceptionThrown":
                self.problems.append(details["exceptionDetails"])
            if answer.get("method") == "Log.entryAdded" and details["entry"]["level"] == "error":
                self.problems.append(details["entry"])
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

    def run(self, script):
        """The value of a script's last expression. A promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, *scripts):
        """Wait until the value of each script is true, one after the other."""
        for script in scripts:
            try:
                until(lambda script=script: self.run(script), 60)
            except AssertionError:
                raise AssertionError(script, self.run("document.body.innerText")) from None

    def of(self, name, expression):
        """The value of an expression of the element with an id, such as "hidden"."""
        return self.run(f"document.getElementById('{name}').{expression}")

    def text(self, selector):
        """The text of the first element of a CSS selector."""
        return self.run(f"document.querySelector({json.dumps(selector)})?.textContent.trim()")

    def click(self, selector):
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def enter(self, name, text):
        """Type text into the field with an id, and press Enter."""
        self.of(name, "focus()")
        self.call("Input.insertText", text=text)
        event = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        self.call("Input.dispatchKeyEvent", type="keyDown", text="\r", **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def choose_file(self, selector, path):
        """Choose a file, as a person does in the dialog of a file input."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def names(self):
        """The accessible name of everything that takes the focus."""
        for node in self.call("Accessibility.getFullAXTree")["nodes"]:
            focusable = any(one["name"] == "focusable" and one["value"]["value"] for one in node.get("properties", []))
            if focusable and not node["ignored"]:
                yield node.get("name", {}).get("value", "")
