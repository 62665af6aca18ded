"""Listening addresses as TorchServe writes them: `http://HOST[:PORT]`, `https://HOST[:PORT]`, `unix:/path`. Pure."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from dataclasses import dataclass

_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9a-fA-F:.]+(?:%[\w.-]+)?\]|[^:/\[\]\s]+)(:(?P<port>\d+))?/?", re.IGNORECASE
)

#: Ports of an address that names none: (http, https), by API.
DEFAULT_PORTS = {"inference": (80, 443), "management": (8081, 8444), "metrics": (8082, 8445)}


#: Bytes of a Unix socket's path: sun_path has 108 with its final NUL (unix(7)).
UNIX_PATH_BYTES_MAX = 107
UNIX = "unix:"


@dataclass(frozen=True, slots=True)
class Address:
    """The address of an HTTP API: a host and port, or a Unix socket's path. Port 0: a free port."""

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def tls(self) -> bool:
        return self.scheme == "https"

    @property
    def loopback(self) -> bool:
        return self.scheme == "unix" or is_loopback(self.host)

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"{UNIX}{self.path}"
        return f"{self.scheme}://{bracketed(self.host)}:{self.port}"


def parse_address(text: str, api: str) -> Address:
    """The address that `text` names; `api` is a key of DEFAULT_PORTS.

    :raises ValueError: not an address; the message names the allowed forms.
    """
    text = text.strip()
    if text.lower().startswith(UNIX):
        return Address("unix", path=_unix_path(text))
    match = _URL.fullmatch(text)
    if not match:
        raise ValueError("allowed are http://HOST[:PORT], https://HOST[:PORT] and unix:/PATH")
    scheme = match["scheme"].lower()
    port = int(match["port"]) if match["port"] else DEFAULT_PORTS[api][scheme == "https"]
    if port > 65535:
        raise ValueError(f"port {port} is larger than 65535")
    return Address(scheme, match["host"].strip("[]"), port)


def _unix_path(text: str) -> str:
    """The path of `unix:/path`, also written `unix:///path`. :raises ValueError: relative, or too long."""
    path = text[len(UNIX) :]
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise ValueError("a Unix socket has an absolute path: unix:/PATH")
    path = "/" + path.lstrip("/")
    length = len(path.encode())
    if length > UNIX_PATH_BYTES_MAX:
        raise ValueError(f"the path has {length} bytes; the system allows a Unix socket {UNIX_PATH_BYTES_MAX}")
    return path


def bracketed(host: str) -> str:
    """The host as written before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def unix_path(host: str) -> str:
    """The path of a host that `parse_host` made of `unix:/PATH`; "" for other hosts."""
    return host[len(UNIX) :] if host.startswith(UNIX) else ""


def parse_host(text: str) -> str:
    """An IP address (or `localhost`) or `unix:/PATH`, as the gRPC listeners take it.

    :raises ValueError: anything else.
    """
    if text.strip().lower().startswith(UNIX):
        return UNIX + _unix_path(text.strip())
    host = text.strip().strip("[]")
    if host.lower() == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        raise ValueError("allowed are an IP address such as 127.0.0.1, 0.0.0.0 or ::1, and unix:/PATH") from None


def parse_name(text: str) -> str:
    """A name or an address by which clients call a server; `.example.org` (also `*.example.org`) for every name below,
    `*` for any.

    :raises ValueError: something else, a port too.
    """
    word = text.strip().lower()
    if word == "*":
        return word
    if word.startswith("[") and word.endswith("]"):
        word = word[1:-1]
    if ":" not in word:
        word = word.removeprefix("*").removesuffix(".")
        if re.fullmatch(r"\.?[^\s:/@\[\]?#*.]+(\.[^\s:/@\[\]?#*.]+)*", word):
            return word
    else:
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(word))
    raise ValueError("allowed are names and addresses without ports, `.example.org` for every name below, and `*`")


def is_loopback(host: str) -> bool:
    """True for `localhost`, loopback IP addresses and Unix sockets. Other names count as reachable from outside."""
    if host.lower() == "localhost" or unix_path(host):
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
