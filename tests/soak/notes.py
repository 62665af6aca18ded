"""The notes of the soak's handlers: for which requests a worker had called its handler before it was killed.

A kill between the server's note that a batch begins and the handler's own fails requests that the handler has seen
nothing of, since nobody can know that. Both notes of a worker are therefore compared before each kill, while it stands
still: its handler notes with each call for which batch the server's newest note was.
"""

from __future__ import annotations

import os
import re
import signal
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from ts.protocol.shared import PLACES

GUARD_S = 60.0
#: For the notes of one worker. The file has holes: what isn't written takes no room.
NOTES_BYTES = 64 << 20
#: Where a note is no disk's work, on Linux.
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
TABLE_BYTES = PLACES * 8
#: A note: the size of the batch, then its requests, each an ID. Beside the size: the batch's id and the time.
ID_BYTES, UNKNOWN = 16, 255
HEAD = struct.Struct("=xQ6s")
#: Whose work has begun is noted before anything else, in memory that outlives the worker: a call of the system would
#: take its time, in which a kill could hide that the work had begun. So would the notes of a batch's requests, one
#: after another: that there is a batch goes first, then its size, then the requests, and at last which batch it is.
HANDLER = """
import hashlib, mmap, os, secrets, time
from ts.utils.util import PredictionException

def servers_note():
    for name in os.listdir("/proc/self/fd"):
        path = "/proc/self/fd/" + name
        if os.path.lexists(path) and "torchrelay-progress" in os.readlink(path):
            return memoryview(mmap.mmap(int(name), {table})).cast("Q")
    raise RuntimeError("the worker has no memory for the server's notes")

NOTES = open(os.path.join({folder!r}, f"{{os.getpid()}}-{{secrets.token_hex(8)}}"), "wb+")
NOTES.truncate({size})
BEGUN, noted, TABLE = mmap.mmap(NOTES.fileno(), {size}), 0, servers_note()
BEGUN[:65536] = bytes(65536)  # the system gives the pages now, not at the first note on each

def body_of(row):
    return bytes(row.get("data") or row.get("body"))

def answer_of(body):
    ask = body.split(b" ", 2)[1]
    if ask == b"slow":
        time.sleep(0.03)
    if ask == b"fail":
        return PredictionException("this one fails", 422)
    return hashlib.sha256(body).hexdigest()

def handle(data, context):
    BEGUN[noted] = {unknown}
    if data is None:
        BEGUN[noted] = 0
        return None
    note(data)
    return [answer_of(body_of(row)) for row in data]

def note(data):
    global noted
    head = noted
    BEGUN[noted] = len(data)
    for row in data:
        noted += {id_bytes}
        BEGUN[noted : noted + {id_bytes}] = (row.get("data") or row.get("body"))[:{id_bytes}]
    noted += {id_bytes}
    BEGUN[head + 9 : head + 15] = int(time.time() * 1000).to_bytes(6, "little")
    BEGUN[head + 1 : head + 9] = max(TABLE).to_bytes(8, "little")
"""


def handler_of(folder: Path) -> str:
    """A handler that makes its notes in this folder, each worker in a file of its own."""
    return HANDLER.format(folder=str(folder), size=NOTES_BYTES, table=TABLE_BYTES, id_bytes=ID_BYTES, unknown=UNKNOWN)


class Call(NamedTuple):
    """A call of a handler, as it has noted it. `size`: of the batch, UNKNOWN if it had no time to say so; `names`: the
    IDs of the requests it had noted. `batch_id`, `at_s` (`time.time()`): 0 before its note was complete."""

    size: int
    names: Sequence[str]
    batch_id: int
    at_s: float


def calls_in(file: Path) -> Iterator[Call]:
    """The calls that a worker's handler has noted."""
    with file.open("rb") as notes:
        while (head := notes.read(ID_BYTES)) and head[0]:
            size = head[0]
            names = [notes.read(ID_BYTES) for _ in range(size)] if size != UNKNOWN else []
            batch_id, at_ms = HEAD.unpack_from(head)
            at_s = int.from_bytes(at_ms, "little") / 1000
            yield Call(size, [name.decode() for name in names if name[0]], batch_id, at_s)
            if size == UNKNOWN:
                return


def named(folder: Path) -> set[str]:
    """The IDs of all requests that handlers have noted."""
    return {name for file in folder.iterdir() for call in calls_in(file) for name in call.names}


# --- a kill

#: Where a worker stood: between the server's note and its handler's, in the handler's note, or elsewhere: then both
#: notes know the same requests.
BETWEEN, NOTING, ELSEWHERE = "between the notes", "in the handler's note", "elsewhere"


class Kill(NamedTuple):
    """What was seen of a worker that stood still before it was killed. Ids of batches: the newest in the server's
    note and in the handler's; times: `time.time()`, 0 for a handler without a complete note."""

    pid: int
    where: str
    server_id: int
    handler_id: int
    noted_s: float
    stopped_s: float
    still_s: float
    killed_s: float

    def __str__(self) -> str:
        times = (("noted", self.noted_s), ("stopped", self.stopped_s), ("still", self.still_s))
        told = ", ".join(f"{name} {(at_s - self.killed_s) * 1000:+.0f} ms" for name, at_s in times if at_s)
        stamp = datetime.fromtimestamp(self.killed_s).isoformat(timespec="milliseconds")
        ids = f"server's batch {self.server_id}, handler's {self.handler_id}"
        return f"pid {self.pid} killed {stamp} {self.where} ({ids}; {told})"


class _Memory(NamedTuple):
    """Of a worker: the address of the server's note, and the file of the handler's."""

    address: int
    notes: Path


def kill(pid: int, folder: Path) -> Kill:
    """Kills a worker of the soak that stands still. Raises ProcessLookupError if it has ended meanwhile."""
    process = os.pidfd_open(pid)  # its number may soon be another process's
    try:
        memory = _memory(pid, folder)
        stopped_s = time.time()
        signal.pidfd_send_signal(process, signal.SIGSTOP)
        try:
            wait_still(pid)
            still_s = time.time()
            where, server_id, last = _look(pid, memory)
        finally:
            killed_s = time.time()
            signal.pidfd_send_signal(process, signal.SIGKILL)
    finally:
        os.close(process)
    return Kill(pid, where, server_id, last.batch_id, last.at_s, stopped_s, still_s, killed_s)


def where_stands(pid: int, folder: Path) -> str:
    """Where a worker that stands still (Linux) is."""
    return _look(pid, _memory(pid, folder))[0]


def _memory(pid: int, folder: Path) -> _Memory:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except FileNotFoundError:
        maps = []
    # The server's note is there twice: the handler has mapped it, too.
    addresses = [int(line.partition("-")[0], 16) for line in maps if "torchrelay-progress" in line]
    files = [Path(line.split(maxsplit=5)[5]) for line in maps if f"{folder}/" in line]
    if not (addresses and files):
        raise ProcessLookupError(f"process {pid} is no worker with notes in {folder}")
    return _Memory(addresses[0], files[0])


def _look(pid: int, memory: _Memory) -> tuple[str, int, Call]:
    """Where a worker stands, the id of the newest batch in the server's note, and the handler's last call.

    The server's note has one place for all batches whose ids have the same remainder, and the ids count the batches of
    all workers: the number of taken places says nothing about the number of batches. The newest id does: a blocking
    handler's batches begin one after another, in the order of their ids."""
    with Path(f"/proc/{pid}/mem").open("rb") as file:
        file.seek(memory.address)
        server_id = max(struct.unpack(f"={PLACES}Q", file.read(TABLE_BYTES)))
    last = [Call(0, (), 0, 0.0), *calls_in(memory.notes)][-1]
    if last.size and not last.batch_id:
        return NOTING, server_id, last
    return (BETWEEN if last.batch_id < server_id else ELSEWHERE), server_id, last


def wait_still(pid: int) -> None:
    """Returns when each thread of a process with SIGSTOP stands still: the signal works a little later. Raises
    ProcessLookupError if it has ended."""
    end_s = time.monotonic() + GUARD_S
    while True:
        states = set(_states(pid))
        if states == {"T"}:
            return
        if not states or states & {"Z", "X"}:
            raise ProcessLookupError(f"process {pid} has ended")
        if time.monotonic() > end_s:
            raise TimeoutError(f"process {pid} has the states {states} {GUARD_S:.0f} s after SIGSTOP")
        time.sleep(0.0005)


def _states(pid: int) -> Iterator[str]:
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            yield file.read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):  # a thread that has ended
            continue


# --- what the server says of a killed worker

READY = re.compile(r"Worker (\d+) of \S+ is ready \(pid (\d+)")
DIED = re.compile(r"^(\S+) .*Worker (\d+) of \S+ died: .*; request ids: (.*)$")


class Death(NamedTuple):
    """A line of the server's log about the end of a worker, from `at_s` (`time.time()`)."""

    pid: int
    at_s: float
    line: str


def deaths_in(lines: Iterable[str]) -> Mapping[str, Death]:
    """The deaths of workers, by the IDs of the requests that failed with them."""
    pids: dict[str, int] = {}
    deaths: dict[str, Death] = {}
    for line in lines:
        if ready := READY.search(line):
            pids[ready[1]] = int(ready[2])
        elif died := DIED.search(line):
            at_s = datetime.strptime(died[1], "%Y-%m-%dT%H:%M:%S,%f").timestamp()
            death = Death(pids.get(died[2], 0), at_s, line)
            deaths |= dict.fromkeys(died[3].split(), death)
    return deaths


class Verdict(NamedTuple):
    """Why a request failed that no handler has noted. `where`: where its worker stood when it was killed; "" for a
    worker that the soak didn't kill, or a request that failed in another way."""

    where: str
    text: str

    @property
    def explained(self) -> bool:
        return self.where in (BETWEEN, NOTING)


def verdict(name: str, deaths: Mapping[str, Death], kills: Iterable[Kill]) -> Verdict:
    """About the request with this ID."""
    death = deaths.get(name)
    if death is None:
        return Verdict("", "the server's log has no dead worker of it")
    of_pid = [one for one in kills if one.pid == death.pid]  # several, if a number was used again
    if not of_pid:
        return Verdict("", f"its worker, pid {death.pid}, wasn't killed by the soak: {death.line}")
    one = min(of_pid, key=lambda one: abs(death.at_s - one.killed_s))
    late_ms = (death.at_s - one.killed_s) * 1000
    return Verdict(one.where, f"{one}; {late_ms:.0f} ms later: {death.line}")
