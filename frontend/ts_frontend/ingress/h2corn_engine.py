"""The h2corn engine: HTTP/2 in Rust threads, our ASGI application in the running loop.

h2corn's `Server.serve` prints a banner, and binds sockets itself. We bind (sockets.py) and hand the descriptors to the
entry that h2corn's own supervisor uses; it isn't public, which is one reason why the version is pinned.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from pathlib import Path

import h2corn
from h2corn._lib import prepare_tls
from h2corn._server import load_tls_material

from ts_frontend.ingress.application import LINGER_S, application
from ts_frontend.ingress.call import Listener
from ts_frontend.ingress.sockets import listen

logger = logging.getLogger(__name__)

#: The drain ends by our own clock (`drain`'s `grace_s`); h2corn wants its limit long before.
GRACE_S_MAX = 86_400.0
#: After calls were cancelled: how long until their statuses are on their way.
SETTLE_S = 2.0
STREAMS_PER_CONNECTION_MAX = 4096
HEADER_BYTES_MAX = 64 * 1024
#: A client that reads nothing for so long loses the stream.
STALL_S_MAX = 600.0
HTTP_IDLE_S_MAX = 120.0
HTTP_BODY_IDLE_S_MAX = 60.0
#: h2corn refuses larger bodies by itself; the application, whose refusal says why, must see its limit passed first.
#: So many bytes may be on their way to it: HTTP/2's window.
HTTP_BODY_BYTES_EXTRA = 8 * 1024 * 1024 + 64 * 1024


class H2cornEngine:
    """One h2corn server for each listener (each has limits and TLS of its own), all in one loop."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._servers = {listener.name: ListenerServer(listener) for listener in listeners}

    async def start(self) -> None:
        started: list[ListenerServer] = []
        try:
            for server in self._servers.values():
                started.append(server)
                await server.start()
        except BaseException:
            await asyncio.gather(*(server.drain(0) for server in started))
            raise

    def port(self, name: str) -> int:
        return self._servers[name].port

    async def drain(self, grace_s: float) -> None:
        await asyncio.gather(*(server.drain(grace_s) for server in self._servers.values()))

    async def wait(self) -> None:
        await asyncio.gather(*(server.wait() for server in self._servers.values()))


class ListenerServer:
    """One listener's socket, application and h2corn server."""

    def __init__(self, listener: Listener) -> None:
        if math.isfinite(listener.limits.connection_age_s_max):
            logger.warning("%s: h2corn has no maximal connection age; use the grpcio engine for it", listener.name)
        self._listener = listener
        self._application = application(listener)
        self._server: h2corn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Binds and serves. Raises ListenFailed (OSError), or ValueError for TLS files that can't be used."""
        config = server_config(self._listener)
        tls = prepare_tls(config, load_tls_material(config))
        sockets = listen(self._listener)
        self.port = 0 if self._listener.path else sockets[0].getsockname()[1]
        self._server = h2corn.Server(self._application, config)
        descriptors = [one.detach() for one in sockets]
        self._serving = asyncio.create_task(self._server._serve_worker_fds(descriptors, prepared_tls=tls))
        await self._server.wait_started()

    async def drain(self, grace_s: float) -> None:
        if self._server is None or self._serving is None:
            return
        self._application.drain()
        # Answers that were sent just before are on their way, too.
        lingering_s = min(LINGER_S, grace_s)
        await asyncio.sleep(lingering_s)
        self._server.shutdown()
        await asyncio.wait([self._serving], timeout=grace_s - lingering_s)
        if not self._serving.done():
            count = self._application.abort()
            if count:
                logger.warning(
                    "%s: %d calls did not end in %g s and were cancelled", self._listener.name, count, grace_s
                )
            await asyncio.wait([self._serving], timeout=SETTLE_S)
        if not self._serving.done():
            self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)

    async def wait(self) -> None:
        if self._serving is not None:
            await asyncio.shield(self._serving)


def server_config(listener: Listener) -> h2corn.Config:
    """h2corn's settings for a listener. What gRPC itself limits (messages, deadlines) is limited in exchange.py."""
    tls = listener.tls
    client_ca = Path(tls.client_ca_file) if tls and tls.client_ca_file else None
    grpc = bool(listener.routes) or listener.http_app is None
    return h2corn.Config(
        grpc=grpc,
        runtime_threads=1,  # the loop is the bottleneck; a second I/O thread costs a quarter more CPU per request
        lifespan="off",
        access_log=False,
        server_header="off",
        date_header=False,
        max_concurrent_streams=STREAMS_PER_CONNECTION_MAX,
        h2_max_header_list_size=HEADER_BYTES_MAX,
        h2_max_header_block_size=HEADER_BYTES_MAX,
        limit_request_head_size=HEADER_BYTES_MAX,
        max_request_body_size=listener.limits.request_bytes_max + HTTP_BODY_BYTES_EXTRA,
        timeout_request_header=listener.limits.head_pause_s_max,
        timeout_request_body_idle=HTTP_BODY_IDLE_S_MAX,
        # gRPC's idle connections stay open, as clients expect; sockets.py finds those whose peer is dead.
        timeout_keep_alive=0 if listener.http_app is None else HTTP_IDLE_S_MAX,
        h2_timeout_response_stall=STALL_S_MAX,
        h2_timeout_write=STALL_S_MAX,
        timeout_graceful_shutdown=GRACE_S_MAX,
        certfile=Path(tls.certificate_file) if tls else None,
        keyfile=Path(tls.key_file) if tls else None,
        ca_certs=client_ca,
        cert_reqs="none" if client_ca is None else "required",
    )
