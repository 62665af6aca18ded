"""A worker on another machine than its frontend: `python -m ts.runtime.remote`, with its instructions (a JSON object)
on standard input.

It connects to the frontend over TLS and says who it is; then it is a worker like any other. What the frontend reads off
a shared file otherwise, the batches that have begun, it is told here, before the handler is called.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
from functools import partial
from math import isinf
from typing import Any

from ts.protocol.frames import Begun, Message, Predict, Times
from ts.protocol.outbox import Outbox
from ts.protocol.progress import PROGRESS_BYTES, Progress
from ts.protocol.secure import SecureSocket
from ts.runtime.agent import greet
from ts.runtime.handlers import Loaded, load
from ts.runtime.jobs import Ledger
from ts.runtime.main import answer, prepare_logging, prepare_process
from ts.runtime.process import die_with, outlive_stops
from ts.runtime.worker import Link, leave


class RemoteLink(Link):
    """The link of a worker whose frontend's clock is `ahead_s` before its own."""

    def __init__(self, sock: SecureSocket, ahead_s: float) -> None:
        super().__init__(sock)
        self._ahead_s = ahead_s

    def _decode(self, data: bytes) -> list[Message]:
        return [self._timed(message) for message in super()._decode(data)]

    def _filled(self, size: int, room: int) -> list[Message]:
        return [self._timed(message) for message in super()._filled(size, room)]

    def _timed(self, message: Message) -> Message:
        if not self._ahead_s or not isinstance(message, Predict):
            return message
        ahead_s = self._ahead_s
        items = [
            item if isinf(item.deadline_s) else item._replace(deadline_s=item.deadline_s - ahead_s)
            for item in message.items
        ]
        return message._replace(items=items)


class _TimedOutbox(Outbox):
    """Gives times as the frontend's clock has them."""

    def __init__(self, ahead_s: float) -> None:
        super().__init__()
        self._ahead_s = ahead_s

    def push(self, message: Message) -> None:
        if isinstance(message, Times):
            message = Times(message.job_id, *(time_s + self._ahead_s for time_s in message[1:]))
        super().push(message)


class RemoteLedger(Ledger):
    """The ledger of such a worker."""

    def __init__(self, ahead_s: float, *limits: Any) -> None:
        super().__init__(*limits)
        if ahead_s:
            self.outbox = _TimedOutbox(ahead_s)


class ReportedProgress(Progress):
    """Tells the frontend of each batch before its handler is called: the note is with the system by then, which sends
    it even if this process is killed."""

    __slots__ = ("_link",)

    def __init__(self, link: Link) -> None:
        super().__init__(bytearray(PROGRESS_BYTES))
        self._link = link

    def begin(self, batch_id: int) -> None:
        with self._link.ledger.lock:
            self._link.ledger.outbox.push(Begun(batch_id))
        self._link.drain()


def moved(value: Any, origin: str, here: str) -> Any:
    """Settings with the paths that they have on this machine."""
    if isinstance(value, str):
        inside = value == origin or value.startswith(origin + "/")
        return here + value[len(origin) :] if inside else value
    if isinstance(value, list):
        return [moved(one, origin, here) for one in value]
    if isinstance(value, dict):
        return {key: moved(one, origin, here) for key, one in value.items()}
    return value


def _load(instructions: dict[str, Any], settings: dict[str, Any]) -> Loaded:
    found: dict[str, Any] = moved(settings, instructions["origin"], instructions["model_dir"])
    if found.get("metrics_config"):
        found["metrics_config"] = instructions["metrics_config"]
    return load(found)


def main() -> None:
    die_with(os.getppid())
    outlive_stops()
    instructions = json.load(sys.stdin)
    try:
        sock, ahead_s = greet(instructions, "worker")
    except OSError as error:
        sys.exit(f"the worker can't reach the server at {instructions['host']}:{instructions['port']}: {error}")
    link = RemoteLink(sock, ahead_s)
    prepare_process()
    ledger: Any = partial(RemoteLedger, ahead_s)
    status = answer(link, ReportedProgress(link), ledger, prepare_logging, loading=partial(_load, instructions))
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    leave(status)


if __name__ == "__main__":
    main()
