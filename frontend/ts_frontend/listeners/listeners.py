"""The doors: every listener with what answers there, made from the configuration and the parts that server.py built."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import ts.version
from ts_frontend.authorization.authorization import Authorization
from ts_frontend.config.addresses import Address, bracketed, unix_path
from ts_frontend.config.keys import KeyKind
from ts_frontend.config.kinds import ExtraPort
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import InvalidArgument
from ts_frontend.grpc import health as health_service
from ts_frontend.grpc import reflection
from ts_frontend.grpc.auth import guarded
from ts_frontend.grpc.call import Keepalive, ListenerLimits, Method, RequestIds, routes
from ts_frontend.grpc.inference import InferenceService
from ts_frontend.grpc.management import ManagementService
from ts_frontend.grpc.open_inference import OpenInferenceService, StreamDialect
from ts_frontend.grpc.repository import RepositoryService
from ts_frontend.grpc.telemetry import CallMetrics, logged
from ts_frontend.grpc.triton import SettingsService, SharedMemoryService, StatisticsService
from ts_frontend.http.app import Cors, HttpApp
from ts_frontend.http.auth import HttpGuard
from ts_frontend.http.custom import HttpRoutes
from ts_frontend.http.guard import Guard, Hosts
from ts_frontend.http.kserve_v1 import HttpKServe
from ts_frontend.http.management import HttpManagement
from ts_frontend.http.open_inference import HttpOpenInference, unknown
from ts_frontend.http.openai import HttpOpenAI
from ts_frontend.http.openapi import INFERENCE as INFERENCE_API
from ts_frontend.http.openapi import KSERVE, OPEN_INFERENCE, OPENAI, HttpDescription, HttpDocs, Operation
from ts_frontend.http.openapi import MANAGEMENT as MANAGEMENT_API
from ts_frontend.http.openapi import METRICS as METRICS_API
from ts_frontend.http.request import AsgiApp, BodyLimits, Route
from ts_frontend.http.torchserve import HttpInference, MetricsApp
from ts_frontend.http.triton import HttpTriton
from ts_frontend.http.workflows import HttpWorkflows
from ts_frontend.listeners.certificates import certificate_files
from ts_frontend.listeners.listener import Listener
from ts_frontend.listeners.sockets import check_free
from ts_frontend.models.health import Health
from ts_frontend.models.manager import ModelManager
from ts_frontend.models.metrics import flooded_connections
from ts_frontend.models.repository import Repository
from ts_frontend.open_inference.models import About
from ts_frontend.open_inference.settings import LogSettings, TraceSettings
from ts_frontend.open_inference.shared_memory import Regions
from ts_frontend.scheduling.sequence_queue import sequence_headers
from ts_frontend.telemetry.logging.logs import Logs
from ts_frontend.telemetry.metrics.registry import MetricsRegistry
from ts_frontend.telemetry.tracing.tracing import sampling_of
from ts_frontend.workflows.manager import WorkflowManager

if TYPE_CHECKING:
    from ts_frontend.telemetry.tracing.spans import Traces

log = logging.getLogger(__name__)


class Api(NamedTuple):
    """What answers at an HTTP address, and what its description says of that. `managing` changes what is served: it
    needs a management key, wherever it is."""

    address: Address
    operations: Sequence[Operation]
    routes: Sequence[Route]
    managing: Sequence[Route] = ()


def sharing(apis: Mapping[str, Api]) -> dict[tuple[str, ...], Api]:
    """Listeners by the names of the APIs that share them: those of one address do, unless each takes a free port."""
    found: dict[tuple[str, ...], Api] = {}
    for name, api in apis.items():
        address = api.address
        names = next(
            (names for names, one in found.items() if one.address == address and (address.port or address.path)), ()
        )
        together = found.pop(names, Api(address, (), ()))
        found[(*names, name)] = Api(
            address,
            (*together.operations, *api.operations),
            (*together.routes, *api.routes),
            (*together.managing, *api.managing),
        )
    return found


def asking_for_keys(
    apis: Mapping[str, Api], guard: HttpGuard, kinds: Mapping[str, KeyKind], renewing: str
) -> dict[str, Api]:
    """The same, each API for those who have its key, and with the call that makes new keys; metrics are everyone's."""
    found = {}
    for name, api in apis.items():
        asking = [guard.guarded(route, kinds[name]) for route in api.routes] if name in kinds else api.routes
        managing = [guard.guarded(route, KeyKind.MANAGEMENT) for route in api.managing]
        routes = (*asking, guard.token_route) if name == renewing else tuple(asking)
        found[name] = api._replace(routes=routes, managing=managing)
    return found


logger = logging.getLogger(__name__)

ENGINES = ("auto", "h2corn", "grpcio")


class Engine(Protocol):
    """Serves several listeners in the running event loop; started and drained once."""

    async def start(self) -> None:
        """Listens. All listeners or none: raises OSError that names the address that can't be had."""

    def port(self, name: str) -> int:
        """The port of the listener `name`, which the system chose if it asked for 0."""

    async def drain(self, grace_s: float) -> None:
        """Takes no more calls, waits up to `grace_s` seconds for those running, and ends the rest UNAVAILABLE."""

    async def wait(self) -> None:
        """Returns after a drain; raises when the engine stopped for another reason."""


class Joined:
    """Two engines as one, each with listeners of its own: gRPC's, and those that only h2corn can serve."""

    def __init__(self, first: Engine, second: Engine) -> None:
        self._engines = (first, second)

    async def start(self) -> None:
        first, second = self._engines
        await first.start()
        try:
            await second.start()
        except BaseException:
            await first.drain(0)
            raise

    def port(self, name: str) -> int:
        first, second = self._engines
        with contextlib.suppress(KeyError):
            return first.port(name)
        return second.port(name)

    async def drain(self, grace_s: float) -> None:
        await asyncio.gather(*(engine.drain(grace_s) for engine in self._engines))

    async def wait(self) -> None:
        await asyncio.gather(*(engine.wait() for engine in self._engines))


def serves_http() -> bool:
    """Whether listeners with an HTTP application can be served here: h2corn is installed (it needs Python 3.11)."""
    return importlib.util.find_spec("h2corn") is not None


def make_engine(kind: str, listeners: Sequence[Listener]) -> Engine:
    """An engine that isn't started yet. `kind`: one of ENGINES; "auto" is h2corn wherever it can do what is asked.

    Raises ValueError for an unknown kind or two listeners of one name, InvalidArgument for h2corn where it isn't
    installed.
    """
    if kind not in ENGINES:
        raise ValueError(f"grpc_engine is {kind!r}; use one of {', '.join(ENGINES)}")
    if len({listener.name for listener in listeners}) != len(listeners):
        raise ValueError("two listeners have one name")
    if kind == "auto":
        kind = _best_kind(listeners)
    http = [listener for listener in listeners if listener.http_app is not None and not listener.routes]
    if kind == "grpcio" and http:
        return Joined(make_engine("grpcio", [one for one in listeners if one not in http]), make_engine("h2corn", http))
    if kind == "h2corn":
        if not serves_http():
            raise InvalidArgument("grpc_engine=h2corn: h2corn is not installed; it needs Python 3.11 or later")
        from ts_frontend.listeners.h2corn import H2cornEngine

        return H2cornEngine(listeners)
    from ts_frontend.listeners.grpcio import GrpcioEngine

    return GrpcioEngine(listeners)


def _best_kind(listeners: Sequence[Listener]) -> str:
    if not serves_http():
        return "grpcio"
    if any(math.isfinite(listener.limits.connection_age_s_max) for listener in listeners):
        logger.warning("A maximal connection age is set: gRPC is served by grpcio, as h2corn has no such limit")
        return "grpcio"
    return "h2corn"


INFERENCE, MANAGEMENT = "grpc_inference", "grpc_management"
HTTP_INFERENCE, HTTP_MANAGEMENT, HTTP_METRICS = "http_inference", "http_management", "http_metrics"
NO_HTTP = "The HTTP APIs are not served: they need h2corn, which needs Python 3.11 or later"


#: Whose keys the listeners ask for, where keys are asked for.
KINDS = {
    INFERENCE: KeyKind.INFERENCE,
    HTTP_INFERENCE: KeyKind.INFERENCE,
    MANAGEMENT: KeyKind.MANAGEMENT,
    HTTP_MANAGEMENT: KeyKind.MANAGEMENT,
}


class Listeners:
    """The listeners of one server. `engine` serves them; `warnings`: what is not served, and why."""

    def __init__(
        self,
        config: ServerConfig,
        administration: ModelManager,
        workflows: WorkflowManager,
        repository: Repository,
        health: Health,
        logs: Logs,
        metrics: MetricsRegistry,
        authorization: Authorization | None,
        tracing: Traces | None = None,
    ) -> None:
        self._config = config
        self._authorization = authorization
        self._tracing = tracing
        self._administration = administration
        self._workflows = workflows
        self._repository = repository
        self._health = health
        self._logs = logs
        self._metrics = metrics
        self._guard = None if authorization is None else HttpGuard(authorization)
        self._calls = CallMetrics() if config.counts_grpc_calls else None
        if self._calls is not None:
            metrics.gather(self._calls.families, always=bool(config.grpc_metrics))
        self._floods: dict[str, int] = {}
        metrics.gather(lambda: [flooded_connections(self._floods, metrics.host)])
        self._regions = Regions(config.shared_memory_keys)
        self._log_settings = LogSettings(logs, administration.check_model_api)
        sampling = sampling_of(config, on=False) if tracing is None else tracing.sampling
        self._traces = TraceSettings(administration.registry, sampling, administration.check_model_api)
        self._tls = certificate_files(config)
        if config.certificate_file and self._tls is None:
            log.warning("certificate_file is set, but no address uses TLS: write https:// or enable_grpc_ssl=true")
        self._http = self._http_apis() if serves_http() else {}
        self.warnings = [] if self._http else [NO_HTTP]
        for warning in self.warnings:
            log.warning(warning)
        self._listeners = [*self._grpc_listeners(), *self._http_listeners()]
        self.engine: Engine = make_engine(config.grpc_engine, self._listeners)

    def check_addresses(self) -> None:
        """Raises OSError for an address that can't be had, before the models of the start are loaded for nothing."""
        check_free(self._listeners)

    def addresses(self) -> dict[str, str]:
        """What listens where, by the name of the API."""
        config = self._config
        hosts = dict.fromkeys((INFERENCE, *self._extra_ports), config.grpc_inference_address)
        hosts[MANAGEMENT] = config.grpc_management_address
        if not config.enable_grpc:
            hosts = {}
        found = {name: self._grpc_address(name, host) for name, host in hosts.items()}
        for names, api in self._http.items():
            found |= dict.fromkeys(names, str(replace(api.address, port=self.engine.port(names[0]))))
        return found

    def _grpc_address(self, name: str, host: str) -> str:
        """As gRPC clients take it."""
        if unix_path(host):
            return host
        return f"{bracketed(host)}:{self.engine.port(name)}{' (TLS)' if self._config.enable_grpc_ssl else ''}"

    # --- gRPC

    def _grpc_listeners(self) -> list[Listener]:
        config = self._config
        if not config.enable_grpc:
            return []
        registry = self._administration.registry
        repository = RepositoryService(self._repository, registry)
        keys, about = sequence_headers(config), About(config.server_id, ts.version.__version__)
        shared = (
            *repository.methods(),
            *StatisticsService(registry).methods(),
            *SharedMemoryService(self._regions).methods(),
            *InferenceService(registry, self._health, keys).methods(),
        )
        managing = (*repository.managing(), *SettingsService(self._log_settings, self._traces).methods())

        def inference(dialect: str) -> Mapping[KeyKind, Sequence[Method]]:
            tensors = OpenInferenceService(registry, self._health, about, StreamDialect(dialect), self._regions, keys)
            return {KeyKind.INFERENCE: (*shared, *tensors.methods()), KeyKind.MANAGEMENT: managing}

        host = config.grpc_inference_address
        return [
            self._grpc_listener(INFERENCE, host, config.grpc_inference_port, inference(config.stream_dialect)),
            *(
                self._grpc_listener(name, host, extra.port, inference(extra.dialect or config.stream_dialect))
                for name, extra in self._extra_ports.items()
            ),
            self._grpc_listener(
                MANAGEMENT,
                config.grpc_management_address,
                config.grpc_management_port,
                {KeyKind.MANAGEMENT: ManagementService(self._administration).methods()},
            ),
        ]

    @property
    def _extra_ports(self) -> Mapping[str, ExtraPort]:
        """Further listeners of gRPC inference by their names; none beside a Unix socket."""
        config = self._config
        extra = () if unix_path(config.grpc_inference_address) else config.grpc_extra_ports
        return {f"{INFERENCE}_{number}": port for number, port in enumerate(extra, 2)}

    def _grpc_listener(self, name: str, host: str, port: int, methods: Mapping[KeyKind, Sequence[Method]]) -> Listener:
        """A listener with these methods, by the key that they need, health and reflection."""
        config = self._config
        asked = (
            self._traced(logged(self._guarded(method, kind), self._logs))
            for kind, some in methods.items()
            for method in some
        )
        own = (*asked, *health_service.methods(self._health))
        path = unix_path(host)
        tls = self._tls if config.enable_grpc_ssl and not path else None
        limits = ListenerLimits(
            config.max_request_size, config.max_response_size, *self._ages(name), keepalive=self._keepalive
        )
        table = routes(*map(self._counted, (*own, *reflection.methods(own))))
        app = self._http_app([MetricsApp(self._metrics).route], "" if path else host) if config.grpc_metrics else None
        flooded = self._flooded(name)
        return Listener(name, host, port, table, limits, tls, app, path, self._path_mode, flooded)

    def _traced(self, method: Method) -> Method:
        if self._tracing is None:
            return method
        from ts_frontend.grpc.tracing import traced  # OpenTelemetry is an extra

        return traced(method, self._tracing.tracer)

    def _counted(self, method: Method) -> Method:
        return method if self._calls is None else self._calls.counted(method)

    def _guarded(self, method: Method, kind: KeyKind) -> Method:
        return method if self._authorization is None else guarded(method, self._authorization, kind)

    def _ages(self, name: str) -> tuple[float, float]:
        """How old a connection of that listener may become, and its grace after that, in seconds."""
        api = MANAGEMENT if name == MANAGEMENT else INFERENCE
        age_ms = getattr(self._config, f"{api}_max_connection_age_ms")
        grace_ms = getattr(self._config, f"{api}_max_connection_age_grace_ms")
        return tuple(math.inf if value is None else value / 1000 for value in (age_ms, grace_ms))  # type: ignore[return-value]

    @property
    def _keepalive(self) -> Keepalive:
        config = self._config
        return Keepalive(
            config.grpc_keepalive_time_ms,
            config.grpc_keepalive_timeout_ms,
            config.grpc_keepalive_permit_without_calls,
            config.grpc_http2_max_pings_without_data,
            config.grpc_http2_min_time_between_pings_ms,
            config.grpc_http2_min_ping_interval_without_data_ms,
        )

    @property
    def _path_mode(self) -> int:
        return int(self._config.unix_socket_mode, 8)

    # --- HTTP

    def _http_apis(self) -> dict[tuple[str, ...], Api]:
        """Each HTTP listener by the APIs it serves."""
        config, registry = self._config, self._administration.registry

        def loaded_at_startup() -> list[str]:
            return [model.name for model in registry if model.loaded_at_startup]

        kserve = HttpKServe(registry)
        inference = HttpInference(registry, self._health, loaded_at_startup, kserve.predicting)
        tensors = HttpOpenInference(
            registry,
            self._health,
            self._repository,
            About(config.server_id, ts.version.__version__),
            self._regions,
            sequence_headers(config),
            always=config.ts_open_inference_protocol,
        )
        model_api = config.model_api_enabled
        management = HttpManagement(self._administration, registry, model_api=model_api)
        workflows = HttpWorkflows(self._workflows, model_api=model_api)
        triton = HttpTriton(registry, self._regions, self._log_settings, self._traces)
        predicting = (
            triton.route,
            tensors.route,
            *([kserve.route] if config.kserve_mode else []),
            HttpOpenAI(registry).route,
            HttpRoutes(registry).route,
            inference.route,
            workflows.predicting,
            unknown,
        )
        apis = {}
        if config.enable_http:
            managing = (tensors.managing, triton.managing)
            operations = (*INFERENCE_API, *OPEN_INFERENCE, *OPENAI, *(KSERVE if config.kserve_mode else ()))
            apis[HTTP_INFERENCE] = Api(config.inference_address, operations, predicting, managing)
        apis[HTTP_MANAGEMENT] = Api(config.management_address, MANAGEMENT_API, (management.route, workflows.managing))
        if config.enable_metrics_api:
            metrics = MetricsApp(self._metrics)
            apis[HTTP_METRICS] = Api(config.metrics_address, METRICS_API, (metrics.route,))
        return sharing(apis if self._guard is None else asking_for_keys(apis, self._guard, KINDS, HTTP_MANAGEMENT))

    def _http_listeners(self) -> list[Listener]:
        return [self._http_listener(names, api) for names, api in self._http.items()]

    def _http_listener(self, names: Sequence[str], api: Api) -> Listener:
        config, address = self._config, api.address
        description = HttpDescription(api.operations, self._administration.registry, ts.version.__version__)
        docs = HttpDocs(api.operations, ts.version.__version__)
        app: AsgiApp = self._http_app(
            self._with_keys(
                names, description.route, (*docs.routes(config.enable_docs_url), *api.managing, *api.routes)
            ),
            address.host,
        )
        if self._tracing is not None:
            from ts_frontend.http.tracing import traced  # OpenTelemetry is an extra

            app = traced(app, self._tracing.tracer, [operation.path for operation in api.operations])
        tls = self._tls if address.tls else None
        limits = ListenerLimits(
            config.max_request_size, config.max_response_size, head_pause_s_max=config.request_head_timeout_s
        )
        path, mode, flooded = address.path, self._path_mode, self._flooded(names[0])
        return Listener(names[0], address.host, address.port, {}, limits, tls, app, path, mode, flooded)

    def _flooded(self, api: str) -> Callable[[], None]:
        """What counts the connections of an API that h2corn closes because too many of their calls were cancelled."""
        self._floods[api] = 0

        def closed() -> None:
            self._floods[api] += 1

        return closed

    def _http_app(self, found: Sequence[Route], host: str) -> HttpApp:
        """These routes behind the guard of a listener on `host`, "" for a Unix socket."""
        config = self._config
        hosts = Hosts(host, config.hosts, config.allowed_hosts)
        of_a_model = HttpRoutes(self._administration.registry).route
        return HttpApp(
            found,
            RequestIds().next,
            guard=Guard(hosts, config.cors_allowed_origin, of_a_model).route,
            log=self._http_answered,
            cors=Cors(config.cors_allowed_origin, config.cors_allowed_methods, config.cors_allowed_headers),
            limits=BodyLimits(config.max_request_size, config.request_body_timeout_s),
        )

    def _with_keys(self, names: Sequence[str], description: Route, found: Sequence[Route]) -> list[Route]:
        """The routes of a listener; for what no single API answers, any key of its APIs will do."""
        kinds = [KINDS[name] for name in names if name in KINDS]
        if self._guard is None or not kinds:
            return [description, *found]
        return [self._guard.guarded(description, *kinds), *found, self._guard.last(*kinds)]

    def _http_answered(self, peer: str, request: str, status: int, duration_ms: float, request_id: str) -> None:
        self._metrics.http_answered(status)
        self._logs.access(peer, request, status, duration_ms, request_id)
