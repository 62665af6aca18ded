"""The URLs of models: what is none, and what a copy is called. Pure."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

from ts_frontend.errors import ArchiveNotFound, InvalidArgument
from ts_frontend.models import s3
from ts_frontend.models.remote import failure

_URL_CHARS_MAX = 4096
_NAME_BYTES_MAX = 255
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
PIN = re.compile(r"#sha256=([0-9A-Fa-f]{64})\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ODD = re.compile(r"[ \\]")


def check_text(url: str, plain: str) -> None:
    """Refuses what no honest URL has: paths that climb, blanks, backslashes, credentials, an unreadable pin."""
    if not plain:
        raise ArchiveNotFound("empty url")
    if len(url) > _URL_CHARS_MAX:
        raise InvalidArgument(f"url has {len(url)} characters; at most {_URL_CHARS_MAX} are allowed")
    if ".." in unquote(unquote(plain)):
        raise ArchiveNotFound(f"Relative path is not allowed in url: {url}")
    remote = SCHEME.match(plain)
    if _CONTROL.search(plain) or (remote and _ODD.search(plain)):
        raise InvalidArgument(f"url {url!a} has a blank, a backslash or a control character")
    if "#sha256=" in plain:
        raise InvalidArgument(f"url {url!a}: #sha256= needs 64 hexadecimal digits")
    if remote:
        _check_remote(url, plain, remote[1].lower())


def _check_remote(url: str, plain: str, scheme: str) -> None:
    if scheme == "s3":
        s3.parse(plain)
        return
    if scheme not in ("http", "https", "file"):
        raise InvalidArgument(f"url {url!a}: {scheme} is not supported; http, https, s3 and file are")
    try:
        parts = urlsplit(plain)
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError as error:
        raise InvalidArgument(f"url {url!a}: {error}") from error
    if "@" in parts.netloc or not port_is_fine or (scheme == "file") != (not parts.hostname):
        raise InvalidArgument(f"url {url!a}: give a host without user and password (file:///path has no host)")


def file_name(url: str) -> str:
    """The name that a download gets: the last segment of the URL's path."""
    name = s3.parse(url).name if is_s3(url) else unquote(urlsplit(url).path.rpartition("/")[2])
    if not name or name.startswith(".") or set(name) & set("/\\") or not name.isprintable():
        raise failure(url, f"{name!a}, the last part of its path, can't be a file's name")
    if len(name.encode()) > _NAME_BYTES_MAX:
        raise failure(url, f"the last part of its path is longer than {_NAME_BYTES_MAX} bytes")
    return name


def is_s3(url: str) -> bool:
    return url[:5].lower() == "s3://"
