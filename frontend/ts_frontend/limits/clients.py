"""Who asks: the client of a request, found from its headers and its connection, for everything that the request does.

Secrets are neither kept nor shown: a client without a name is known by a digest of its key, whose own key is made anew
with each process, so that nobody can find the secret from it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, NamedTuple

from ts_frontend.limits.rules import ADDRESS, AUTHORIZATION, CERTIFICATE, HEADER, KEY, OTHER, Rules

if TYPE_CHECKING:
    from ts_frontend.limits.accounts import Account

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
        """Goes by these rules from now on."""
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
