"""Calls to a server of the Open Inference Protocol, and its answers, as data (tests/data/triton/README.md).

`python ts_scripts/exchanges.py --http HOST:PORT --grpc HOST:PORT FILE...` makes the calls of each file, in order, and
writes the answers into it: the files were recorded in this way with a real Triton. With `--out DIR` the files are
written there instead.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import http.client
import json
import os
import re
import socket
import time
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message

from ts.protocol import open_inference_pb2 as pb
from ts.protocol.pool import POOL

Exchange: TypeAlias = "dict[str, Any]"
Answer: TypeAlias = "dict[str, Any]"

SERVICE = "inference.GRPCInferenceService"
GUARD_S = 60
#: The time for which a socket stays open for further bytes.
SILENCE_S = 2
#: The text in a call that stands for the prefix of names of shared memory, which differs at each run.
KEY = "${KEY}"
LENGTH_HEADER = "inference-header-content-length"
HEADERS = ("content-type", "content-encoding", LENGTH_HEADER, "accept-encoding", "allow")
_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_PACKED: Mapping[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
_STREAM = "ModelStreamInfer"


def read(file: Path) -> list[Exchange]:
    found: list[Exchange] = json.loads(file.read_text())
    return found


def write(file: Path, exchanges: Sequence[Exchange]) -> None:
    lines = ",\n".join(json.dumps(exchange, ensure_ascii=False) for exchange in exchanges)
    file.write_text(f"[\n{lines}\n]\n")


class Player:
    """Makes calls to one server. `http` and `grpc` are HOST:PORT."""

    def __init__(self, http: str, grpc_address: str) -> None:
        self._http = http
        self._channel = grpc.insecure_channel(grpc_address, _UNLIMITED)
        self._key = f"/exchanges_{uuid.uuid4().hex[:12]}"
        self._files: set[Path] = set()

    def close(self) -> None:
        self._channel.close()
        for file in self._files:
            file.unlink(missing_ok=True)

    def play(self, exchange: Exchange) -> Answer:
        """The answer to a call; a call with `until` is repeated for a while until it gets that answer."""
        exchange = json.loads(json.dumps(exchange).replace(KEY, self._key))
        kind = next(kind for kind in ("grpc", "http", "socket", "memory") if kind in exchange)
        play: Callable[[Exchange], Answer] = getattr(self, f"_{kind}_call")
        answer = play(exchange)
        end = time.monotonic() + GUARD_S
        while answer != exchange.get("until", answer) and time.monotonic() < end:
            answer = play(exchange)
        text = json.dumps(answer, ensure_ascii=False)
        found: Answer = json.loads(text.replace(self._key, KEY))
        return found

    # --- gRPC

    def _grpc_call(self, exchange: Exchange) -> Answer:
        """Makes a gRPC call. `grpc` is a method of the service, or a path, whose messages are bytes."""
        method, metadata = exchange["grpc"], list(exchange.get("metadata", {}).items())
        path = method if "/" in method else f"/{SERVICE}/{method}"
        options = {"metadata": metadata, "timeout": exchange.get("timeout_s", GUARD_S)}
        if method == _STREAM:
            given = [_message(one, pb.ModelInferRequest) for one in exchange["requests"]]
            return _streamed(self._channel.stream_stream(path)(iter(given), **options))
        try:
            data = self._channel.unary_unary(path)(_request(exchange, method), **options)
        except grpc.RpcError as error:
            return _failed(error)
        if "/" in method:
            return {"code": "OK", "base64": base64.b64encode(data).decode()}
        return {"code": "OK", "message": as_json(getattr(pb, f"{method}Response").FromString(data))}

    # --- HTTP

    def _http_call(self, exchange: Exchange) -> Answer:
        method, target = exchange["http"].split(" ", 1)
        connection = http.client.HTTPConnection(self._http, timeout=GUARD_S)
        try:
            connection.putrequest(method, target, skip_accept_encoding=True)
            body = body_of(exchange)
            headers = exchange.get("headers", {})
            if (body or method == "POST") and "content-length" not in {name.lower() for name in headers}:
                connection.putheader("Content-Length", str(len(body)))
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders(body or None)
            response = connection.getresponse()
            return _http_answer(response, response.read())
        finally:
            connection.close()

    def _socket_call(self, exchange: Exchange) -> Answer:
        """Sends the bytes unchanged; returns only the statuses of the answers."""
        host, port = self._http.rsplit(":", 1)
        found = b""
        with socket.create_connection((host, int(port)), SILENCE_S) as connection:
            for part in exchange["socket"]:
                connection.sendall(part.encode())
                try:
                    while data := connection.recv(65536):
                        found += data
                except TimeoutError:
                    pass
                except ConnectionError:
                    break
        return {"statuses": [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3})", found)]}

    # --- shared memory

    def _memory_call(self, exchange: Exchange) -> Answer:
        file = Path("/dev/shm") / exchange["key"].lstrip("/")
        match exchange["memory"]:
            case "create":
                self._files.add(file)
                file.write_bytes(base64.b64decode(exchange.get("base64", "")).ljust(exchange["size"], b"\0"))
                return {}
            case "read":
                return {"base64": base64.b64encode(file.read_bytes()).decode()}
            case _:
                file.unlink()
                return {}


def _message(value: Any, kind: Any) -> bytes:
    data: bytes = json_format.ParseDict(value, kind(), descriptor_pool=POOL).SerializeToString()
    return data


def _request(exchange: Exchange, method: str) -> bytes:
    if "/" in method or "base64" in exchange:
        return base64.b64decode(exchange.get("base64", ""))
    return _message(exchange.get("request", {}), getattr(pb, f"{method}Request"))


def _streamed(answers: Any) -> Answer:
    found: list[Any] = []
    try:
        for data in answers:
            found.append(as_json(pb.ModelStreamInferResponse.FromString(data)))
    except grpc.RpcError as error:
        return _failed(error) | {"messages": found}
    return {"code": "OK", "messages": found}


def as_json(message: Message) -> Any:
    return json_format.MessageToDict(message, preserving_proto_field_name=True, descriptor_pool=POOL)


def _failed(error: Any) -> Answer:
    return {"code": error.code().name, "error": error.details()}


def body_of(exchange: Exchange) -> bytes:
    """The body of a call: `json`, followed by `binary` (base64); or `text`; or `base64`. `packed`: its compression."""
    if "json" in exchange:
        data = json.dumps(exchange["json"], ensure_ascii=False).encode() + base64.b64decode(exchange.get("binary", ""))
    elif "text" in exchange:
        data = exchange["text"].encode()
    else:
        data = base64.b64decode(exchange.get("base64", ""))
    return _PACKED[exchange["packed"]](data) if "packed" in exchange else data


def _http_answer(response: http.client.HTTPResponse, body: bytes) -> Answer:
    headers = {name.lower(): value for name, value in response.getheaders() if name.lower() in HEADERS}
    answer: Answer = {"status": response.status, "headers": headers}
    packed = headers.get("content-encoding", "")
    if packed in ("gzip", "deflate"):
        body = gzip.decompress(body) if packed == "gzip" else zlib.decompress(body)
    if LENGTH_HEADER in headers:
        length = int(headers[LENGTH_HEADER])
        return answer | {"json": json.loads(body[:length]), "binary": base64.b64encode(body[length:]).decode()}
    return answer | _shown(body)


def _shown(body: bytes) -> Answer:
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(body).decode()}
    if text.startswith("data: "):
        return {"events": [_json_or_text(event.removeprefix("data: ")) for event in text.split("\n\n") if event]}
    value = _json_or_text(text)
    return {"text": text} if isinstance(value, str) else {"json": value}


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def main() -> None:
    parser = argparse.ArgumentParser(description="Records what a server answers.")
    parser.add_argument("--http", required=True, metavar="HOST:PORT")
    parser.add_argument("--grpc", required=True, metavar="HOST:PORT")
    parser.add_argument("--out", type=Path, help="a folder for the files with the answers")
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    player = Player(options.http, options.grpc)
    try:
        for file in options.files:
            exchanges = read(file)
            for exchange in exchanges:
                exchange["answer"] = player.play(exchange)
            write(options.out / file.name if options.out else file, exchanges)
    finally:
        player.close()


if __name__ == "__main__":
    os.umask(0o077)
    main()
