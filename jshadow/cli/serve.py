"""`jshadow serve`: an HTTP server with OpenAI's routes over one model and a library of documents."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jshadow.cli.compile_cache import add_cache_option
from jshadow.cli.options import (
    add_policy_options,
    add_weights_options,
    check_fetch,
    check_fitted_file,
    load_model,
    policy_of,
)
from jshadow.cli.progress import waiting
from jshadow.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from jshadow.server.service import Service

ABOUT = """Serve a model over HTTP with OpenAI's routes, and a page at /. With --library, each uploaded file is read
once, and its state is stored. SIGTERM ends the server when the open requests are answered."""
MOST_BIASES = 300  # tokens with a bias in a request, as in OpenAI's API


def add_options(add: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add.set_defaults(run=run_serve)
    add.add_argument("model", help="HF directory, or hub id")
    add.add_argument("--library", metavar="DIR", help="directory or object store of the stored documents")
    add.add_argument("--name", help="id of the model in requests (default: the last part of MODEL)")
    sizes = add.add_argument_group("sizes")
    sizes.add_argument(
        "--max-context", type=int, help="tokens of a prompt and its answer (default: the model's context)"
    )
    sizes.add_argument("--room", type=int, default=1024, help="new tokens of a request, at most (default: %(default)s)")
    sizes.add_argument("--slots", type=int, default=8, help="rows that one step feeds (default: %(default)s)")
    sizes.add_argument("--queue", type=int, default=1024, help="requests that may wait (default: %(default)s)")
    sizes.add_argument("--device-gib", type=float, help="device memory for rows (default: what is free)")
    sizes.add_argument("--host-gib", type=float, help="host memory for rows (default: what is free)")
    sizes.add_argument("--library-device-gib", type=float, default=0.0, help="device tier (default: %(default)s)")
    sizes.add_argument("--library-host-gib", type=float, default=4.0, help="host tier (default: %(default)s)")
    sizes.add_argument("--library-disk-gib", type=float, help="files of the library (default: no limit)")
    add_policy_options(add)
    add_weights_options(add)
    http = add.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    http.add_argument("--port", type=int, default=8000, help="port; 0 takes a free one (default: %(default)s)")
    http.add_argument("--api-key-file", metavar="FILE", type=Path, help="a file with one API key on each line")
    http.add_argument("--max-body-mib", type=float, default=16.0, help="of a request (default: %(default)s)")
    http.add_argument("--max-upload-mib", type=float, default=64.0, help="of a file (default: %(default)s)")
    http.add_argument("--timeout", type=float, default=600.0, help="seconds of a request (default: %(default)s)")
    http.add_argument("--drain", type=float, default=60.0, help="seconds for open requests at the end (default: 60)")
    add.add_argument("--warm-only", action="store_true", help="compile all programs, and exit")
    add_cache_option(add)
    add.add_argument("--json", action="store_true", help="print one JSON object when the server listens")


def run_serve(args: argparse.Namespace) -> int:
    """Run `jshadow serve`, and return 0 when a signal has ended it in order."""
    try:
        import fastapi  # noqa: F401
        import llguidance  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"serve needs the package {error.name}: pip install 'jshadow[serve]'") from error
    if not 0 <= args.port < 2**16:
        raise ConfigError(f"--port must lie in [0, 65536), got {args.port}")
    check_fetch(args.fetch)
    check_fitted_file(args.fitted)
    service = service_of(args)
    if args.warm_only:
        with waiting("compiling"):
            service.engine.warm()
        service.engine.close()
        print(json.dumps({"programs": service.engine.report().programs}) if args.json else "all programs are compiled")
        return 0
    from jshadow.server.run import config_of, serve

    config = config_of(service, args.host, args.port)
    socket = config.bind_socket()
    socket.listen(config.backlog)  # who reads the URL below can connect
    host, port = socket.getsockname()[:2]
    about = {"url": f"http://{host}:{port}", "model": service.options.name, "max_context": service.most_tokens}
    print(json.dumps(about) if args.json else f"{about['model']} at {about['url']}", flush=True)
    try:
        return serve(service, config, [socket], drain_seconds=args.drain)
    finally:
        if service.library is not None:
            service.library.close()
        print("the server has ended", file=sys.stderr)


def service_of(args: argparse.Namespace) -> "Service":
    """Return the service of the options. Raises the errors of `load`, `Library` and `Engine`."""
    from jshadow.engine.sparse_prefill import parse_prefill
    from jshadow.library import Library, TierLimits
    from jshadow.server.options import ServerOptions, read_keys
    from jshadow.server.service import Service
    from jshadow.serving import Engine, EngineOptions, Limits

    policy, prefill = policy_of(args), parse_prefill(args.prefill or "exact")
    keys = () if args.api_key_file is None else read_keys(args.api_key_file)
    options = ServerOptions(
        args.name or Path(args.model).name,
        keys,
        body_bytes=scaled("--max-body-mib", args.max_body_mib, 2**20),
        upload_bytes=scaled("--max-upload-mib", args.max_upload_mib, 2**20),
        seconds=args.timeout,
    )
    params = load_model(args)
    if params.tokenizer is None:
        raise PromptError(f"serve needs a tokenizer, and {args.model} has none")
    fitted = None
    if args.fitted is not None:
        from jshadow.engine.saved.fitted import load_fitted

        fitted = load_fitted(args.fitted, params, policy)
    context = params.config.context if args.max_context is None else args.max_context
    library = None
    if args.library is not None:
        tiers = TierLimits(
            device=scaled("--library-device-gib", args.library_device_gib, 2**30),
            host=scaled("--library-host-gib", args.library_host_gib, 2**30),
            disk=scaled("--library-disk-gib", args.library_disk_gib, 2**30),
        )
        library = Library(args.library, params, policy, capacity=context, fetch=args.fetch, limits=tiers, fitted=fitted)
    limits = Limits(
        device_bytes=scaled("--device-gib", args.device_gib, 2**30),
        host_bytes=scaled("--host-gib", args.host_gib, 2**30),
        waiting=args.queue,
    )
    settings: dict[str, Any] = {"penalties": True, "bias_limit": MOST_BIASES, "logprobs": True, "grammar": True}
    engine = Engine(
        params,
        policy,
        classes=classes_of(context, args.room, args.slots),
        library=library,
        limits=limits,
        options=EngineOptions(fetch=args.fetch, fitted=fitted, prefill=prefill, **settings),
    )
    return Service(engine, library, options)


def scaled(name: str, value: float | None, unit: int) -> Any:
    """Return a number of bytes, or None for None. Raises ConfigError for a value below 0 or not finite."""
    if value is None:
        return None
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{name} must be at least 0 and finite, got {value!r}")
    return int(value * unit)


def classes_of(context: int, room: int, slots: int) -> list[Any]:
    """Return the classes of rows: contexts of 1/1, 1/4, 1/16 of the longest, as long as twice the room fits into them.

    Raises:
        ConfigError: the room leaves no prompt.
    """
    from jshadow.serving import RowClass

    if room >= context:
        raise ConfigError(f"--room must be below --max-context={context}, got {room}")
    sizes = [context]
    while sizes[-1] // 4 >= 2 * room:
        sizes.append(sizes[-1] // 4)
    return [RowClass(size - room, room, slots) for size in sizes]
