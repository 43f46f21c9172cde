"""Runs a server: uvicorn with an orderly end."""

import contextlib
import gc
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from jshadow.errors import JshadowError
from jshadow.serving.http.access import HEAD_SECONDS, Connection
from jshadow.serving.http.app import make_app
from jshadow.serving.http.service import Service

_SWITCH_SECONDS = 0.001  # after which a thread lets another one run. An answer of the event loop takes several turns.
_THREAD_STACK = 2**23  # twice that of the process that checks grammars
_MOST_FILES = 2**16  # files and sockets that a server may have open, if the system lets it


class Server(uvicorn.Server):
    """A uvicorn server that drains before it ends.

    After SIGTERM or SIGINT it goes on to listen, so that `/ready` says 503 and new requests are refused with 503. It
    ends when no request is open and all states are written. A second signal ends it at once.
    """

    def __init__(
        self, config: uvicorn.Config, service: Service, drain_seconds: float, listening: Callable[[], None]
    ) -> None:
        """Take a uvicorn configuration.

        What is open has `drain_seconds` to finish after a signal. `listening` is called when the server listens.
        """
        super().__init__(config)
        self.service, self.drain_seconds, self.listening = service, drain_seconds, listening
        self.signalled = 0.0
        _allow_files()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        if self.started:
            self.listening()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the end."""
        if self.service.draining:
            self.should_exit = self.force_exit = True
        self.service.draining, self.signalled = True, time.monotonic()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end. uvicorn calls this ten times a second."""
        if self.service.engine.failure is not None:
            self.should_exit = True  # open requests have its error; whoever started the server can start it again
        if self.service.draining:
            late = time.monotonic() - self.signalled > self.drain_seconds
            self.should_exit = self.should_exit or late or not self.service.busy
        return await super().on_tick(counter)


def _allow_files() -> None:
    """Let this process have as many open files and sockets as the system lets it. The default is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(_MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def serve(
    service: Service,
    config: uvicorn.Config,
    sockets: list[socket.socket],
    *,
    drain_seconds: float = 60.0,
    listening: Callable[[], None] = lambda: None,
    warming: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> int:
    """Answer HTTP requests until a signal comes. Return the exit status. It is 1 if the engine has failed.

    The engine and the library stay open.

    Args:
        service: the model. Its programs are compiled in another thread, and then `/ready` says 200.
        config: host, port and further options of uvicorn. Its app is `make_app(service)`.
        sockets: where to listen.
        drain_seconds: the longest wait for open requests and for files after a signal.
        listening: called when the server listens.
        warming: returns the context manager in which the programs are compiled, for a display.

    Raises:
        JshadowError: the programs cannot be compiled within the limits.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    server = Server(config, service, drain_seconds, listening)
    failed: list[JshadowError] = []

    def compile_all() -> None:
        try:
            with warming():
                service.engine.warm(service.compiling)
            gc.collect()
            gc.freeze()  # the model and its programs: looking through them again would stop all threads for a while
            service.begin()
        except JshadowError as error:
            failed.append(error)
            server.should_exit = True

    threading.stack_size(_THREAD_STACK)
    threading.Thread(target=compile_all, name="jshadow-warm", daemon=True).start()
    server.run(sockets)
    broken = service.engine.failure is not None
    if failed and not service.draining:
        raise failed[0]
    return 0 if server.started and not broken else 1


def config_of(service: Service, host: str, port: int) -> uvicorn.Config:
    """Return the configuration of uvicorn for a service. `port` 0 takes a free port."""
    return uvicorn.Config(
        make_app(service),
        host,
        port,
        loop="asyncio",
        http=Connection,
        server_header=False,
        log_level="warning",
        timeout_keep_alive=int(HEAD_SECONDS),
        timeout_graceful_shutdown=1,  # after `drain_seconds`, requests that are open still are cancelled
        backlog=2048,
    )
