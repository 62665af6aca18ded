"""The limits of a listener and its connections."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ts_frontend.transport.arriving import Arriving
from ts_frontend.transport.open_streams import OpenStreams
from ts_frontend.transport.unread import Unread

#: Requests at a time on an HTTP/2 connection, and the bytes of a request's headers.
STREAMS_PER_CONNECTION_MAX = 4096
HEADER_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, slots=True)
class Keepalive:
    """HTTP/2 pings, in the terms of gRPC's keepalive; milliseconds, None for no pings. `time_ms`: the server pings a
    client that has been silent for this long and closes the connection without an answer in `timeout_ms`. A client
    without data that pings more often than `min_ping_interval_without_data_ms`, or without a call if
    `permit_without_calls` is false, loses its connection."""

    time_ms: int | None = None
    timeout_ms: int | None = None
    permit_without_calls: bool = True
    max_pings_without_data: int = 0
    min_time_between_pings_ms: int | None = None
    min_ping_interval_without_data_ms: int = 5000


@dataclass(frozen=True, slots=True)
class ListenerLimits:
    """The limits of a listener. Sizes in bytes, times in seconds; `math.inf` for no limit. `head_s_max`: the time in
    which a client sends a request's head; `idle_s_max`: that of an idle connection; `write_s_max`: the longest time in
    which a client reads nothing of an answer, 0 for no limit; `connections_max`: of a listener at a time, 0 for its
    share of the open files; `resets_max`: streams that a client may reset at once on a connection, of which
    `resets_per_s` come back each second; `arriving`: the requests that are still arriving, with the limit for all of
    them together; `unread`: the answers that wait for their clients, with theirs; `streams`: the streaming calls that
    are open, with theirs."""

    request_bytes_max: int = 6_553_500
    response_bytes_max: int = 6_553_500
    connection_age_s_max: float = math.inf
    connection_age_grace_s: float = math.inf
    head_s_max: float = 10.0
    idle_s_max: float = math.inf
    write_s_max: float = 120.0
    connections_max: int = 0
    resets_max: int = 1000
    resets_per_s: float = 200.0
    keepalive: Keepalive = Keepalive()
    arriving: Arriving = field(default_factory=Arriving, compare=False)
    unread: Unread = field(default_factory=Unread, compare=False)
    streams: OpenStreams = field(default_factory=OpenStreams, compare=False)
