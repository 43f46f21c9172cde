"""The lines that `jshadow serve` prints at its start: address, model, policy, rows and library."""

import argparse
from typing import TYPE_CHECKING, Any

import jax

from jshadow.policies.settings import changed_settings
from jshadow.serving.admission import PlannedClass

if TYPE_CHECKING:
    from jshadow.serving.http.service import Service

MIB, GIB = 2**20, 2**30


def about(service: "Service", url: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return what a server serves, as JSON can hold it. Bytes are planned, and those of a row without the documents."""
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
        "classes": [class_about(plan) for plan in engine.plans],
        "device_bytes": limits.device_bytes,
        "host_bytes": limits.host_bytes,
        "library": documents,
        "api_keys": len(service.options.api_keys),
    }


def class_about(plan: PlannedClass) -> dict[str, Any]:
    """Return the size of a class of rows, and the bytes of one row."""
    one = plan.row_class
    return {
        "prompt": one.prompt,
        "room": one.room,
        "rows": one.rows,
        "device_bytes": plan.bytes.device // one.rows,
        "host_bytes": plan.bytes.host // one.rows,
        "fallback": plan.fallback,
    }


def lines(known: dict[str, Any]) -> list[str]:
    """Return what `about` returned as lines of text."""
    settings = ", ".join(f"{name}={value}" for name, value in known["settings"].items())
    rows = [
        f"{one['rows']} of {one['prompt']:,} + {one['room']:,} tokens, each {size(one['device_bytes'])} on the device"
        + (f" and {size(one['host_bytes'])} on the host" if one["host_bytes"] else "")
        + (f"; full attention, because {one['fallback']}" if one["fallback"] else "")
        for one in known["classes"]
    ]
    documents, keys = known["library"], known["api_keys"]
    library = "none: files are not stored (--library DIR)"
    if documents is not None:
        count = documents["documents"]
        named = f"{count} document{'' if count == 1 else 's'}"
        library = f"{documents['place']}, {named} of {documents['tokens']:,} tokens, {size(documents['bytes'])}"
    table = [
        ("page", f"{known['url']}/"),
        ("API", f"{known['url']}/v1"),
        ("model", f"{known['model']}, {known['dtype']}, on {known['device']}"),
        ("policy", f"{known['policy']}{f' with {settings}' if settings else ''}, fetch {known['fetch']}"),
        *(("rows" if place == 0 else "", text) for place, text in enumerate(rows)),
        ("for rows", f"{size(known['device_bytes'])} on the device, {size(known['host_bytes'])} on the host"),
        ("library", library),
        ("API keys", f"{keys}" if keys else "none: each request is answered (--api-key-file FILE)"),
    ]
    return [f"{name:<9} {text}" for name, text in table]


def size(count: int | None) -> str:
    """Return bytes as MiB or GiB."""
    if count is None:
        return "any bytes"
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / MIB:,.1f} MiB"
