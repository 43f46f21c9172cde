"""On PYTHONPATH: a `jshadow` process with the option `--part $KILLED_PART` kills itself in its third record, once.

The file $KILLED_MARK stands for the death. Python imports this module at the start of every process.
"""

import os
import signal
import sys

part, mark = os.environ.get("KILLED_PART"), os.environ.get("KILLED_MARK", "")
if part in sys.orig_argv and "jshadow" in sys.orig_argv and not os.path.exists(mark):
    real, written = os.write, []

    def write(handle, data):
        """Write a half of the third record, and die."""
        if b'"hit_rate"' not in bytes(data[-200:]):
            return real(handle, data)
        written.append(data)
        if len(written) < 3:
            return real(handle, data)
        real(handle, data[: len(data) // 2])
        with open(mark, "w"):
            os.kill(os.getpid(), signal.SIGKILL)

    os.write = write
