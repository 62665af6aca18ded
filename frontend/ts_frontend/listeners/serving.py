"""The listeners in service: each has its sockets, its certificate, and the services that answer its requests."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

from ts_frontend.errors import ClientGone, Code, Draining
from ts_frontend.grpc.call import Exchange
from ts_frontend.grpc.protocol import CONTENT_TYPE as GRPC
from ts_frontend.grpc.protocol import is_grpc, status_headers
from ts_frontend.http.request import answer_error, not_found
from ts_frontend.listeners.certificates import CertificateFiles, Pem, context
from ts_frontend.listeners.descriptors import report_full, shared_out
from ts_frontend.listeners.sockets import Listener, Listening, listen
from ts_frontend.tasks import kept, uncancel
from ts_frontend.transport.connection import Server
from ts_frontend.transport.http2 import Http2Stream
from ts_frontend.transport.stream import Stream

logger: Final = logging.getLogger(__name__)

#: The types of errors for requests that a connection could not read.
REFUSALS: Final = {
    414: "UriTooLongException",
    431: "RequestHeaderFieldsTooLargeException",
    501: "NotImplementedException",
    505: "HttpVersionNotSupportedException",
}


class Serving:
    """The listeners of one server, in the running event loop. They are started and drained once. `left`: the sockets
    that the server which this one replaces has left, by the listeners' `where`; `ports`: those of listeners of another
    frontend."""

    def __init__(
        self,
        listeners: Sequence[Listener],
        left: Mapping[str, Sequence[int]] = MappingProxyType({}),
        ports: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        if len({listener.name for listener in listeners}) != len(listeners):
            raise ValueError("two listeners have one name")
        self._listeners = {listener.name: ServedListener(listener) for listener in shared_out(listeners)}
        self._left = dict(left)
        self._ports = ports
        self._drained = asyncio.Event()

    async def start(self) -> None:
        """Starts all listeners or none. Raises ListenFailed (OSError) that names the unavailable address, or
        CertificateRefused for TLS files that can't be used."""
        started: list[ServedListener] = []
        try:
            for one in self._listeners.values():
                started.append(one)
                one.start(self._left.pop(one.where, ()))
        except BaseException:
            await asyncio.gather(*(one.drain(0) for one in started))
            raise
        finally:  # nobody listens at the others' addresses any more
            for fd in itertools.chain(*self._left.values()):
                os.close(fd)
            self._left.clear()

    def port(self, name: str) -> int:
        """The port of the listener `name`, chosen by the system for port 0."""
        return self._ports[name] if name in self._ports else self._listeners[name].port

    def another(self) -> dict[str, list[socket.socket]]:
        """The sockets of another frontend, by the shared listeners' `where`."""
        return {one.where: one.another() for one in self._listeners.values() if one.shared}

    def own_ports(self) -> dict[str, int]:
        """The ports of the listeners that other frontends don't have, by their names."""
        return {name: one.port for name, one in self._listeners.items() if not one.shared}

    def leave(self) -> dict[str, list[int]]:
        """Leaves the sockets to the next server in this process, before `drain`."""
        return {one.where: one.leave() for one in self._listeners.values()}

    async def drain(self, grace_s: float) -> None:
        """Accepts no more requests, waits up to `grace_s` seconds for running ones, and ends the rest UNAVAILABLE."""
        await asyncio.gather(*(one.drain(grace_s) for one in self._listeners.values()))
        self._drained.set()

    async def wait(self) -> None:
        await self._drained.wait()


class ServedListener:
    """One listener: gRPC calls go to their methods, all other requests to its HTTP service."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._limits, self._routes = listener.limits, listener.routes
        self._http = listener.http or not_found
        self._only_http = listener.http is not None and not listener.routes
        self._listening: Listening | None = None
        self._server: Server | None = None
        self._watches: list[asyncio.Task[None]] = []
        #: The tasks of calls whose answers aren't complete.
        self._running: set[asyncio.Task[None]] = set()
        self._aborted = self._leaves = False

    @property
    def port(self) -> int:
        return 0 if self._listening is None else self._listening.port

    @property
    def where(self) -> str:
        return self._listener.where

    @property
    def shared(self) -> bool:
        return self._listener.shared

    def another(self) -> list[socket.socket]:
        return [] if self._listening is None else self._listening.another()

    def leave(self) -> list[int]:
        self._leaves = True
        return [] if self._listening is None else self._listening.leave()

    def start(self, left: Sequence[int] = ()) -> None:
        listener = self._listener
        files = CertificateFiles(listener.name, listener.tls) if listener.tls else None
        secured = None if files is None or listener.tls is None else context(listener.tls, files.read())
        self._listening = listening = listen(listener, left)
        self._server = Server(listener.name, self._limits, self.serve, listener.flooded)
        self._server.start(listening.sockets, secured)
        name, most = listener.name, self._limits.connections_max
        if most:
            watch = partial(report_full, name, most, listening.waiting)
            self._watches.append(kept(watch, f"{name}: the watch over waiting clients"))
        if files is not None and listener.tls is not None and listener.tls.check_s:
            self._watches.append(kept(partial(files.follow, self._renew), f"{name}: the watch over TLS files"))

    async def _renew(self, pem: Pem) -> None:
        """Gives new connections the new certificate, and asks clients of the old ones to close theirs."""
        assert self._server is not None and self._listener.tls is not None
        self._server.renew(context(self._listener.tls, pem))

    async def drain(self, grace_s: float) -> None:
        """Returns when all calls have ended and clients have read their answers, soon after `grace_s` at the latest."""
        latest_s = time.monotonic() + grace_s
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        listening, server = self._listening, self._server
        if listening is None or server is None:
            return
        server.draining = True
        if grace_s and not self._leaves:
            await listening.refuse()
        server.stop_accepting()
        listening.close()
        await server.drain(max(0.0, latest_s - time.monotonic()), self._abort)

    def _abort(self) -> int:
        """Cancels the running calls, which end with UNAVAILABLE; returns their number."""
        self._aborted = True
        for task in self._running:
            task.cancel()
        return len(self._running)

    # --- requests

    async def serve(self, stream: Stream) -> None:
        task = stream.task
        assert isinstance(task, asyncio.Task)
        self._running.add(task)
        exchange = None
        try:
            if isinstance(stream, Http2Stream) and not self._only_http and self._is_call(stream):
                exchange = Exchange(stream, self._limits)
                await exchange.run(self._routes.get(stream.head.path))
            else:
                await self._answer_http(stream)
        except ClientGone:
            pass
        except asyncio.CancelledError:
            if stream.done or not self._aborted:
                return  # a task that ends cancelled keeps the exception, whose frames refer to the task
            uncancel()
            if exchange is not None:
                await exchange.refuse_draining()
            elif not stream.begun:
                answer_error(stream, Draining.http_status, Draining.type_name, "The server is shutting down")
        except Exception:
            logger.exception("%s: a request failed", self._listener.name)
        finally:
            self._running.discard(task)
            stream.task = None
            del task
            if not stream.given and not stream.done:
                stream.abort()  # an answer that has begun ends where it is

    def _is_call(self, stream: Http2Stream) -> bool:
        head = stream.head
        if head.refusal is not None or head.method != "POST":
            return False
        kind = head.by_name.get(b"content-type")
        return kind == b"application/grpc" or is_grpc(kind)

    async def _answer_http(self, stream: Stream) -> None:
        head = stream.head
        if head.refusal is not None:
            self._refuse(stream, head.refusal.status, str(head.refusal))
        elif self._only_http:
            await self._http(stream)
        elif is_grpc(head.by_name.get(b"content-type")):
            if stream.peer.version != "2":
                answer_error(stream, 505, "HttpVersionNotSupportedException", "gRPC needs HTTP/2")
            else:
                allowed = (b"allow", b"POST")
                answer_error(stream, 405, "MethodNotAllowedException", "gRPC calls are POST requests", allowed)
        elif head.path in self._routes and head.method == "POST":
            message = f"{head.path} is a gRPC method: the content type must be application/grpc"
            answer_error(stream, 415, "UnsupportedMediaTypeException", message)
        else:
            await self._http(stream)

    def _refuse(self, stream: Stream, status: int, message: str) -> None:
        if isinstance(stream, Http2Stream) and is_grpc(stream.head.by_name.get(b"content-type")):
            stream.respond(200, (GRPC, *status_headers(Code.RESOURCE_EXHAUSTED, message)))
        else:
            answer_error(stream, status, REFUSALS.get(status, "BadRequestException"), message)
