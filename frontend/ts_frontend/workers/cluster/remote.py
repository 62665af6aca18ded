"""The frontend's view of a worker's process on another machine: its lines, its memory and its end come over a
connection to its agent there, and the batches that it begins over another one."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ts.protocol.progress import NOTE, PROGRESS_BYTES, Progress, has_begun
from ts.protocol.secure import SecureSocket
from ts.protocol.text import unmarked
from ts_frontend.workers.process import TAIL_LINE_CHARS_MAX, ExitStatus, LineSink, WorkerProcess

log = logging.getLogger(__name__)

READ_BYTES = 64 * 1024
READS_PER_TURN_MAX = 16
TOLD_BYTES_MAX = 4 << 20
#: The most seconds to wait for Ray's reason, after a worker's connection ended without a report.
REASON_S_MAX = 0.5
#: Notes wait unread until so many bytes have come: a note is 30 bytes with TLS.
NOTES_BYTES = 4096
NOTES_PER_TURN_MAX = 1024
#: The most seconds from the end of a worker's connection to the end of its notes.
NOTES_S_MAX = 1.0


@dataclass(frozen=True, slots=True)
class WorkerNode:
    """The machine of a worker. `gpus`: the ids, on that machine, of the GPUs that Ray assigned."""

    id: str
    address: str
    host: str
    gpus: tuple[str, ...] = ()

    @staticmethod
    def of(told: Any) -> WorkerNode:
        found = told if isinstance(told, dict) else {}
        return WorkerNode(
            str(found.get("id", "")),
            str(found.get("address", "")),
            str(found.get("host", "")),
            tuple(str(gpu) for gpu in found.get("gpus") or ()),
        )

    @property
    def name(self) -> str:
        return f"{self.address} ({self.id[:8]})"

    def described(self) -> dict[str, Any]:
        gpus = {"gpus": list(self.gpus)} if self.gpus else {}
        return {"id": self.id, "address": self.address, "host": self.host, **gpus}


class _Incoming:
    """The bytes of a connection: `on_data` gets them, in at most `reads_max` pieces a turn of the loop; `on_end` is
    called once, at the connection's end, but not after `close`."""

    def __init__(
        self, sock: SecureSocket, reads_max: int, on_data: Callable[[bytes], None], on_end: Callable[[], None]
    ) -> None:
        self._sock: SecureSocket | None = sock
        self._reads_max = reads_max
        self._on_data, self._on_end = on_data, on_end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._readable)

    def _readable(self) -> None:
        for _ in range(self._reads_max):
            if self._sock is None:
                return
            try:
                data = self._sock.recv(READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.end()
                return
            self._on_data(data)

    def send(self, data: bytes) -> None:
        """Sends a few bytes; a failure is the connection's end."""
        if self._sock is not None:
            try:
                self._sock.sendmsg([memoryview(data)])
            except OSError:
                self.end()

    def end(self) -> None:
        if self._sock is not None:
            self.close()
            self._on_end()

    def close(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            self._loop.remove_reader(sock.fileno())
            sock.close()


class AgentLine:
    """The connection to an agent. `on_told` gets its messages; `on_end` is called once, at its end."""

    def __init__(
        self, sock: SecureSocket, on_told: Callable[[dict[str, Any]], None], on_end: Callable[[], None]
    ) -> None:
        self._on_told = on_told
        self._rest = b""
        self._incoming = _Incoming(sock, READS_PER_TURN_MAX, self._take, on_end)

    def _take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            for line in lines:
                self._on_told(json.loads(line))
            if len(self._rest) > TOLD_BYTES_MAX:
                raise ValueError(f"a line of more than {TOLD_BYTES_MAX} bytes")
        except (ValueError, TypeError, KeyError) as error:
            log.error("The agent of a worker says something that it shouldn't: %s", error)
            self._incoming.end()

    def kill(self) -> None:
        """Asks the agent to end its worker, which it also does when the connection ends."""
        self._incoming.send(b"kill\n")

    def close(self) -> None:
        """Closes the connection; nothing is called afterwards."""
        self._incoming.close()


class Notes:
    """The connection on which a worker sends the ids of the batches that it begins. They are of interest only when the
    worker has died, so they are read many at a time, and the rest at the connection's end."""

    def __init__(self, sock: SecureSocket) -> None:
        self._rest = b""
        self._table = bytearray(PROGRESS_BYTES)
        self._progress = Progress(self._table)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        sock.announce_from(NOTES_BYTES)
        self._incoming = _Incoming(sock, NOTES_PER_TURN_MAX, self._take, lambda: self.ended.set_result(None))

    def _take(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        whole = len(data) - len(data) % NOTE.size
        self._rest = data[whole:]
        for (batch_id,) in NOTE.iter_unpack(data[:whole]):
            self._progress.begin(batch_id)

    def table(self) -> bytes:
        """The record of the begun batches, as far as it has been read."""
        return bytes(self._table)

    def close(self) -> None:
        """Closes the connection; the record stays."""
        self._incoming.end()


class RemoteProcess(WorkerProcess):
    """A worker process on a node. `on_end` is called at its end, `on_lost` when its agent ended without a report."""

    def __init__(
        self,
        name: str,
        pid: int,
        node: WorkerNode,
        sock: Any,
        notes: Notes,
        sink: LineSink,
        on_end: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        super().__init__(pid, name, sock, io.BytesIO())
        self.node = node
        self._sink = sink
        self._on_end, self._on_lost = on_end, on_lost
        self._line: AgentLine | None = None
        self._notes = notes
        self._record: bytes | None = None
        self._memory_bytes = 0
        self._lost = ""
        self._silent = False
        self.exited.add_done_callback(lambda _: on_end())

    @property
    def lost(self) -> str:
        return self._lost

    @property
    def remote(self) -> bool:
        return True

    @property
    def where(self) -> dict[str, Any]:
        return self.node.described()

    def attend(self, line: AgentLine) -> None:
        self._line = line

    # --- what its agent says

    def told(self, what: dict[str, Any]) -> None:
        if "lines" in what:
            for line in what["lines"]:
                self.tail.append(unmarked(line)[1][:TAIL_LINE_CHARS_MAX])
                self._sink(str(what["stream"]), line)
        elif "rss" in what:
            self._memory_bytes = int(what["rss"])
        elif "exit" in what:
            self._record = _table_of(what["begun"])
            self.ended(ExitStatus(None if self._lost else int(what["exit"])))

    def silent(self) -> None:
        """Handles the end of the agent's connection without a status: the node is lost, or the actor was ended."""
        if self.exited.done():
            return
        self._silent = True
        self._lost = self._lost or f"The connection to its node {self.node.name} ended"
        self._on_lost()
        asyncio.get_running_loop().call_later(REASON_S_MAX, self.ended, ExitStatus(None))

    def doomed(self) -> None:
        """Ends the worker, since Ray ended on its node: at once if its connections have ended, else by its agent."""
        if self.exited.done() or self._line is None:
            return
        self._lost = f"Ray has ended on its node {self.node.name}"
        if self._silent:
            self.ended(ExitStatus(None))
        else:
            self._line.kill()

    def explained(self, reason: str) -> None:
        if not self.exited.done():
            self._lost = f"Its node {self.node.name} or its actor ended: {reason}" if reason else self._lost
            self.ended(ExitStatus(None))

    # --- as a process

    async def last_notes(self) -> None:
        await asyncio.wait({self._notes.ended}, timeout=NOTES_S_MAX)

    def unbegun(self, batch_ids: Any) -> set[int]:
        """By the notes, which precede the calls; by the worker's own record once its agent has reported it."""
        table = self._notes.table() if self._record is None else self._record
        return {batch_id for batch_id in batch_ids if not has_begun(table, batch_id)}

    def spent(self) -> dict[int, tuple[float, float]]:
        """Returns nothing: these figures are in the memory of its machine."""
        return {}

    def waiting(self) -> int:
        """Returns 0 for the same reason."""
        return 0

    def resident_bytes(self) -> int:
        return self._memory_bytes

    def kill(self) -> None:
        if not self.exited.done() and self._line is not None:
            self._line.kill()

    def release(self) -> None:
        """Closes its connections: the agent ends the worker's child processes."""
        self._notes.close()
        if self._line is not None:
            self._line.close()


def _table_of(batch_ids: Iterable[int]) -> bytes:
    """The table of a worker that has begun these batches. Raises TypeError for anything else than numbers."""
    table = bytearray(PROGRESS_BYTES)
    progress = Progress(table)
    for batch_id in batch_ids:
        progress.begin(batch_id)
    return bytes(table)
