"""Every route over HTTP, once: what it does, whose key opens it, and the form of its errors. Pure.

The guard and the keys decide by it. What no row names counts as a change of the server: a route that is added without
a row is closed to pages of other origins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum, IntEnum
from functools import lru_cache
from typing import NamedTuple

from ts_frontend.config.keys import KeyKind


class Effect(IntEnum):
    """What a call does, the harmless first. OPEN: tells probes and clients what everyone may know; READS: tells what is
    served; RUNS: runs a model; CHANGES: changes what is served, or how."""

    OPEN = 0
    READS = 1
    RUNS = 2
    CHANGES = 3


class ErrorDialect(Enum):
    """Whose form errors have."""

    TORCHSERVE = "TorchServe"
    OPEN_INFERENCE = "Open Inference Protocol"
    OPENAI = "OpenAI"


class Row(NamedTuple):
    """`methods`: with blanks between, `*` for any; GET stands for HEAD, too. `path`: `{name}` is one segment, `{name*}`
    any number of them, last. `key`: whose key opens it, None for everyone. `json`: the body is JSON."""

    methods: str
    path: str
    effect: Effect
    key: KeyKind | None = KeyKind.INFERENCE
    dialect: ErrorDialect = ErrorDialect.TORCHSERVE
    json: bool = False


OPEN, READS, RUNS, CHANGES = Effect
_OIP, _OPENAI = ErrorDialect.OPEN_INFERENCE, ErrorDialect.OPENAI
_INFERENCE, _MANAGEMENT = KeyKind.INFERENCE, KeyKind.MANAGEMENT
_MODEL, _VERSION = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
_REPOSITORIES = ("/v2/repository", "/v2/repository/{repository}")


def _of_models() -> Iterator[Row]:
    """Open Inference Protocol: of a model, and of a version."""
    for path in (_MODEL, _VERSION):
        yield Row("GET", path, READS, dialect=_OIP)
        yield Row("GET", f"{path}/ready", OPEN, None, _OIP)
        yield Row("GET", f"{path}/config", READS, dialect=_OIP)
        yield Row("GET", f"{path}/stats", READS, dialect=_OIP)
        for rest in ("infer_stream", "generate", "generate_stream"):
            yield Row("POST", f"{path}/{rest}", RUNS, _INFERENCE, _OIP, json=True)
    # Handlers of TorchServe take any body, by any method.
    yield Row("*", f"{_MODEL}/infer", RUNS, dialect=_OIP)
    yield Row("*", f"{_MODEL}/explain", RUNS, dialect=_OIP)
    yield Row("POST", f"{_VERSION}/infer", RUNS, _INFERENCE, _OIP, json=True)


def _managing() -> Iterator[Row]:
    """Triton's: the repository, settings, shared memory."""
    for path in _REPOSITORIES:
        yield Row("POST", f"{path}/index", READS, dialect=_OIP)
        for verb in ("load", "unload"):
            yield Row("POST", f"{path}/models/{{model}}/{verb}", CHANGES, _MANAGEMENT, _OIP, json=True)
    for path in ("/v2/logging", "/v2/trace/setting", f"{_MODEL}/trace/setting"):
        yield Row("GET", path, READS, _MANAGEMENT, _OIP)
        yield Row("POST", path, CHANGES, _MANAGEMENT, _OIP, json=True)
    for kind in ("system", "cuda"):
        of_all, of_one = f"/v2/{kind}sharedmemory", f"/v2/{kind}sharedmemory/region/{{region}}"
        yield Row("GET", f"{of_all}/status", READS, dialect=_OIP)
        yield Row("GET", f"{of_one}/status", READS, dialect=_OIP)
        yield Row("POST", f"{of_one}/register", CHANGES, _INFERENCE, _OIP, json=True)
        yield Row("POST", f"{of_one}/unregister", CHANGES, _INFERENCE, _OIP, json=True)
        yield Row("POST", f"{of_all}/unregister", CHANGES, _INFERENCE, _OIP, json=True)


ROUTES: tuple[Row, ...] = (
    # Every listener
    Row("OPTIONS", "/", OPEN, None),
    Row("*", "/api-description", OPEN, None),
    Row("GET", "/docs", READS, None),
    Row("GET", "/openapi.json", READS, None),
    Row("GET", "/v2/docs", READS, None, _OIP),
    Row("GET", "/v2/docs/dataplane.json", READS, None, _OIP),
    Row("OPTIONS", "/predictions/{model}/{rest*}", READS),
    Row("OPTIONS", "/explanations/{model}/{rest*}", READS),
    Row("OPTIONS", "/models/{model}/{rest*}", READS),
    Row("OPTIONS", "/v1/models/{model}/{rest*}", READS),
    Row("OPTIONS", "/v2/models/{model}/{rest*}", READS, dialect=_OIP),
    # Inference
    Row("*", "/ping", OPEN, None),
    Row("*", "/predictions/{model}/{rest*}", RUNS),
    Row("*", "/explanations/{model}/{rest*}", RUNS),
    Row("*", "/invocations", RUNS),
    Row("*", "/models/{model}/invoke", RUNS),
    Row("*", "/{model}/predict", RUNS),
    Row("*", "/{model}/{version}/predict", RUNS),
    Row("*", "/wfpredict/{workflow}/{rest*}", RUNS),
    # KServe's and OpenAI's
    Row("GET", "/", READS),
    Row("GET", "/v1/models", READS, dialect=_OPENAI),
    Row("GET", "/v1/models/{model}", OPEN, None),
    Row("*", "/v1/models/{model}:{verb}", RUNS),
    Row("POST", "/v1/completions", RUNS, _INFERENCE, _OPENAI, json=True),
    Row("POST", "/v1/chat/completions", RUNS, _INFERENCE, _OPENAI, json=True),
    # The Open Inference Protocol and Triton's
    Row("GET", "/v2", READS, dialect=_OIP),
    Row("GET", "/v2/health/live", OPEN, None, _OIP),
    Row("GET", "/v2/health/ready", OPEN, None, _OIP),
    Row("GET", "/v2/models", READS, dialect=_OIP),
    Row("GET", "/v2/models/stats", READS, dialect=_OIP),
    *_of_models(),
    *_managing(),
    # Management
    Row("GET", "/models", READS, _MANAGEMENT),
    Row("POST", "/models", CHANGES, _MANAGEMENT),
    Row("GET", "/models/{model}", READS, _MANAGEMENT),
    Row("PUT DELETE", "/models/{model}", CHANGES, _MANAGEMENT),
    Row("GET", "/models/{model}/{version}", READS, _MANAGEMENT),
    Row("PUT DELETE", "/models/{model}/{version}", CHANGES, _MANAGEMENT),
    Row("PUT", "/models/{model}/{version}/set-default", CHANGES, _MANAGEMENT),
    Row("GET", "/workflows", READS, _MANAGEMENT),
    Row("POST", "/workflows", CHANGES, _MANAGEMENT),
    Row("GET", "/workflows/{workflow}", READS, _MANAGEMENT),
    Row("DELETE", "/workflows/{workflow}", CHANGES, _MANAGEMENT),
    Row("*", "/token", CHANGES, KeyKind.API),
    # Metrics
    Row("*", "/metrics", READS, None),
)
#: What a model declares for itself (`@custom_handler` of MLServer's runtimes).
OF_A_MODEL = Row("*", "/{path*}", RUNS, dialect=ErrorDialect.OPEN_INFERENCE)


class Decision(NamedTuple):
    """What a request is taken for. `managing`: only those who manage the server may do it; `known`: a row names it."""

    effect: Effect
    managing: bool
    dialect: ErrorDialect
    json: bool
    known: bool


def _pattern(path: str) -> re.Pattern[str]:
    """Of segments, each with `/` before it. None of them is empty where a path is decided: see `decision`."""
    words = re.split(r"(/\{\w+\*\}|\{\w+\})", "" if path == "/" else path)
    forms = {"}": "[^/]*", "*": "(?:/[^/]*)*"}
    found = (forms["*" if word.endswith("*}") else "}"] if word.endswith("}") else re.escape(word) for word in words)
    return re.compile("".join(found))


def methods_of(row: Row) -> frozenset[str]:
    """Empty: any."""
    words = set(row.methods.split()) - {"*"}
    return frozenset(words | {"HEAD"} if "GET" in words else words)


class _Compiled(NamedTuple):
    row: Row
    methods: frozenset[str]
    pattern: re.Pattern[str]


def _by_beginning() -> dict[str, list[_Compiled]]:
    """The rows by their first segment, "" for those that begin with any."""
    found: dict[str, list[_Compiled]] = {}
    for row in ROUTES:
        first = row.path.split("/")[1]
        key = "" if first.startswith("{") else first
        found.setdefault(key, []).append(_Compiled(row, methods_of(row), _pattern(row.path)))
    return found


_ROWS = _by_beginning()
_CACHED_CHARACTERS_MAX = 256


def decision(method: str, path: str) -> Decision:
    """What a request is taken for; of several rows that fit, the strictest counts, in whatever order routes are asked.
    `path` is percent-decoded; slashes at its end don't count."""
    return (_cached if len(path) <= _CACHED_CHARACTERS_MAX else _decided)(method, path)


def _decided(method: str, path: str) -> Decision:
    path = path.rstrip("/")
    _, _, rest = path.partition("/")
    first = rest.partition("/")[0]
    places = [*_ROWS.get(first, ()), *(_ROWS[""] if first else ())]
    fitting = [one for one in places if one.pattern.fullmatch(path)]
    rows = [one.row for one in fitting if not one.methods or method in one.methods]
    dialect = _OIP if first == "v2" else fitting[0].row.dialect if fitting else ErrorDialect.TORCHSERVE
    if not rows:
        reads = method == "OPTIONS"  # answers of these say what there is, and do nothing
        return Decision(READS if reads else CHANGES, not reads, dialect, False, False)
    return Decision(
        max(row.effect for row in rows),
        any(row.key in (KeyKind.MANAGEMENT, KeyKind.API) for row in rows),
        dialect,
        any(row.json for row in rows),
        True,
    )


_cached = lru_cache(maxsize=1024)(_decided)
