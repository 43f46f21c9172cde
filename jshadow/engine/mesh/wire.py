"""Addresses and messages of the roll call: `HOST:PORT`, and JSON objects, one a line, over TCP."""

import contextlib
import ipaddress
import json
import re
import socket
from typing import Any

from jshadow.errors import ConfigError

MOST_BYTES = 65_536  # of one message
PROTOCOL = 1
# If a host has lost its power or its network, its peers know it after 10 + 4 * 4 = 26 seconds.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 4, "TCP_KEEPCNT": 4}


def split_address(address: str, field: str) -> tuple[str, int]:
    """Return the host and the port of "HOST:PORT". An IPv6 address stands in brackets.

    Args:
        address: the text.
        field: its name in the error message.

    Raises:
        ConfigError: the text is not of this form, or the port is not from 1 to 65,535.
    """
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):(\d{1,5})", address)
    if found is None or not 1 <= int(found[2]) <= 65_535:
        raise ConfigError(f"{field} must be HOST:PORT with a port from 1 to 65535, got {address!r:.80}")
    return found[1].strip("[]"), int(found[2])


def join_address(host: str, port: int) -> str:
    """Return "HOST:PORT". An IPv6 address is put into brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind_address(host: str, port: int) -> str:
    """Return where process 0 listens: on the loopback interface if the host is there, else on all interfaces."""
    name = "127.0.0.1" if host == "localhost" else host
    try:
        loopback = ipaddress.ip_address(name).is_loopback
    except ValueError:  # a name
        loopback = False
    return join_address(name if loopback else "::" if socket.has_dualstack_ipv6() else "0.0.0.0", port)


def listen(address: str) -> socket.socket:
    """Return a socket that listens at "HOST:PORT". Raises OSError if the port cannot be opened."""
    host, port = split_address(address, "bind address")
    if host == "::":
        return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel close a connection whose other host is silent. It needs no thread of Python."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # not all systems have all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message. If the other side is gone, nothing happens: whoever reads from it finds out."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


class Lines:
    """The messages that arrive on a connection."""

    def __init__(self) -> None:
        self.rest = b""

    def take(self, content: bytes) -> list[dict[str, Any]]:
        """Return the messages that end in these bytes.

        Raises:
            ValueError: a line is not a JSON object, is nested too deeply, or is longer than MOST_BYTES.
        """
        *lines, self.rest = (self.rest + content).split(b"\n")
        if len(self.rest) > MOST_BYTES or self.rest[:1] not in (b"", b"{"):
            raise ValueError(f"a message begins with {self.rest[:8]!r}, or has more than {MOST_BYTES} bytes")
        try:
            messages = [json.loads(line) for line in lines]
        except RecursionError as error:
            raise ValueError("a message is nested too deeply") from error
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a message is not a JSON object")
        return messages
