"""The three kinds of keys and their two formats: `Authorization: Bearer KEY`, and key_file.json. Pure.

Sources: TorchServe 0.12's key_file.json and token authorization; RFC 6750 for the header. Nothing here puts a key into
a message.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum
from hmac import compare_digest
from typing import Any, TypeAlias

#: The length of TorchServe's own keys: shorter given keys are refused as a mistake.
KEY_CHARACTERS_MIN = 8
KEY_CHARACTERS_MAX = 4096
#: Each request is compared with all keys of a kind.
KEYS_MAX = 32

_BEARER = re.compile(rb"Bearer[ \t]+([\x21-\x7e]+)")
_KEY = re.compile(r"[\x21-\x7e]+")
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")
_LAST_S = datetime(9999, 12, 31, tzinfo=UTC).timestamp()


class KeyKind(Enum):
    """The calls that a key permits; the value is its name in key_file.json. API: calls that make new keys."""

    MANAGEMENT = "management"
    INFERENCE = "inference"
    API = "API"


class BadKeys(ValueError):
    """Invalid given keys; the message names which and why, without the keys."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key. `expires_s`: its expiry, in seconds since 1970."""

    secret: bytes = field(repr=False)
    expires_s: float = math.inf


Keys: TypeAlias = "Mapping[KeyKind, tuple[Key, ...]]"


def bearer(values: Sequence[bytes]) -> bytes | None:
    """The key of the `Authorization` header; None unless there is exactly one, in the form `Bearer KEY`."""
    match = _BEARER.fullmatch(values[0]) if len(values) == 1 else None
    return None if match is None else match[1]


def opens(keys: Sequence[Key], presented: bytes, now_s: float) -> bool:
    """Whether `presented` is one of these keys and not expired. Its timing reveals only the keys' length."""
    good = False
    for key in keys:
        good |= compare_digest(key.secret, presented) and now_s < key.expires_s
    return good


def why_refused(keys: Keys, kind: KeyKind, values: Sequence[bytes], now_s: float) -> str:
    """The reason why `opens` refused these headers, for the log."""
    presented = bearer(values)
    if presented is None:
        return "it sent more than one Authorization" if len(values) > 1 else _why_unread(values)
    if any(compare_digest(key.secret, presented) for key in keys.get(kind, ())):
        return "its key has expired"
    others = [other for other in keys if other is not kind and opens(keys[other], presented, now_s)]
    return f"its key is the one of kind {others[0].value}" if others else "its key is unknown"


def _why_unread(values: Sequence[bytes]) -> str:
    return "its Authorization isn't `Bearer KEY`" if values else "it sent no key"


# --- key_file.json


def key_file_text(keys: Keys) -> str:
    """The keys, one of each kind, as TorchServe writes them."""
    return json.dumps({kind.value: _entry(keys[kind][0]) for kind in KeyKind if keys.get(kind)}, indent=2)


def _entry(key: Key) -> dict[str, str]:
    entry = {"key": key.secret.decode("ascii")}
    return entry if math.isinf(key.expires_s) else entry | {"expiration time": time_text(key.expires_s)}


def time_text(seconds: float) -> str:
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=min(seconds, _LAST_S))
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def parse_time(text: str) -> float:
    """Seconds since 1970 of an ISO 8601 time, with any number of digits of the second, and Z or an offset.

    :raises ValueError: it isn't one.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError("allowed are times such as 2030-12-31T23:59:59Z")
    whole, fraction, zone = match.groups()
    seconds = datetime.fromisoformat(whole + zone.replace("Z", "+00:00")).timestamp()
    return seconds + float(f"0.{fraction or 0}")


def parse_key_file(text: str) -> Keys:
    """The keys of a JSON text: one key of each kind, `{"key": KEY, "expiration time": TIME}`, or a list of these.

    :raises BadKeys: the text has another form.
    """
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        raise BadKeys("it is not JSON") from None
    if not isinstance(tree, dict):
        raise BadKeys('it is no JSON object such as {"inference": {"key": "..."}}')
    found = {}
    for name, value in tree.items():
        kind = kind_named(name)
        if kind is None or kind in found:
            raise BadKeys("its members are management, inference and API, each once at most")
        found[kind] = tuple(_parsed_keys(kind, value))
    return checked(found)


def kind_named(name: str) -> KeyKind | None:
    """The kind with this name, exact or in lower case, or None."""
    return next((kind for kind in KeyKind if name in (kind.value, kind.value.lower())), None)


def _parsed_keys(kind: KeyKind, value: Any) -> Iterator[Key]:
    for number, entry in enumerate(value if isinstance(value, list) else [value], 1):
        where = f"{kind.value} key {number}"
        if isinstance(entry, str):
            entry = {"key": entry}
        if not isinstance(entry, dict) or not isinstance(entry.get("key"), str):
            raise BadKeys(f'{where}: allowed are a text and {{"key": TEXT, "expiration time": TIME}}')
        yield key_of(where, entry["key"], entry.get("expiration time"))


def key_of(where: str, text: str, expires: object = None) -> Key:
    """A given key, checked; `where` names it in messages. `expires`: the text of a time, None for never."""
    if not _KEY.fullmatch(text):
        raise BadKeys(f"{where}: allowed are printable ASCII characters without blanks")
    if not KEY_CHARACTERS_MIN <= len(text) <= KEY_CHARACTERS_MAX:
        raise BadKeys(f"{where} has {len(text)} characters; allowed are {KEY_CHARACTERS_MIN} to {KEY_CHARACTERS_MAX}")
    try:
        return Key(text.encode("ascii"), math.inf if expires is None else parse_time(str(expires)))
    except ValueError as error:
        raise BadKeys(f"{where}, expiration time: {error}") from None


def parse_key_lines(kind: KeyKind, text: str) -> tuple[Key, ...]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return tuple(key_of(f"{kind.value} key {number}", line) for number, line in enumerate(lines, 1))


def checked(keys: Mapping[KeyKind, tuple[Key, ...]]) -> Keys:
    """Returns the keys. :raises BadKeys: none at all, none of a named kind, or more than KEYS_MAX of one."""
    if not keys:
        raise BadKeys("it holds no key")
    for kind, found in keys.items():
        if not found:
            raise BadKeys(f"it names {kind.value} and holds no key of that kind")
        if len(found) > KEYS_MAX:
            raise BadKeys(f"it holds {len(found)} keys of kind {kind.value}; the most is {KEYS_MAX}")
    return keys


def joined(*some: Keys) -> Keys:
    """The keys of all arguments; of equal secrets of a kind, the first counts."""
    found: dict[KeyKind, dict[bytes, Key]] = {}
    for keys in some:
        for kind, ones in keys.items():
            for key in ones:
                found.setdefault(kind, {}).setdefault(key.secret, key)
    return {kind: tuple(ones.values()) for kind, ones in found.items()}
