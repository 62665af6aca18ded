"""The first checks of every HTTP request: refuses cross-origin requests of web pages, and requests without the key that
their route needs (docs/security.md).

Browsers send requests of any page, also to servers on their own machine. They name the page's origin (`Origin`), its
relation to the server (`Sec-Fetch-Site`), and whether the answer is to be shown (`Sec-Fetch-Mode`, `Sec-Fetch-Dest`).
With DNS rebinding, a page's host name resolves to the server's address, and the browser treats the page as the server's
own; `Host` then has the page's name. Sources: RFC 6454, the Fetch Standard, Fetch Metadata.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from ts_frontend.authorization.authorization import NOT_RENEWED, Authorization
from ts_frontend.config.keys import KeyKind
from ts_frontend.config.kinds import is_loopback
from ts_frontend.errors import PermissionDenied
from ts_frontend.http.errors import ErrorDialect, ForeignHost, ForeignOrigin, Unauthorized, UnsupportedMediaType
from ts_frontend.http.request import JSON, HttpAnswer, HttpRequest, Parameters, query_pairs
from ts_frontend.http.routing import Effect, Find, Match

FORM: Final = "application/x-www-form-urlencoded"
#: The content types that browsers send for any page without a preflight: forms and fetches, pings of links, reports.
SIMPLE: Final = frozenset({"", "text/plain", "multipart/form-data", FORM, "text/ping", "application/csp-report"})
#: Those of them that other programs send, too: `curl -d`, Triton's clients.
_USUAL: Final = frozenset({"", FORM})
#: Values of Sec-Fetch-Site for typed addresses, and for pages of the same origin; "" if it isn't sent.
_TYPED: Final = frozenset({b"", b"none"})
_OWN_SITES: Final = frozenset({*_TYPED, b"same-origin"})
#: Values of Sec-Fetch-Mode and Sec-Fetch-Dest for answers that are shown, in a window or in a frame.
_NAVIGATIONS: Final = frozenset({b"navigate", b"nested-navigate"})
_FRAMES: Final = frozenset({b"document", b"iframe", b"frame", b"embed", b"object", b"fencedframe"})
_HOST: Final = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]?#]+)(?::\d{0,5})?")
_HOST_CHARACTERS_MAX: Final = 256
_WHO_MAY: Final = "cors_allowed_origin names the origin that may"
_MANAGE: Final = "manage the server by this address"
_SHOW: Final = "show what a model answers"


class Hosts:
    """The host names under which clients may call a listener: `host`: its own address ("" for a Unix socket), `told`:
    the server's other addresses, `allowed`: the setting `allowed_hosts`.

    `any_name`: any host name is accepted: for listeners that other machines reach, unless `allowed_hosts` is set, and
    for Unix sockets, which browsers can't reach."""

    def __init__(self, host: str, told: Sequence[str] = (), allowed: Sequence[str] = ()) -> None:
        local = not host or is_loopback(host)
        own = () if local else (socket.gethostname(),)
        names = (host, *told, *own, *(word for word in allowed if word[0] not in "*."))
        self._names = frozenset(map(_plain, filter(None, names)))
        self._ends = tuple(word for word in allowed if word[0] == ".")
        self._all = "*" in allowed or not (local or allowed)
        self.any_name = self._all or not host
        self.has = lru_cache(maxsize=256)(self._has)

    def _has(self, header: str, reached: str) -> bool:
        if self._all:
            return True
        match = _HOST.fullmatch(header) if len(header) <= _HOST_CHARACTERS_MAX else None
        name = _plain(match["name"]) if match else ""
        if not name:
            return False
        if name in self._names or name.endswith(self._ends) or name == _plain(reached):
            return True
        return is_loopback(name) or name.endswith(".localhost")


def _plain(host: str) -> str:
    """Returns a name in lower case without the root's dot, or an address in its shortest form."""
    name = host.strip("[]").lower()
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return name.removesuffix(".")
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


class Guard:
    """The first check of a listener's requests: refuses the forbidden ones and lets the others pass.

    `allowed_origin`: the origin whose pages are treated as the server's own ("*": all). `managed`: the listener has the
    management API and the console, so that pages of its own origin may manage the server. `of_a_model` finds the paths
    that models declare, which aren't in the table of routes."""

    def __init__(
        self, hosts: Hosts, allowed_origin: str | None = None, of_a_model: Find | None = None, *, managed: bool = True
    ) -> None:
        self._hosts = hosts
        self._allowed = allowed_origin.encode() if allowed_origin else b""
        self._managers = _OWN_SITES if managed else _TYPED
        self._of_a_model = of_a_model

    def check(self, request: HttpRequest, match: Match) -> None:
        """Raises ForeignHost, ForeignOrigin, UnsupportedMediaType. `match`: the request's route."""
        if not self._hosts.any_name:
            self._check_hosts(request.values(b"host"), request.reached)
        effect, managing, json = match[:3]
        named = request.by_name
        from_page = b"origin" in named or b"sec-fetch-site" in named
        if from_page:
            if (managing or effect is Effect.CHANGES) and not self._is_a_models(request, match):
                self._check_page(request, self._managers, _MANAGE)
            elif effect >= Effect.RUNS and _is_shown(named):
                self._check_page(request, _OWN_SITES, _SHOW)
        if json:
            _check_type(named.get(b"content-type", b""), from_page)

    def _is_a_models(self, request: HttpRequest, match: Match) -> bool:
        """Returns True if a model declares the path and the table of routes, which comes first, doesn't have it."""
        if match.known or self._of_a_model is None:
            return False
        return self._of_a_model(request.method, request.path) is not None

    def _check_hosts(self, hosts: Sequence[bytes], reached: str) -> None:
        for host in hosts:
            if not self._hosts.has(host.decode("latin-1"), reached):
                raise ForeignHost(
                    f"The request is for {_shown(host)}, which isn't a name of this server; allowed_hosts adds names"
                )

    def _check_page(self, request: HttpRequest, sites: frozenset[bytes], deed: str) -> None:
        """Refuses pages of other origins; and pages of the server's own one, unless `sites` has them."""
        origins, hosts = request.values(b"origin"), request.values(b"host")
        if self._allowed == b"*" or (origins and all(origin == self._allowed for origin in origins)):
            return
        own = b"same-origin" in sites
        for origin in origins:
            if not (own and self._is_own(origin.decode("latin-1"), hosts, request.reached)):
                raise ForeignOrigin(f"Pages of {_shown(origin)} may not {deed}; {_WHO_MAY}")
        for site in request.values(b"sec-fetch-site"):
            if site.strip().lower() not in sites:
                raise ForeignOrigin(f"Pages of other origins ({_shown(site)}) may not {deed}; {_WHO_MAY}")

    def _is_own(self, origin: str, hosts: Sequence[bytes], reached: str) -> bool:
        """Whether the page comes from this server, by one of its names, also behind a Unix socket's proxy."""
        try:
            page = urlsplit(origin).netloc.lower()
        except ValueError:
            return False
        same = bool(page) and [page] == [host.decode("latin-1").lower() for host in hosts]
        return same and self._hosts.has(page, reached)


def _is_shown(named: Mapping[bytes, bytes]) -> bool:
    """Returns whether a browser shows the answer as a document, in a window or in a frame."""
    mode, destination = named.get(b"sec-fetch-mode", b""), named.get(b"sec-fetch-dest", b"")
    return mode.strip().lower() in _NAVIGATIONS or destination.strip().lower() in _FRAMES


def _check_type(header: bytes, from_browser: bool) -> None:
    if header == JSON[1]:  # the usual one
        return
    kind = header.partition(b";")[0].strip().lower().decode("latin-1")
    if kind in SIMPLE and (from_browser or kind not in _USUAL):
        raise UnsupportedMediaType(f"The content type must be application/json, not {kind[:80] or 'none'}")


def _shown(value: bytes) -> str:
    return value[:200].decode("latin-1")


AUTHORIZATION: Final = b"authorization"
#: The kinds of keys that /token renews, by the value of `type`.
_RENEWED: Final = {"management": KeyKind.MANAGEMENT, "inference": KeyKind.INFERENCE}


class HttpKeys:
    """Checks the key of a request before its body is read."""

    def __init__(self, authorization: Authorization) -> None:
        self._authorization = authorization

    def check(self, request: HttpRequest, match: Match) -> bool:
        """Returns True if one of the keys that the match asks for is valid, and removes it from the headers for
        handlers; False if none was needed. Raises PermissionDenied for routes with TorchServe's errors, Unauthorized
        for others. /token checks its key itself."""
        if not match.keys or KeyKind.API in match.keys:
            return False
        try:
            self._check(request, match.keys)
            return True
        except PermissionDenied as error:
            if match.dialect is ErrorDialect.TORCHSERVE:
                raise
            raise Unauthorized(error.message) from error

    def _check(self, request: HttpRequest, kinds: Sequence[KeyKind]) -> None:
        values = presented(request)
        for kind in kinds:
            if self._authorization.opens(kind, values):
                request.drop(AUTHORIZATION)
                return
        self._authorization.refuse(kinds[0], values, request.peer)

    async def token(self, request: HttpRequest) -> HttpAnswer:
        """Answers /token?type=management (or inference): makes a new key and writes it to key_file.json."""
        values = presented(request)
        word = Parameters(query_pairs(request)).text("type") or ""
        kind = _RENEWED.get(word)
        if not self._authorization.opens(KeyKind.API, values):
            self._authorization.refuse(KeyKind.API, values, request.peer, NOT_RENEWED)
        if kind is None:
            raise PermissionDenied(f"{NOT_RENEWED} (type is {word[:80]!r}, not inference or management)")
        await self._authorization.renew(kind)
        return HttpAnswer(200, (JSON,), b"\n")


def presented(request: HttpRequest) -> list[bytes]:
    return request.values(AUTHORIZATION)
