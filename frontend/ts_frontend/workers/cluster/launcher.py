"""Starts workers on the nodes of a Ray cluster: asks for an actor, and waits until its process has connected; and the
view of such a process: its lines, its memory and its end come over a connection to its agent there, and the batches
that it begins over another one.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ts.protocol.secure import SecureSocket
from ts.protocol.shared import NOTE, PROGRESS_BYTES, Progress, has_begun
from ts.protocol.text import unmarked
from ts_frontend.tasks import watched
from ts_frontend.workers.cluster.link import BridgeLink, Gate, ended
from ts_frontend.workers.cluster.resources import ClusterNode, ClusterRequest, Spares
from ts_frontend.workers.launchers import LaunchFailed
from ts_frontend.workers.process import TAIL_LINE_CHARS_MAX, ExitStatus, LineSink, ProcessSpec, WorkerProcess

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


#: Seconds without a place after which a worker reports the reason of its waiting.
PATIENCE_S = 1.5
#: Seconds for which a lost node is avoided: Ray takes some seconds to notice a dead node, and would place workers there
#: until then.
AVOID_S = 20.0
#: Seconds after which a worker that was to get a node's spare process is placed elsewhere; after so many nodes, on any.
SPARE_S = 8.0
TRIES_MAX = 2
#: Seconds for which a launch comes before spare processes, whose start would slow it down.
HASTE_S = 10.0
#: The most placements of a worker that loses its place before it has connected.
LOSSES_MAX = 20
#: The most seconds between the connections of an agent and of its worker, which has to import its packages.
WORKER_S_MAX = 60.0


class _Launch:
    """A worker from its order to its end."""

    def __init__(self, number: int, spec: ProcessSpec, request: ClusterRequest, sink: LineSink) -> None:
        self.number, self.spec, self.request = number, spec, request
        self.sink = sink
        self.token = secrets.token_hex(16)
        self.begun_s = time.monotonic()
        self.arrived: asyncio.Future[RemoteProcess] = asyncio.get_running_loop().create_future()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.node = WorkerNode("", "", "")
        self.line: AgentLine | None = None
        self.notes: Notes | None = None
        self.process: RemoteProcess | None = None
        self.tail: list[str] = []
        self.chosen = ""  # the node whose spare process it is to get
        self.tried: list[str] = []  # the nodes chosen for it so far
        self.ordered_s = self.greeted_s = self.begun_s  # the last order, and the agent's greeting

    def starting(self, now_s: float) -> bool:
        return self.process is None and now_s - self.begun_s < HASTE_S

    async def turn(self, timeout_s: float | None) -> None:
        """Returns when the worker has connected, failed or lost its place, or after that time in seconds."""
        ends: set[asyncio.Future[Any]] = {self.arrived, self.lost}
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    def lose(self, reason: str) -> None:
        """Notes that the worker lost its place before it connected, which is no failure of the model."""
        self.part()
        if not self.lost.done():
            self.lost.set_result(reason)

    def part(self) -> None:
        """Closes the connections to its processes, until the worker's own has come."""
        if self.line is not None:
            self.line.close()
            self.line = None
        if self.notes is not None and self.process is None:
            self.notes.close()
            self.notes = None

    def fail(self, reason: str) -> None:
        if not self.arrived.done():
            self.arrived.set_exception(LaunchFailed(reason))


class ClusterLauncher:
    """Starts workers through Ray. `listen`: the host and the port that workers connect to; the host "" is this
    machine's address in the cluster. `metrics_config`: a file for workers, "" for none. `bridge`: replaces the
    default bridge. `spares`: nodes with room have a started process for the next worker."""

    def __init__(
        self,
        address: str,
        env: Mapping[str, str],
        listen: tuple[str, int],
        metrics_config: str,
        bridge: BridgeLink | None = None,
        spares: bool = True,
    ) -> None:
        self.bridge = bridge or BridgeLink(address, env)
        self.bridge.on_worker_ended = self._worker_ended
        self.bridge.on_nodes_gone = self._nodes_gone
        self.bridge.on_told = self._told_of_nodes
        self.bridge.on_end = self._bridge_ended
        self._listen = listen
        self._metrics_config = metrics_config
        self._gate: Gate | None = None
        self._numbers = itertools.count(1)
        self._launches: dict[int, _Launch] = {}
        self._suspects: dict[str, float] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._ended_nodes: set[str] = set()  # whose Ray has ended, although the head may not have noticed it
        self._spares = Spares()
        self._keep_spares = spares

    async def start(self) -> None:
        """Connects to Ray. Raises ClusterUnreachable; OSError if the workers' address can't be bound."""
        await self.bridge.start()
        host, port = self._listen
        self._gate = Gate(self.bridge.server_certificate(), host or self.bridge.host, port)
        log.info("Workers of the cluster connect to %s:%s.", host or self.bridge.host, self._gate.port)

    # --- starts

    async def launch(self, spec: ProcessSpec, sink: LineSink) -> WorkerProcess:
        """Returns when the worker has connected, however long Ray takes to find a place for it. Raises LaunchFailed."""
        assert spec.cluster is not None and self._gate is not None
        launch = _Launch(next(self._numbers), spec, spec.cluster, sink)
        self._launches[launch.number] = launch
        self._gate.expect(launch.token, lambda *guest: self._welcome(launch, *guest))
        try:
            losses = 0
            while True:
                launch.lost = asyncio.get_running_loop().create_future()
                await launch.turn(self._order(launch, self._gate.port))
                if launch.line is not None:
                    await launch.turn(None)
                if launch.arrived.done():
                    return launch.arrived.result()
                if launch.lost.done():
                    losses += 1
                    if losses == LOSSES_MAX:
                        raise LaunchFailed(launch.lost.result())
                self._renumber(launch)  # and what it had to avoid may be there again
        except BaseException:
            self._abandon(launch)
            raise
        finally:
            self._gate.forget(launch.token)

    def _renumber(self, launch: _Launch) -> None:
        """Withdraws an order that will be given again."""
        self._launches.pop(launch.number)
        self.bridge.order("end", id=launch.number)
        launch.number = next(self._numbers)
        self._launches[launch.number] = launch

    def _order(self, launch: _Launch, port: int) -> float | None:
        """Asks for the worker's actor; returns the seconds after which it is asked for again, since nodes that were
        avoided may do then. Raises LaunchFailed."""
        if not self.bridge.usable:
            raise LaunchFailed(launch.spec.name + " " + self.bridge.state.why_waiting(launch.request, time.monotonic()))
        own, avoided = self.bridge.worker_certificate(), self._avoided()
        launch.chosen = self._choose(launch, avoided) if len(launch.tried) < TRIES_MAX else ""
        launch.tried.append(launch.chosen)
        launch.ordered_s = time.monotonic()
        instructions = {
            "host": self._listen[0] or self.bridge.host,
            "port": port,
            "token": launch.token,
            **own._asdict(),
            "origin": launch.spec.cwd,
            "env": dict(launch.request.env),
        }
        self.bridge.order(
            "place",
            id=launch.number,
            model=launch.spec.name,
            request=asdict(launch.request),
            instructions=instructions,
            metrics_config=self._metrics_config,
            avoid=avoided,
            node=launch.chosen,
        )
        if launch.chosen:
            return SPARE_S
        return AVOID_S if avoided else None

    def _avoided(self) -> list[str]:
        """The nodes on which workers were lost recently; none if there are no other nodes."""
        now_s = time.monotonic()
        self._suspects = {node: until_s for node, until_s in self._suspects.items() if until_s > now_s}
        living = {node.id for node in self.bridge.state.nodes if node.alive}
        return sorted(self._suspects) if living - self._suspects.keys() else []

    def _choose(self, launch: _Launch, avoided: list[str]) -> str:
        """The node where a spare process waits for the worker; "" for none. A placement group has its own nodes."""
        if launch.request.group or launch.request.packages:
            return ""
        nodes = (node for node in self.bridge.state.nodes if node.id not in avoided and node.id not in launch.tried)
        return self._spares.choose(nodes, launch.request, self._workers(), time.monotonic())

    def _workers(self) -> Counter[str]:
        """The number of workers of each node, with those that start."""
        return Counter(one.node.id or one.chosen for one in self._launches.values() if one.node.id or one.chosen)

    def _abandon(self, launch: _Launch) -> None:
        self._launches.pop(launch.number, None)
        self.bridge.order("end", id=launch.number)
        launch.part()
        if launch.arrived.done() and not launch.arrived.cancelled() and launch.arrived.exception() is None:
            process = launch.arrived.result()
            process.sock.close()
            process.release()

    def _welcome(self, launch: _Launch, role: str, sock: SecureSocket, hello: dict[str, Any]) -> None:
        """Handles a connection of the launch: first the agent's, then the worker's two, its notes' before its own."""
        if role == "agent" and launch.line is None:
            launch.node = WorkerNode.of(hello.get("node"))
            launch.greeted_s = time.monotonic()
            if launch.node.id != launch.chosen:
                self._spares.taken(launch.node.id)
            line = launch.line = AgentLine(sock, lambda what: self._told(launch, what), lambda: self._silent(launch))
            asyncio.get_running_loop().call_later(WORKER_S_MAX, self._give_up_hanging, launch, line)
        elif role == "notes" and launch.line is not None and launch.notes is None:
            launch.notes = Notes(sock)
        elif role == "worker" and launch.line is not None and launch.notes is not None and not launch.arrived.done():
            process = RemoteProcess(
                launch.spec.name,
                int(hello.get("pid") or 0),
                launch.node,
                sock,
                launch.notes,
                launch.sink,
                lambda: self._ended(launch),
                lambda: self._lost(launch),
            )
            process.attend(launch.line)
            process.tail.extend(launch.tail)
            launch.process = process
            launch.arrived.set_result(process)
            log.info(
                "A worker of %s has connected from node %s after %.1f s, %.1f s of which Ray took to start its actor%s",
                launch.spec.name,
                launch.node.name,
                time.monotonic() - launch.ordered_s,
                launch.greeted_s - launch.ordered_s,
                " in a spare process" if launch.chosen == launch.node.id else "",
            )
        else:
            log.warning("A second %s of %s was refused", role, launch.spec.name)
            sock.close()

    def _told(self, launch: _Launch, what: dict[str, Any]) -> None:
        if launch.process is not None:
            launch.process.told(what)
        elif "lines" in what:
            for line in what["lines"]:
                launch.tail.append(line)
                launch.sink(str(what["stream"]), line)
        elif "exit" in what:
            last = f": {launch.tail[-1]}" if launch.tail else ""
            launch.fail(f"the worker ended with exit code {what['exit']} before it connected{last}")

    def _silent(self, launch: _Launch) -> None:
        if launch.process is not None:
            launch.process.silent()
        else:
            self._suspect(launch.node.id)
            launch.lose(f"the connection to node {launch.node.name} ended before the worker connected")

    def _give_up_hanging(self, launch: _Launch, line: AgentLine) -> None:
        """Loses a worker that doesn't connect, although its agent has: its process hangs before it can load the model,
        for which there is another limit."""
        if launch.line is line and not launch.arrived.done():
            self._suspect(launch.node.id)
            launch.lose(f"the worker on node {launch.node.name} started, but didn't connect within {WORKER_S_MAX:g} s")

    # --- ends

    def _ended(self, launch: _Launch) -> None:
        if self._launches.pop(launch.number, None) is not None:
            self.bridge.order("end", id=launch.number)

    def _lost(self, launch: _Launch) -> None:
        """Handles the end of a worker's connections: its node has died, or its actor alone, which Ray would tell."""
        self._suspect(launch.node.id)
        if launch.node.id in self._ended_nodes and launch.process is not None:
            launch.process.doomed()

    async def _attend(self, place: ClusterNode) -> None:
        """Ends the workers of a node as soon as Ray's own process there has ended: the head takes seconds to notice
        that, and Ray's processes of the node, with which the workers end, half a second. For those that have ended
        before, this is the reason."""
        if not await ended(place.address, place.port):
            return
        self._ended_nodes.add(place.id)
        self._suspect(place.id)
        self._spares.lost(place.id)
        for launch in list(self._launches.values()):
            if launch.process is not None and launch.node.id == place.id:
                launch.process.doomed()
            elif launch.line is None and launch.chosen == place.id:
                launch.lose(f"Ray has ended on node {place.name}")

    def _suspect(self, node_id: str) -> None:
        if node_id:
            self._suspects[node_id] = time.monotonic() + AVOID_S

    def _worker_ended(self, number: int, reason: str, lost: bool) -> None:
        launch = self._launches.get(number)
        if launch is None:
            return
        self._suspects.pop(launch.node.id, None)  # Ray knows of the loss, and the node may live
        if launch.process is not None:
            launch.process.explained(reason)
        elif lost:
            launch.lose(reason)
        else:
            launch.fail(reason or "its actor ended before the worker connected")

    def _nodes_gone(self, nodes: list[ClusterNode]) -> None:
        for node in nodes:
            log.warning("Node %s of the cluster has left", node.name)
            self._suspects.pop(node.id, None)

    def _told_of_nodes(self) -> None:
        """Watches new nodes, and asks for spare processes, unless workers are just starting."""
        now_s, nodes = time.monotonic(), self.bridge.state.nodes
        living = {node.id: node for node in nodes if node.alive and node.port}
        for node_id in self._watches.keys() - living.keys():
            self._watches.pop(node_id).cancel()
            self._ended_nodes.discard(node_id)
        for node_id in living.keys() - self._watches.keys():
            self._watches[node_id] = watched(self._attend(living[node_id]), "The watch of a node")
        self._spares.told(nodes, now_s)
        if not self._keep_spares or any(launch.starting(now_s) for launch in self._launches.values()):
            return
        requests: list[ClusterRequest] = []
        for launch in self._launches.values():
            if launch.request not in requests:
                requests.append(launch.request)
        trusted = [node for node in nodes if node.id not in self._suspects]
        for node, count in self._spares.due(trusted, requests, self._workers(), now_s):
            self.bridge.order("spare", address=f"{node.address}:{node.port}", count=count)

    def _bridge_ended(self, reason: str) -> None:
        self._spares.forget()
        for launch in list(self._launches.values()):
            launch.fail(f"Ray went away while the worker waited for a place: {reason}")

    def waiting(self, worker_id: int) -> str:
        """The reason why a starting worker waits; "" if it isn't waiting, or not for long."""
        now_s = time.monotonic()
        for launch in self._launches.values():
            if launch.spec.worker_id == worker_id and launch.process is None and launch.line is None:
                late = now_s - launch.begun_s > PATIENCE_S
                return self.bridge.state.why_waiting(launch.request, now_s) if late else ""
        return ""

    def forget(self, spec: ProcessSpec) -> None:
        """Releases the files of an unregistered model in Ray's store."""
        self.bridge.order("forget", root=spec.cwd)

    async def close(self) -> None:
        """Ends the workers and the bridge. The agents end with their connections."""
        for watch in self._watches.values():
            watch.cancel()
        for launch in list(self._launches.values()):
            launch.fail("the server ends")
            launch.part()
        if self._gate is not None:
            self._gate.close()
        await self.bridge.close()
