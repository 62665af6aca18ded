"""The doors: every listener with what answers there, made from the configuration and the parts that server.py built."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import ts.version
from ts_frontend.addresses import bracketed, unix_path
from ts_frontend.apis import Api, asking_for_keys, sharing
from ts_frontend.authorization.authorization import Authorization
from ts_frontend.authorization.keys import Kind
from ts_frontend.batching.sequence_jobs import keys_of
from ts_frontend.config import ServerConfig
from ts_frontend.config_kinds import ExtraPort
from ts_frontend.health import Health
from ts_frontend.ingress.asgi import AsgiApp
from ts_frontend.ingress.call import Keepalive, Limits, Listener, Method, routes
from ts_frontend.ingress.engine import Engine, make_engine, serves_http
from ts_frontend.ingress.http import Cors, HttpApp
from ts_frontend.ingress.http_call import BodyLimits, Route
from ts_frontend.ingress.sockets import check_free
from ts_frontend.models.administration import Administration
from ts_frontend.repository.repository import Repository
from ts_frontend.services import health as health_service
from ts_frontend.services import reflection
from ts_frontend.services.grpc_token import guarded
from ts_frontend.services.guard import Guard, Hosts
from ts_frontend.services.http_description import INFERENCE as INFERENCE_API
from ts_frontend.services.http_description import MANAGEMENT as MANAGEMENT_API
from ts_frontend.services.http_description import METRICS as METRICS_API
from ts_frontend.services.http_description import HttpDescription
from ts_frontend.services.http_docs import HttpDocs
from ts_frontend.services.http_inference import HttpInference
from ts_frontend.services.http_kserve import HttpKServe
from ts_frontend.services.http_management import HttpManagement
from ts_frontend.services.http_metrics import MetricsApp
from ts_frontend.services.http_open_inference import HttpOpenInference
from ts_frontend.services.http_openai import HttpOpenAI
from ts_frontend.services.http_operations import KSERVE, OPEN_INFERENCE, OPENAI
from ts_frontend.services.http_routes import HttpRoutes
from ts_frontend.services.http_token import HttpGuard
from ts_frontend.services.http_triton import HttpTriton
from ts_frontend.services.http_v2 import unknown
from ts_frontend.services.http_workflows import HttpWorkflows
from ts_frontend.services.inference import InferenceService
from ts_frontend.services.management import ManagementService
from ts_frontend.services.metadata import RequestIds
from ts_frontend.services.open_inference import OpenInferenceService
from ts_frontend.services.repository import RepositoryService
from ts_frontend.services.server_settings import LogSettings, SettingsService, TraceSettings
from ts_frontend.services.shared_memory import Regions, SharedMemoryService
from ts_frontend.services.statistics import StatisticsService
from ts_frontend.services.tensor_models import About
from ts_frontend.services.tensor_streams import Dialect
from ts_frontend.telemetry.access import logged
from ts_frontend.telemetry.logs import Logs
from ts_frontend.telemetry.metrics import MetricsRegistry
from ts_frontend.telemetry.metrics_grpc import CallMetrics
from ts_frontend.telemetry.metrics_served import flooded_connections
from ts_frontend.telemetry.tracing import Tracing, sampling_of
from ts_frontend.tls import certificate_files
from ts_frontend.workflows.administration import WorkflowAdministration

log = logging.getLogger(__name__)

INFERENCE, MANAGEMENT = "grpc_inference", "grpc_management"
HTTP_INFERENCE, HTTP_MANAGEMENT, HTTP_METRICS = "http_inference", "http_management", "http_metrics"
NO_HTTP = "The HTTP APIs are not served: they need h2corn, which needs Python 3.11 or later"


#: Whose keys the listeners ask for, where keys are asked for.
KINDS = {
    INFERENCE: Kind.INFERENCE,
    HTTP_INFERENCE: Kind.INFERENCE,
    MANAGEMENT: Kind.MANAGEMENT,
    HTTP_MANAGEMENT: Kind.MANAGEMENT,
}


class Doors:
    """The listeners of one server. `engine` serves them; `warnings`: what is not served, and why."""

    def __init__(
        self,
        config: ServerConfig,
        administration: Administration,
        workflows: WorkflowAdministration,
        repository: Repository,
        health: Health,
        logs: Logs,
        metrics: MetricsRegistry,
        authorization: Authorization | None,
        tracing: Tracing | None = None,
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
        keys, about = keys_of(config), About(config.server_id, ts.version.__version__)
        shared = (
            *repository.methods(),
            *StatisticsService(registry).methods(),
            *SharedMemoryService(self._regions).methods(),
            *InferenceService(registry, self._health, keys).methods(),
        )
        managing = (*repository.managing(), *SettingsService(self._log_settings, self._traces).methods())

        def inference(dialect: str) -> Mapping[Kind, Sequence[Method]]:
            tensors = OpenInferenceService(registry, self._health, about, Dialect(dialect), self._regions, keys)
            return {Kind.INFERENCE: (*shared, *tensors.methods()), Kind.MANAGEMENT: managing}

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
                {Kind.MANAGEMENT: ManagementService(self._administration).methods()},
            ),
        ]

    @property
    def _extra_ports(self) -> Mapping[str, ExtraPort]:
        """Further listeners of gRPC inference by their names; none beside a Unix socket."""
        config = self._config
        extra = () if unix_path(config.grpc_inference_address) else config.grpc_extra_ports
        return {f"{INFERENCE}_{number}": port for number, port in enumerate(extra, 2)}

    def _grpc_listener(self, name: str, host: str, port: int, methods: Mapping[Kind, Sequence[Method]]) -> Listener:
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
        limits = Limits(config.max_request_size, config.max_response_size, *self._ages(name), keepalive=self._keepalive)
        table = routes(*map(self._counted, (*own, *reflection.methods(own))))
        app = self._http_app([MetricsApp(self._metrics).route], "" if path else host) if config.grpc_metrics else None
        flooded = self._flooded(name)
        return Listener(name, host, port, table, limits, tls, app, path, self._path_mode, flooded)

    def _traced(self, method: Method) -> Method:
        return method if self._tracing is None else self._tracing.method(method)

    def _counted(self, method: Method) -> Method:
        return method if self._calls is None else self._calls.counted(method)

    def _guarded(self, method: Method, kind: Kind) -> Method:
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
            keys_of(config),
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
            app = self._tracing.http(app, [operation.path for operation in api.operations])
        tls = self._tls if address.tls else None
        limits = Limits(
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
