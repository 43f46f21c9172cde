"""The settings of a server."""

import dataclasses
import ipaddress
import re
from pathlib import Path

from jshadow.errors import CheckpointError, ConfigError, check_integer
from jshadow.weights.tokenizer import read_text

_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|[0-9a-fA-F:]+:[0-9a-fA-F:]*")
ANY_HOST = "*"


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Settings of a server.

    Attributes:
        name: the id of the model in requests and responses.
        api_keys: the keys that a request may have. Empty: no key is asked for.
        allowed_hosts: without keys, the names that the header Host may have, beside those of this machine: names or
            addresses without a port. ANY_HOST allows all.
        body_bytes: maximum size of a request's body in bytes, except an upload.
        upload_bytes: maximum size of an uploaded file in bytes.
        held_bytes: maximum size of the bodies of all open requests together in bytes. One body may exceed it alone.
        seconds: maximum time of a request in seconds, and of its body. A request that takes longer is cancelled.

    Raises:
        ConfigError: a value is out of range.
    """

    name: str
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    body_bytes: int = 2**24
    upload_bytes: int = 2**26
    held_bytes: int = 2**28
    seconds: float = 600.0

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


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the API keys of a file: one on each line. Empty lines and lines that begin with # do not count.

    Raises:
        CheckpointError: the file cannot be read, or has no key in it.
    """
    try:
        lines = [line.strip() for line in read_text(path.expanduser()).splitlines()]
    except (OSError, UnicodeError) as error:
        raise CheckpointError(f"{path} must be a readable UTF-8 file of API keys: {error}") from error
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise CheckpointError(f"{path} must have at least one API key in it, got none")
    return keys
