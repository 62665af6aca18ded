"""Routing over HTTP: the rows of the table of routes, and the choice of the row for a method and a path. Pure.

A request without a row counts as a change of the server, so that other origins' pages can't send it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum, IntEnum
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

from ts_frontend.config.keys import KeyKind
from ts_frontend.http.errors import ErrorDialect
from ts_frontend.http.request import HttpAnswer, HttpRequest, Serve

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
