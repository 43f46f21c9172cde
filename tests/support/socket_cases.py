"""A server that listens on a socket, in another thread of the test's process."""

import contextlib
import threading
import time
from socket import SO_SNDBUF, SOL_SOCKET

from jshadow.serving.http.run import Server, config_of


@contextlib.contextmanager
def listening(service, *, drain_seconds=30.0, buffer=None):
    """The running `Server` of a service, with its address as `address`. It is ended at the end of the block.

    `buffer` is the number of bytes that the system keeps of what was sent on a connection and was not read.
    """
    config = config_of(service, "127.0.0.1", 0)
    socket = config.bind_socket()
    begun = threading.Event()
    if buffer is not None:
        socket.setsockopt(SOL_SOCKET, SO_SNDBUF, buffer)
    server = Server(config, service, drain_seconds, begun.set)
    server.address = socket.getsockname()
    thread = threading.Thread(target=server.run, args=([socket],))
    thread.start()
    try:
        assert begun.wait(30)
        yield server
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def until(condition, seconds=30.0):
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition must hold in time"
        time.sleep(0.005)


def idle(service):
    """Whether no request has a row, waits or is open."""
    report = service.engine.report()
    return not (report.rows_in_use or report.waiting or report.reading or service.open)
