"""What the server needs to know of X.509 certificates: from when to when they count. Pure.

Python's ssl module doesn't tell that of a certificate that it hasn't verified. Structure: RFC 5280, 4.1; encoding:
X.690.
"""

from __future__ import annotations

import base64
import binascii
import re
from datetime import datetime, timezone
from typing import NamedTuple

_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18


class Validity(NamedTuple):
    """First and last moment, UTC."""

    begins: datetime
    ends: datetime


def validities(pem: bytes) -> list[Validity]:
    """Of every certificate of a PEM file, in their order.

    :raises ValueError: one isn't X.509.
    """
    return [_validity(_decoded(match[1])) for match in _BLOCK.finditer(pem)]


def _decoded(body: bytes) -> bytes:
    try:
        return base64.b64decode(b"".join(body.split()), validate=True)
    except binascii.Error as error:
        raise ValueError(f"a certificate isn't base64: {error}") from None


def _validity(certificate: bytes) -> Validity:
    """Certificate -> TBSCertificate -> [version], serial number, algorithm, issuer, validity."""
    try:
        fields = _Elements(_only(_only(certificate)))
        tag, _ = fields.take()
        for _ in range(4 if tag == _VERSION else 3):
            tag, content = fields.take()
        if tag != _SEQUENCE:
            raise ValueError
        times = _Elements(content)
        return Validity(_time(*times.take()), _time(*times.take()))
    except (IndexError, ValueError):
        raise ValueError("a certificate isn't X.509") from None


def _only(der: bytes) -> bytes:
    tag, content = _Elements(der).take()
    if tag != _SEQUENCE:
        raise ValueError
    return content


class _Elements:
    """The elements of some DER one after the other. IndexError or ValueError: there is none."""

    def __init__(self, der: bytes) -> None:
        self._der = der
        self._at = 0

    def take(self) -> tuple[int, bytes]:
        """(tag, content) of the next one."""
        tag, length, at = self._der[self._at], self._der[self._at + 1], self._at + 2
        if length & 0x80:
            count = length & 0x7F
            length, at = int.from_bytes(self._der[at : at + count], "big"), at + count
        self._at = at + length
        if self._at > len(self._der):
            raise ValueError
        return tag, self._der[at : self._at]


def _time(tag: int, content: bytes) -> datetime:
    """UTCTime has two digits of the year, which from 50 on are those of 19xx (RFC 5280, 4.1.2.5.1)."""
    text = content.decode("ascii")
    if tag == _UTC_TIME:
        text = ("19" if text[:2] >= "50" else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=timezone.utc)
