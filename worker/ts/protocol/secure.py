"""TLS between the frontend and workers on other machines: contexts from certificates in memory, and a non-blocking
socket with a plain socket's interface."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

#: The most bytes of a TLS record.
RECORD_BYTES = 16 * 1024
WRITE_BYTES_MAX = 64 * 1024
#: The seconds after which the loss of a silent machine is noticed, about.
SILENCE_S_MAX = 10


class PeerCertificate(NamedTuple):
    """One side's certificate and key, and the authority of both sides, as PEM."""

    authority: str
    certificate: str
    key: str


def server_context(own: PeerCertificate) -> ssl.SSLContext:
    """The context of a listening side. Every client needs a certificate of the same authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    context.verify_mode = ssl.CERT_REQUIRED
    return _filled(context, own)


def client_context(own: PeerCertificate) -> ssl.SSLContext:
    """The context of a connecting side. Host names aren't checked: the authority belongs to one server's start."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    return _filled(context, own)


def _filled(context: ssl.SSLContext, own: PeerCertificate) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=own.authority)
    with _file(f"{own.certificate}\n{own.key}") as path:
        context.load_cert_chain(path)
    return context


@contextlib.contextmanager
def _file(text: str) -> Iterator[str]:
    """A file that only this process can read, in memory if the system supports it."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("torchrelay-key", os.MFD_CLOEXEC)
        try:
            os.write(handle, text.encode())
            yield f"/proc/self/fd/{handle}"
        finally:
            os.close(handle)
    else:
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(text)
            file.flush()
            yield file.name


def keep_watch(sock: socket.socket) -> None:
    """Enables keep-alive, to notice a lost machine, and disables Nagle's algorithm."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every_s = max(1, SILENCE_S_MAX // 5)
    for name, value in (
        ("TCP_KEEPIDLE", every_s * 2),
        ("TCP_KEEPINTVL", every_s),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", SILENCE_S_MAX * 1000),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class SecureSocket:
    """A connected, non-blocking TLS socket with a plain socket's calls and errors. Two threads may use it."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._using = threading.Lock()
        self._owed = b""

    def fileno(self) -> int:
        return self._sock.fileno()

    def setblocking(self, flag: bool) -> None:
        """Accepted for compatibility; the socket stays non-blocking."""

    def recv(self, size: int) -> bytes:
        """Reads at least RECORD_BYTES at a time, because poll doesn't report the rest of a decrypted record. Raises
        BlockingIOError, ConnectionError."""
        with self._using:
            try:
                return self._sock.recv(max(size, RECORD_BYTES))
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None
            except ssl.SSLError as error:
                raise ConnectionResetError(str(error)) from error

    def recvmsg_into(self, buffers: Sequence[memoryview | bytearray]) -> tuple[int, list[Any], int, Any]:
        """Fills the first buffer, then the second, which has room for a whole record. As `socket.socket`."""
        data = self.recv(RECORD_BYTES)
        at = 0
        for buffer in buffers:
            part = data[at : at + len(buffer)]
            memoryview(buffer)[: len(part)] = part
            at += len(part)
        return len(data), [], 0, None

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """The number of bytes written. After BlockingIOError the next call begins with the same, recorded bytes."""
        with self._using:
            chunk = self._owed or _joined(buffers)
            try:
                sent = self._sock.send(chunk)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                self._owed = chunk
                raise BlockingIOError from None
            except ssl.SSLError as error:
                raise ConnectionResetError(str(error)) from error
            self._owed = b""
            return sent

    def announce_from(self, size: int) -> None:
        """Lets poll report the socket as readable only when about so many bytes have come, or its end."""
        with contextlib.suppress(OSError):  # a system without it reports each arrival
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)

    def shutdown(self, how: int) -> None:
        socket.socket.shutdown(self._sock, how)

    def close(self) -> None:
        self._sock.close()


def _joined(buffers: Sequence[memoryview]) -> bytes:
    parts: list[memoryview] = []
    size = 0
    for buffer in buffers:
        part = buffer[: WRITE_BYTES_MAX - size]
        parts.append(part)
        size += len(part)
        if size == WRITE_BYTES_MAX:
            break
    return b"".join(parts)
