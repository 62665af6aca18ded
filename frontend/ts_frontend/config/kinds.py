"""The types of settings: the parsing of their text, and the allowed values; listening addresses as TorchServe writes
them: `http://HOST[:PORT]`, `https://HOST[:PORT]`, `unix:/path`. Pure.

`SettingKind.parse` takes stripped, non-empty text, and raises ValueError naming the allowed values.
"""

from __future__ import annotations

import contextlib
import difflib
import ipaddress
import json
import math
import re
import shlex
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ts_frontend.config.keys import BadKeys, key_of
from ts_frontend.errors import InvalidArgument

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


#: Settings of models by name, version and TorchServe's key: {"m": {"1.0": {"minWorkers": 1}}}.
ModelEntries: TypeAlias = "Mapping[str, Mapping[str, Mapping[str, Any]]]"

_Key = TypeVar("_Key", bound=Hashable)
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def no_effect(what: str, where: str, why: str) -> str:
    """The log message about an option without effect, `what`, given in the source `where`."""
    return f"{what} ({where}) has no effect: {why}"


def grouped(rows: Iterable[tuple[str, _Key]]) -> Mapping[_Key, str]:
    """For tables of the documentation: the names that have the same key, in backquotes, as one text."""
    names: dict[_Key, list[str]] = {}
    for name, key in rows:
        names.setdefault(key, []).append(f"`{name}`")
    return {key: ", ".join(these) for key, these in names.items()}


class ConfigError(InvalidArgument):
    """The server can't start with these settings; one line for each problem."""

    remedy = "Correct the settings, one a line; `torchserve config` shows each value and its source."


@dataclass(frozen=True, slots=True)
class SettingKind:
    """A type of setting. `name`: its name in the documentation. `words`: of a type that is read as Java reads booleans
    (blanks count, and so does an empty text), the words for true and false; any other text is false with a warning."""

    name: str
    parse: Callable[[str], Any]
    words: tuple[str, ...] = ()


def whole(least: int = 0, most: float = math.inf) -> SettingKind:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text):
            raise ValueError("allowed are whole numbers")
        _check_range(int(text), least, most)
        return int(text)

    return SettingKind("integer", parse)


def number(least: float = 0.0) -> SettingKind:
    def parse(text: str) -> float:
        value = float(text) if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text) else math.nan
        if math.isnan(value):
            raise ValueError("allowed are numbers")
        _check_range(value, least, math.inf)
        return value

    return SettingKind("number", parse)


def choice(*allowed: str) -> SettingKind:
    def parse(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError(f"allowed are {', '.join(allowed)}")
        return text.lower()

    return SettingKind(" \\| ".join(f"`{word}`" for word in allowed), parse)


FRONTENDS_MAX = 64


def _frontends(text: str) -> int:
    if text.lower() == "auto":
        return 0
    if not text.isdecimal() or not 1 <= int(text) <= FRONTENDS_MAX:
        raise ValueError(f"allowed are auto and 1 to {FRONTENDS_MAX}")
    return int(text)


FRONTENDS = SettingKind("integer \\| `auto`", _frontends)


def address(api: str) -> SettingKind:
    return SettingKind("URL", lambda text: parse_address(text, api))


def _check_range(value: float, least: float, most: float) -> None:
    if value < least:
        raise ValueError(f"the least is {least:g}")
    if value > most:
        raise ValueError(f"the most is {most:g}")


def _switch(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError("allowed are true and false")
    return text.lower() in _TRUE


def _mode(text: str) -> str:
    """File permissions: three octal digits."""
    if not re.fullmatch(r"0?[0-7]{3}", text):
        raise ValueError("allowed are three octal digits, such as 600 or 660")
    return text[-3:]


def _one_of(*true: str) -> Callable[[str], bool]:
    """Reads these words, in any case, as true and any other text as false, as Java's Boolean.parseBoolean does."""
    return lambda text: text.lower() in true


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return text


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _keys(text: str) -> tuple[str, ...]:
    """Keys of calls; error messages don't contain them."""
    found = _words(text)
    for number, word in enumerate(found, 1):
        try:
            key_of(f"key {number}", word)
        except BadKeys as error:
            raise ValueError(str(error)) from None
    return found


def _path(text: str) -> Path:
    if "\0" in text:
        raise ValueError("a path has no NUL character")
    return Path(text).expanduser()


def _models(text: str) -> ModelEntries:
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    for where, entry in _entries(tree):
        for key in _ENTRY_NUMBERS:
            value = entry.get(key, 0)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{key} of {where} is {json.dumps(value)}; allowed are whole numbers")
    return {name: dict(versions) for name, versions in tree.items()}


def _settings(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError('allowed is a JSON object, such as {"dtype": "bfloat16"}')
    return found


def _entries(tree: object) -> list[tuple[str, Mapping[str, object]]]:
    """("name/version", settings) of every entry. :raises ValueError: another shape."""
    found = []
    for name, versions in _object(tree, "the whole").items():
        for version, entry in _object(versions, name).items():
            found.append((f"{name}/{version}", _object(entry, f"{name}/{version}")))
    return found


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f'{where} is not a JSON object; allowed is {{"name": {{"version": {{"minWorkers": 1}}}}}}')
    return value


_ENTRY_NUMBERS = ("minWorkers", "maxWorkers", "batchSize", "maxBatchDelay", "responseTimeout", "startupTimeout")


#: The dialects of ModelStreamInfer that a port can be given.
DIALECTS = ("auto", "triton", "mlserver")


class ExtraPort(NamedTuple):
    """A further port, and the dialect of its streams ("" for the server's)."""

    port: int
    dialect: str = ""

    def __str__(self) -> str:
        return f"{self.port}:{self.dialect}" if self.dialect else str(self.port)


def _extra_port(word: str) -> ExtraPort:
    port, _, dialect = word.partition(":")
    if dialect not in ("", *DIALECTS):
        raise ValueError(f"{dialect} is not a dialect; there are {', '.join(DIALECTS)}")
    return ExtraPort(int(PORT.parse(port)), dialect)


#: The device of a resource that each device has.
EVERY_DEVICE = -1


class LimitedResource(NamedTuple):
    """How many of a resource of Triton's rate limiter there are on a device."""

    name: str
    number: int
    device: int = EVERY_DEVICE

    def __str__(self) -> str:
        return f"{self.name}:{self.number}" + ("" if self.device == EVERY_DEVICE else f":{self.device}")


def _resource(word: str) -> LimitedResource:
    name, *numbers = word.split(":")
    if not name or len(numbers) not in (1, 2) or not all(one.isdecimal() and len(one) < 10 for one in numbers):
        raise ValueError(f"{word}: write NAME:COUNT or NAME:COUNT:DEVICE, with whole numbers")
    return LimitedResource(name, *map(int, numbers))


@dataclass(frozen=True, slots=True)
class ProgramLine:
    """A program's file and its arguments."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.words)


@dataclass(frozen=True, slots=True)
class ProgramLines:
    """Several programs; as text, separated by `;`."""

    lines: tuple[ProgramLine, ...] = ()

    def __str__(self) -> str:
        return "; ".join(map(str, self.lines))


def _programs(text: str) -> ProgramLines:
    reader = shlex.shlex(text, posix=True, punctuation_chars=";")
    reader.whitespace_split, reader.commenters = True, ""
    lines: list[list[str]] = [[]]
    try:
        for word in reader:
            if word.strip(";"):
                lines[-1].append(word)
            else:
                lines.append([])
    except ValueError as error:
        raise ValueError(f"not words as a shell has them: {error}") from None
    return ProgramLines(tuple(ProgramLine(tuple(line)) for line in lines if line))


TEXT = SettingKind("text", str)
#: TorchServe's booleans: its guards must not be read as more open here.
BOOLEAN = SettingKind("boolean", _one_of("true"), ("true", "false"))
OPEN_INFERENCE = SettingKind("boolean", _one_of("true", "oip"), ("true", "oip", "false"))
#: This server's own booleans, among them other servers' options, which accept more words.
SWITCH = SettingKind("switch", _switch)
PATH = SettingKind("path", _path)
PATTERN = SettingKind("regular expression", _pattern)
PATTERNS = SettingKind("comma list of regular expressions", lambda text: tuple(map(_pattern, _words(text))))
PATHS = SettingKind("comma list of paths", lambda text: tuple(_path(word) for word in _words(text)))
WORDS = SettingKind("comma list", _words)
PROGRAMS = SettingKind("`FILE ARGUMENT …; FILE …`", _programs)
KEYS = SettingKind("comma list", _keys)
MODELS = SettingKind("JSON", _models)
OBJECT = SettingKind("JSON object", _settings)
MODE = SettingKind("octal permissions", _mode)
HOST = SettingKind("IP address or `unix:/PATH`", parse_host)
HOSTS = SettingKind("comma list of names and addresses", lambda text: tuple(map(parse_name, _words(text))))
PORT = whole(0, 65535)
#: -1 for `auto`.
MEMORY = SettingKind("integer \\| `auto`", lambda text: -1 if text.lower() == "auto" else whole().parse(text))
PORTS = SettingKind("comma list of integers", lambda text: tuple(int(PORT.parse(word)) for word in _words(text)))
RESOURCES = SettingKind("comma list of `NAME:COUNT[:DEVICE]`", lambda text: tuple(map(_resource, _words(text))))
EXTRA_PORTS = SettingKind("comma list of `PORT[:DIALECT]`", lambda text: tuple(map(_extra_port, _words(text))))


#: The form of a repository's name on Hugging Face's hub, and the files' suffixes that it doesn't have.
HUB_NAME = r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}"
_FILES = (".mar", ".gz", ".tgz", ".gguf", ".zip")


def is_hub_name(text: str) -> bool:
    """Whether it may be a name of the hub, ORG/NAME or ORG/NAME@REVISION."""
    found = re.fullmatch(rf"{HUB_NAME}(?:@[\w./%-]+)?", text, re.ASCII)
    return found is not None and Path(text).suffix not in _FILES


def lies_elsewhere(url: str) -> bool:
    """Whether the operator's `url` names a model outside any store. Blocking."""
    path = Path(url)
    here = "/" in url and (path.is_dir() or (path.suffix == ".gguf" and path.is_file()))
    return "://" in url or here or is_hub_name(url)


def bucket_of(path: Path) -> str | None:
    """`s3://bucket/prefix` for the path `s3:/bucket/prefix`, its form as a Path; so for `gs:`; None for others."""
    parts = path.parts
    scheme = parts[0].lower() if len(parts) > 1 else ""
    return f"{scheme}//{'/'.join(parts[1:])}" if scheme in ("s3:", "gs:") else None


NAMES_SHOWN_MAX, NAMES_COMPARED_MAX, NAME_CHARACTERS_MAX = 10, 200, 40


def names_there(what: str, names: Collection[str], word: str = "") -> str:
    """The end of an error about something unknown: the name that is most like `word`, and the names that there are, in
    their order: the first NAMES_SHOWN_MAX, cut to NAME_CHARACTERS_MAX. Only the first NAMES_COMPARED_MAX are compared,
    and only their beginnings, so that an error costs milliseconds at most."""
    first = tuple(_beginning(name) for name in islice(names, NAMES_COMPARED_MAX))
    shown = ", ".join(first[:NAMES_SHOWN_MAX]) or "none"
    more = f" and {len(names) - NAMES_SHOWN_MAX} more" if len(names) > NAMES_SHOWN_MAX else ""
    return f"{_nearest_there(_beginning(word), first) or '.'} {what}: {shown}{more}."


@lru_cache(maxsize=64)
def _nearest_there(word: str, names: tuple[str, ...]) -> str:
    """As `nearest`. Clients repeat a wrong name, and comparing it with 200 takes as long as ten requests."""
    return nearest(word, names)


def _beginning(name: str) -> str:
    """A name that fits into a message: cut, and without the surrogates of names that aren't UTF-8."""
    cut = name if len(name) <= NAME_CHARACTERS_MAX else f"{name[: NAME_CHARACTERS_MAX - 1]}…"
    return cut.encode("utf-8", "replace").decode()


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """`; did you mean X?` for the most similar known word, or "". `likeness`: difflib's ratio, 0 to 1."""
    close = nearest_of(word, known, likeness)
    return "" if close is None else f"; did you mean {close}?"


def nearest_of(word: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The most similar known word, or None."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=likeness)
    return by_lower[close[0]] if close else None


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def bytes_of(value: object) -> int | None:
    """The size in bytes, None for a value that is no size of at least 1 byte."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if value > 0 else None
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) and len(value) < 40 else None
    if match is None:
        return None
    unit = match[2].lower().removesuffix("b")
    if unit == "i":
        return None
    base = 1024 if unit.endswith("i") else 1000
    return int(float(match[1]) * base ** _POWERS[unit.removesuffix("i")]) or None


def _size(text: str) -> int:
    found = 0 if text == "0" else bytes_of(text)
    if found is None:
        raise ValueError("allowed are bytes, or a size such as 512MiB")
    return found


SIZE = SettingKind("integer \\| size with a unit", _size)
