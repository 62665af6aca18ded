"""The frontend's end of one worker's socket: raw and non-blocking, messages in and out.

asyncio's stream transports can't pass descriptors and copy more than necessary, so this module reads and writes the
socket itself and uses the loop only to wait for readiness.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from ts.protocol.decoder import Decoder
from ts.protocol.frames import FrameError, Message, Predict, request_frame
from ts.protocol.outbox import Outbox
from ts_frontend.job import Job

READ_BYTES: Final = 64 * 1024
READS_PER_TURN_MAX: Final = 4
#: The bytes that are read together with the rest of a large frame.
BEYOND_BYTES: Final = 16 * 1024


class Connection:
    """Messages to and from one worker. `on_messages` gets the messages that arrived together; `on_end` is called
    once, with the reason, when the socket ends or has invalid data."""

    def __init__(
        self,
        sock: socket.socket,
        on_messages: Callable[[list[Message]], None],
        on_end: Callable[[str], None],
        message_bytes_max: int,
    ) -> None:
        sock.setblocking(False)
        self._sock: socket.socket | None = sock
        self.on_messages = on_messages
        self._on_end = on_end
        self._decoder = Decoder(message_bytes_max)
        self._outbox = Outbox()
        self._loop = asyncio.get_running_loop()
        self._writing = False
        self._flush_scheduled = False
        self._beyond: bytearray | None = None
        self._fd = sock.fileno()
        self._loop.add_reader(self._fd, self._readable)

    def push(self, message: Message) -> None:
        """Queues a message; `flush` or the end of this turn of the loop writes it."""
        if self._sock is None:
            return
        self._outbox.push(message)
        if not self._flush_scheduled and not self._writing:
            self._flush_scheduled = True
            self._loop.call_soon(self.flush)

    def push_request(self, batch_id: int, job: Job) -> None:
        """`push` for a batch of one job. Its sender has to call `flush` afterwards, which saves another turn of the
        loop."""
        frame = request_frame(batch_id, job.id, job.request_id, job.deadline_s, job.request_headers, job.inputs)
        if frame is None:
            self.push(Predict(batch_id, [job.item()]))
        elif self._sock is not None:
            self._outbox.push_frame(frame)

    def flush(self) -> None:
        """Writes the queued messages as far as the socket accepts them; the rest follows when it is writable."""
        self._flush_scheduled = False
        if self._writing or self._sock is None:
            return
        if not self._write():
            self._writing = True
            self._loop.add_writer(self._fd, self._writable)

    def _write(self) -> bool:
        """Returns True when everything is written (or the socket has ended: its reader reports that)."""
        sock, outbox = self._sock, self._outbox
        while outbox and sock is not None:
            try:
                outbox.sent(sock.sendmsg(outbox.buffers()))
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                self._end(f"writing failed: {error}")
                return True
        return True

    def _writable(self) -> None:
        if self._write() and self._sock is not None:
            self._loop.remove_writer(self._fd)
            self._writing = False

    def _readable(self) -> None:
        for _ in range(READS_PER_TURN_MAX):
            if not self._read_once():
                return

    def _read_once(self) -> bool:
        """Returns True when there may be more to read."""
        sock = self._sock
        if sock is None:
            return False
        room = self._decoder.room
        if room is not None:
            return self._read_into(sock, room)
        try:
            data = sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._end(f"reading failed: {error}")
            return False
        if not data:
            self._end("socket closed")
            return False
        return self._decode(data) and len(data) == READ_BYTES

    def _read_into(self, sock: socket.socket, room: memoryview) -> bool:
        """Reads into the rest of a large frame, and the bytes after it; otherwise like `_read_once`."""
        beyond = self._beyond
        if beyond is None:
            beyond = self._beyond = bytearray(BEYOND_BYTES)
        try:
            size = sock.recvmsg_into([room, beyond])[0]
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._end(f"reading failed: {error}")
            return False
        if not size:
            self._end("socket closed")
            return False
        more = size - len(room)
        return self._decode(bytes(beyond[:more]) if more > 0 else b"", min(size, len(room))) and more >= 0

    def _decode(self, data: bytes, filled: int = 0) -> bool:
        """Decodes the bytes read: `filled` bytes in the decoder's buffer, and `data` after them."""
        try:
            messages = self._decoder.filled(filled) if filled else []
            if data:
                messages += self._decoder.feed(data)
        except FrameError as error:
            self._end(f"worker sent no valid frame: {error}")
            return False
        if messages:
            self.on_messages(messages)
        return True

    def _end(self, reason: str) -> None:
        if self._sock is not None:
            self.close()
            self._on_end(reason)

    def finish(self, reason: str) -> None:
        """Reads the last messages of a peer that has ended, then ends, even if a child of the peer holds the socket."""
        while self._read_once():
            pass
        self._end(reason)

    def close(self) -> None:
        """Closes the socket; nothing is called afterwards."""
        sock, self._sock = self._sock, None
        if sock is None:
            return
        self._loop.remove_reader(self._fd)
        if self._writing:
            self._loop.remove_writer(self._fd)
        sock.close()
