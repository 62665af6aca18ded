"""The TLS files: read and checked before a listener uses them, and reloaded when they change."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
import re
import ssl
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from ts_frontend.config.checks import secured
from ts_frontend.config.files import read_file
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import InvalidArgument
from ts_frontend.listeners.sockets import Tls

_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18


class Validity(NamedTuple):
    """The first and last moment of a certificate's validity, UTC."""

    begins: datetime
    ends: datetime


def validities(pem: bytes) -> list[Validity]:
    """Returns the validity of every certificate of a PEM file, in their order.

    :raises ValueError: one isn't X.509.
    """
    return [_validity(_decoded(match[1])) for match in _BLOCK.finditer(pem)]


def _decoded(body: bytes) -> bytes:
    try:
        return base64.b64decode(b"".join(body.split()), validate=True)
    except binascii.Error as error:
        raise ValueError(f"a certificate isn't base64: {error}") from None


def _validity(certificate: bytes) -> Validity:
    """The validity in Certificate -> TBSCertificate -> [version], serial number, algorithm, issuer, validity."""
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
    """The elements of DER data, one after the other. `take` raises IndexError or ValueError when there are no more."""

    def __init__(self, der: bytes) -> None:
        self._der = der
        self._at = 0

    def take(self) -> tuple[int, bytes]:
        tag, length, at = self._der[self._at], self._der[self._at + 1], self._at + 2
        if length & 0x80:
            count = length & 0x7F
            length, at = int.from_bytes(self._der[at : at + count], "big"), at + count
        self._at = at + length
        if self._at > len(self._der):
            raise ValueError
        return tag, self._der[at : self._at]


def _time(tag: int, content: bytes) -> datetime:
    """A UTCTime or GeneralizedTime. UTCTime has two-digit years; from 50 on they mean 19xx (RFC 5280, 4.1.2.5.1)."""
    text = content.decode("ascii")
    if tag == _UTC_TIME:
        text = ("19" if text[:2] >= "50" else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


logger = logging.getLogger(__name__)

#: A certificate that expires sooner causes a warning.
ENDS_SOON = timedelta(days=14)

KEYS_TAKEN = "RSA of 2048 bits or more, an elliptic curve P-256, P-384 or P-521, or Ed25519"
#: The last is OpenSSL 3's error for a key of another type than the certificate's.
_TOO_WEAK = {
    "EE_KEY_TOO_SMALL": f"the key is too small; take {KEYS_TAKEN}",
    "CA_KEY_TOO_SMALL": f"the authority's key is too small; take {KEYS_TAKEN}",
    "CA_MD_TOO_WEAK": "the certificate is signed with too weak a digest; take SHA-256 or more",
}
_MISMATCHES = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_KEY = b"PRIVATE KEY-----"
_ENCRYPTED = (b"-----BEGIN ENCRYPTED PRIVATE KEY-----", b"Proc-Type: 4,ENCRYPTED")


class CertificateRefused(InvalidArgument):
    """A file that TLS needs can't be used; the message says which one, and why."""

    remedy = "Name a certificate and the key that belongs to it, as PEM ([security.md](security.md#tls))."


@dataclass(frozen=True, slots=True)
class Pem:
    """The checked contents of the files. `warnings`: problems that don't keep the certificate from working."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None = None
    warnings: tuple[str, ...] = ()


def read(tls: Tls, now: datetime | None = None) -> Pem:
    """Reads and checks the files of `tls`. Blocking. `now`: with a time zone.

    :raises CertificateRefused: one is missing, isn't PEM, is encrypted, or the key isn't the certificate's.
    """
    now = now or datetime.now(UTC)
    certificate = _file("certificate_file", tls.certificate_file)
    key = _file("private_key_file", tls.key_file)
    _check_certificates("certificate_file", tls.certificate_file, certificate)
    _check_key(tls.key_file, key)
    _check_pair(tls)
    warnings = list(_warnings("certificate_file", tls.certificate_file, certificate, now))
    client_ca = None
    if tls.client_ca_file is not None:
        client_ca = _file("client_ca_file", tls.client_ca_file)
        _check_certificates("client_ca_file", tls.client_ca_file, client_ca)
        warnings += _warnings("client_ca_file", tls.client_ca_file, client_ca, now)
    return Pem(certificate, key, client_ca, tuple(warnings))


def _file(setting: str, path: str) -> bytes:
    try:
        return read_file(Path(path))
    except OSError as error:
        raise CertificateRefused(f"{setting} {path}: {error.strerror}") from None


def _check_certificates(setting: str, path: str, pem: bytes) -> None:
    if _CERTIFICATE not in pem:
        what = "holds a private key, no certificate" if _KEY in pem else "is no PEM certificate"
        raise CertificateRefused(
            f"{setting} {path}: {what} (-----BEGIN CERTIFICATE-----). "
            f"DER becomes PEM with: openssl x509 -inform DER -in {path} -out cert.pem"
        )
    try:
        validities(pem)
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("latin-1"))
    except (ssl.SSLError, ValueError) as error:
        raise CertificateRefused(f"{setting} {path}: {_reason(error)}") from None


def _check_key(path: str, pem: bytes) -> None:
    if any(mark in pem for mark in _ENCRYPTED):
        raise CertificateRefused(
            f"private_key_file {path}: is encrypted with a passphrase, which a server can't ask for. "
            f"Decrypt it with: openssl pkey -in {path} -out key.pem; and keep key.pem readable for the server only"
        )
    if _KEY not in pem:
        what = "holds a certificate, no private key" if _CERTIFICATE in pem else "is no PEM private key"
        raise CertificateRefused(
            f"private_key_file {path}: {what} (-----BEGIN PRIVATE KEY-----). "
            f"DER becomes PEM with: openssl pkey -inform DER -in {path} -out key.pem"
        )


def _check_pair(tls: Tls) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.certificate_file, tls.key_file, password="")
    except ssl.SSLError as error:
        if error.reason in _MISMATCHES:
            text = f"private_key_file {tls.key_file}: isn't the key of certificate_file {tls.certificate_file}"
            raise CertificateRefused(text) from None
        raise CertificateRefused(
            f"certificate_file {tls.certificate_file} and private_key_file {tls.key_file}: {_reason(error)}"
        ) from None
    except OSError as error:
        raise CertificateRefused(f"certificate_file {tls.certificate_file}: {error.strerror}") from None


def _reason(error: Exception) -> str:
    """Returns the text of an OpenSSL error; the error itself often names only where it was raised."""
    if not isinstance(error, ssl.SSLError):
        return str(error)
    if error.reason in _TOO_WEAK:
        return _TOO_WEAK[error.reason]
    return (
        f"can't be read ({error.reason.replace('_', ' ').lower()})"
        if error.reason
        else "is damaged, or of no known kind"
    )


def _warnings(setting: str, path: str, pem: bytes, now: datetime) -> Iterator[str]:
    for validity in validities(pem):
        state = _state(validity, now)
        if state:
            yield f"{setting} {path}: a certificate {state}"


def _state(validity: Validity, now: datetime) -> str:
    if validity.ends < now:
        return f"expired on {validity.ends:%Y-%m-%d %H:%M} UTC; clients will refuse it"
    if validity.begins > now:
        return f"counts only from {validity.begins:%Y-%m-%d %H:%M} UTC on; clients will refuse it until then"
    if validity.ends < now + ENDS_SOON:
        return f"expires on {validity.ends:%Y-%m-%d %H:%M} UTC"
    return ""


def context(tls: Tls, pem: Pem) -> ssl.SSLContext:
    """The context of a listener's handshakes with these contents of the files.

    :raises CertificateRefused: OpenSSL can't use them.
    """
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    found.minimum_version = ssl.TLSVersion.TLSv1_2
    found.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    found.set_alpn_protocols(["h2", "http/1.1"])
    try:
        found.load_cert_chain(tls.certificate_file, tls.key_file)
    except (OSError, ssl.SSLError) as error:  # changed since they were checked
        files = f"certificate_file {tls.certificate_file} and private_key_file {tls.key_file}"
        raise CertificateRefused(f"{files}: {_reason(error)}") from None
    if pem.client_ca is not None:
        found.verify_mode = ssl.CERT_REQUIRED
        found.load_verify_locations(cadata=pem.client_ca.decode("latin-1"))
    return found


# --- files that change


class CertificateFiles:
    """The files of one listener. `name` is for the log."""

    def __init__(self, name: str, tls: Tls) -> None:
        self._name = name
        self._tls = tls
        self._seen: object = None
        self._complaint = ""

    def read(self) -> Pem:
        """Returns the files' present contents; warnings go to the log. Blocking.

        :raises CertificateRefused: they can't be used.
        """
        self._seen = self._signature()
        pem = read(self._tls)
        for warning in pem.warnings:
            logger.warning("%s: %s", self._name, warning)
        return pem

    def read_if_changed(self) -> Pem | None:
        """The files' contents if they have changed and can be used, else None; refusals are logged. Blocking."""
        before = self._signature()
        if before == self._seen:
            return None
        try:
            pem = read(self._tls)
        except CertificateRefused as error:
            self._complain(error.message)
            return None
        if self._signature() != before:  # a file is being written: read at the next check
            return None
        self._seen, self._complaint = before, ""
        for warning in pem.warnings:
            logger.warning("%s: %s", self._name, warning)
        return pem

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            self._complaint = text
            logger.warning("%s: the certificate in use stays, the new files can't be used: %s", self._name, text)

    def _signature(self) -> list[tuple[int, int, int, int] | None]:
        paths = (self._tls.certificate_file, self._tls.key_file, self._tls.client_ca_file)
        return [_signature(path) for path in paths if path is not None]

    async def follow(self, renew: Callable[[Pem], Awaitable[None]]) -> None:
        """Checks the files every `check_s` seconds and calls `renew` with changed ones, until it is cancelled."""
        while True:
            await asyncio.sleep(self._tls.check_s)
            pem = await asyncio.to_thread(self.read_if_changed)
            if pem is None:
                continue
            try:
                await renew(pem)
            except Exception as error:
                self._complain(str(error))
            else:
                logger.info("%s: new connections get the certificate that certificate_file holds now", self._name)


def _signature(path: str) -> tuple[int, int, int, int] | None:
    with contextlib.suppress(OSError):
        status = Path(path).stat()
        return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
    return None


def certificate_files(config: ServerConfig) -> Tls | None:
    """The files of TLS addresses, None without such addresses. Both files are set then (`config/checks.py`)."""
    if not any(secured(config)):
        return None
    client_ca = None if config.client_ca_file is None else str(config.client_ca_file)
    return Tls(str(config.certificate_file), str(config.private_key_file), client_ca, config.certificate_check_s)


def check_certificates(config: ServerConfig) -> None:
    """Checks the TLS files before the models are loaded. Warnings are left to the listeners.

    :raises CertificateRefused: a file that is needed can't be used.
    """
    tls = certificate_files(config)
    if tls is not None:
        read(tls)


class CertificateEnds:
    """The expiry of the first certificate of each file, for the metrics; a changed file is read again."""

    def __init__(self, tls: Tls) -> None:
        named = {"certificate_file": tls.certificate_file, "client_ca_file": tls.client_ca_file}
        self._paths = {setting: path for setting, path in named.items() if path is not None}
        self._known: dict[str, tuple[object, float | None]] = {}

    def read(self) -> dict[str, float]:
        """Returns seconds since 1970 by the file's setting, without files that can't be read now."""
        found = {}
        for setting, path in self._paths.items():
            now = _signature(path)
            if self._known.get(setting, (None, None))[0] != now:
                self._known[setting] = now, _first_end_s(path)
            if (ends_s := self._known[setting][1]) is not None:
                found[setting] = ends_s
        return found


def _first_end_s(path: str) -> float | None:
    with contextlib.suppress(OSError, ValueError):  # the watch over the files logs it
        return min(one.ends.timestamp() for one in validities(read_file(Path(path))))
    return None
