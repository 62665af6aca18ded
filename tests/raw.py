"""Clients with nothing of ours but the messages' classes: plain sockets and h2, one connection for each call.

A call begins when it is made. `piece` reads the next piece of its answer and `end` the rest; `leave` gives it up as
clients do: by closing the connection (HTTP/1.1) or resetting the stream (HTTP/2, gRPC).
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import h2.config
import h2.connection
import h2.events

from support import GUARD_S
from ts_frontend.protos.inference_pb2 import PredictionResponse, PredictionsRequest

INFERENCE = "/org.pytorch.serve.grpc.inference.InferenceAPIsService"
CANCEL = 8
FRAME_HEAD_BYTES = 9


class End(NamedTuple):
    """`status`: of HTTP or of gRPC, as text, "" if the connection or the stream ended without one. `whole`: the
    answer had a regular end. `body`: the part that wasn't read as pieces."""

    status: str
    body: bytes
    whole: bool


class Http1:
    """A POST on a connection of its own."""

    def __init__(self, port: int, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), GUARD_S)
        self._reader = self.sock.makefile("rb")
        self._status = ""
        self._chunked = self._over = False
        self._left = 0
        lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{lines}\r\n"
        self.sock.sendall(head.encode() + body)

    def _head(self) -> None:
        if self._status:
            return
        first = self._reader.readline().decode()
        if not first:
            raise ConnectionError("the connection ended before an answer")
        self._status = first.split()[1]
        for line in iter(self._reader.readline, b"\r\n"):
            name, _, value = line.decode("latin-1").strip().lower().partition(": ")
            self._chunked |= (name, value) == ("transfer-encoding", "chunked")
            self._left = int(value) if name == "content-length" else self._left

    def piece(self) -> bytes:
        """A chunk, or the whole body of an answer without chunks; b"" at its end. Raises ConnectionError if the
        connection breaks."""
        self._head()
        if self._over:
            return b""
        if not self._chunked:
            self._over = True
            return self._exactly(self._left)
        line = self._reader.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the connection ended within an answer")
        size = int(line, 16)
        data = self._exactly(size + 2)[:-2]
        self._over = not size
        return data

    def _exactly(self, size: int) -> bytes:
        data = self._reader.read(size)
        if len(data) < size:
            raise ConnectionError("the connection ended within an answer")
        return data

    def end(self) -> End:
        found: list[bytes] = []
        try:
            while piece := self.piece():
                found.append(piece)
        except ConnectionError:
            return End(self._status, b"".join(found), False)
        finally:
            self.leave()
        return End(self._status, b"".join(found), True)

    def leave(self) -> None:
        self.close()

    def close(self) -> None:
        self._reader.close()
        self.sock.close()


class Http2:
    """A request on an HTTP/2 connection of its own, over plain TCP by prior knowledge. `ended`: its body is whole.
    `headers`: of the answer, also those of its trailers; `reset`: the code with which the server reset the stream."""

    def __init__(
        self,
        port: int,
        path: str,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        method: str = "POST",
        ended: bool = True,
    ) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), GUARD_S)
        self._http = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._http.initiate_connection()
        names = {":method": method, ":path": path, ":scheme": "http", ":authority": "localhost", **(headers or {})}
        self._http.send_headers(1, list(names.items()), end_stream=ended and not body)
        self._data: deque[bytes] = deque()
        self._frames = b""
        self.headers: dict[str, str] = {}
        self.trailers: dict[str, str] = {}
        self.reset: int | None = None
        self._ended = self._whole = False
        self._flush()
        self._send(body, ended)

    def _send(self, body: bytes, ended: bool) -> None:
        while body:
            size = min(self._http.local_flow_control_window(1), self._http.max_outbound_frame_size, len(body))
            if size:
                self._http.send_data(1, body[:size], end_stream=ended and size == len(body))
                body = body[size:]
                self._flush()
            else:
                self._read()

    def _flush(self) -> None:
        self.sock.sendall(self._http.data_to_send())

    def _read(self) -> None:
        try:
            data = self.sock.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            self._ended = True
            return
        self._frames += data
        while len(self._frames) >= FRAME_HEAD_BYTES:
            size = FRAME_HEAD_BYTES + int.from_bytes(self._frames[:3], "big")
            if len(self._frames) < size:
                break
            frame, self._frames = self._frames[:size], self._frames[size:]
            for event in self._http.receive_data(frame):
                self._take(event)
        with contextlib.suppress(OSError):
            self._flush()

    def _take(self, event: Any) -> None:
        if isinstance(event, (h2.events.ResponseReceived, h2.events.TrailersReceived)):
            fields = {str(name): str(value) for name, value in event.headers}
            self.headers |= fields
            if isinstance(event, h2.events.TrailersReceived):
                self.trailers = fields
        elif isinstance(event, h2.events.DataReceived):
            self._data.append(event.data)
            self._http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.StreamEnded):
            self._ended = self._whole = True
        elif isinstance(event, h2.events.StreamReset):
            self._ended, self.reset = True, event.error_code
        elif isinstance(event, h2.events.ConnectionTerminated):
            # GOAWAY ends no stream that has begun (RFC 9113, 6.8); h2 takes it for the connection's end.
            self._http.state_machine.state = h2.connection.ConnectionState.CLIENT_OPEN

    def piece(self) -> bytes:
        """The data of one frame; b"" at the end of the answer. Raises ConnectionError if the connection breaks."""
        while not self._data and not self._ended:
            self._read()
        if self._data:
            return self._data.popleft()
        if not self._whole:
            raise ConnectionError("the stream ended without its end")
        return b""

    def end(self) -> End:
        found: list[bytes] = []
        try:
            while piece := self.piece():
                found.append(piece)
        except ConnectionError:
            pass
        finally:
            self.sock.close()
        return End(self.headers.get(":status", ""), b"".join(found), self._whole)

    def leave(self) -> None:
        """Resets the stream and keeps the connection, as clients of many streams do."""
        if not self._ended:
            self._http.reset_stream(1, CANCEL)
            self._flush()

    def close(self) -> None:
        self.sock.close()


class Grpc:
    """A call of gRPC by hand. `timeout_s` is its deadline."""

    def __init__(
        self, port: int, method: str, message: bytes, timeout_s: float | None = None, client: type[Http2] = Http2
    ) -> None:
        headers = {"content-type": "application/grpc", "te": "trailers"}
        if timeout_s is not None:
            headers["grpc-timeout"] = f"{round(timeout_s * 1e6)}u"
        self._call = client(port, method, b"\0" + len(message).to_bytes(4, "big") + message, headers)
        self._rest = b""

    def piece(self) -> bytes:
        """The next message; b"" after the last."""
        while len(self._rest) < 5 or len(self._rest) < 5 + int.from_bytes(self._rest[1:5], "big"):
            more = self._call.piece()
            if not more:
                return b""
            self._rest += more
        size = 5 + int.from_bytes(self._rest[1:5], "big")
        message, self._rest = self._rest[5:size], self._rest[size:]
        return message

    def messages(self) -> tuple[str, Sequence[bytes], str]:
        """The status, the messages that hadn't been read, and the status's words."""
        found: list[bytes] = []
        try:
            while message := self.piece():
                found.append(message)
        except ConnectionError:
            pass
        finally:
            self.close()
        return self._call.headers.get("grpc-status", ""), found, self._call.headers.get("grpc-message", "")

    def leave(self) -> None:
        self._call.leave()

    def close(self) -> None:
        self._call.close()


class Prediction:
    """TorchServe's Predictions or StreamPredictions: the pieces are those of the handler's answer."""

    def __init__(
        self, port: int, model: str, body: bytes, *, streamed: bool = False, timeout_s: float | None = None
    ) -> None:
        message = PredictionsRequest(model_name=model, input={"data": body}).SerializeToString()
        method = "StreamPredictions" if streamed else "Predictions"
        self._call = Grpc(port, f"{INFERENCE}/{method}", message, timeout_s)

    def piece(self) -> bytes:
        message = self._call.piece()
        return PredictionResponse.FromString(message).prediction if message else b""

    def end(self) -> End:
        status, messages, _ = self._call.messages()
        body = b"".join(PredictionResponse.FromString(message).prediction for message in messages)
        return End(status, body, bool(status))

    def leave(self) -> None:
        self._call.leave()

    def close(self) -> None:
        self._call.close()
