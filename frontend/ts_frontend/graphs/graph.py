"""A graph's nodes in order, one request's run through it, and the requests that run; and the ensemble: models as steps,
whose outputs are the inputs of others by the names of tensors. Nothing here knows models."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from ts.protocol.frames import Chunk, Feed, Pairs
from ts_frontend.errors import Ending, InvalidArgument, InvalidGraph, ServeError
from ts_frontend.job import Job, Whereabouts
from ts_frontend.tasks import owned, watched

log = logging.getLogger(__name__)


NODES_MAX = 256
#: Bytes of a streamed answer that its reader hasn't taken: with more, the graph waits.
UNREAD_BYTES_MAX = 256 * 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph without cycles. `parents` and `children` have every node, in the given order."""

    parents: Mapping[str, tuple[str, ...]]
    children: Mapping[str, tuple[str, ...]]

    @property
    def starts(self) -> tuple[str, ...]:
        return tuple(name for name, before in self.parents.items() if not before)

    @property
    def leaves(self) -> tuple[str, ...]:
        return tuple(name for name, after in self.children.items() if not after)

    def up_to(self, wanted: Collection[str]) -> Graph:
        """The part of the graph that these nodes need."""
        needed, left = set(wanted), list(wanted)
        while left:
            more = [name for name in self.parents[left.pop()] if name not in needed]
            needed.update(more)
            left += more
        return self.without(self.parents.keys() - needed)

    def below(self, name: str) -> Graph:
        """The part of the graph that needs this node, without it."""
        found, left = set[str](), [name]
        while left:
            more = [child for child in self.children[left.pop()] if child not in found]
            found.update(more)
            left += more
        return self.without(self.parents.keys() - found)

    def without(self, names: Collection[str]) -> Graph:
        def rest(edges: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
            return {
                name: tuple(one for one in others if one not in names)
                for name, others in edges.items()
                if name not in names
            }

        return Graph(rest(self.parents), rest(self.children))


NO_GRAPH = Graph({}, {})


def make_graph(edges: Mapping[str, Sequence[str]], what: str = "dag") -> Graph:
    """The graph of each node's children; a node that is only listed as a child has no children. `what` begins the
    messages. Raises InvalidGraph."""
    children = {name: tuple(dict.fromkeys(named)) for name, named in edges.items()}
    for named in edges.values():
        for child in named:
            children.setdefault(child, ())
    if not children:
        raise InvalidGraph(f"{what} has no nodes")
    if len(children) > NODES_MAX:
        raise InvalidGraph(f"{what} has {len(children)} nodes; at most {NODES_MAX} are allowed")
    parents: dict[str, tuple[str, ...]] = dict.fromkeys(children, ())
    for name, named in children.items():
        for child in named:
            parents[child] += (name,)
    _check_cycles(children, parents, what)
    return Graph(parents, children)


def _check_cycles(children: Mapping[str, Sequence[str]], parents: Mapping[str, Sequence[str]], what: str) -> None:
    """Raises InvalidGraph for a cycle: removes nodes without parents, until all others are on or below one."""
    missing = {name: len(before) for name, before in parents.items()}
    free = [name for name, count in missing.items() if not count]
    while free:
        name = free.pop()
        del missing[name]
        for child in children[name]:
            missing[child] -= 1
            if not missing[child]:
                free.append(child)
    if missing:
        raise InvalidGraph(f"{what} has a cycle: {' -> '.join(_cycle(missing, parents))}")


def _cycle(left: Mapping[str, int], parents: Mapping[str, Sequence[str]]) -> list[str]:
    """A cycle among the nodes in `left`, each of which has a parent there."""
    name = next(iter(left))
    path: list[str] = []
    while name not in path:
        path.append(name)
        name = next(parent for parent in parents[name] if parent in left)
    return [name, *reversed(path[path.index(name) :])]


async def run_through(graph: Graph, ask: Callable[[str, Mapping[str, T]], Coroutine[Any, Any, T]]) -> dict[str, T]:
    """The answers of all nodes. `ask` gets a node and the answers so far, once all of the node's parents have theirs;
    independent nodes run at the same time. The first failure raises its error and cancels the other nodes, as does a
    cancellation of the caller."""
    missing = {name: len(parents) for name, parents in graph.parents.items()}
    ready = list(graph.starts)
    answers: dict[str, T] = {}
    running: dict[asyncio.Task[T | Ending], str] = {}
    try:
        while ready or running:
            if len(ready) == 1 and not running:
                name = ready[0]
                answers[name] = await ask(name, answers)
                done = [name]
            else:
                for name in ready:
                    running[owned(outcome(ask(name, answers)))] = name
                done = await _first(running, answers)
            ready = []
            for name in done:
                for child in graph.children[name]:
                    missing[child] -= 1
                    if not missing[child]:
                        ready.append(child)
    finally:
        await cancelled(running)
    return answers


async def _first(running: dict[asyncio.Task[T | Ending], str], answers: dict[str, T]) -> list[str]:
    """Takes the next answers out of `running`. Raises the ServeError of a failure."""
    ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    done = []
    for task in ended:
        found = task.result()
        if isinstance(found, Ending):
            raise found.error()
        name = running.pop(task)
        answers[name] = found
        done.append(name)
    return done


async def outcome(work: Coroutine[Any, Any, T]) -> T | Ending:
    """What `work` returns, or its error as a value: an exception in a task makes a reference cycle with its frames."""
    try:
        return await work
    except ServeError as error:
        return error.ending()


async def cancelled(tasks: dict[asyncio.Task[T | Ending], str]) -> None:
    """Cancels tasks, and returns when they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.gather(*tasks, return_exceptions=True)
        tasks.clear()  # breaks the cycle of a cancelled task, its exception and the caller's frame


class Runs:
    """The requests that run through a graph: it owns their jobs. `answer`: answers one of them by the methods of its
    `Running`; `trouble`: why it can't answer any, "" if it can."""

    def __init__(
        self, name: str, answer: Callable[[Running], Coroutine[Any, Any, None]], trouble: Callable[[], str]
    ) -> None:
        self.name = name
        self.trouble = trouble
        self._answer = answer
        self._running: dict[Job, tuple[Running, asyncio.Task[None]]] = {}

    def put(self, job: Job) -> None:
        """Runs an accepted job."""
        job.queued_at_s = time.monotonic()
        job.enqueue(self)
        job.send(None, job.queued_at_s)
        job.owner = self
        running = Running(job)
        self._running[job] = running, watched(self._run(running), f"A request to {self.name}")

    async def _run(self, running: Running) -> None:
        job = running.job
        try:
            await self._answer(running)
        except ServeError as error:
            job.fail(error)
        finally:
            self._running.pop(job, None)
            if not job.done:
                job.fail(ServeError(f"The request to {self.name} was lost"))

    def close(self) -> None:
        """Ends all requests, whose jobs their caller fails."""
        for job in list(self._running):
            self.release(job)

    # --- as the jobs' owner

    def release(self, job: Job) -> None:
        """Cancels what runs for a job: its caller has left."""
        _, task = self._running.pop(job, (None, None))
        if task is not None:
            task.cancel()

    def grant(self, job: Job, size_bytes: int) -> None:
        running, _ = self._running.get(job, (None, None))
        if running is not None:
            running.taken(size_bytes)

    def feed(self, job: Job, feed: Feed) -> None:
        """Does nothing: a graph takes whole requests."""

    def measure(self, job: Job) -> Whereabouts:
        raise AssertionError(f"job {job.id} runs on no worker of its own")


class Running:
    """One request that runs. `waited_s`: the seconds that its steps have spent in their queues."""

    __slots__ = ("_more", "_unread_bytes", "job", "waited_s")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.waited_s = 0.0
        self._unread_bytes = 0
        self._more: asyncio.Future[None] | None = None

    def answer(self, body: bytes, headers: Pairs = (), status: int = 200) -> None:
        """The whole answer, or the end of one in pieces for b""."""
        self.job.deliver(Chunk(self.job.id, body, True, status, "", headers))

    async def send(self, piece: bytes, headers: Pairs = ()) -> None:
        """A piece of the answer. Waits while its reader has much to read."""
        self._unread_bytes += len(piece)
        self.job.deliver(Chunk(self.job.id, piece, False, 200, "", headers))
        while self._unread_bytes > UNREAD_BYTES_MAX and not self.job.done:
            self._more = asyncio.get_running_loop().create_future()
            await self._more

    def taken(self, size_bytes: int) -> None:
        self._unread_bytes = max(0, self._unread_bytes - size_bytes)
        more, self._more = self._more, None
        if more is not None and not more.done():
            more.set_result(None)


@dataclass(frozen=True, slots=True)
class Step:
    """`name`: in messages; `version`: "" for the default one. `inputs` and `outputs`: the ensemble's tensor for each
    input and output of the model."""

    name: str
    model: str
    version: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Ensemble:
    """`makers`: the step that makes each tensor; `outputs`: those that the client gets; `batch_max`: 0 without
    batches."""

    steps: Mapping[str, Step]
    graph: Graph
    makers: Mapping[str, str]
    outputs: tuple[str, ...]
    batch_max: int = 0

    what: ClassVar[str] = "ensemble"

    @property
    def models(self) -> Iterator[tuple[str, str, str]]:
        """For each step its name, and its model's name and version."""
        return ((step.name, step.model, step.version) for step in self.steps.values())


def make_ensemble(
    steps: Sequence[Step], inputs: Collection[str], outputs: Sequence[str], source: str, batch_max: int = 0
) -> Ensemble:
    """The ensemble of these steps. Raises InvalidArgument, naming `source`, the step and the tensor."""
    if not steps:
        raise InvalidArgument(f"{source}: ensemble_scheduling has no step")
    makers: dict[str, str] = {}
    for step in steps:
        if not step.model:
            raise InvalidArgument(f"{source}: {step.name} has no model_name")
        if not step.outputs:
            raise InvalidArgument(f"{source}: {step.name} has no output_map: nothing would be made of its answer")
        for tensor in step.outputs.values():
            if tensor in inputs:
                raise InvalidArgument(f"{source}: {step.name} makes tensor {tensor!r}, which is the ensemble's input")
            if tensor in makers:
                raise InvalidArgument(f"{source}: {makers[tensor]} and {step.name} both make tensor {tensor!r}")
            makers[tensor] = step.name
    for step in steps:
        for name, tensor in step.inputs.items():
            if tensor not in makers and tensor not in inputs:
                raise InvalidArgument(
                    f"{source}: {step.name} takes tensor {tensor!r} as its input {name!r}, but no step makes it, and "
                    "it is no input of the ensemble"
                )
    for tensor in outputs:
        if tensor not in makers:
            raise InvalidArgument(f"{source}: no step makes output {tensor!r}")
    edges: dict[str, list[str]] = {step.name: [] for step in steps}
    for step in steps:
        for tensor in step.inputs.values():
            if tensor in makers:
                edges[makers[tensor]].append(step.name)
    try:
        graph = make_graph(edges, "ensemble_scheduling")
    except InvalidGraph as error:
        raise InvalidArgument(f"{source}: {error.message}") from None
    return Ensemble({step.name: step for step in steps}, graph, makers, tuple(outputs), batch_max)
