"""The service of `jshadow serve`: the model, the library and the engine that the options describe."""

import argparse
import dataclasses
from typing import TYPE_CHECKING

import jax

from jshadow.cache.host_memory import least_limit
from jshadow.cli.options import load_model
from jshadow.cli.progress import waiting
from jshadow.cli.serve import MOST_CONTEXT, Early, room_of
from jshadow.engine.saved.fitted import load_fitted
from jshadow.errors import ConfigError, PromptError
from jshadow.library import Library, TierLimits
from jshadow.serving import Engine, EngineOptions, Limits, RowClass
from jshadow.serving.admission import plan_classes
from jshadow.serving.http.service import Service

if TYPE_CHECKING:
    from jshadow.weights.params import Params

MOST_BIASES = 300  # tokens with a bias in a request, as in OpenAI's API
FEWER = 4  # the contexts of two classes differ by this factor
UNKNOWN_HOST_BYTES = 2**32  # of the library, if the system does not say how much memory is free
GIB = 2**30


def service_of(args: argparse.Namespace, early: Early) -> Service:
    """Return the service of the options. Raises the errors of `load`, `Library` and `Engine`."""
    with waiting(f"loading {args.model}"):
        params = load_model(args)
    if params.tokenizer is None:
        raise PromptError(f"serve needs a tokenizer, and {args.model} has none")
    context = context_of(args.max_context, params)
    room = room_of(args.room, context)
    fitted = None if args.fitted is None else load_fitted(args.fitted, params, early.policy)
    options = EngineOptions(
        fetch=args.fetch,
        fitted=fitted,
        prefill=early.prefill,
        penalties=True,
        bias_limit=MOST_BIASES,
        logprobs=True,
        grammar=True,
    )
    classes = classes_of(context, room, args.slots)
    # The rows of the longest class are stored, so the library and the engine have one fetch mode.
    options = dataclasses.replace(options, fetch=plan_classes(params, early.policy, classes, options)[-1].fetch)
    tiers, library = tiers_of(args), None
    if args.library is not None:
        library = Library(
            args.library, params, early.policy, capacity=context, fetch=options.fetch, limits=tiers, fitted=fitted
        )
    try:
        limits = limits_of(args, tiers)
        engine = Engine(params, early.policy, classes=classes, library=library, limits=limits, options=options)
    except BaseException:
        if library is not None:
            library.close()
        raise
    return Service(engine, library, early.options)


def context_of(given: int | None, params: "Params") -> int:
    """Return the largest number of tokens of a prompt and its answer. Raises ConfigError if the model has fewer."""
    if given is None:
        return min(params.config.context, MOST_CONTEXT)
    if given > params.config.context:
        raise ConfigError(f"--max-context must be at most the model's context={params.config.context}, got {given}")
    return given


def classes_of(context: int, room: int, slots: int) -> list[RowClass]:
    """Return the classes of rows: contexts of 1, 1/4, 1/16, ... of the longest that have at least twice the room."""
    sizes = [context]
    while sizes[-1] // FEWER >= 2 * room:
        sizes.append(sizes[-1] // FEWER)
    return [RowClass(size - room, room, slots) for size in sizes]


def tiers_of(args: argparse.Namespace) -> TierLimits:
    """Return the limits of the library. Half of the free host memory is for its states if no option says more."""
    if args.library is None:
        return TierLimits(device=0, host=0)
    host = bytes_of(args.library_host_gib)
    if host is None:
        free = least_limit()
        host = UNKNOWN_HOST_BYTES if free is None else free.free // 2
    return TierLimits(device=bytes_of(args.library_device_gib), host=host, disk=bytes_of(args.library_disk_gib))


def limits_of(args: argparse.Namespace, tiers: TierLimits) -> Limits:
    """Return the limits of the rows: those of the options, or what is free and not for the library."""
    free = Limits().of_machine()
    for_device, for_host = tiers.device or 0, tiers.host or 0
    if jax.default_backend() == "cpu":  # both are the same memory
        for_device = for_host = for_device + for_host
    device, host = bytes_of(args.device_gib), bytes_of(args.host_gib)
    if device is None and free.device_bytes is not None:
        device = max(1, free.device_bytes - for_device)
    if host is None and free.host_bytes is not None:
        host = max(1, free.host_bytes - for_host)
    return Limits(device_bytes=device, host_bytes=host, waiting=args.queue)


def bytes_of(gib: float | None) -> int | None:
    """Return a number of GiB in bytes. None stays None."""
    return None if gib is None else int(gib * GIB)
