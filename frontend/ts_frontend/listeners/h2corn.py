"""The h2corn engine: HTTP/2 in Rust threads, our ASGI application in the running loop.

h2corn's `Server.serve` prints a banner, and binds sockets itself. This engine binds them (sockets.py) and passes the
descriptors to the entry point of h2corn's own supervisor. It isn't public, one reason why the version is pinned.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import h2corn
from h2corn._lib import prepare_tls
from h2corn._server import TlsMaterial

from ts_frontend.grpc.call import Keepalive
from ts_frontend.listeners.application import LINGER_S, application
from ts_frontend.listeners.certificates import CertificateFiles, CertificateRefused, Pem, key_refused
from ts_frontend.listeners.descriptors import is_exhausted, report_full
from ts_frontend.listeners.listener import HEADER_BYTES_MAX, STREAMS_PER_CONNECTION_MAX, Listener
from ts_frontend.listeners.sockets import LINGER_S_MAX, Listening, cut, hold, keep, listen, quiet
from ts_frontend.tasks import kept, owned, watched

logger = logging.getLogger(__name__)

#: h2corn needs the limit of a drain at its start; `drain` limits it by `grace_s`.
GRACE_S_MAX = 86_400.0
#: Seconds after the cancellation of calls until their statuses are sent.
SETTLE_S = 1.0
#: Seconds until h2corn is started again that ended for want of a descriptor.
AGAIN_S = 1.0
#: Seconds that a drain waits for active HTTP/1.1 clients before h2corn closes idle connections.
QUIET_S_MAX = 1.0
#: The time limit for sending a connection's queued frames, however steadily its client reads.
FLUSH_S_MAX = 3600.0
HTTP_IDLE_S_MAX = 120.0
HTTP_BODY_IDLE_S_MAX = 60.0
#: h2corn refuses larger bodies itself; the application, whose error names the setting, must see its own limit first.
#: Up to this number of bytes (HTTP/2's window) may be in flight to it.
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
    """One listener: its sockets and servers. One server accepts connections; those from before a renewal of the
    certificate run until their connections have ended."""

    def __init__(self, listener: Listener) -> None:
        if math.isfinite(listener.limits.connection_age_s_max):
            logger.warning("%s: h2corn has no maximal connection age; use the grpcio engine for it", listener.name)
        if listener.limits.keepalive != Keepalive():
            logger.warning(
                "%s: h2corn sends no pings and answers every ping; the keepalive settings need grpc_engine=grpcio. "
                "TCP keepalive detects dead clients",
                listener.name,
            )
        self._listener = listener
        self._listening: Listening | None = None
        self._serving: Serving | None = None
        self._retired: dict[Serving, asyncio.Task[None]] = {}
        self._following: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._draining = False

    @property
    def port(self) -> int:
        return 0 if self._listening is None else self._listening.port

    async def start(self) -> None:
        """Binds and serves. Raises ListenFailed (OSError), or CertificateRefused for TLS files that can't be used."""
        tls = self._listener.tls
        files = CertificateFiles(self._listener.name, tls) if tls else None
        prepared = prepare(self._listener, files.read() if files else None)
        self._listening = listen(self._listener)
        self._serving = await self._serve(prepared)
        name, most = self._listener.name, self._listener.limits.connections_max
        if most:
            self._reporting = kept(
                partial(report_full, name, most, self._listening.waiting), f"{name}: the watch over waiting clients"
            )
        if files is not None and tls is not None and tls.check_s:
            self._following = kept(
                partial(files.follow, self._renew), f"{self._listener.name}: the watch over TLS files"
            )

    async def _serve(self, prepared: Prepared) -> Serving:
        assert self._listening is not None
        serving = Serving(
            self._listener, self._listening.descriptors(), prepared, lambda: cut(self._ports, self._paths)
        )
        try:
            await serving.server.wait_started()
        except BaseException:
            await serving.drain(0)
            raise
        return serving

    async def _renew(self, pem: Pem) -> None:
        """Gives new connections the new certificate, and asks clients of the old ones to close theirs."""
        serving = await self._serve(prepare(self._listener, pem))
        former, self._serving = self._serving, serving
        if former is not None:
            self._retired[former] = task = watched(
                former.drain(GRACE_S_MAX), f"{self._listener.name}: the end of a server with a former certificate"
            )
            task.add_done_callback(lambda _: self._retired.pop(former, None))

    async def drain(self, grace_s: float) -> None:
        """Returns when all calls have ended and clients have read their answers, or at the limit of `Serving.drain`."""
        latest_s = time.monotonic() + grace_s
        self._draining = True
        await self._stop_watching()
        retired = dict(self._retired)
        for task in retired.values():
            task.cancel()
        await asyncio.gather(*retired.values(), return_exceptions=True)
        servings = [*retired, *([self._serving] if self._serving else [])]
        for serving in servings:
            serving.application.drain()
        if self._listening is not None:
            if grace_s:
                await self._until_quiet(self._listening, grace_s)
            self._listening.close()
        # h2corn closes a connection without reading what has arrived. The client's next write would fail, and it may
        # then drop answers that it hasn't read. A client that was silent for longer has read them.
        held = hold(self._ports, self._paths, silent_s=LINGER_S_MAX)
        keeping = owned(keep(held))
        draining = [owned(serving.drain(latest_s - time.monotonic())) for serving in servings]
        try:
            await asyncio.gather(*draining)
            await asyncio.wait([keeping], timeout=max(0.0, min(LINGER_S_MAX, latest_s - time.monotonic())))
        finally:
            for task in (*draining, keeping):
                task.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def _until_quiet(self, listening: Listening, grace_s: float) -> None:
        """Waits for quiet connections before h2corn drains, since h2corn then closes connections without a request at
        once, even if one has just arrived. Until then each HTTP/1.1 answer asks its client to close the connection;
        HTTP/2 clients learn from h2corn which requests aren't served."""
        await listening.refuse()
        limit_s = min(QUIET_S_MAX, grace_s)
        await quiet(self._ports, self._paths, min(LINGER_S, limit_s), limit_s)

    @property
    def _ports(self) -> tuple[int, ...]:
        return (self.port,) if self.port else ()

    @property
    def _paths(self) -> tuple[str, ...]:
        return (self._listener.path,) if self._listener.path else ()

    async def _stop_watching(self) -> None:
        watching = [task for task in (self._following, self._reporting) if task is not None]
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)

    async def wait(self) -> None:
        serving = None
        while serving is not self._serving:
            serving = self._serving
            if serving is not None:
                try:
                    await asyncio.shield(serving.task)
                except OSError as error:
                    if self._draining or not is_exhausted(error):
                        raise
                    await self._serve_again(serving, error)

    async def _serve_again(self, ended: Serving, error: OSError) -> None:
        """Serves on the same sockets as soon as the system has room again: h2corn ends when it can't accept a
        connection."""
        logger.error("%s: %s; its connections were closed", self._listener.name, error)
        while ended is self._serving and not self._draining:
            await asyncio.sleep(AGAIN_S)
            try:
                serving = await self._serve(ended.prepared)
            except OSError as another:
                if not is_exhausted(another):
                    raise
                logger.error("%s: %s", self._listener.name, another)
                continue
            if ended is not self._serving or self._draining:  # a new certificate or a drain came meanwhile
                await serving.drain(0)
                return
            self._serving = serving
            logger.warning("%s accepts connections again", self._listener.name)


class Serving:
    """An h2corn server on one listener's sockets, with one certificate. `cut` shuts down the listener's connections."""

    def __init__(self, listener: Listener, descriptors: list[int], prepared: Prepared, cut: Callable[[], None]) -> None:
        self._name = listener.name
        self._cut = cut
        self.prepared = prepared
        self.application = application(listener)
        self.server = h2corn.Server(self.application, prepared.config)
        serving = self.server._serve_worker_fds(descriptors, prepared_tls=prepared.tls)
        self.task: asyncio.Task[None] = owned(serving)

    async def drain(self, grace_s: float) -> None:
        """Returns when all calls have ended, at the latest `grace_s` + 2 * SETTLE_S seconds later: connections whose
        clients don't read are shut down then, since h2corn would wait for them."""
        self.application.drain()
        # Answers sent just before are still in flight, too.
        lingering_s = max(0.0, min(LINGER_S, grace_s))
        await asyncio.sleep(lingering_s)
        self.server.shutdown()
        await asyncio.wait([self.task], timeout=max(0.0, grace_s - lingering_s))
        if not self.task.done():
            count = self.application.abort()
            if count:
                logger.warning("%s: %d calls did not end in %g s and were cancelled", self._name, count, grace_s)
            await asyncio.wait([self.task], timeout=SETTLE_S)
        if not self.task.done():
            self._cut()
            logger.warning("%s: connections whose clients don't read were shut down", self._name)
            await asyncio.wait([self.task], timeout=SETTLE_S)
        if self.task.done():
            await asyncio.gather(self.task, return_exceptions=True)
        else:
            logger.warning("%s: h2corn has not ended", self._name)


class Prepared(NamedTuple):
    """h2corn's settings, and the certificate in its form."""

    config: h2corn.Config
    tls: Any


def prepare(listener: Listener, pem: Pem | None) -> Prepared:
    """Raises CertificateRefused for files that OpenSSL accepts and h2corn doesn't."""
    config = server_config(listener)
    if pem is None:
        return Prepared(config, prepare_tls(config, None))
    try:
        return Prepared(config, prepare_tls(config, TlsMaterial(pem.certificate, pem.key, pem.client_ca)))
    except (OSError, ValueError) as error:
        assert listener.tls is not None
        if "private key" in str(error):
            raise key_refused(listener.tls) from None
        files = f"certificate_file {listener.tls.certificate_file} and private_key_file {listener.tls.key_file}"
        raise CertificateRefused(f"{files}: {error}") from None


def server_config(listener: Listener) -> h2corn.Config:
    """h2corn's settings for a listener. exchange.py enforces gRPC's own limits (messages, deadlines)."""
    tls = listener.tls
    client_ca = Path(tls.client_ca_file) if tls and tls.client_ca_file else None
    grpc = bool(listener.routes) or listener.http_app is None
    return h2corn.Config(
        grpc=grpc,
        bind=(f"unix:{listener.path}" if listener.path else "127.0.0.1:0",),  # tells only the kind of the sockets
        runtime_threads=1,  # the loop is the bottleneck; a second I/O thread costs a quarter more CPU per request
        lifespan="off",
        access_log=False,
        server_header="off",
        date_header=False,
        limit_connections=listener.limits.connections_max,  # further ones wait in the system's queue
        max_concurrent_streams=STREAMS_PER_CONNECTION_MAX,
        h2_max_header_list_size=HEADER_BYTES_MAX,
        h2_max_header_block_size=HEADER_BYTES_MAX,
        limit_request_head_size=HEADER_BYTES_MAX,
        max_request_body_size=listener.limits.request_bytes_max + HTTP_BODY_BYTES_EXTRA,
        timeout_request_header=listener.limits.head_pause_s_max,
        timeout_request_body_idle=HTTP_BODY_IDLE_S_MAX,
        # gRPC's idle connections stay open, as clients expect; sockets.py finds those whose peer is dead.
        timeout_keep_alive=0 if grpc else HTTP_IDLE_S_MAX,
        h2_timeout_response_stall=listener.limits.write_s_max,
        h2_timeout_write=FLUSH_S_MAX,
        timeout_graceful_shutdown=GRACE_S_MAX,
        certfile=Path(tls.certificate_file) if tls else None,
        keyfile=Path(tls.key_file) if tls else None,
        ca_certs=client_ca,
        cert_reqs="none" if client_ca is None else "required",
    )
