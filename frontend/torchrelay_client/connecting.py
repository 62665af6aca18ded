"""Connections to the server: TLS, keys, channel options; the same for blocking and asyncio."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc

from torchrelay_client.calls import Call

CHANNELS = 4
TIMEOUT_S = 60.0
#: How soon a broken connection is tried again, at first and at most.
RECONNECT_FIRST_MS, RECONNECT_MOST_MS = 100, 2000

Options = Sequence[tuple[str, Any]]
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class TLS:
    """PEM files: `ca`, the authority that signed the server's certificate (None: the machine's own); `certificate` and
    `key`, the client's, for servers that ask for one. `server_name`: the name to check, if not the address's."""

    ca: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None
    server_name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError when a file can't be read, ValueError for a certificate without its key."""
        if (self.certificate is None) != (self.key is None):
            raise ValueError("TLS: a client's certificate and its key belong together, one of them is missing")
        files = [None if path is None else Path(path).read_bytes() for path in (self.ca, self.key, self.certificate)]
        return grpc.ssl_channel_credentials(*files)


def channel_options(tls: TLS | None, more: Options) -> list[tuple[str, Any]]:
    """Each channel has a connection of its own, which comes back soon after the server does; messages of any size."""
    own: list[tuple[str, Any]] = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_FIRST_MS),
        ("grpc.min_reconnect_backoff_ms", RECONNECT_FIRST_MS),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MOST_MS),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.enable_http_proxy", 0),
    ]
    if tls is not None and tls.server_name:
        own.append(("grpc.ssl_target_name_override", tls.server_name))
    return [*own, *more]


class Channels(Generic[C]):
    """`count` channels made by `make`, used in turn. A channel connects with its first call."""

    def __init__(self, make: Callable[[], C], count: int) -> None:
        if count < 1:
            raise ValueError(f"channels={count}: at least one is needed")
        self.all = [make() for _ in range(count)]
        self._methods: list[dict[str, Any]] = [{} for _ in range(count)]
        self._turns = itertools.count()

    def method(self, call: Call[Any]) -> Any:
        turn = next(self._turns) % len(self.all)
        known = self._methods[turn]
        if call.path not in known:
            make = getattr(self.all[turn], call.arity)
            known[call.path] = make(call.path, request_serializer=_written, response_deserializer=call.answer)
        return known[call.path]


def _written(message: Any) -> bytes:
    return bytes(message.SerializeToString())
