"""The link of a worker on another machine than its frontend, whose clock is another: received times are converted to
its own clock, and sent times to the frontend's. Begun batches are sent over a connection of their own, because there
is no shared memory.
"""

from __future__ import annotations

import select
from math import isinf
from mmap import mmap

from ts.protocol.frames import Message, Predict, Times
from ts.protocol.outbox import Outbox
from ts.protocol.secure import SecureSocket
from ts.protocol.shared import NOTE, PLACES, Progress
from ts.runtime.jobs import Ledger
from ts.runtime.worker import Link, leave, parted


class RemoteLink(Link):
    """The link of a worker whose frontend's clock is `ahead_s` before its own. `notes`: the connection of its begun
    batches, which forked processes don't keep either."""

    def __init__(self, sock: SecureSocket, ahead_s: float, notes: SecureSocket) -> None:
        super().__init__(sock)
        self._ahead_s = ahead_s
        self._notes = notes

    def _part(self) -> None:
        super()._part()
        parted(self._notes.fileno())

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


class SentProgress(Progress):
    """Tells the frontend of each batch before its handler is called: the operating system has the note by then, and
    sends it even if this process is killed. The notes have a connection of their own, which the frontend reads once in
    a while, so that it isn't woken by each and answers can still share a write.

    The memory is shared with the agent: unless the whole machine dies, it reports which of the batches were begun
    indeed."""

    __slots__ = ("_notes",)

    def __init__(self, notes: SecureSocket, memory: mmap | bytearray) -> None:
        super().__init__(memory)
        self._notes = notes

    def begin(self, batch_id: int) -> None:
        self._tell(batch_id)
        place = batch_id % PLACES  # as `Progress.begin`, which may not be called: nothing may follow the record
        if self._ids[place] < batch_id:
            self._ids[place] = batch_id

    def _tell(self, batch_id: int) -> None:
        note = memoryview(NOTE.pack(batch_id))
        while True:
            try:
                self._notes.sendmsg([note])
                return
            except BlockingIOError:
                poller = select.poll()
                poller.register(self._notes.fileno(), select.POLLOUT)
                poller.poll()
            except OSError:
                leave(0)  # the frontend has gone
