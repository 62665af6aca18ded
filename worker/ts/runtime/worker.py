"""The worker's end of its socket: reading, writing, and the end of the connection.

The thread that runs handlers reads the socket itself while it is idle, which saves a switch between threads. A second
thread checks every few milliseconds whether the first is still inside the same handler call; only then does it read
instead (cancels, credit, further requests) and write unsent messages.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from mmap import mmap
from typing import TYPE_CHECKING, Final, NoReturn

from ts.protocol.codes import BROKEN_FRAME
from ts.protocol.decoder import Decoder
from ts.protocol.frames import FrameError, Load, LoadFailed, Message, Ready
from ts.protocol.shared import ANSWERS_AT, REQUESTS_AT, Giver, Taker
from ts.runtime.jobs import Batch, Ledger

if TYPE_CHECKING:
    from ts.protocol.secure import SecureSocket

READ_BYTES: Final = 64 * 1024
#: The bytes that are read together with the rest of a large frame.
BEYOND_BYTES: Final = 16 * 1024
MESSAGE_BYTES_MAX: Final = 1 << 32
TICK_S: Final = 0.005
HELD_PIECES_MAX: Final = 64
HELD_S_MAX = 0.0002
IDLE_TICKS: Final = 20
STAND_IN_WAIT_MS = 100


def leave(status: int) -> NoReturn:
    """Flushes printed output and ends the process at once."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    os._exit(status)


def parted(fd: int) -> None:
    """Puts an ended socket in the place of a connection that a forked process has inherited."""
    with contextlib.suppress(OSError):  # closed already
        ended, other = socket.socketpair()
        other.close()
        os.dup2(ended.fileno(), fd, inheritable=False)
        ended.close()


class _Poller:
    """Waits for the socket, one for each thread: poll objects allow one call. Bytes on `alarm_fd` end a wait, too."""

    def __init__(self, fd: int, alarm_fd: int | None = None) -> None:
        self._fd = fd
        self._in, self._in_out = select.poll(), select.poll()
        self._in.register(fd, select.POLLIN)
        self._in_out.register(fd, select.POLLIN | select.POLLOUT)
        if alarm_fd is not None:
            self._in.register(alarm_fd, select.POLLIN)
            self._in_out.register(alarm_fd, select.POLLIN)

    def wait(self, to_write: bool, timeout_ms: int | None) -> bool:
        """Waits for data to read or, with `to_write`, room to write: True for the latter."""
        events = (self._in_out if to_write else self._in).poll(timeout_ms)
        return any(fd == self._fd and event & select.POLLOUT for fd, event in events)


class _Alarm:
    """Ends the wait of another thread for the socket."""

    def __init__(self) -> None:
        self._reading, self._writing = socket.socketpair()
        for one in (self._reading, self._writing):
            one.setblocking(False)

    def fileno(self) -> int:
        return self._reading.fileno()

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it rings already
            self._writing.send(b"!")

    def close(self) -> None:
        for one in (self._reading, self._writing):
            one.close()

    def silence(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._reading.recv(64)


class Link:
    """Messages in and out. All methods but `flush`, `wait_for_credit` and `wait_until` belong to the thread that made
    it. `sock`: the connected socket, or its descriptor. `leave` ends a worker that has lost its frontend, by default
    the process."""

    def __init__(self, sock: int | SecureSocket, leave: Callable[[int], NoReturn] = leave) -> None:
        self._leave = leave
        self._sock = socket.socket(fileno=sock) if isinstance(sock, int) else sock
        self._sock.setblocking(False)
        self._decoder = Decoder(MESSAGE_BYTES_MAX)
        self._early: list[Message] = []
        self._reading = threading.Lock()
        self._news = False
        self._beyond = bytearray(BEYOND_BYTES)
        self._alarm = _Alarm()
        self._standing_in = False
        sock_fd = self._sock.fileno()
        self._poller, self._watch_poller = _Poller(sock_fd), _Poller(sock_fd, self._alarm.fileno())
        self._owner = threading.get_ident()
        self._calls = 0
        self._call = 0
        self._parked = False
        self._wake = threading.Event()
        self._watcher: threading.Thread | None = None
        self._closed = False
        self._forked = False
        self.ledger = Ledger(0, 0)
        self.waits_for_credit = True
        self.holds_back = False
        self._flushed_s = 0.0
        self.on_backlog: Callable[[], object] = lambda: None
        self.on_turn: Callable[[Batch], None] | None = None
        self.on_taken: Callable[[], object] = lambda: None

    def fileno(self) -> int:
        return self._sock.fileno()

    def part_from_forks(self) -> None:
        """Keeps the processes that a handler forks from this connection. One that returned into the runtime would be a
        second worker on the same socket, and one that outlives this process would hide its end from the frontend."""
        os.register_at_fork(after_in_child=self._part)

    def _part(self) -> None:
        self._forked = True
        self._leave = self._end_fork
        parted(self._sock.fileno())

    def _orphaned(self) -> NoReturn:
        """Ends with the frontend, as do the processes that the worker started: those of an engine would go on holding
        the memory of a GPU."""
        if self._leave is leave and os.getsid(0) == os.getpid():
            listed = os.listdir("/proc") if sys.platform == "linux" else []
            for pid in map(int, filter(str.isdecimal, listed)):
                with contextlib.suppress(OSError):  # it has ended
                    if pid != os.getpid() and os.getpgid(pid) == os.getpid():
                        os.kill(pid, signal.SIGKILL)
        self._leave(0)

    def _end_fork(self, status: int = 0) -> NoReturn:
        print(
            f"process {os.getpid()}, which the handler has forked, returned from the handler and was ended: only its "
            "parent may answer. End such a process with os._exit(0), or start it with multiprocessing or subprocess",
            file=sys.stderr,
        )
        leave(status)

    # --- before the model is loaded

    def wait_for_load(self) -> Load:
        while True:
            self._poller.wait(False, None)
            messages = self._decode(self._recv() or b"")
            if messages:
                break
        first = messages[0]
        if not isinstance(first, Load):
            raise FrameError(f"a worker's first message is Load, not {type(first).__name__}")
        self._early = messages[1:]
        return first

    def open(
        self, ledger: Ledger, message_bytes_max: int | None = None, shared: mmap | bytearray | None = None
    ) -> None:
        """Delivers messages to `ledger` from now on, also during the load. `shared`: memory with arenas for large
        bodies."""
        self._decoder.message_bytes_max = message_bytes_max or MESSAGE_BYTES_MAX
        if shared is not None:
            self._decoder.taker, ledger.outbox.giver = Taker(shared, REQUESTS_AT), Giver(shared, ANSWERS_AT)
        self.ledger = ledger
        for message in self._early:
            ledger.receive(message)
        self._watcher = threading.Thread(target=self._watch, name="ts-socket", daemon=True)
        self._watcher.start()

    def announce(self, message: Ready | LoadFailed) -> None:
        with self.ledger.lock:
            self.ledger.outbox.push(message)
        self.flush()

    # --- the owner's marks

    def enter(self) -> None:
        """Marks the beginning of a handler call: the other thread may take over if the call takes long."""
        self._calls += 1
        self._call = self._calls
        if self._parked:
            self._wake.set()

    def leave(self) -> None:
        """Ends the call, and the other thread's wait for the socket, which would take the next messages."""
        if self._forked:
            self._end_fork()
        self._call = 0
        if self._standing_in:
            self._alarm.ring()

    # --- reading

    def receive(self, wait: bool) -> None:
        """Delivers the received messages; with `wait`, only after some have arrived, or a write can continue."""
        with self._reading:
            if self._news:
                self._news = False
                return
            if not wait:
                self._read()
                return
        # A waiter has taken all received messages: a read beforehand would mostly find nothing, and cost an exception.
        self._poll(self._poller, None)
        with self._reading:
            self._news = False
            self._read()

    def _poll(self, poller: _Poller, timeout_ms: int | None) -> None:
        if poller.wait(bool(self.ledger.outbox), timeout_ms):
            self.flush()

    def _recv(self) -> bytes | None:
        """Reads the socket; None when there is no data. The process ends with the socket."""
        try:
            data = self._sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return None
        except ConnectionError:
            data = b""
        if not data:
            self._orphaned()
        return data

    def _recv_into(self, room: memoryview) -> int | None:
        """Reads into the buffer of the decoder, and the bytes after it; otherwise like `_recv`."""
        try:
            size = self._sock.recvmsg_into([room, self._beyond])[0]
        except (BlockingIOError, InterruptedError):
            return None
        except ConnectionError:
            size = 0
        if not size:
            self._orphaned()
        return size

    def _decode(self, data: bytes) -> list[Message]:
        try:
            return self._decoder.feed(data)
        except FrameError as error:
            self._broken(error)

    def _filled(self, size: int, room: int) -> list[Message]:
        """The messages after `size` bytes were read into a buffer of `room` bytes and behind it."""
        try:
            messages = self._decoder.filled(min(size, room))
            return messages if size <= room else messages + self._decoder.feed(bytes(self._beyond[: size - room]))
        except FrameError as error:
            self._broken(error)

    def _broken(self, error: FrameError) -> NoReturn:
        print(f"the frontend sent no valid frame: {error}", file=sys.stderr)
        self._leave(BROKEN_FRAME)

    def _read(self) -> bool:
        room = self._decoder.room
        if room is None:
            data = self._recv()
            if data is None:
                return False
            messages = self._decode(data)
        else:
            size = self._recv_into(room)
            if size is None:
                return False
            messages = self._filled(size, len(room))
        receive = self.ledger.receive
        for message in messages:
            receive(message)
        return True

    # --- writing

    def may_hold_back(self) -> bool:
        """Whether pieces may wait for more to share a write: they follow each other closely, none is the first of an
        answer, and the other thread writes them within two ticks."""
        ledger = self.ledger
        if not self.holds_back or ledger.first_waits or threading.get_ident() != self._owner:
            return False
        return ledger.unsent < HELD_PIECES_MAX and time.monotonic() - self._flushed_s < HELD_S_MAX

    def flush(self) -> bool:
        """Writes as much as the socket accepts now; returns False if something is left."""
        ledger = self.ledger
        outbox = ledger.outbox
        with ledger.lock:
            ledger.unsent = 0
            ledger.first_waits = False
            self._flushed_s = time.monotonic()
            while outbox:
                try:
                    outbox.sent(self._sock.sendmsg(outbox.buffers()))
                except (BlockingIOError, InterruptedError):
                    break
                except OSError:
                    self._orphaned()
            else:
                return True
        self.on_backlog()
        return False

    def drain(self) -> None:
        """Writes everything, without a time limit."""
        while not self.flush():
            self._poll(self._poller, None)

    def close(self) -> None:
        """Closes the socket and ends the other thread, for a worker in a shared process."""
        self._closed = True
        self._wake.set()
        self._alarm.ring()
        if self._watcher is not None:
            self._watcher.join()
        self._alarm.close()
        self._sock.close()

    def wait_for_credit(self, batch: Batch) -> None:
        """Waits until every reader of the batch has credit, or no caller waits for it."""
        if threading.get_ident() != self._owner:
            with self.ledger.changed:
                while batch.stalled and not batch.cancelled:
                    self.ledger.changed.wait()
        elif self.waits_for_credit:
            self.leave()
            while batch.stalled and not batch.cancelled:
                self.receive(wait=True)
            self.enter()

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Returns when `ready()` is true, which depends on messages of the frontend. Other messages are delivered
        meanwhile, and `on_taken` is called for them."""
        if threading.get_ident() != self._owner:
            with self.ledger.changed:
                self.ledger.changed.wait_for(ready)
        elif not ready():
            in_call = self._call
            self.leave()
            while not ready():
                self.receive(wait=True)
            if in_call:
                self.enter()
            self.on_taken()

    # --- the other thread

    def _watch(self) -> None:
        seen = idle = 0
        while not self._closed:
            if idle >= IDLE_TICKS:
                self._wake.clear()
                self._parked = True
                if not self._call and not self._closed:
                    self._wake.wait()
                self._parked = False
                idle = 0
            time.sleep(TICK_S)
            call = self._call
            if call == 0:
                idle += 1
            elif call != seen:
                idle = 0
            else:
                self._stand_in(call)
            seen = call

    def _stand_in(self, call: int) -> None:
        self._alarm.silence()  # of the calls before
        self._standing_in = True
        while self._call == call:
            self._poll(self._watch_poller, STAND_IN_WAIT_MS)
            with self._reading:
                if self._call == call and self._read():
                    self._news = True
        self._standing_in = False
