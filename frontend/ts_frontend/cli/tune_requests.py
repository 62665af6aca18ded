"""The requests of `torchserve tune`: read from files, and sent with a protocol of the model's clients."""

from __future__ import annotations

import asyncio
import http.client
import json
import mimetypes
import ssl
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
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
#: The most requests that the command keeps in flight.
IN_FLIGHT_MAX = 4096


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
    if protocol == "grpc":
        async with target.channel(target.address(target.inference_port), grpc.aio) as channel:
            yield _over_grpc(channel, target, name, requests)
        return
    path = f"/predictions/{name}" if protocol == "http" else f"/v2/models/{name}/infer"
    with closing(_Connections(target, http_port, path, requests)) as connections:
        yield connections.send


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


class _Connections:
    """Connections of HTTP/1.1 to one address, as many as requests in flight; each request takes a thread."""

    def __init__(self, target: Target, port: int, path: str, requests: Sequence[Recorded]) -> None:
        self._path, self._requests, self._address = path, requests, target.address(port)
        self._keys = dict(target.keys.metadata(KeyKind.INFERENCE))
        kind: Any = http.client.HTTPConnection
        if target.ca_file is not None:
            tls = ssl.create_default_context(cafile=target.ca_file)
            if target.certificate_file is not None:
                tls.load_cert_chain(target.certificate_file, target.certificate_key_file)
            kind = partial(http.client.HTTPSConnection, context=tls)
        self._made = partial(kind, target.host, port, timeout=REQUEST_S_MAX)
        self._idle: list[http.client.HTTPConnection] = []
        self._threads = ThreadPoolExecutor(IN_FLIGHT_MAX)

    async def send(self, number: int) -> None:
        request = self._requests[number % len(self._requests)]
        await asyncio.get_running_loop().run_in_executor(self._threads, self._call, request)

    def _call(self, request: Recorded) -> None:
        connection = self._idle.pop() if self._idle else self._made()
        try:
            if connection.sock is None:
                connection.connect()
        except OSError as error:
            raise CallFailed(
                "UNAVAILABLE", f"No server answers HTTP at {self._address} ({error}). Its port: --http-port"
            ) from None
        kind = {"Content-Type": request.media_type} if request.media_type else {}
        try:
            connection.request("POST", self._path, request.body, {**self._keys, **kind})
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise CallFailed("UNAVAILABLE", f"{self._address} did not answer in HTTP: {error}") from None
        self._idle.append(connection)
        if answer.status >= 300:
            raise CallFailed("UNKNOWN", f"HTTP {answer.status}: {body.decode(errors='replace')}")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for connection in self._idle:
            connection.close()
