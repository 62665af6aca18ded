"""Listening addresses as TorchServe writes them: `http://HOST[:PORT]`, `https://HOST[:PORT]`, `unix:/path`. Pure."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

_URL = re.compile(r"(?P<scheme>https?)://(?P<host>\[[0-9a-fA-F:.%]+\]|[^:/\[\]\s]+)(:(?P<port>\d+))?/?", re.IGNORECASE)

#: Ports of an address that names none: (http, https), by API.
DEFAULT_PORTS = {"inference": (80, 443), "management": (8081, 8444), "metrics": (8082, 8445)}


@dataclass(frozen=True, slots=True)
class Address:
    """Where an HTTP API listens: a host and port, or a Unix socket's path. Port 0 takes a free one."""

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def tls(self) -> bool:
        return self.scheme == "https"

    @property
    def loopback(self) -> bool:
        """True when only this machine can reach it."""
        return self.scheme == "unix" or is_loopback(self.host)

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def parse_address(text: str, api: str) -> Address:
    """The address that `text` names; `api` is a key of DEFAULT_PORTS.

    :raises ValueError: not an address; says what is allowed.
    """
    text = text.strip()
    if text.startswith("unix:/"):
        return Address("unix", path=text[len("unix:") :])
    match = _URL.fullmatch(text)
    if not match:
        raise ValueError("allowed are http://HOST[:PORT], https://HOST[:PORT] and unix:/PATH")
    scheme = match["scheme"].lower()
    port = int(match["port"]) if match["port"] else DEFAULT_PORTS[api][scheme == "https"]
    if port > 65535:
        raise ValueError(f"port {port} is larger than 65535")
    return Address(scheme, match["host"].strip("[]"), port)


def parse_host(text: str) -> str:
    """An IP address (or `localhost`), as the gRPC listeners take it.

    :raises ValueError: anything else.
    """
    host = text.strip().strip("[]")
    if host.lower() == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        raise ValueError("allowed is an IP address such as 127.0.0.1, 0.0.0.0 or ::1") from None


def is_loopback(host: str) -> bool:
    """True for `localhost` and loopback IP addresses; a name that isn't an address counts as reachable from outside."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
