"""`jshadow serve`: an HTTP server with OpenAI's routes over one model and a library of documents."""

import argparse
import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jshadow.cli.compile_cache import add_cache_option
from jshadow.cli.mesh import add_mesh_options
from jshadow.cli.options import (
    add_policy_options,
    add_weights_options,
    check_fetch,
    check_fitted_file,
    policy_of,
)
from jshadow.cli.progress import waiting
from jshadow.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from jshadow.engine.sparse_prefill import SparsePrefill
    from jshadow.policies import Policy
    from jshadow.serving.http.options import ServerOptions
    from jshadow.serving.http.service import Service

ABOUT = """Serve a model over HTTP with OpenAI's routes, and with a page at /. With --library, each uploaded file is
read once, and its state is stored. SIGTERM or Ctrl-C ends the server when the open requests are answered."""
EXAMPLE = "example: jshadow serve meta-llama/Llama-3.1-8B-Instruct --library documents --slots 16"
MOST_CONTEXT = 32_768  # of the model's context, unless --max-context says otherwise
ROOM = 1024
MIB = 2**20
CLOSE_SECONDS = 3.0  # to close the engine and the library in


def add_options(add: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add.set_defaults(run=run_serve)
    add.epilog = EXAMPLE
    add.add_argument("model", metavar="MODEL", help="HF directory, or hub id")
    add.add_argument("--name", help="id of the model in requests (default: the last part of MODEL)")
    add.add_argument("--warm-only", action="store_true", help="compile all programs, and exit")
    add.add_argument("--json", action="store_true", help="print one JSON object when the server listens")
    add_cache_option(add)

    http = add.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    http.add_argument("--port", type=int, default=8000, help="port; 0 takes a free one (default: %(default)s)")
    http.add_argument("--api-key-file", metavar="FILE", type=Path, help="file with one API key a line (default: none)")
    allowed = (
        "name that the header Host may have, for a server without keys; may be given again (default: this machine's)"
    )
    http.add_argument("--allowed-host", metavar="NAME", action="append", default=[], help=allowed)
    http.add_argument("--insecure", action="store_true", help="without keys, let other machines ask")
    http.add_argument("--max-body-mib", type=float, default=16.0, metavar="MIB", help="of a request (default: 16)")
    http.add_argument("--max-upload-mib", type=float, default=64.0, metavar="MIB", help="of a file (default: 64)")
    http.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds of a request (default: 600)")
    http.add_argument("--drain", type=float, default=60.0, metavar="S", help="seconds to end in (default: 60)")

    sizes = add.add_argument_group("requests and rows")
    context = f"tokens of a prompt and its answer (default: the model's context, at most {MOST_CONTEXT:,})"
    sizes.add_argument("--max-context", type=int, metavar="N", help=context)
    room = f"tokens after a stored document, or new ones (default: {ROOM:,}, at most a quarter of --max-context)"
    sizes.add_argument("--room", type=int, metavar="N", help=room)
    sizes.add_argument("--slots", type=int, default=8, metavar="N", help="rows that one step feeds (default: 8)")
    sizes.add_argument("--queue", type=int, default=1024, metavar="N", help="requests that may wait (default: 1024)")
    sizes.add_argument("--device-gib", type=float, metavar="GIB", help="device memory of rows (default: what is free)")
    sizes.add_argument("--host-gib", type=float, metavar="GIB", help="host memory of rows (default: what is free)")

    library = add.add_argument_group("library")
    library.add_argument("--library", metavar="DIR", help="directory or object store of the documents (default: none)")
    library.add_argument(
        "--library-device-gib", type=float, default=0.0, metavar="GIB", help="device memory (default: 0)"
    )
    library.add_argument(
        "--library-host-gib", type=float, metavar="GIB", help="host memory (default: half of what is free)"
    )
    library.add_argument("--library-disk-gib", type=float, metavar="GIB", help="files (default: no limit)")

    add_policy_options(add.add_argument_group("method"))
    weights = add.add_argument_group("weights")
    add_weights_options(weights)
    add_mesh_options(weights)


@dataclasses.dataclass(frozen=True)
class Early:
    """The settings that follow from the options alone, before the model is loaded."""

    policy: "Policy"
    prefill: "SparsePrefill | None"
    options: "ServerOptions"


def run_serve(args: argparse.Namespace) -> int:
    """Run `jshadow serve`, and return 0 when a signal has ended it in order."""
    from jshadow.cli.serve_model import service_of

    early = check_options(args)
    listener = None if args.warm_only else listening_socket(args.host, args.port)
    try:
        service = service_of(args, early)
        if listener is None:
            return run_warm(service, as_json=args.json)
        return run_server(args, service, listener)
    finally:
        if listener is not None:
            listener.close()


def run_warm(service: "Service", *, as_json: bool) -> int:
    """Compile all programs, and return 0."""
    begin = time.monotonic()
    try:
        with waiting("compiling"):
            service.engine.warm()
        programs, seconds = service.engine.report().programs, time.monotonic() - begin
    finally:
        end(service)
    told = {"programs": programs, "seconds": seconds}
    print(json.dumps(told) if as_json else f"{programs} programs are compiled, in {seconds:.1f} s")
    return 0


def run_server(args: argparse.Namespace, service: "Service", listener: socket.socket) -> int:
    """Serve until a signal comes, and return 0."""
    from jshadow.cli.serve_report import about, lines
    from jshadow.serving.http.run import config_of, serve

    host, port = listener.getsockname()[:2]
    known = about(service, f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}", args)
    text = json.dumps(known) if args.json else "\n".join(lines(known))
    try:
        return serve(
            service,
            config_of(service, args.host, port),
            [listener],
            drain_seconds=args.drain,
            listening=lambda: print(text, flush=True),
            warming=warming,
        )
    finally:
        end(service)
        print("jshadow: the server has ended", file=sys.stderr)


@contextlib.contextmanager
def warming() -> Iterator[None]:
    """Show that the programs are compiled, and for how long."""
    begin = time.monotonic()
    with waiting("compiling"):
        yield
    print(f"jshadow: ready after {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)


def end(service: "Service") -> None:
    """Close the engine and the library. If that takes long, such as on a disk that hangs, the process ends anyway."""
    late = threading.Timer(CLOSE_SECONDS, give_up)
    late.daemon = True
    late.start()
    service.engine.close(drain=False)
    if service.library is not None:
        service.library.close()
    late.cancel()


def give_up() -> None:
    """End the process with 1. Files that are half written have names of their own, and the next start removes them."""
    told = f"jshadow: the engine or the disk did not end in {CLOSE_SECONDS:g} s, so what was not written is lost"
    print(told, file=sys.stderr, flush=True)
    os._exit(1)


def check_options(args: argparse.Namespace) -> Early:
    """Return what the options say without the model.

    Raises:
        ConfigError: a package is missing, or a value is out of range.
        CheckpointError: a file cannot be read, or --library is no directory.
    """
    try:
        import fastapi  # noqa: F401
        import llguidance  # noqa: F401
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"serve needs the package {error.name}: pip install 'jshadow[serve]'") from error
    from jshadow.engine.sparse_prefill import parse_prefill
    from jshadow.serving.http.options import ServerOptions, read_keys

    for name, least in (("port", 0), ("slots", 1), ("queue", 1), ("room", 1), ("max_context", 2)):
        check_number(name, getattr(args, name), least)
    for name in ("library_device_gib", "library_host_gib", "library_disk_gib", "drain"):
        check_number(name, getattr(args, name), 0)
    for name in ("device_gib", "host_gib", "max_body_mib", "max_upload_mib", "timeout"):
        check_number(name, getattr(args, name), 0, above=True)
    if args.port >= 2**16:
        raise ConfigError(f"--port must be below 65536, got {args.port}")
    if args.max_context is not None:
        room_of(args.room, args.max_context)
    check_fetch(args.fetch)
    check_fitted_file(args.fitted)
    if args.library is not None and "://" not in args.library:
        place = Path(args.library).expanduser()
        if place.exists() and not place.is_dir():
            raise CheckpointError(f"--library must be a directory, got the file {place}")
    options = ServerOptions(
        args.name or Path(args.model).name,
        () if args.api_key_file is None else read_keys(args.api_key_file),
        allowed_hosts_of(args),
        body_bytes=int(args.max_body_mib * MIB),
        upload_bytes=int(args.max_upload_mib * MIB),
        seconds=args.timeout,
    )
    return Early(policy_of(args), parse_prefill(args.prefill or "exact"), options)


def allowed_hosts_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the hosts by which a server without keys may be named. Raises ConfigError if it needs keys."""
    from jshadow.serving.http.options import ANY_HOST, is_loopback

    if args.api_key_file is not None or is_loopback(args.host):
        return tuple(args.allowed_host)
    if not args.insecure:
        raise ConfigError(
            f"--host must be an address of this machine alone in a server without keys, got {args.host}; give it "
            "--api-key-file FILE, or --insecure if everybody who reaches the address may read all documents"
        )
    return tuple(args.allowed_host) or (ANY_HOST,)


def check_number(name: str, value: float | None, least: float, *, above: bool = False) -> None:
    """Raise ConfigError for an option that is not finite, below the limit, or equal to it if `above`. None is right."""
    if (value is not None and not (least < value if above else least <= value)) or value == float("inf"):
        limit = f"above {least:g}" if above else f"at least {least:g}"
        raise ConfigError(f"--{name.replace('_', '-')} must be {limit} and finite, got {value!r}")


def room_of(room: int | None, context: int) -> int:
    """Return the room of rows with this context. Raises ConfigError if it leaves no prompt."""
    if room is None:
        return max(1, min(ROOM, context // 4))
    if room >= context:
        raise ConfigError(f"--room must be below the context of {context} tokens, got {room}")
    return room


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket of an address, which does not listen yet. Raises ConfigError if the address is not free."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise ConfigError(f"--host and --port must name a free address, got {host} and {port}: {error}") from error
    return found
