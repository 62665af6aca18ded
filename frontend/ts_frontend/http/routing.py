"""Routing over HTTP: the rows of the table of routes, and the choice of the row for a method and a path; and the first
checks of every request, which refuse cross-origin requests of web pages, and requests without the key that their route
needs (docs/security.md).

A request without a row counts as a change of the server, so that other origins' pages can't send it.

Browsers send requests of any page, also to servers on their own machine. They name the page's origin (`Origin`), its
relation to the server (`Sec-Fetch-Site`), and whether the answer is to be shown (`Sec-Fetch-Mode`, `Sec-Fetch-Dest`).
With DNS rebinding, a page's host name resolves to the server's address, and the browser treats the page as the server's
own; `Host` then has the page's name. Sources: RFC 6454, the Fetch Standard, Fetch Metadata.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum, IntEnum
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from ts_frontend.authorization.authorization import NOT_RENEWED, Authorization
from ts_frontend.config.keys import KeyKind
from ts_frontend.config.kinds import is_loopback
from ts_frontend.errors import PermissionDenied
from ts_frontend.http.errors import ErrorDialect, ForeignHost, ForeignOrigin, Unauthorized, UnsupportedMediaType
from ts_frontend.http.request import JSON, HttpAnswer, HttpRequest, Parameters, Serve, query_pairs

HTTP_INFERENCE: Final = "http_inference"
HTTP_MANAGEMENT: Final = "http_management"
HTTP_METRICS: Final = "http_metrics"
#: The HTTP API of a gRPC listener, with `grpc_metrics`.
GRPC_METRICS: Final = "grpc_metrics"
#: The kind of keys of each HTTP API; other APIs need none.
KEY_OF_API: Final = {HTTP_INFERENCE: KeyKind.INFERENCE, HTTP_MANAGEMENT: KeyKind.MANAGEMENT}
#: For `Row.keys`: any key of the listener's APIs is accepted.
ANY_KEY: Final = (KeyKind.INFERENCE, KeyKind.MANAGEMENT)


class Effect(IntEnum):
    """The effect of a call, from harmless to strict. OPEN: public facts for probes and clients; READS: describes the
    served models; RUNS: runs a model; CHANGES: changes the served models or the server."""

    OPEN = 0
    READS = 1
    RUNS = 2
    CHANGES = 3


class Switch(Enum):
    """A setting that a row depends on."""

    KEYS = "keys"
    KSERVE = "kserve_mode"
    DOCS = "enable_docs_url"
    CONSOLE = "enable_console"
    #: The pages' files: served with either of the two before.
    PAGES = "pages"
    #: The hosting platforms with paths of their own.
    SAGEMAKER = "platform=sagemaker"
    AZUREML = "platform=azureml"
    MLFLOW = "platform=mlflow"


HOSTING: Final = frozenset({Switch.SAGEMAKER, Switch.AZUREML, Switch.MLFLOW})

#: An unbound method of the service that answers.
Function: TypeAlias = "Callable[[Any, HttpRequest], Awaitable[HttpAnswer]]"


@dataclass(frozen=True)
class Row:
    """One route. `methods`: separated by blanks, `*` for any; GET includes HEAD. `path`: `{name}` is one segment,
    `{name}:word` one segment with that suffix, `{name*}` any number of segments at the end; trailing slashes are
    ignored. `function`: answers.

    `on`: the APIs with this route; `keys`: one of these kinds is needed, none for `()`, ANY_KEY: any key of the
    listener's APIs. `dialect`: the form of its errors. `json`: the body is JSON. `when`: only with this setting.
    `yields`: a model's own route of this path takes precedence.

    Rows with a `summary` are in the API description: `operation`: its id (by default made of method and path), `query`:
    the parameters, all optional but `url`, `body`: its content types, `described_as`: the method to describe for a row
    with any method."""

    methods: str
    path: str
    effect: Effect
    function: Function
    summary: str = ""
    operation: str = ""
    query: Sequence[str] = ()
    _: KW_ONLY
    on: Sequence[str]
    keys: Sequence[KeyKind]
    body: Sequence[str] = ()
    described_as: str = "post"
    dialect: ErrorDialect = ErrorDialect.TORCHSERVE
    json: bool = False
    when: Switch | None = None
    yields: bool = False
    #: `methods`, with HEAD; empty: any.
    accepted: frozenset[str] = field(init=False, default=frozenset(), compare=False)

    def __post_init__(self) -> None:
        words = set(self.methods.split()) - {"*"}
        object.__setattr__(self, "accepted", frozenset(words | {"HEAD"} if "GET" in words else words))

    def accepts(self, method: str) -> bool:
        return not self.accepted or method in self.accepted

    @property
    def managing(self) -> bool:
        return KeyKind.API in self.keys or tuple(self.keys) == (KeyKind.MANAGEMENT,)

    @property
    def template(self) -> str:
        """Returns the path in the form of OpenAPI and traces."""
        return re.sub(r"/\{\w+\*\}$", "", self.path)

    @property
    def described_method(self) -> str:
        return self.described_as if self.methods == "*" else self.methods.lower()


class Match(NamedTuple):
    """The route found for a request. `serve` answers it; if it is None, `allowed` has the methods of the path.
    `effect`, `managing` and `json` are the strictest of all matching rows on all listeners, so that sharing an address
    weakens no check. `known`: a row names the request. `yields`: a model's own route of this path takes precedence.
    `params`: the values of the names in the path."""

    effect: Effect
    managing: bool
    json: bool
    dialect: ErrorDialect
    keys: Sequence[KeyKind]
    known: bool = True
    yields: bool = False
    serve: Serve | None = None
    params: Mapping[str, str] = {}
    allowed: Sequence[str] = ()
    template: str = ""


#: Finds the route of a method and a path.
Find: TypeAlias = "Callable[[str, str], Match | None]"


class _Node:
    """A node in the tree of paths: `rows` end here, `rests` match any following segments."""

    __slots__ = ("any", "ends", "rests", "rows", "words")

    def __init__(self) -> None:
        self.words: dict[str, _Node] = {}
        self.ends: dict[str, _Node] = {}
        self.any: _Node | None = None
        self.rows: list[Row] = []
        self.rests: list[Row] = []

    def add(self, row: Row, segments: Sequence[str]) -> None:
        if not segments:
            self.rows.append(row)
            return
        word, *rest = segments
        name, _, end = word.rpartition("}")
        if name.endswith("*"):
            self.rests.append(row)
        elif not name:
            self.words.setdefault(word, _Node()).add(row, rest)
        elif end:
            self.ends.setdefault(end, _Node()).add(row, rest)
        else:
            self.any = self.any or _Node()
            self.any.add(row, rest)

    def fitting(self, segments: Sequence[str], values: tuple[str, ...] = ()) -> Iterator[tuple[Row, tuple[str, ...]]]:
        """Yields the matching rows, each with the values of its names; literal segments come before names."""
        if segments:
            word, rest = segments[0], segments[1:]
            if word in self.words:
                yield from self.words[word].fitting(rest, values)
            for end, node in self.ends.items():
                if word.endswith(end):
                    yield from node.fitting(rest, (*values, word[: -len(end)]))
            if self.any is not None:
                yield from self.any.fitting(rest, (*values, word))
        else:
            for row in self.rows:
                yield row, values
        for row in self.rests:
            yield row, (*values, "/".join(segments))


_CACHED_CHARACTERS_MAX: Final = 256


class RouteTable:
    """The rows of the listener with these `apis`. Of several rows that fit a path, one with literal segments wins over
    one with names, then the first wins; a description (OPTIONS) comes before both.

    `services`: objects with the rows' functions; without any, `find` returns no `serve`. Raises LookupError for a row
    whose function no service has."""

    def __init__(
        self, rows: Sequence[Row], apis: Sequence[str], switches: Iterable[Switch] = (), services: Sequence[object] = ()
    ) -> None:
        self._keys = tuple(KEY_OF_API[api] for api in apis if api in KEY_OF_API)
        self.rows = served_rows(rows, apis, switches)
        members = _members(services)
        self._serve = {id(row): _bound(row.function, members) for row in self.rows} if services else {}
        self._here = {id(row) for row in self.rows}
        #: Other platforms' rows for a path give no form to its errors.
        self._off = HOSTING - {*switches}
        self._root = _Node()
        for row in rows:
            self._root.add(row, _segments(row.path))
        self._cached = lru_cache(maxsize=1024)(self._find)

    def find(self, method: str, path: str) -> Match:
        """Returns the route of a method and a path, which is percent-decoded."""
        return (self._cached if len(path) <= _CACHED_CHARACTERS_MAX else self._find)(method, path)

    def _find(self, method: str, path: str) -> Match:
        segments = _segments(path)
        fitting = sorted(self._root.fitting(segments), key=lambda one: one[0].methods != "OPTIONS")
        here = [one for one in fitting if id(one[0]) in self._here]
        rows = [row for row, _ in fitting if row.accepts(method)]
        row, values = next((one for one in here if one[0].accepts(method)), (None, ()))
        named = [one for one, _ in here if not one.path.endswith("*}")]
        reads = method == "OPTIONS" and not rows  # OPTIONS only describes the listener
        effect = max((one.effect for one in rows), default=Effect.READS if reads else Effect.CHANGES)
        return Match(
            effect,
            any(one.managing for one in rows) or not (rows or reads),
            row.json if row else any(one.json for one in rows),
            row.dialect
            if row
            else _dialect(segments, named or [one for one, _ in fitting if one.when not in self._off]),
            self._keys_of(row, effect),
            bool(rows),
            row is None or row.yields,
            None if row is None else self._serve.get(id(row)),
            dict(zip(_names(row.path), values, strict=True)) if row else {},
            () if row else sorted({word for one in named for word in one.accepted}),
            row.template if row else named[0].template if named else "",
        )

    def _keys_of(self, row: Row | None, effect: Effect) -> Sequence[KeyKind]:
        """Returns the key kinds for a row: any of the listener's keys if no row matches, or if a row without keys
        shares its path with a stricter one, so that predictions' paths don't reveal a model's readiness."""
        if row is None or row.keys == ANY_KEY or (row.effect is Effect.OPEN and effect is not Effect.OPEN):
            return self._keys
        return row.keys


def served_rows(rows: Sequence[Row], apis: Sequence[str], switches: Iterable[Switch]) -> list[Row]:
    on = {None, *switches}
    return [row for row in rows if row.when in on and not set(row.on).isdisjoint(apis)]


def _members(services: Sequence[object]) -> dict[int, tuple[object, str]]:
    """The first service with a member of its class, or inherited by it, and the member's name; by the member's id,
    since functions of compiled classes have other names."""
    found: dict[int, tuple[object, str]] = {}
    for service in reversed(services):
        by_name = {name: one for kind in reversed(type(service).__mro__) for name, one in vars(kind).items()}
        found.update({id(one): (service, name) for name, one in by_name.items()})
    return found


def _bound(function: Function, members: Mapping[int, tuple[object, str]]) -> Serve:
    if id(function) not in members:
        raise LookupError(f"no service answers by {function.__qualname__}")
    service, name = members[id(function)]
    serve: Serve = getattr(service, name)
    return serve


def _dialect(segments: Sequence[str], rows: Sequence[Row]) -> ErrorDialect:
    """Returns the dialect of the error for a request without a route."""
    if segments[:1] == ["v2"]:
        return ErrorDialect.OPEN_INFERENCE
    if rows:
        return rows[0].dialect
    is_openais = segments[:1] == ["v1"] or segments[:2] == ["openai", "v1"]
    return ErrorDialect.OPENAI if is_openais else ErrorDialect.TORCHSERVE


def _segments(path: str) -> list[str]:
    return path.rstrip("/").split("/")[1:]


@lru_cache(maxsize=512)
def _names(path: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\{(\w+)\*?\}", path))


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
