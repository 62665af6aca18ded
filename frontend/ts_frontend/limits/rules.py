"""`limits.yaml`: who a client is, and the limits and weights of clients, for the server and for its models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from ts_frontend.config.files import read_text
from ts_frontend.config.kinds import nearest

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
        return any(getattr(self, one.name) is not None for one in fields(self) if one.name != "weight")

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
    given = _mapping(where, found, [one.name for one in fields(Rule)])
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
