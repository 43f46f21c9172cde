"""The settings of a server."""

import dataclasses
import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from jshadow.errors import ConfigError, check_integer
from jshadow.serving.http.keys import KeyLimits
from jshadow.serving.http.traces import Traces

_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|[0-9a-fA-F:]+:[0-9a-fA-F:]*")
ANY_HOST = "*"


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Settings of a server.

    Attributes:
        name: the id of the model in requests and responses.
        api_keys: the keys that a request may have, and the limits of each. Empty: no key is asked for.
        api_key_file: the file that the keys are from, which is read again when it has changed, or None.
        allowed_hosts: without keys, the names that the header Host may have, beside those of this machine: names or
            addresses without a port. ANY_HOST allows all.
        body_bytes: maximum size of a request's body in bytes, except an upload.
        upload_bytes: maximum size of an uploaded file in bytes.
        held_bytes: maximum size of the bodies of all open requests together in bytes. One body may exceed it alone.
        seconds: maximum time of a request in seconds, and of its body. A request that takes longer is cancelled.
        traces: where spans of requests go.

    Raises:
        ConfigError: a value is out of range.
    """

    name: str
    api_keys: Mapping[str, KeyLimits] = MappingProxyType({})
    api_key_file: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    body_bytes: int = 2**24
    upload_bytes: int = 2**26
    held_bytes: int = 2**28
    seconds: float = 600.0
    traces: Traces = dataclasses.field(default_factory=Traces)

    def __post_init__(self) -> None:
        for name in ("body_bytes", "upload_bytes", "held_bytes"):
            check_integer(name, getattr(self, name), least=1)
        for host in self.allowed_hosts:
            if host != ANY_HOST and not _HOST_NAME.fullmatch(host):
                raise ConfigError(f"allowed_hosts must be names or addresses without a port, got {host!r:.80}")
        if not 0 < self.seconds < float("inf"):
            raise ConfigError(f"seconds must be above 0 and finite, got {self.seconds!r}")


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is that of this machine for its own programs alone."""
    try:
        return host == "localhost" or host.endswith(".localhost") or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
