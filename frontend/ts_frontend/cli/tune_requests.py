"""The requests of `torchserve tune`: read from files, and sent with a protocol of the model's clients."""

from __future__ import annotations

import asyncio
import json
import mimetypes
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import grpc

from ts_frontend.cli.client import CallFailed, Target
from ts_frontend.cli.commands import DEFAULT_INPUT
from ts_frontend.config.keys import KeyKind
from ts_frontend.protos import inference_pb2, inference_pb2_grpc
from ts_frontend.tuning.load import Send

PROTOCOLS = ("grpc", "http", "v2")
REQUEST_S_MAX = 60.0
#: The most bytes of a line in an answer's head.
_LINE_BYTES_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request to send again. `media_type`: "" if the file's name has no known suffix."""

    body: bytes
    media_type: str


def read(paths: Sequence[Path], protocol: str) -> list[Recorded]:
    """The requests of these files in order: a folder's files by name, a `.jsonl` file's lines.

    :raises click.BadParameter: there is none, or one that is invalid for the protocol.
    """
    files = [file for path in paths for file in (_files_of(path) if path.is_dir() else [path])]
    found = [request for file in files for request in _requests_of(file)]
    if not found:
        raise click.BadParameter(f"{', '.join(map(str, paths))}: it contains no request", param_hint="--input")
    if protocol == "v2":
        for number, request in enumerate(found, 1):
            _check_v2(request.body, f"request {number} of {', '.join(map(str, paths))}")
    return found


def _files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))


def _requests_of(file: Path) -> list[Recorded]:
    if file.suffix == ".jsonl":
        lines = (line.strip() for line in file.read_bytes().splitlines())
        return [Recorded(line, "application/json") for line in lines if line]
    return [Recorded(file.read_bytes(), mimetypes.guess_type(file.name)[0] or "")]


def _check_v2(body: bytes, where: str) -> None:
    try:
        inputs = json.loads(body).get("inputs")
    except (ValueError, AttributeError):
        inputs = None
    if not isinstance(inputs, list):
        raise click.BadParameter(
            f'{where} is not a request of the Open Inference Protocol, {{"inputs": [{{"name", "shape", "datatype", '
            f'"data"}}, …]}}; --protocol http and --protocol grpc send any bytes',
            param_hint="--input",
        )


@asynccontextmanager
async def sender(
    protocol: str, target: Target, http_port: int, name: str, requests: Sequence[Recorded]
) -> AsyncIterator[Send]:
    """Yields the sender of the n-th request to this model; its connections are closed with the context."""
    if protocol == "grpc":
        async with target.channel(target.address(target.inference_port), grpc.aio) as channel:
            yield _over_grpc(channel, target, name, requests)
        return
    path = f"/predictions/{name}" if protocol == "http" else f"/v2/models/{name}/infer"
    connections = _Connections(target, http_port)
    try:
        yield _over_http(connections, path, requests)
    finally:
        connections.close()


def _over_grpc(channel: Any, target: Target, name: str, requests: Sequence[Recorded]) -> Send:
    stub = inference_pb2_grpc.InferenceAPIsServiceStub(channel)
    metadata = target.keys.metadata(KeyKind.INFERENCE)
    messages = [inference_pb2.PredictionsRequest(model_name=name, input={DEFAULT_INPUT: it.body}) for it in requests]

    async def send(number: int) -> None:
        try:
            await stub.Predictions(messages[number % len(messages)], metadata=metadata, timeout=REQUEST_S_MAX)
        except grpc.RpcError as error:
            failed: Any = error
            raise CallFailed(failed.code().name, f"{failed.code().name}: {failed.details()}") from None

    return send


def _over_http(connections: _Connections, path: str, requests: Sequence[Recorded]) -> Send:
    messages = [connections.message(path, request) for request in requests]

    async def send(number: int) -> None:
        await asyncio.wait_for(connections.call(messages[number % len(messages)]), REQUEST_S_MAX)

    return send


class _Connections:
    """A pool of HTTP/1.1 connections to one address, as many as concurrent requests."""

    def __init__(self, target: Target, port: int) -> None:
        self._host, self._port = target.host, port
        self._address = target.address(port)
        self._keys = "".join(f"{name}: {value}\r\n" for name, value in target.keys.metadata(KeyKind.INFERENCE))
        self._tls: ssl.SSLContext | None = None
        if target.ca_file is not None:
            self._tls = ssl.create_default_context(cafile=target.ca_file)
            if target.certificate_file is not None:
                self._tls.load_cert_chain(target.certificate_file, target.certificate_key_file)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def message(self, path: str, request: Recorded) -> bytes:
        """The bytes of the request."""
        kind = f"Content-Type: {request.media_type}\r\n" if request.media_type else ""
        head = f"POST {path} HTTP/1.1\r\nHost: {self._address}\r\n{self._keys}{kind}"
        return f"{head}Content-Length: {len(request.body)}\r\n\r\n".encode() + request.body

    async def call(self, message: bytes) -> None:
        """Sends it and reads the answer. Raises CallFailed unless it succeeds."""
        try:
            reader, writer = self._idle.pop() if self._idle else await self._open()
        except OSError as error:
            raise CallFailed(
                "UNAVAILABLE", f"No server answers HTTP at {self._address} ({error}). Its port: --http-port"
            ) from None
        done = False
        try:
            writer.write(message)
            status, body, stays = await _answer(reader)
            done = stays
        except (OSError, EOFError, ValueError) as error:
            raise CallFailed("UNAVAILABLE", f"{self._address} did not answer in HTTP: {error}") from None
        finally:
            if done:
                self._idle.append((reader, writer))
            else:
                writer.close()
        if status >= 300:
            raise CallFailed("UNKNOWN", f"HTTP {status}: {body.decode(errors='replace')}")

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._host, self._port, limit=_LINE_BYTES_MAX, ssl=self._tls)

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bool]:
    """Status, body, and whether the connection can be used again."""
    words = (await reader.readline()).split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1."):
        raise ValueError("it ended the connection" if not words else f"it begins with {words[0][:40]!r}")
    headers = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip().lower()
    if headers.get(b"transfer-encoding") == b"chunked":
        body = await _chunks(reader)
    else:
        body = await reader.readexactly(int(headers[b"content-length"])) if b"content-length" in headers else b""
    return int(words[1]), body, headers.get(b"connection") != b"close"


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int((await reader.readline()).split(b";")[0], 16):
        parts.append(await reader.readexactly(size))
        await reader.readline()
    while (await reader.readline()).strip():
        pass
    return b"".join(parts)
