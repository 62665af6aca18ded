"""The link of a worker on another machine than its frontend, whose clock is another: received times are converted to
its own clock, and sent times to the frontend's. Begun batches are sent as messages, because there is no shared
memory.
"""

from __future__ import annotations

from math import isinf

from ts.protocol.frames import Begun, Message, Predict, Times
from ts.protocol.outbox import Outbox
from ts.protocol.progress import PROGRESS_BYTES, Progress
from ts.protocol.secure import SecureSocket
from ts.runtime.jobs import Ledger
from ts.runtime.worker import Link


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
    """Converts times to the frontend's clock."""

    def __init__(self, ahead_s: float) -> None:
        super().__init__()
        self._ahead_s = ahead_s

    def push(self, message: Message) -> None:
        if isinstance(message, Times):
            message = Times(message.job_id, *(time_s + self._ahead_s for time_s in message[1:]))
        super().push(message)


class RemoteLedger(Ledger):
    """The ledger of such a worker."""

    def __init__(self, ahead_s: float, credit_bytes: int, response_bytes_max: int, explains: bool = False) -> None:
        super().__init__(credit_bytes, response_bytes_max, explains)
        if ahead_s:
            self.outbox = _TimedOutbox(ahead_s)


class ReportedProgress(Progress):
    """Tells the frontend of each batch before its handler is called: the operating system has the message by then,
    and sends it even if this process is killed."""

    __slots__ = ("_link",)

    def __init__(self, link: Link) -> None:
        super().__init__(bytearray(PROGRESS_BYTES))
        self._link = link

    def begin(self, batch_id: int) -> None:
        with self._link.ledger.lock:
            self._link.ledger.outbox.push(Begun(batch_id))
        self._link.drain()
