"""A served model version: its archive, settings, queue and workers, and its statistics since it was loaded, read from
its ledger and its batches; and all of them by name and version, with the default version of each name."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple

from ts.protocol.frames import Input, Item, Pairs
from ts.protocol.path_template import BadTemplate, PathTemplate
from ts_frontend.caching.cache import ModelCache
from ts_frontend.config.kinds import names_there
from ts_frontend.errors import (
    DefaultVersionInUse,
    Draining,
    LimitExceeded,
    ModelExists,
    ModelNotFound,
    ModelNotLoaded,
    ModelVersionNotFound,
    NoWorker,
    QueueFull,
    ServeError,
)
from ts_frontend.graphs.graph import Runs
from ts_frontend.job import FedJob, Job, JobState, Ledger, Recorder
from ts_frontend.models.archive import Archive
from ts_frontend.models.settings import ModelSettings, Requested, Signature, made_config, signature_from
from ts_frontend.scheduling.queues import TIMEOUT_US, WorkQueue
from ts_frontend.tasks import Notifier
from ts_frontend.telemetry.metrics.families import TIMES_MAX
from ts_frontend.telemetry.metrics.requests import LatencyCounts, ModelMetrics
from ts_frontend.telemetry.metrics.text import Examples
from ts_frontend.telemetry.timing import asking
from ts_frontend.workers.in_flight import BatchRecorder, Spent
from ts_frontend.workers.memory import Resident, ResidentState
from ts_frontend.workers.pool import Pool
from ts_frontend.workers.supervisor import PoolScaler

_ANSWERED: Final = JobState.ANSWERED
#: Responses of one request up to this number are counted, each under its number.
RESPONSES_MAX: Final = 1024
_KINDS: Final = ("success", "fail", "empty", "cancel")


@dataclass(slots=True)
class Kinds:
    """Responses with one number: the count of each kind, and the seconds since the previous one (or the request)."""

    success: tuple[int, float] = (0, 0.0)
    fail: tuple[int, float] = (0, 0.0)
    empty: tuple[int, float] = (0, 0.0)
    cancel: tuple[int, float] = (0, 0.0)


class CountedResponses:
    """Adds up the responses of a decoupled model version."""

    __slots__ = ("_by_index",)

    def __init__(self) -> None:
        self._by_index: dict[int, Kinds] = {}

    def response(self, index: int, kind: str, seconds: float) -> None:
        """An `OnResponse` of `ts_frontend.workers.in_flight`."""
        if index >= RESPONSES_MAX or kind not in _KINDS:
            return
        entry = self._by_index.setdefault(index, Kinds())
        count, total_s = getattr(entry, kind)
        setattr(entry, kind, (count + 1, total_s + seconds))

    def read(self) -> dict[int, Kinds]:
        return {index: replace(kinds) for index, kinds in sorted(self._by_index.items())}


class Batches(NamedTuple):
    """The handler calls with batches of one size: their count, their seconds on the worker, and the seconds of reading
    and writing tensors in them."""

    calls: int
    seconds: float
    read_s: float
    written_s: float


@dataclass(frozen=True, slots=True)
class Statistics:
    """Sums since the model was loaded; times in seconds. `queue_s`: from acceptance to the handler's turn, of all
    answered requests; `handler_s`: of the handler calls, counted for each request of a batch; `read_s` and `written_s`:
    of reading and writing tensors, not part of `handler_s`; `batches`: by size; `responses`: of a decoupled model, by
    their number from 0. `last_at_s`: the time of the last request in seconds since 1970, 0 for none."""

    answered: int = 0
    answered_s: float = 0.0
    failed: int = 0
    failed_s: float = 0.0
    queue_s: float = 0.0
    handler_s: float = 0.0
    read_s: float = 0.0
    written_s: float = 0.0
    last_at_s: float = 0.0
    waiting: int = 0
    batches: Mapping[int, Batches] = field(default_factory=dict)
    responses: Mapping[int, Kinds] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        return sum(batches.calls for batches in self.batches.values())

    @property
    def worked_s(self) -> float:
        """The seconds that answered requests spent on workers."""
        return self.handler_s + self.read_s + self.written_s


@dataclass(slots=True)
class _Seen:
    """The sums for a batch size as of the last read."""

    calls: float = 0
    answered: float = 0
    read_s: float = 0.0
    written_s: float = 0.0


class CountedBatches:
    """Adds up the batches of one model version's workers, and passes them on to `recorder`."""

    def __init__(self, recorder: BatchRecorder) -> None:
        self.responses = CountedResponses()
        self._recorder = recorder
        #: For each size: calls, their seconds, and the answered requests.
        self._sizes: dict[int, list[float]] = {}
        #: The seconds of batches of one answered request, which are added up together, at the latest when there are
        #: TIMES_MAX.
        self._lone: list[float] = []
        self._spent: dict[int, tuple[float, float]] = {}
        self._waited_s = self._handler_s = 0.0
        self._seen: dict[int, _Seen] = {}
        #: The sums for answered requests, as of the last read.
        self._read_s = self._written_s = 0.0

    def answered(self, jobs: Sequence[Job], waited_s: float, worked_s: float, now_s: float) -> None:
        if len(jobs) == 1 and jobs[0].state is _ANSWERED:
            lone = self._lone
            lone.append(worked_s)
            self._waited_s += waited_s
            if len(lone) >= TIMES_MAX:
                self._sum_up()
        else:
            self._add(len(jobs), 1, sum([job.state is _ANSWERED for job in jobs]), waited_s, worked_s)
        self._recorder.answered(jobs, waited_s, worked_s, now_s)

    def _add(self, size: int, calls: int, answered: int, waited_s: float, worked_s: float) -> None:
        """Adds batches of one size, each with the same part of answered requests."""
        entry = self._sizes.get(size) or self._sizes.setdefault(size, [0, 0.0, 0])
        entry[0] += calls
        entry[1] += worked_s
        entry[2] += answered
        self._waited_s += waited_s * answered / calls
        self._handler_s += worked_s * answered / calls

    def _sum_up(self) -> None:
        lone, self._lone = self._lone, []
        if lone:
            self._add(1, len(lone), len(lone), 0.0, sum(lone))

    def loaded(self, worker_id: int, seconds: float) -> None:
        self._recorder.loaded(worker_id, seconds)

    def spent(self, spent: Spent) -> None:
        """Keeps the time that an ended worker spent on reading and writing tensors."""
        self._spent = _added([self._spent, spent])

    def read(self, ledger: Ledger, working: Iterable[Spent] = ()) -> Statistics:
        """The sums, with those of the model version's ledger and of its running workers. The parts never exceed the
        whole, since clients subtract them: the handler's time is measured after its answers were sent, and is reduced
        where necessary, as are the times of reading and writing."""
        self._sum_up()
        queue_s = ledger.queued_s + self._waited_s
        last_at_s = time.time() - (time.monotonic() - ledger.last_s) if ledger.last_s else 0.0
        spent = _added([self._spent, *working])
        batches: dict[int, Batches] = {}
        for size, (calls, seconds, answered) in sorted(self._sizes.items()):
            parts = _at_most(spent.get(size, (0.0, 0.0)), seconds)
            batches[size] = Batches(int(calls), seconds, *parts)
            self._share(self._seen.setdefault(size, _Seen()), calls, answered, parts)
        worked_s = max(min(self._handler_s, ledger.answered_s - queue_s), 0.0)
        read_s, written_s = _at_most((self._read_s, self._written_s), worked_s)
        return Statistics(
            answered=ledger.answered,
            answered_s=ledger.answered_s,
            failed=ledger.failed,
            failed_s=ledger.failed_s,
            queue_s=queue_s,
            handler_s=worked_s - read_s - written_s,
            read_s=read_s,
            written_s=written_s,
            last_at_s=last_at_s,
            waiting=ledger.queued,
            batches=batches,
            responses=self.responses.read(),
        )

    def _share(self, seen: _Seen, calls: float, answered: float, parts: tuple[float, float]) -> None:
        """Adds the tensors read and written since the last call, by the share of answered requests since then. A
        call that failed thus takes nothing away: clients take the sums for counters, which never fall."""
        share = (answered - seen.answered) / (calls - seen.calls) if calls > seen.calls else answered / calls
        read_s, written_s = max(parts[0], seen.read_s), max(parts[1], seen.written_s)
        self._read_s += (read_s - seen.read_s) * share
        self._written_s += (written_s - seen.written_s) * share
        seen.calls, seen.answered, seen.read_s, seen.written_s = calls, answered, read_s, written_s


def _added(sums: Iterable[Spent]) -> dict[int, tuple[float, float]]:
    found: dict[int, tuple[float, float]] = {}
    for one in sums:
        for size, (read_s, written_s) in one.items():
            before = found.get(size, (0.0, 0.0))
            found[size] = before[0] + read_s, before[1] + written_s
    return found


def _at_most(parts: tuple[float, float], whole_s: float) -> tuple[float, float]:
    """Both parts, scaled by one factor when their sum exceeds the whole."""
    both_s = sum(parts)
    if both_s <= whole_s:
        return parts
    return parts[0] * whole_s / both_s, parts[1] * whole_s / both_s


log: Final = logging.getLogger(__name__)

NO_WORKER: Final = (
    'Model "{name}" has no worker to serve inference request. Please use scale workers API to add workers. '
    "If this is a sequence inference, please check if it is closed, or expired; or exceeds maxSequenceJobQueueSize"
)


#: Why a request was never queued: the values of the metric's label `reason`.
REFUSALS: Final = {
    QueueFull: "queue_full",
    ModelNotLoaded: "not_loaded",
    NoWorker: "no_worker",
    Draining: "draining",
    LimitExceeded: "limited",
}


#: The mark of a request in the form of a route (`ts.tensors.forms`), which no client's request can have.
ROUTE_MARK: Final = "\0route"


class Route(NamedTuple):
    """A model's own HTTP path."""

    method: str
    template: PathTemplate

    def fits(self, path: str) -> bool:
        return self.template.fits(path)


class OpenAIHandler(NamedTuple):
    """A handler's support of OpenAI's API. `speaks`: the handler reads requests and writes answers itself; `names`:
    further model names that it answers to, those of adapters among them; `honours`: the optional parameters that it
    supports besides those of a plain text request (None: it checks them itself); `adapters`: the sources of a language
    model's adapters by name (None: it can't have any); `fixed`: why they can't be changed, "" if they can."""

    speaks: bool = False
    names: tuple[str, ...] = ()
    honours: frozenset[str] | None = frozenset()
    adapters: Mapping[str, str] | None = None
    fixed: str = ""


class Model:
    """One version of one model. `minimum` and `maximum`: the worker counts of the last scale call; `workflow`: the name
    of the workflow that it is a node of, or ""; `new_job` and `new_fed`: make its jobs, with a `Job`'s arguments;
    `ledger`: owns them."""

    def __init__(
        self,
        name: str,
        version: str,
        url: str,
        archive: Archive,
        settings: ModelSettings,
        requested: Requested,
        queue: WorkQueue,
        pool: Pool,
        metrics: ModelMetrics,
        *,
        signature: Signature,
        counted: CountedBatches,
        response_bytes_max: int,
        loaded_at_startup: bool,
        new_job: Callable[..., Job] = Job,
        new_fed: Callable[..., Job] = FedJob,
        ledger: Ledger | None = None,
        scaler: PoolScaler | None = None,
        cache: ModelCache | None = None,
        graph: Runs | None = None,
        steps: Sequence[tuple[str, str]] = (),
        share: Callable[[int], int] | None = None,
        guests: Ledger | None = None,
    ) -> None:
        self.name = name
        self.version = version
        self.url = url
        self.archive = archive
        self.settings = settings
        self.requested = requested
        self.queue = queue
        self.pool = pool
        self._signature = signature
        self._metrics = metrics
        self._counted = counted
        self.ledger = ledger or Ledger()
        #: The jobs that other frontends have handed over, None if there are none.
        self.guests = guests
        self._share = share
        #: Requests that were never queued, by reason.
        self.refused = dict.fromkeys((*REFUSALS.values(), "other"), 0)
        self.scaler = scaler
        self.examples: Examples | None = None  # set once a client reads metrics with exemplars
        self.resident: Resident | None = None  # if it is loaded on demand
        #: Accepts the requests that name no version in its place, as `submit`, while a rollout divides them.
        self.rollout: Callable[..., Job] | None = None
        self.cache = cache
        #: What runs its requests in place of workers, and the names and versions of the models that it asks.
        self.graph = graph
        self.steps = steps
        self.minimum = self.maximum = 0
        self.scale_between(settings.min_workers, settings.max_workers)
        self.workflow = ""
        self.loaded_at_startup = loaded_at_startup
        self._response_bytes_max = response_bytes_max
        self._new_job, self._new_fed = new_job, new_fed
        self._leaving = False
        self._takes_streams = False
        self._routes: Sequence[Route] | None = None
        self._openai: OpenAIHandler | None = None
        self._own_names: tuple[str, ...] = ()
        #: Held by a call that changes its adapters.
        self.adapters_turn = asyncio.Lock()
        #: When it was registered, in seconds since the epoch.
        self.created_s = time.time()

    def own(self, workers: int) -> int:
        """The part of the model's workers that this frontend has."""
        return workers if self._share is None else self._share(workers)

    def scale_between(self, minimum: int, maximum: int) -> int:
        """Sets the worker counts. Returns those to run now: `minimum`, or the present number under autoscaling."""
        self.minimum, self.maximum = minimum, maximum
        return self.own(minimum) if self.scaler is None else self.scaler.between(minimum, maximum)

    def adopt(self, archive: Archive, settings: ModelSettings) -> None:
        """Takes over the archive and settings as its handler has completed them."""
        self.archive, self.settings = archive, settings
        if archive.signature is not None:
            self._signature = archive.signature

    @property
    def tokens(self) -> Mapping[str, tuple[float, int]]:
        """What a language model has told of its tokens (`MetricsRegistry.tokens`)."""
        return self._metrics.tokens

    def forget_metrics(self) -> None:
        self._metrics.close()

    def observe(self, latencies: LatencyCounts | None) -> None:
        """Also counts its requests' latencies in `latencies` from now on; None stops that."""
        self._metrics.observe(latencies)

    @property
    def queued(self) -> int:
        """The requests that wait here for a worker, those of other frontends among them."""
        return self.ledger.queued + (0 if self.guests is None else self.guests.queued)

    @property
    def running(self) -> int:
        """The requests on workers of this frontend."""
        if self.guests is None:
            return self.ledger.sent
        return self.ledger.sent + self.guests.sent - sum(one.jobs for one in self.pool.lenders)

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def submit(
        self,
        inputs: Sequence[Input],
        *,
        headers: Pairs = (),
        deadline_s: float = math.inf,
        request_id: str | None = None,
        stream: bool = False,
        alone: bool = False,
        version_named: bool = False,
        counted: bool = True,
        new_job: Callable[..., Job] | None = None,
        shared: bool = False,
        routed: bool = False,
    ) -> Job:
        """Accepts a request; raises NoWorker, ModelNotLoaded, QueueFull or Draining when it can't.

        `deadline_s`: `time.monotonic()` seconds, for the time in the queue and on a worker together. `alone`: it is
        never batched with others. `version_named`: the caller named this version, not the default. `counted`: metrics
        count it as an inference. `new_job`: makes its job in place of the model's `new_job`. `shared`: it runs for
        requests that wait for it in the cache, which are counted and have deadlines themselves. `routed`: a rollout
        has chosen this version for it.
        """
        if self.rollout is not None and not (version_named or shared or routed):
            return self.rollout(
                inputs,
                headers=headers,
                deadline_s=deadline_s,
                request_id=request_id,
                stream=stream,
                alone=alone,
                counted=counted,
                new_job=new_job,
            )
        recorder: Recorder | None = None
        if counted and not shared:
            requests = self._metrics.requests(version_named)
            requests.accepted()
            recorder = requests.answered
        try:
            if self._leaving:
                raise Draining(f'Model "{self.name}" version {self.version} is being unregistered')
            if self.cache is not None and recorder is not None and new_job is None:
                job = self._cached(self.cache, inputs, headers, deadline_s, request_id, recorder)
                if job is not None:
                    return job
            if self.resident is not None:
                self.resident.asked()
            elif self.pool.unavailable:
                raise NoWorker(NO_WORKER.format(name=self.name) + self.pool.refusal())
            if self.pool.load_failure is not None:
                raise self.pool.not_loaded()
            ends_s = deadline_s
            if self.settings.client_timeout_ms and not shared:
                deadline_s = min(deadline_s, time.monotonic() + self.settings.client_timeout_ms / 1000)
            job = (new_job or self._new_job)(
                self.ledger,
                inputs,
                request_id=request_id or str(uuid.uuid4()),
                headers=headers,
                deadline_s=deadline_s,
                ends_s=ends_s,
                stream=stream,
                alone=alone,
                response_bytes_max=self._response_bytes_max,
                recorder=recorder,
                timing=asking.job(str(self), self._fills_batches) if asking.ever else None,
            )
            if self.graph is None:
                self.queue.put(job)
            else:
                self.graph.put(job)
        except ServeError as error:
            self.refused[next((word for kind, word in REFUSALS.items() if isinstance(error, kind)), "other")] += 1
            raise
        if deadline_s != math.inf:
            self.pool.end_by(deadline_s)
        return job

    def take_over(self, item: Item, *, stream: bool, alone: bool, fed: bool) -> Job:
        """Accepts a request from another frontend, which counts it; only the workers of this one run it. `fed`: it gets
        further inputs. Raises as `submit`, but also accepts while the model is removed."""
        assert self.guests is not None
        if self.resident is not None:
            self.resident.asked()
        elif all(slot.gave_up for slot in self.pool.slots):
            raise NoWorker(NO_WORKER.format(name=self.name) + self.pool.refusal())
        if self.pool.load_failure is not None:
            raise self.pool.not_loaded()
        job = (self._new_fed if fed else self._new_job)(
            self.guests,
            item.inputs,
            request_id=item.request_id,
            headers=item.headers,
            deadline_s=item.deadline_s,
            stream=stream,
            alone=alone,
            response_bytes_max=self._response_bytes_max,
        )
        self.queue.put(job)
        if item.deadline_s != math.inf:
            self.pool.end_by(item.deadline_s)
        return job

    def _cached(
        self,
        cache: ModelCache,
        inputs: Sequence[Input],
        headers: Pairs,
        deadline_s: float,
        request_id: str | None,
        recorder: Recorder,
    ) -> Job | None:
        """The job of a request that the cache answers; None if it has nothing to do with it."""
        said = cache.takes(inputs, headers)
        if said is None:
            return None
        if self.settings.client_timeout_ms:
            deadline_s = min(deadline_s, time.monotonic() + self.settings.client_timeout_ms / 1000)
        own_id = request_id or str(uuid.uuid4())
        job = self._new_job(
            self.ledger,
            (),
            request_id=own_id,
            deadline_s=deadline_s,
            ends_s=deadline_s,
            response_bytes_max=self._response_bytes_max,
            recorder=recorder,
        )
        return cache.answer(job, said, inputs, headers, partial(self._run, own_id))

    def _run(self, request_id: str, inputs: Sequence[Input], headers: Pairs) -> Job:
        """Runs the handler for the requests that wait in the cache. Raises as `submit`."""
        if self.has_priorities:  # a request's own timeout isn't that of the others
            headers = [pair for pair in headers if pair[0] != TIMEOUT_US]
        return self.submit(inputs, headers=headers, request_id=request_id, shared=True)

    def settle_cache(self, info: Mapping[str, Any]) -> None:
        """Closes the cache if a ready worker says that the handler isn't made for one."""
        refusal = self.cache.refusal(info, self.signature.decoupled) if self.cache is not None else ""
        if refusal and refusal not in self.settings.warnings:
            log.warning("Model %s: %s", self, refusal)
            self.settings = replace(self.settings, warnings=(*self.settings.warnings, refusal))

    def infos(self) -> Iterator[Mapping[str, Any]]:
        """The handler's `info` of each ready worker; of a model on demand without workers, that of the last one; then
        what other frontends lend."""
        for slot in self.pool.slots:
            if slot.worker is not None and slot.worker.info:
                yield slot.worker.info
        if self.resident is not None and self.resident.info:
            yield self.resident.info
        for lender in self.pool.lenders:
            if lender.info:
                yield lender.info

    @property
    def _fills_batches(self) -> bool:
        settings = self.settings
        return settings.batch_size > 1 and settings.max_batch_delay_set and settings.max_batch_delay_ms > 0

    @property
    def signature(self) -> Signature:
        """The tensors declared by its files or, where they declare none, by its handler when it was loaded."""
        if not self._signature.declared:
            for info in self.infos():
                if info.get("signature"):
                    found = signature_from(info["signature"])
                    return replace(found, metadata={**self._signature.metadata, **found.metadata})
        return self._signature

    def open_stream(
        self, inputs: Sequence[Input], *, headers: Pairs, deadline_s: float, request_id: str, version_named: bool
    ) -> FedJob:
        """Accepts the first request of a stream; the others go into the same call of the handler (`takes_streams`).
        Arguments and errors as of `submit`."""
        job = self.submit(
            inputs,
            headers=headers,
            deadline_s=deadline_s,
            request_id=request_id,
            stream=True,
            alone=True,
            version_named=version_named,
            new_job=self._new_fed,
        )
        assert isinstance(job, FedJob)
        return job

    @property
    def takes_streams(self) -> bool:
        """Whether one call of its handler takes the requests of a whole stream, as reported by ready workers. Requests
        of a sequence come one by one."""
        if not self._takes_streams and not self.settings.stateful:
            self._takes_streams = any(info.get("takes_streams") for info in self.infos())
        return self._takes_streams

    @property
    def routes(self) -> Sequence[Route]:
        """The paths that its handler answers besides the protocols', as reported by a ready worker."""
        if self._routes is None and self.archive.adapter:
            for info in self.infos():
                self._routes = list(self._routes_of(info))
                break
        return self._routes or ()

    def _routes_of(self, info: Mapping[str, Any]) -> Iterator[Route]:
        for one in info.get("routes") or ():
            try:
                yield Route(one["method"], PathTemplate(one["path"]))
            except BadTemplate as error:
                log.error("Model %s %s: a route of its handler is left out. %s", self.name, self.version, error)

    @property
    def openai(self) -> OpenAIHandler | None:
        """Its handler's support of OpenAI's API, as reported by a ready worker; None before the first is ready."""
        if self._openai is None:
            for info in self.infos():
                said = info.get("openai") or {}
                honours = said.get("honours", ())
                self._own_names = tuple(said.get("names") or ())
                self._openai = OpenAIHandler(
                    bool(said.get("speaks")),
                    self._names(said.get("adapters") or {}),
                    None if honours is None else frozenset(honours),
                    said.get("adapters"),
                    str(said.get("fixed") or ""),
                )
                break
        return self._openai

    def _names(self, adapters: Mapping[str, str]) -> tuple[str, ...]:
        return (*self._own_names, *adapters, *[f"{self.name}:{one}" for one in adapters])

    def answer_to(self, adapters: Mapping[str, str]) -> None:
        """Its workers now have these adapters, and answer to their names."""
        assert self._openai is not None
        self._openai = self._openai._replace(names=self._names(adapters), adapters=adapters)

    def load_with(self, adapters: Mapping[str, str]) -> None:
        """Has later workers load these adapters."""
        load = self.pool.plan.load
        load["handler_settings"] = {**(load.get("handler_settings") or {}), "adapters": dict(adapters)}

    @property
    def takes_tensors(self) -> bool:
        """Whether its handler is made for tensor requests: it declares tensors, or is written for another server."""
        return bool(self.archive.adapter) or self.signature.declared

    @property
    def is_language_model(self) -> bool:
        """Whether its handler is loaded, speaks OpenAI's API, and takes texts as tensors, too."""
        return self.takes_tensors and self.openai is not None and self.openai.speaks

    @property
    def adapter(self) -> str:
        """The adapter of a handler written for another server, "" for TorchServe's."""
        return self.archive.adapter

    @property
    def streams(self) -> bool:
        """Whether answers to successive requests may interleave: decoupled, or of a generator or async handler."""
        return self.signature.decoupled or any(
            info.get("handler_kind") in ("generator", "async") for info in self.infos()
        )

    def config_message(self) -> dict[str, Any]:
        """The protocol's message ModelConfig, as JSON: that of its adapter, or one made from its settings."""
        own: dict[str, Any] | None = self.archive.adapter_settings.get("config")
        return own if own is not None else made_config(self.name, self.signature, self.settings, self.minimum)

    @property
    def takes_batches(self) -> bool:
        """Whether the first dimension of its tensors is that of a batch; config.pbtxt says so by `max_batch_size`."""
        config = self.archive.adapter_settings.get("config")
        return config is None or bool(config.get("max_batch_size"))

    @property
    def has_priorities(self) -> bool:
        return self.archive.priorities is not None

    @property
    def stateful(self) -> bool:
        return self.settings.stateful

    @property
    def statistics(self) -> Statistics:
        return self._counted.read(self.ledger, (slot.worker.spent for slot in self.pool.slots if slot.worker))

    @property
    def ready(self) -> bool:
        """True when a worker can take a request, or a request would start one."""
        if self.resident is not None and self.resident.state in (ResidentState.KNOWN, ResidentState.UNLOADING):
            return not self._leaving
        return self.pool.ready and not self._leaving

    @property
    def loading(self) -> bool:
        """True while a worker loads for the first time and none is ready yet."""
        return bool(self.pool.slots) and not self.pool.ready_count and not self.failing

    @property
    def failing(self) -> bool:
        """Whether it should have workers but none is ready or in its first load, or one of them was given up."""
        slots = self.pool.slots
        if any(slot.gave_up for slot in slots):
            return True
        return bool(slots) and not self.pool.ready_count and all(slot.failures for slot in slots)

    def give_up_waiting(self, reason: str) -> None:
        """Fails the requests that wait for its first worker. `reason` continues the sentence `Model "NAME" …`."""
        self.pool.on_demand = False
        if not self.pool.ready_count:
            self.queue.fail_all(Draining(f'Model "{self.name}" {reason} before a worker was ready'))

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits until all accepted ones are settled; False after `timeout_s`."""
        self._leaving = True
        self.give_up_waiting("was unregistered")
        empty: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        guests = self.guests or self.ledger
        self.ledger.when_empty(lambda: guests.when_empty(lambda: empty.set_result(None)))
        done, _ = await asyncio.wait({empty}, timeout=timeout_s)
        return bool(done)

    def fail_rest(self, reason: str) -> None:
        """Ends its requests, and drops its kept answers."""
        if self.cache is not None:
            self.cache.close()
        if self.graph is not None:
            self.graph.close()
        for job in [*self.ledger.live.values(), *(self.guests or self.ledger).live.values()]:
            job.fail(Draining(reason))


class _Versions:
    """The versions of one name, in the order they were added; the first is the default until another is set."""

    def __init__(self, first: Model) -> None:
        self.all = {first.version: first}
        self.default = first


class Registry:
    """All models. `changes` is notified when one is added or removed, or its readiness may have changed."""

    def __init__(self) -> None:
        self.changes = Notifier()
        self._names: dict[str, _Versions] = {}

    def __iter__(self) -> Iterator[Model]:
        for versions in self._names.values():
            yield from versions.all.values()

    def find(self, name: str, version: str | None = None) -> Model:
        """The model; its default version if `version` is None or "". Raises ModelNotFound, ModelVersionNotFound."""
        versions = self._names.get(name)
        if versions is None:
            raise self._unknown(name)
        if not version:
            return versions.default
        model = versions.all.get(version)
        if model is None:
            raise _unknown_version(versions, version)
        return model

    def get(self, name: str, version: str = "") -> Model | None:
        """The same as `find`, but None when there is no such model."""
        versions = self._names.get(name)
        if versions is None:
            return None
        return versions.all.get(version) if version else versions.default

    def versions(self, name: str) -> list[Model]:
        """All versions of a name. Raises ModelNotFound."""
        versions = self._names.get(name)
        if versions is None:
            raise self._unknown(name)
        return list(versions.all.values())

    def defaults(self) -> list[Model]:
        return [self._names[name].default for name in sorted(self._names)]

    def is_default(self, model: Model) -> bool:
        versions = self._names.get(model.name)
        return versions is not None and versions.default is model

    def check_free(self, name: str, version: str) -> None:
        """Raises ModelExists when that version is registered."""
        if name in self._names and version in self._names[name].all:
            raise ModelExists(name, version)

    def add(self, model: Model) -> None:
        self.check_free(model.name, model.version)
        if model.name in self._names:
            self._names[model.name].all[model.version] = model
        else:
            self._names[model.name] = _Versions(model)
        self.changes.notify()

    def put(self, model: Model) -> Model | None:
        versions = self._names.get(model.name)
        old = None if versions is None else versions.all.get(model.version)
        if versions is None or old is None:
            self.add(model)
            return None
        versions.all[model.version] = model
        if versions.default is old:
            versions.default = model
        self.changes.notify()
        return old

    def set_default(self, name: str, version: str) -> Model:
        versions = self._names.get(name)
        if versions is None:
            raise self._unknown(name)
        model = versions.all.get(version)
        if model is None:
            raise _unknown_version(versions, version, f"Model version {version} does not exist for model {name}")
        versions.default = model
        self.changes.notify()
        return model

    def remove(self, name: str, version: str | None = None) -> Model:
        model = self.find(name, version)
        versions = self._names[name]
        if len(versions.all) == 1:
            del self._names[name]
        elif versions.default is model:
            raise DefaultVersionInUse(name)
        else:
            del versions.all[model.version]
        self.changes.notify()
        return model

    def discard(self, model: Model) -> None:
        versions = self._names.get(model.name)
        if versions is None or versions.all.get(model.version) is not model:
            return
        del versions.all[model.version]
        if not versions.all:
            del self._names[model.name]
        elif versions.default is model:
            versions.default = next(iter(versions.all.values()))
        self.changes.notify()

    def _unknown(self, name: str) -> ModelNotFound:
        return ModelNotFound(name, lambda: names_there("Models here", sorted(self._names), name))


def _unknown_version(versions: _Versions, version: str, message: str = "") -> ModelVersionNotFound:
    name = versions.default.name
    return ModelVersionNotFound(name, version, message, lambda: names_there(f"Versions of {name}", list(versions.all)))
