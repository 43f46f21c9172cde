"""`jshadow serve`: an HTTP server with OpenAI's routes over one model and a library of documents."""

import contextlib
import dataclasses
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from jshadow.cli.compile_cache import CacheOptions
from jshadow.cli.console import waiting
from jshadow.cli.fields import Command, option
from jshadow.cli.options import (
    MODEL_HELP,
    MethodOptions,
    WeightOptions,
    check_least,
    check_method,
    fitted_of,
    load_model,
    policy_of,
)
from jshadow.cli.processes import MeshOptions
from jshadow.errors import CheckpointError, ConfigError, PromptError

if TYPE_CHECKING:
    from jshadow.engine.sparse_prefill import SparsePrefill
    from jshadow.library import TierLimits
    from jshadow.policies import Policy
    from jshadow.serving import Limits, RowClass
    from jshadow.serving.http.options import ServerOptions
    from jshadow.serving.http.service import Service

_MOST_CONTEXT = 32_768  # of the model's context, unless --max-context says otherwise
_ROOM = 1024
_MOST_BIASES = 300  # tokens with a bias in a request, as in OpenAI's API
_FEWER = 4  # the contexts of two classes differ by this factor
_UNKNOWN_HOST_BYTES = 2**32  # of the library, if the system does not say how much memory is free
MIB, GIB = 2**20, 2**30
CLOSE_SECONDS = 3.0  # to close the engine and the library in


@dataclasses.dataclass(kw_only=True)
class _HttpOptions:
    title: ClassVar[str] = "HTTP"
    host: str = option("address to listen on", "127.0.0.1")
    port: int = option("port; 0 takes a free one", 8000)
    uds: str | None = option("Unix socket to listen on, in place of an address", metavar="PATH")
    api_key_file: str | None = option("file with an API key and its limits a line (default: none)", metavar="FILE")
    allowed_host: Sequence[str] = option(
        "name that the header Host may have, for a server without keys; may be given again (default: this machine's)",
        (),
        metavar="NAME",
    )
    insecure: bool = option("without keys, let other machines ask", False)
    max_body_mib: float = option("of a request", 16.0, metavar="MIB")
    max_upload_mib: float = option("of a file", 64.0, metavar="MIB")
    timeout: float = option("seconds of a request", 600.0, metavar="S")
    drain: float = option("seconds to end in", 60.0, metavar="S")
    access_log: bool = option("write a JSON object for each request on stderr", False)
    traces: str | None = option("send traces to this OpenTelemetry collector (default: none)", metavar="URL")


@dataclasses.dataclass(kw_only=True)
class _RowOptions:
    title: ClassVar[str] = "requests and rows"
    max_context: int | None = option(
        f"tokens of a prompt and its answer (default: the model's context, at most {_MOST_CONTEXT:,})"
    )
    room: int | None = option(
        f"tokens after a stored document, or new ones (default: {_ROOM:,}, at most a quarter of --max-context)",
    )
    slots: int = option("rows that one step feeds", 8)
    speculate: str | None = option(
        "propose tokens, and check several of them at once, as in generate; no token changes (default: off)",
        metavar="NAME[:KEY=VALUE...]",
    )
    spill: bool = option("begin with all of a row on the device, and move parts to the host when it is full", False)
    max_rows: int | None = option("requests that may have a row (default: as many as the memory holds)")
    queue: int = option("requests that may wait", 1024)
    device_gib: float | None = option("device memory of rows (default: what is free)", metavar="GIB")
    host_gib: float | None = option("host memory of rows (default: what is free)", metavar="GIB")


@dataclasses.dataclass(kw_only=True)
class _LibraryOptions:
    title: ClassVar[str] = "library"
    library: str | None = option("directory or object store of the documents (default: none)", metavar="DIR")
    library_device_gib: float = option("device memory", 0.0, metavar="GIB")
    library_host_gib: float | None = option("host memory (default: half of what is free)", metavar="GIB")
    library_disk_gib: float | None = option("files (default: no limit)", metavar="GIB")


@dataclasses.dataclass(kw_only=True)
class Serve(
    _HttpOptions, _RowOptions, _LibraryOptions, MethodOptions, WeightOptions, MeshOptions, CacheOptions, Command
):
    """Serve a model over HTTP with OpenAI's routes, and with a page at /.

    With --library, each uploaded file is read once, and its state is stored. SIGTERM or Ctrl-C ends the server when the
    open requests are answered.
    """

    epilog: ClassVar[str] = "example: jshadow serve meta-llama/Llama-3.1-8B-Instruct --library documents --slots 16"
    model: str = option(MODEL_HELP, positional=True, required=True)
    name: str | None = option("id of the model in requests (default: the last part of MODEL)")
    warm_only: bool = option("compile all programs, and exit", False)
    json: bool = option("print one JSON object when the server listens", False)

    def run(self) -> int:
        """Return 0 when a signal has ended the server in order."""
        policy, prefill, options = _check(self)
        listener = None if self.warm_only else _listening_socket(self.host, self.port, self.uds)
        try:
            service = _service_of(self, policy, prefill, options)
            return _warm(service, as_json=self.json) if listener is None else _serve(self, service, listener)
        finally:
            if listener is not None:
                listener.close()
                if self.uds is not None:
                    Path(self.uds).unlink(missing_ok=True)


def _warm(service: "Service", *, as_json: bool) -> int:
    """Compile all programs, and return 0."""
    begin = time.monotonic()
    try:
        with waiting("compiling"):
            service.engine.warm()
        programs, seconds = service.engine.report().programs, time.monotonic() - begin
    finally:
        _end(service)
    told = {"programs": programs, "seconds": seconds}
    print(json.dumps(told) if as_json else f"{programs} programs are compiled, in {seconds:.1f} s")
    return 0


def _serve(args: Serve, service: "Service", listener: socket.socket) -> int:
    """Serve until a signal comes, and return 0."""
    from jshadow.serving.http.run import config_of, serve

    if args.access_log:
        _log_requests()
    host, port = ("", 0) if args.uds is not None else listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    known = _about(service, url if args.uds is None else f"unix:{args.uds}", args)
    text = json.dumps(known) if args.json else "\n".join(_lines(known))
    try:
        return serve(
            service,
            config_of(service, args.host, port),
            [listener],
            drain_seconds=args.drain,
            listening=lambda: print(text, flush=True),
            warming=_warming,
        )
    finally:
        _end(service)
        print("jshadow: the server has ended", file=sys.stderr)


def _log_requests() -> None:
    from jshadow.serving.http.access import ACCESS_LOG

    log, lines = logging.getLogger(ACCESS_LOG), logging.StreamHandler()
    lines.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    log.propagate = False


@contextlib.contextmanager
def _warming() -> Iterator[None]:
    begin = time.monotonic()
    with waiting("compiling"):
        yield
    print(f"jshadow: ready after {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)


def _end(service: "Service") -> None:
    """Close the engine and the library. If that takes long, such as on a disk that hangs, the process ends anyway."""
    late = threading.Timer(CLOSE_SECONDS, _give_up)
    late.daemon = True
    late.start()
    service.engine.close(drain=False)
    if service.library is not None:
        service.library.close()
    service.options.traces.close()
    late.cancel()


def _give_up() -> None:
    """End the process with 1. Files that are half written have names of their own, and the next start removes them."""
    told = f"jshadow: the engine or the disk did not end in {CLOSE_SECONDS:g} s, so what was not written is lost"
    print(told, file=sys.stderr, flush=True)
    os._exit(1)


def _check(args: Serve) -> "tuple[Policy, SparsePrefill | None, ServerOptions]":
    """Return what follows from the options alone, before the model is loaded."""
    try:
        import fastapi  # noqa: F401
        import llguidance  # noqa: F401
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"serve needs the package {error.name}: pip install 'jshadow[serve]'") from error
    from jshadow.engine.sparse_prefill import parse_prefill
    from jshadow.serving.http.keys import read_keys
    from jshadow.serving.http.options import ServerOptions
    from jshadow.serving.http.traces import Traces

    check_least(args, 0, "port", finite=True)
    check_least(args, 1, "slots", "queue", "room", "max_rows", finite=True)
    check_least(args, 2, "max_context", finite=True)
    check_least(args, 0, "library_device_gib", "library_host_gib", "library_disk_gib", "drain", finite=True)
    above = ("device_gib", "host_gib", "max_body_mib", "max_upload_mib", "timeout")
    check_least(args, 0, *above, above=True, finite=True)
    if args.port >= 2**16:
        raise ConfigError(f"--port must be below 65536, got {args.port}")
    if args.max_context is not None:
        _room_of(args.room, args.max_context)
    check_method(args.fetch, args.fitted)
    if args.library is not None and "://" not in args.library:
        place = Path(args.library).expanduser()
        if place.exists() and not place.is_dir():
            raise CheckpointError(f"--library must be a directory, got the file {place}")
    key_file = None if args.api_key_file is None else Path(args.api_key_file)
    options = ServerOptions(
        args.name or Path(args.model).name,
        {} if key_file is None else read_keys(key_file),
        key_file,
        _allowed_hosts_of(args),
        body_bytes=int(args.max_body_mib * MIB),
        upload_bytes=int(args.max_upload_mib * MIB),
        seconds=args.timeout,
        traces=Traces.to(args.traces),
    )
    return policy_of(args), parse_prefill(args.prefill or "exact"), options


def _allowed_hosts_of(args: Serve) -> tuple[str, ...]:
    """Return the hosts by which a server without keys may be named. Raises ConfigError if it needs keys."""
    from jshadow.serving.http.options import ANY_HOST, is_loopback

    if args.api_key_file is not None or args.uds is not None or is_loopback(args.host):
        return tuple(args.allowed_host)
    if not args.insecure:
        raise ConfigError(
            f"--host must be an address of this machine alone in a server without keys, got {args.host}; give it "
            "--api-key-file FILE, or --insecure if everybody who reaches the address may read all documents"
        )
    return tuple(args.allowed_host) or (ANY_HOST,)


def _room_of(room: int | None, context: int) -> int:
    """Return the room of rows with this context. Raises ConfigError if it leaves no prompt."""
    if room is None:
        return max(1, min(_ROOM, context // 4))
    if room >= context:
        raise ConfigError(f"--room must be below the context of {context} tokens, got {room}")
    return room


def _listening_socket(host: str, port: int, path: str | None) -> socket.socket:
    """Return a socket of an address, or of a path, which does not listen yet. Raises ConfigError if it is not free."""
    if path is not None:
        return _unix_socket(path)
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise ConfigError(f"--host and --port must name a free address, got {host} and {port}: {error}") from error
    return found


def _unix_socket(path: str) -> socket.socket:
    """Return a Unix socket that only this user can reach. If a killed server has left its socket there, it is removed.

    Raises ConfigError if the path is not free.
    """
    if Path(path).is_socket():
        if _listens(path):
            raise ConfigError(f"--uds must be a path on which no server listens, got {path}")
        Path(path).unlink()
    found = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        found.bind(path)
    except OSError as error:
        found.close()
        raise ConfigError(f"--uds must be a path for a new socket, got {path}: {error}") from error
    finally:
        os.umask(mask)
    return found


def _listens(path: str) -> bool:
    """Return whether a server listens on a Unix socket. A socket that cannot be asked counts as one in use."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(path)
        except OSError as error:
            return not isinstance(error, ConnectionRefusedError)
    return True


def _service_of(args: Serve, policy: "Policy", prefill: "SparsePrefill | None", options: "ServerOptions") -> "Service":
    """Return the service of the options. Raises the errors of `load`, `Library` and `Engine`."""
    from jshadow.engine.speculation import parse_drafter
    from jshadow.library import Library
    from jshadow.serving import Engine, EngineOptions
    from jshadow.serving.admission import plan_classes
    from jshadow.serving.http.service import Service

    drafter = None if args.speculate is None else parse_drafter(args.speculate, args.dtype)
    with waiting(f"loading {args.model}"):
        params = load_model(args)
    if params.tokenizer is None:
        raise PromptError(f"serve needs a tokenizer, and {args.model} has none")
    context = _context_of(args.max_context, params)
    room = _room_of(args.room, context)
    fitted = fitted_of(args, params, policy)
    parts: dict[str, Any] = {"penalties": True, "bias_limit": _MOST_BIASES, "logprobs": True, "grammar": True}
    asked = EngineOptions(
        fetch=args.fetch, fitted=fitted, prefill=prefill, speculate=drafter, spill=args.spill, **parts
    )
    classes = classes_of(context, room, args.slots)
    # The rows of the longest class are stored, so the library and the engine have one fetch mode.
    fetch = plan_classes(params, policy, classes, asked)[-1].fetch
    tiers, library = _tiers_of(args), None
    if args.library is not None:
        library = Library(args.library, params, policy, capacity=context, fetch=fetch, limits=tiers, fitted=fitted)
    try:
        limits, asked = _limits_of(args, tiers), dataclasses.replace(asked, fetch=fetch)
        engine = Engine(params, policy, classes=classes, library=library, limits=limits, options=asked)
    except BaseException:
        if library is not None:
            library.close()
        raise
    return Service(engine, library, options)


def _context_of(given: int | None, params: Any) -> int:
    """Return the largest number of tokens of a prompt and its answer. Raises ConfigError if the model has fewer."""
    if given is None:
        return min(params.config.context, _MOST_CONTEXT)
    if given > params.config.context:
        raise ConfigError(f"--max-context must be at most the model's context={params.config.context}, got {given}")
    return given


def classes_of(context: int, room: int, slots: int) -> "list[RowClass]":
    """Return the classes of rows: contexts of 1, 1/4, 1/16, ... of the longest that have at least twice the room."""
    from jshadow.serving import RowClass

    sizes = [context]
    while sizes[-1] // _FEWER >= 2 * room:
        sizes.append(sizes[-1] // _FEWER)
    return [RowClass(size - room, room, slots) for size in sizes]


def _tiers_of(args: Serve) -> "TierLimits":
    """Return the limits of the library. Half of the free host memory is for its states if no option says more."""
    from jshadow.cache.host_memory import least_limit
    from jshadow.library import TierLimits

    if args.library is None:
        return TierLimits(device=0, host=0)
    host = _bytes_of(args.library_host_gib)
    if host is None:
        free = least_limit()
        host = _UNKNOWN_HOST_BYTES if free is None else free.free // 2
    return TierLimits(device=_bytes_of(args.library_device_gib), host=host, disk=_bytes_of(args.library_disk_gib))


def _limits_of(args: Serve, tiers: "TierLimits") -> "Limits":
    """Return the limits of the rows: those of the options, or what is free and not for the library."""
    import jax

    from jshadow.serving import Limits

    free = Limits().of_machine()
    for_device, for_host = tiers.device or 0, tiers.host or 0
    if jax.default_backend() == "cpu":  # both are the same memory
        for_device = for_host = for_device + for_host
    device, host = _bytes_of(args.device_gib), _bytes_of(args.host_gib)
    if device is None and free.device_bytes is not None:
        device = max(1, free.device_bytes - for_device)
    if host is None and free.host_bytes is not None:
        host = max(1, free.host_bytes - for_host)
    return Limits(device_bytes=device, host_bytes=host, waiting=args.queue, rows=args.max_rows)


def _bytes_of(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)


def _about(service: "Service", url: str, args: Serve) -> dict[str, Any]:
    """Return what a server serves, as JSON can hold it. Bytes are planned, and those of a row without the documents."""
    import jax

    from jshadow.policies.settings import changed_settings

    engine, library = service.engine, service.library
    limits = engine.admission.limits
    longest = engine.plans[-1]
    documents = None
    if library is not None:
        stored = [one for one in library.documents() if one.problem is None]
        documents = {
            "place": args.library,
            "documents": len(stored),
            "tokens": sum(one.tokens for one in stored),
            "bytes": sum(one.bytes for one in stored),
        }
    return {
        "url": url,
        "model": service.options.name,
        "device": jax.devices()[0].device_kind,
        "dtype": str(service.params.dtype),
        "max_context": service.most_tokens,
        "policy": longest.policy.name,
        "settings": changed_settings(longest.policy),
        "fetch": longest.fetch,
        "classes": [_class_about(plan) for plan in engine.plans],
        "device_bytes": limits.device_bytes,
        "host_bytes": limits.host_bytes,
        "library": documents,
        "api_keys": len(service.keys.limits),
    }


def _class_about(plan: Any) -> dict[str, Any]:
    """Return the size of a class of rows, and the bytes of one row."""
    one = plan.row_class
    return {
        "prompt": one.prompt,
        "room": one.room,
        "rows": one.rows,
        "device_bytes": plan.bytes.rows.device // one.rows,
        "host_bytes": plan.bytes.rows.host // one.rows,
        "fallback": plan.fallback,
    }


def _lines(known: dict[str, Any]) -> list[str]:
    """Return what `_about` returned as lines of text."""
    settings = ", ".join(f"{name}={value}" for name, value in known["settings"].items())
    rows = [
        f"{one['rows']} of {one['prompt']:,} + {one['room']:,} tokens, each {_size(one['device_bytes'])} on the device"
        + (f" and {_size(one['host_bytes'])} on the host" if one["host_bytes"] else "")
        + (f"; full attention, because {one['fallback']}" if one["fallback"] else "")
        for one in known["classes"]
    ]
    documents, keys = known["library"], known["api_keys"]
    library = "none: files are not stored (--library DIR)"
    if documents is not None:
        count = documents["documents"]
        named = f"{count} document{'' if count == 1 else 's'}"
        library = f"{documents['place']}, {named} of {documents['tokens']:,} tokens, {_size(documents['bytes'])}"
    table = [
        ("page", f"{known['url']}/"),
        ("API", f"{known['url']}/v1"),
        ("model", f"{known['model']}, {known['dtype']}, on {known['device']}"),
        ("policy", f"{known['policy']}{f' with {settings}' if settings else ''}, fetch {known['fetch']}"),
        *(("rows" if place == 0 else "", text) for place, text in enumerate(rows)),
        ("for rows", f"{_size(known['device_bytes'])} on the device, {_size(known['host_bytes'])} on the host"),
        ("library", library),
        ("API keys", f"{keys}" if keys else "none: each request is answered (--api-key-file FILE)"),
    ]
    return [f"{name:<9} {text}" for name, text in table]


def _size(count: int | None) -> str:
    """Return bytes as MiB or GiB."""
    if count is None:
        return "any bytes"
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / MIB:,.1f} MiB"
