"""Who asks: the client of a request, found from its headers and its connection, for everything that the request does;
the tokens of language models' requests: the most that one may use, and those that its answer says it has used; and
`limits.yaml`: who a client is, and the limits and weights of clients, for the server and for its models.

Secrets are neither kept nor shown: a client without a name is known by a digest of its key, whose own key is made anew
with each process, so that nobody can find the secret from it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import yaml
from google.protobuf.message import DecodeError

from ts.protocol import open_inference_pb2 as pb
from ts.protocol.frames import Buffer, Input, size_of
from ts.protocol.wire import Malformed, fields
from ts_frontend.config.files import read_text
from ts_frontend.config.kinds import nearest
from ts_frontend.job import Job

if TYPE_CHECKING:
    from ts_frontend.limits.limits import Account

#: What names a client; a header is `header:NAME`.
KEY, AUTHORIZATION, CERTIFICATE, ADDRESS, HEADER = "key", "authorization", "certificate", "address", "header"
IDENTIFY = (KEY, AUTHORIZATION, CERTIFICATE, ADDRESS)
#: The clients that are counted one by one unless the file says otherwise; further ones share an account.
CLIENTS_MAX = 10_000
FILE_BYTES_MAX = 1 << 20
LEAST, MOST = 1e-6, 1e12
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[!-~]{1,100}")
#: The name that stands for all clients without one, in metrics.
OTHER = "other"


class BadLimits(ValueError):
    """The file can't be used; the message names the place in it."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The limits of one client; None: no limit. `burst`: the requests that may come at once (by default those of a
    second, at least one). `weight`: its share of a model's workers beside others, None for the one of a wider rule."""

    weight: float | None = None
    requests_per_second: float | None = None
    burst: float | None = None
    concurrent: int | None = None
    items_per_second: float | None = None
    bytes_per_second: float | None = None
    worker_ms_per_second: float | None = None
    tokens_per_minute: float | None = None

    @property
    def limits(self) -> bool:
        """Whether it has a limit, not only a weight."""
        return any(getattr(self, one.name) is not None for one in dataclasses.fields(self) if one.name != "weight")

    def divided(self, servers: int) -> Rule:
        """The part of one of several servers; each lets at least one request run at a time."""
        if servers < 2:
            return self
        at_once = None if self.concurrent is None else max(1, self.concurrent // servers)
        parts = {name: getattr(self, name) for name in _RATES}
        rates = {name: None if value is None else value / servers for name, value in parts.items()}
        return replace(self, concurrent=at_once, burst=None if self.burst is None else self.burst / servers, **rates)


_RATES = ("requests_per_second", "items_per_second", "bytes_per_second", "worker_ms_per_second", "tokens_per_minute")
NO_RULE = Rule()


@dataclass(frozen=True, slots=True)
class Scope:
    """Rules of the server or of a model: `defaults` for each client, and those of `clients` by name."""

    defaults: Rule = NO_RULE
    clients: Mapping[str, Rule] = field(default_factory=dict)

    def rule(self, name: str) -> Rule:
        return self.clients.get(name, self.defaults)


NO_SCOPE = Scope()


@dataclass(frozen=True, slots=True)
class Rules:
    """The file. `identify`: kinds of identities, of which the first that a request has counts; `names`: the clients'
    names by their identities (`header:VALUE`)."""

    identify: Sequence[str] = IDENTIFY
    names: Mapping[str, str] = field(default_factory=dict)
    server: Scope = NO_SCOPE
    models: Mapping[str, Scope] = field(default_factory=dict)
    clients_max: int = CLIENTS_MAX

    @property
    def counts_items(self) -> bool:
        """Whether a limit needs the items of requests."""
        scopes = (self.server, *self.models.values())
        rules = (rule for scope in scopes for rule in (scope.defaults, *scope.clients.values()))
        return any(rule.items_per_second is not None for rule in rules)

    def weight(self, model: str, name: str) -> float:
        """A client's weight in a model's queue: the narrowest that is given."""
        own = self.models.get(model, NO_SCOPE)
        for rule in (own.clients.get(name), own.defaults, self.server.clients.get(name), self.server.defaults):
            if rule is not None and rule.weight is not None:
                return rule.weight
        return 1.0


def read_rules(path: Path) -> Rules:
    """Blocking. Raises BadLimits."""
    try:
        found = yaml.safe_load(read_text(path, FILE_BYTES_MAX))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise BadLimits(f"it can't be read: {' '.join(str(error).split())}") from error
    return parsed_rules({} if found is None else found)


def parsed_rules(found: object) -> Rules:
    top = _mapping("the file", found, ("identify", "clients", "defaults", "models", "clients_max"))
    names: dict[str, str] = {}
    server = _scope("", top, names)
    models = _mapping("models", top.get("models") or {})
    scopes = {
        str(name): _scope(f"models.{name}", _mapping(f"models.{name}", one, ("defaults", "clients")))
        for name, one in models.items()
    }
    for model, scope in scopes.items():
        if unknown := scope.clients.keys() - server.clients.keys():
            raise BadLimits(f"models.{model}.clients names {min(unknown)!r}, which isn't among clients")
    most = top.get("clients_max", CLIENTS_MAX)
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise BadLimits(f"clients_max must be a whole number from 1, not {most!r}")
    return Rules(_identify(top.get("identify")), names, server, scopes, most)


def _identify(found: object) -> Sequence[str]:
    if found is None:
        return IDENTIFY
    words = [found] if isinstance(found, str) else found
    if not isinstance(words, list) or not words:
        raise BadLimits("identify must be a list of " + ", ".join((*IDENTIFY, "header:NAME")))
    for word in words:
        kind, _, name = str(word).partition(":")
        if word not in IDENTIFY and not (kind == HEADER and _NAME.fullmatch(name)):
            raise BadLimits(f"identify has {word!r}: it must be one of {', '.join((*IDENTIFY, 'header:NAME'))}")
    return tuple(str(word).lower() for word in words)


def _scope(where: str, found: Mapping[str, Any], names: dict[str, str] | None = None) -> Scope:
    """`names`: gets the identities of the server's clients; a model's rules have none."""
    before = f"{where}." if where else ""
    clients = _mapping(f"{before}clients", found.get("clients") or {})
    rules = {}
    for name, one in clients.items():
        if not _NAME.fullmatch(str(name)) or name == OTHER:
            raise BadLimits(
                f"{before}clients has {name!r}: a name is up to 100 printable ASCII characters, not {OTHER}"
            )
        rule = _mapping(f"{before}clients.{name}", one or {})
        if names is not None:
            for identity in _identities(f"clients.{name}.who", rule.pop("who", None)):
                if names.setdefault(identity, str(name)) != name:
                    raise BadLimits(f"{identity!r} is of two clients, {names[identity]} and {name}")
        rules[str(name)] = _rule(f"{before}clients.{name}", rule)
    return Scope(_rule(f"{before}defaults", found.get("defaults") or {}), rules)


def _identities(where: str, found: object) -> list[str]:
    words = [found] if isinstance(found, str) else found
    if not isinstance(words, list) or not words:
        raise BadLimits(f"{where} must name the client: KIND:VALUE, or a list of them")
    for word in words:
        kind, _, value = str(word).partition(":")
        if kind not in (*IDENTIFY, HEADER) or not value:
            raise BadLimits(
                f"{where} has {word!r}: it must be KIND:VALUE, with one of {', '.join((*IDENTIFY, HEADER))}"
            )
        if kind in (KEY, AUTHORIZATION) and not _DIGEST.fullmatch(value):
            raise BadLimits(f"{where}: the value after {kind}: must be the key's SHA-256 in hexadecimal digits")
    return [str(word) for word in words]


def _rule(where: str, found: object) -> Rule:
    given = _mapping(where, found, [one.name for one in dataclasses.fields(Rule)])
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not LEAST <= value <= MOST:
            raise BadLimits(f"{where}.{name} must be a number from {LEAST:g} to {MOST:g}, not {value!r}")
    for name, kinds, least in (("concurrent", int, 1), ("burst", (int, float), 1)):
        if name in given and (not isinstance(given[name], kinds) or given[name] < least):
            raise BadLimits(f"{where}.{name} must be a number from 1, not {given[name]!r}")
    if "burst" in given and "requests_per_second" not in given:
        raise BadLimits(f"{where}.burst has no effect without requests_per_second")
    return Rule(**given)


def _mapping(where: str, found: object, known: Sequence[str] = ()) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise BadLimits(f"{where} must be keys with values, not {found!r}")
    for key in found:
        if known and key not in known:
            raise BadLimits(f"{where} has the unknown key {key!r}{nearest(str(key), known)}")
    return {str(key): value for key, value in found.items()}


#: Longer identities, and those with other characters than printable ASCII, are known by their digest.
IDENTITY_CHARACTERS_MAX: Final = 100
_DIGEST_BYTES: Final = 8


class Client(NamedTuple):
    """`name`: its name in limits.yaml, or its identity; `label`: its name, or `other`."""

    name: str
    label: str


class Signs(NamedTuple):
    """What tells a request's client. `header`: the last value of a header, "" without it; `certificate`: the name in
    the client's certificate; `address`: its host."""

    header: Callable[[str], str]
    certificate: str
    address: str


class Asker:
    """A request and its client. `counts_items`: whether a limit needs its `items`; `accounts`: those that its limits
    were counted in; `tokens`: the most tokens that it will use, 0 if unknown; `on_tokens`: gets the tokens that it has
    used."""

    __slots__ = ("accounts", "client", "counts_items", "items", "on_tokens", "tokens")

    def __init__(self, client: Client, *, counts_items: bool = False) -> None:
        self.client, self.counts_items = client, counts_items
        self.items = 1
        self.accounts: dict[Account, None] = {}
        self.tokens = 0.0
        self.on_tokens: Callable[[float], None] | None = None


#: The request that the running task serves; None for the server's own work, and while there are no limits.
asker: Final[ContextVar[Asker | None]] = ContextVar("asker", default=None)


def expect_tokens(most: Callable[[], float]) -> None:
    """The request that the running task serves will use so many tokens at most."""
    own = asker.get()
    if own is not None:
        own.tokens = most()


def counting_items() -> Asker | None:
    """The request that the running task serves, if a limit needs its items."""
    own = asker.get()
    return own if own is not None and own.counts_items else None


class Clients:
    """Finds clients by the rules. `is_key`: whether the value of `Authorization` has one of the server's keys."""

    def __init__(self, rules: Rules, is_key: Callable[[bytes], bool] | None = None) -> None:
        self.follow(rules)
        self._is_key = is_key
        self._salt = secrets.token_bytes(16)

    def follow(self, rules: Rules) -> None:
        self.rules, self._counts_items = rules, rules.counts_items

    def asker(self, signs: Signs) -> Asker:
        return Asker(self.of(signs), counts_items=self._counts_items)

    def of(self, signs: Signs) -> Client:
        for kind in self.rules.identify:
            identity = self._identity(kind, signs)
            if identity is not None:
                return identity
        return Client("unknown", OTHER)

    def _identity(self, kind: str, signs: Signs) -> Client | None:
        if kind in (KEY, AUTHORIZATION):
            value = signs.header("authorization").encode("latin-1", "replace")
            if not value or (kind == KEY and (self._is_key is None or not self._is_key(value))):
                return None
            return self._secret(kind, value.partition(b" ")[2].strip() or value)
        if kind == CERTIFICATE:
            return self._shown(kind, signs.certificate)
        if kind == ADDRESS:
            return self._shown(kind, signs.address)
        return self._shown(HEADER, signs.header(kind.partition(":")[2]))

    def _secret(self, kind: str, secret: bytes) -> Client:
        name = self.rules.names.get(f"{kind}:{hashlib.sha256(secret).hexdigest()}") if self.rules.names else None
        return Client(f"{kind}:{self._digest(secret)}", OTHER) if name is None else Client(name, name)

    def _shown(self, kind: str, value: str) -> Client | None:
        if not value:
            return None
        name = self.rules.names.get(f"{kind}:{value}")
        if name is not None:
            return Client(name, name)
        plain = len(value) <= IDENTITY_CHARACTERS_MAX and value.isascii() and value.isprintable()
        return Client(f"{kind}:{value if plain else self._digest(value.encode())}", OTHER)

    def _digest(self, value: bytes) -> str:
        return hashlib.blake2b(value, key=self._salt, digest_size=_DIGEST_BYTES).hexdigest()


#: Bytes of a text for each of its tokens, about; and the tokens of an answer whose request names no limit.
TOKEN_BYTES: Final = 4
TOKENS_USUAL: Final = 256
#: Bytes of an event of OpenAI's streams, about, which has a token.
EVENT_BYTES: Final = 200
_EVENTS: Final = "text/event-stream"
#: OpenAI's and Anthropic's members of `usage`.
_COUNTS: Final = re.compile(rb'"(total_tokens|input_tokens|output_tokens)"\s*:\s*(\d{1,15})\b')
_LIMITS: Final = ("max_tokens", "max_new_tokens", "max_output_tokens", "max_completion_tokens")
_LIMIT: Final = re.compile(rb'"max_(?:new_|output_|completion_)?tokens"\s*:\s*(\d{1,9})\b')
#: What the answers of other APIs say, as parameters.
_SAID: Final = ("prompt_tokens", "completion_tokens")
_SAID_IN_JSON: Final = re.compile(rb'"(?:prompt_tokens|completion_tokens)"\s*:\s*(\d{1,15})\b')
#: The beginning of the forms in protobuf, and their option for Triton's streams (`ts.tensors.forms`).
_GRPC: Final = "\0grpc"
_TRITON: Final = ";triton"
#: Fields of a ModelInferRequest and a ModelInferResponse, and of a ModelStreamInferResponse.
_PARAMETERS: Final = 4
_RESPONSE: Final = 2
_FIELDS_MAX: Final = 16_384


def most_tokens(inputs: Sequence[Input]) -> float:
    """The number of tokens that a request of any API but OpenAI's may use, its prompt and its answer together."""
    return size_of(inputs) / TOKEN_BYTES + next(filter(None, map(_limit_in, inputs)), TOKENS_USUAL)


def _limit_in(given: Input) -> int:
    """The length of the answer that an input asks for, 0 if it names none."""
    if given.content_type.startswith(_GRPC):
        found = _parameters(given.data)
        for name in _LIMITS:
            if name in found:
                return max(0, int(found[name].int64_param or found[name].uint64_param))
    limit = _LIMIT.search(given.data)
    return int(limit[1]) if limit else 0


def used_by(job: Job, reserved: float) -> float:
    """The tokens that an ended job has used: those that the last pieces say, or else an estimate by the sizes, at most
    what was reserved."""
    if not job.received_bytes:
        return 0.0
    form = job.inputs[0].content_type if job.inputs else ""
    for piece in reversed(job.at_hand):
        used = _used_in_message(piece, form) if form.startswith(_GRPC) else _used_in_json(bytes(piece))
        if used is not None:
            return used
    events = any(name.lower() == "content-type" and value.startswith(_EVENTS) for name, value in job.headers)
    given = job.received_bytes / (EVENT_BYTES if events else TOKEN_BYTES)
    return min(reserved, job.size_bytes / TOKEN_BYTES + given)


def used_tokens(data: bytes) -> int | None:
    """The tokens that an answer of OpenAI's API, or an event of one, says that it used; None if it doesn't say so."""
    if b'"usage"' not in data:
        return None
    found = {name: int(count) for name, count in _COUNTS.findall(data, data.rindex(b'"usage"'))}
    return found.get(b"total_tokens", sum(found.values())) if found else None


def _used_in_json(data: bytes) -> int | None:
    used = used_tokens(data)
    if used is None and (at := data.rfind(b'"parameters"')) >= 0:
        used = sum(map(int, _SAID_IN_JSON.findall(data, at))) or None
    return used


def _used_in_message(data: Buffer, form: str) -> int | None:
    found = _parameters(data, inner=_RESPONSE if _TRITON in form else 0)
    return sum([int(found[name].int64_param) for name in _SAID if name in found]) or None


def _parameters(data: Buffer, inner: int = 0) -> Mapping[str, Any]:
    """The parameters in a ModelInferRequest or -Response, or in one in the field `inner`; none in a broken one, which
    others report."""
    at, end = 0, len(data)
    try:
        if inner:
            at, end = next(((one.value, one.end) for one in fields(data, at, end) if one.number == inner), (0, 0))
        found = [one for one in islice(fields(data, at, end), _FIELDS_MAX) if one.number == _PARAMETERS]
        message = pb.ModelInferRequest.FromString(b"".join([data[one.start : one.end] for one in found]))
    except (Malformed, DecodeError):
        return {}
    return message.parameters
