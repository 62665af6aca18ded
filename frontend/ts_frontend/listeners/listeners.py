"""Every listener with its services, made from the configuration and the parts that server.py built."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import ts.version
from ts_frontend.authorization.authorization import Authorization
from ts_frontend.config.foreign.platforms import AZUREML, MLFLOW, SAGEMAKER
from ts_frontend.config.keys import KeyKind
from ts_frontend.config.kinds import Address, ExtraPort, bracketed, unix_path
from ts_frontend.config.table import ServerConfig
from ts_frontend.console.collector import Collector
from ts_frontend.console.site import Site
from ts_frontend.errors import InvalidArgument
from ts_frontend.grpc.around import CallMetrics, guarded, limited, logged, traced
from ts_frontend.grpc.call import Method, routes
from ts_frontend.grpc.health import health_methods, reflection_methods
from ts_frontend.grpc.inference import InferenceService
from ts_frontend.grpc.management import ManagementService, RolloutService
from ts_frontend.grpc.open_inference import (
    OpenInferenceService,
    RepositoryService,
    SettingsService,
    StreamDialect,
    TritonService,
)
from ts_frontend.http.app import Cors, HttpApp, noting
from ts_frontend.http.around import HttpLimits, traced_service
from ts_frontend.http.console import CONSOLE_PATH, HttpConsole, HttpPages
from ts_frontend.http.management import HttpManagement, HttpRollouts, HttpWorkflows
from ts_frontend.http.open_inference import HttpCustomHandlers, HttpKServe, HttpOpenInference, HttpTriton
from ts_frontend.http.openai import HttpOpenAI
from ts_frontend.http.openapi import HttpDescription, HttpDocs, Near
from ts_frontend.http.platforms import HttpAzureML, HttpMLflow, HttpPlatforms, Sessions
from ts_frontend.http.request import ONLY_GRPC, BodyLimits, HttpService
from ts_frontend.http.routes import with_routes
from ts_frontend.http.routing import (
    GRPC_METRICS,
    HTTP_INFERENCE,
    HTTP_MANAGEMENT,
    HTTP_METRICS,
    Guard,
    Hosts,
    HttpKeys,
    RouteTable,
    Switch,
    served_rows,
)
from ts_frontend.http.torchserve import HttpInference, HttpMetrics
from ts_frontend.job import RequestIds
from ts_frontend.limits.limits import Limits
from ts_frontend.listeners.certificates import CertificateEnds, certificate_files
from ts_frontend.listeners.serving import Serving
from ts_frontend.listeners.sockets import Listener, check_free
from ts_frontend.models.health import Health
from ts_frontend.models.manager import ModelManager
from ts_frontend.models.metrics import certificate_ends, flooded_connections, unread_answers
from ts_frontend.models.repository import Repository
from ts_frontend.open_inference.models import About, LogSettings, TraceSettings
from ts_frontend.open_inference.requests import Regions
from ts_frontend.rollouts.manager import Rollouts
from ts_frontend.scheduling.queues import sequence_headers
from ts_frontend.telemetry.logging.writer import Logs
from ts_frontend.telemetry.metrics.registry import MetricsRegistry
from ts_frontend.telemetry.metrics.system import Gpus
from ts_frontend.telemetry.tracing.tracing import sampling_of
from ts_frontend.transport.limits import Arriving, Keepalive, ListenerLimits, OpenStreams, Unread
from ts_frontend.workflows.manager import WorkflowManager

if TYPE_CHECKING:
    from ts_frontend.telemetry.tracing.spans import Traces

logger = logging.getLogger(__name__)


def sharing(addresses: Mapping[str, Address]) -> dict[tuple[str, ...], Address]:
    """Groups APIs by address: those of one address share a listener, unless the port is 0."""
    found: dict[tuple[str, ...], Address] = {}
    for name, address in addresses.items():
        names = next((names for names, one in found.items() if one == address and (address.port or address.path)), ())
        found.pop(names, None)
        found[(*names, name)] = address
    return found


INFERENCE, MANAGEMENT = "grpc_inference", "grpc_management"
#: Seconds until an idle HTTP connection is closed. Idle gRPC connections stay open, as clients expect.
HTTP_IDLE_S_MAX = 120.0


@dataclass(eq=False)
class Listeners:
    """The listeners of one frontend. `serving` serves them. `left`, `ports`: as of `Serving`."""

    config: ServerConfig
    manager: ModelManager
    workflows: WorkflowManager
    repository: Repository
    health: Health
    logs: Logs
    metrics: MetricsRegistry
    authorization: Authorization | None
    tracing: Traces | None
    gpus: Gpus
    rollouts: Rollouts
    limits: Limits | None = None
    left: Mapping[str, Sequence[int]] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._keys = None if self.authorization is None else HttpKeys(self.authorization)
        self._calls = CallMetrics() if self.config.counts_grpc_calls else None
        self._floods: dict[str, int] = {}
        self._arriving = Arriving(self.config.arriving_bytes_max, self.config.request_body_timeout_s or math.inf)
        self._unread = Unread(self.config.unread_bytes_max, self.config.write_timeout_s)
        self._streams = OpenStreams(self.config.arriving_bytes_max)
        self._regions = Regions(self.config.shared_memory_keys)
        self._log_settings = LogSettings(self.logs, self._check_settings)
        sampling = sampling_of(self.config, on=False) if self.tracing is None else self.tracing.sampling
        self._traces = TraceSettings(self.manager.registry, sampling, self._check_settings)
        self._tls = certificate_files(self.config)
        if self.config.certificate_file and self._tls is None:
            logger.warning("certificate_file is set, but no address uses TLS: write https:// or enable_grpc_ssl=true")
        self._gather()
        self._site = Site()
        self._started_s = time.time()
        self._http = self._http_addresses()
        self._routes = with_routes(self.config.health_route, self.config.predict_route)
        self.metrics_pages = HttpMetrics(self.metrics, self.gpus)
        self._services = self._http_services()
        served = [*self._grpc_listeners(), *self._http_listeners()]
        self.served = [one for one in served if one.shared or not self.config.frontend]
        self.serving = Serving(self.served, self.left, self.ports)

    def _check_settings(self) -> None:
        """Raises ServeError if clients may not change the settings of the log and of traces."""
        self.manager.check_model_api()
        if self.config.frontends > 1:
            raise InvalidArgument(
                "With several frontends the settings of the log and of traces can't be changed while they serve: "
                "change log_level, trace_rate and the like in the configuration, or set frontends=1"
            )

    def _gather(self) -> None:
        metrics, unread = self.metrics, self._unread
        if self._calls is not None:
            metrics.gather(self._calls.families, always=bool(self.config.grpc_metrics))
        metrics.gather(lambda: [flooded_connections(self._floods, metrics.host)], always=True)
        metrics.gather(lambda: unread_answers(unread.bytes, unread.given_up, metrics.host), always=True)
        if self._tls is not None:
            ends = CertificateEnds(self._tls)
            metrics.gather(lambda: [certificate_ends(ends.read(), metrics.host)], always=True)

    def check_addresses(self) -> None:
        """Raises OSError for an unavailable address, before models are loaded."""
        check_free(self.served, self.left)

    def addresses(self) -> dict[str, str]:
        config = self.config
        hosts = dict.fromkeys((INFERENCE, *self._extra_ports), config.grpc_inference_address)
        hosts[MANAGEMENT] = config.grpc_management_address
        if not config.enable_grpc:
            hosts = {}
        found = {name: self._grpc_address(name, host) for name, host in hosts.items()}
        for names, address in self._http.items():
            found |= dict.fromkeys(names, str(replace(address, port=self.serving.port(names[0]))))
        for name, address in self._extra_http.items():
            found[name] = str(replace(address, port=self.serving.port(name)))
        return found

    def _grpc_address(self, name: str, host: str) -> str:
        if unix_path(host):
            return host
        return f"{bracketed(host)}:{self.serving.port(name)}{' (TLS)' if self.config.enable_grpc_ssl else ''}"

    # --- gRPC

    def _grpc_listeners(self) -> list[Listener]:
        config = self.config
        if not config.enable_grpc:
            return []
        registry = self.manager.registry
        repository = RepositoryService(self.repository, registry)
        keys, about = sequence_headers(config), About(config.server_id, ts.version.__version__)
        shared = (
            *repository.methods(),
            *TritonService(registry, self._regions).methods(),
            *InferenceService(registry, self.health, keys).methods(),
        )
        managing = (*repository.managing(), *SettingsService(self._log_settings, self._traces).methods())

        def inference(dialect: str) -> Mapping[KeyKind, Sequence[Method]]:
            tensors = OpenInferenceService(registry, self.health, about, StreamDialect(dialect), self._regions, keys)
            return {KeyKind.INFERENCE: (*shared, *tensors.methods()), KeyKind.MANAGEMENT: managing}

        host = config.grpc_inference_address
        place = config.grpc_management_address, config.grpc_management_port
        managed = (*ManagementService(self.manager).methods(), *RolloutService(self.rollouts).methods())
        return [
            self._grpc_listener(INFERENCE, host, config.grpc_inference_port, inference(config.stream_dialect)),
            *(
                self._grpc_listener(name, host, extra.port, inference(extra.dialect or config.stream_dialect))
                for name, extra in self._extra_ports.items()
            ),
            self._grpc_listener(MANAGEMENT, *place, {KeyKind.MANAGEMENT: managed}),
        ]

    @property
    def _extra_ports(self) -> Mapping[str, ExtraPort]:
        """Returns further listeners of gRPC inference by their names; none if it is a Unix socket."""
        config = self.config
        extra = () if unix_path(config.grpc_inference_address) else config.grpc_extra_ports
        return {f"{INFERENCE}_{number}": port for number, port in enumerate(extra, 2)}

    def _grpc_listener(self, name: str, host: str, port: int, methods: Mapping[KeyKind, Sequence[Method]]) -> Listener:
        config = self.config
        asked = (self._wrapped(method, kind) for kind, some in methods.items() for method in some)
        own = (*asked, *health_methods(self.health))
        path = unix_path(host)
        tls = self._tls if config.enable_grpc_ssl and not path else None
        limits = ListenerLimits(
            config.max_request_size,
            config.max_response_size,
            *self._ages(name),
            keepalive=self._keepalive,
            resets_max=config.http2_resets_max,
            resets_per_s=config.http2_resets_per_second,
            write_s_max=config.write_timeout_s,
            arriving=self._arriving,
            unread=self._unread,
            streams=self._streams,
        )
        table = routes(*map(self._counted, (*own, *reflection_methods(own))))
        app = (
            self._http_app(self._route_table([GRPC_METRICS]), "" if path else host, elsewhere=ONLY_GRPC)
            if config.grpc_metrics
            else None
        )
        flooded = self._flooded(name)
        shared, sibling = config.frontends > 1 and name != MANAGEMENT, config.frontend > 0
        return Listener(name, host, port, table, limits, tls, app, path, self._path_mode, flooded, shared, sibling)

    def _wrapped(self, method: Method, kind: KeyKind) -> Method:
        """The method with all that is done around its calls."""
        if self.authorization is not None:
            method = guarded(method, self.authorization, kind)
        if self.limits is not None:
            method = limited(method, self.limits)
        method = logged(method, self.logs, times_all=self.config.times_requests)
        return method if self.tracing is None else traced(method, self.tracing.tracer)

    def _counted(self, method: Method) -> Method:
        return method if self._calls is None else self._calls.counted(method)

    def _ages(self, name: str) -> tuple[float, float]:
        """The maximal age of a connection of that listener and the grace after it, in seconds."""
        api = MANAGEMENT if name == MANAGEMENT else INFERENCE
        age_ms = getattr(self.config, f"{api}_max_connection_age_ms")
        grace_ms = getattr(self.config, f"{api}_max_connection_age_grace_ms")
        return tuple(math.inf if value is None else value / 1000 for value in (age_ms, grace_ms))  # type: ignore[return-value]

    @property
    def _keepalive(self) -> Keepalive:
        config = self.config
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
        return int(self.config.unix_socket_mode, 8)

    # --- HTTP

    def _http_addresses(self) -> dict[tuple[str, ...], Address]:
        config = self.config
        addresses = {HTTP_INFERENCE: config.inference_address} if config.enable_http else {}
        addresses[HTTP_MANAGEMENT] = config.management_address
        if config.enable_metrics_api:
            addresses[HTTP_METRICS] = config.metrics_address
        return sharing(addresses)

    @property
    def _extra_http(self) -> Mapping[str, Address]:
        extra = self.config.http_extra_addresses
        return {f"{HTTP_INFERENCE}_{number}": address for number, address in enumerate(extra, 2)}

    def _http_services(self) -> list[object]:
        config, registry = self.config, self.manager.registry

        def loaded_at_startup() -> list[str]:
            return [model.name for model in registry if model.loaded_at_startup]

        keys = sequence_headers(config)
        inference = HttpInference(registry, self.health, loaded_at_startup, keys)
        tensors = HttpOpenInference(
            registry,
            self.health,
            self.repository,
            About(config.server_id, ts.version.__version__),
            self._regions,
            keys,
            always=config.ts_open_inference_protocol,
            torchserve=inference,
        )
        clients = None if self.limits is None else self.limits.rows
        collector = Collector(registry, self.health, self._about, self.gpus, clients=clients)
        kserve = HttpKServe(registry, inference)
        management = HttpManagement(self.manager, registry, self.health, model_api=config.model_api_enabled)
        self._platforms = HttpPlatforms(
            registry,
            inference,
            tensors,
            kserve,
            management,
            sessions=Sessions(config.session_expires_s) if config.session_expires_s else None,
            generates=config.environment.get("SAGEMAKER_TRITON_INFERENCE_TYPE", "").lower() == "generate",
        )
        return [
            inference,
            tensors,
            kserve,
            self._platforms,
            HttpOpenAI(registry, self.health),
            HttpTriton(registry, self._regions, self._log_settings, self._traces),
            management,
            HttpRollouts(self.rollouts),
            HttpWorkflows(self.workflows, model_api=config.model_api_enabled),
            self.metrics_pages,
            HttpAzureML(
                registry, self.health, loaded_at_startup, config.environment.get("HTTP_X_MS_SERVER_VERSION", "")
            ),
            HttpMLflow(),
            HttpConsole(collector, registry, self.manager.loader.store.names),
            *([] if self._keys is None else [self._keys]),
        ]

    def _near(self, here: Sequence[str]) -> Near:
        """Tells what is near an unknown path of the listener with these APIs."""

        def place(api: str) -> str:
            names, address = next((names, address) for names, address in self._http.items() if api in names)
            return "its Unix socket" if address.path else f"port {self.serving.port(names[0])}"

        switches = self._switches()
        return Near(
            {api: served_rows(self._routes, [api], switches) for names in self._http for api in names}, here, place
        )

    def _switches(self) -> list[Switch]:
        config = self.config
        wanted = {
            Switch.KEYS: self._keys is not None,
            Switch.KSERVE: config.kserve_mode,
            Switch.DOCS: config.docs_enabled,
            Switch.CONSOLE: config.enable_console,
            Switch.PAGES: config.enable_console or config.docs_enabled,
            Switch.SAGEMAKER: config.platform == SAGEMAKER,
            Switch.AZUREML: config.platform == AZUREML,
            Switch.MLFLOW: config.platform == MLFLOW,
        }
        return [switch for switch, is_on in wanted.items() if is_on]

    def _route_table(self, apis: Sequence[str]) -> RouteTable:
        config, version, switches = self.config, ts.version.__version__, self._switches()
        rows = served_rows(self._routes, apis, switches)
        described = HttpDescription(rows, self.manager.registry, version), HttpDocs(rows, version)
        about = {"name": "torchrelay", "version": version}
        pages = HttpPages(self._site, apis, about, self._console_address, docs=config.docs_enabled)
        table = RouteTable(self._routes, apis, switches, [*self._services, *described, pages])
        if HTTP_INFERENCE in apis:
            self._platforms.routes = table
        return table

    def _about(self) -> dict[str, object]:
        config = self.config
        return {
            "name": "torchrelay",
            "version": ts.version.__version__,
            "id": config.server_id,
            "startedAt": round(self._started_s, 3),
            "addresses": self.addresses(),
            "modelApi": config.model_api_enabled,
            "docs": config.docs_enabled,
            "keys": self._keys is not None,
        }

    def _console_address(self) -> str:
        """The console's address, for the pages of other listeners; "" unless only this machine reaches all of them."""
        config = self.config
        if not (config.enable_console and config.loopback_only):
            return ""
        address = self.addresses().get(HTTP_MANAGEMENT, "")
        return f"{address}{CONSOLE_PATH}" if address.startswith("http") else ""

    def _http_listeners(self) -> list[Listener]:
        return [
            *(self._http_listener(names[0], names, address) for names, address in self._http.items()),
            *(self._http_listener(name, [HTTP_INFERENCE], address) for name, address in self._extra_http.items()),
        ]

    def _http_listener(self, name: str, apis: Sequence[str], address: Address) -> Listener:
        config, table = self.config, self._route_table(apis)
        app: HttpService = self._http_app(
            table,
            address.host,
            with_models=HTTP_INFERENCE in apis,
            managed=HTTP_MANAGEMENT in apis,
            near=self._near(apis),
        )
        if self.tracing is not None:
            app = traced_service(app, self.tracing.tracer, table)
        tls = self._tls if address.tls else None
        limits = ListenerLimits(
            config.max_request_size,
            config.max_response_size,
            head_s_max=config.request_head_timeout_s or math.inf,
            idle_s_max=HTTP_IDLE_S_MAX,
            resets_max=config.http2_resets_max,
            resets_per_s=config.http2_resets_per_second,
            write_s_max=config.write_timeout_s,
            unread=self._unread,
        )
        path, mode, flooded = address.path, self._path_mode, self._flooded(name)
        shared, sibling = config.frontends > 1 and HTTP_INFERENCE in apis, config.frontend > 0
        return Listener(name, address.host, address.port, {}, limits, tls, app, path, mode, flooded, shared, sibling)

    def _flooded(self, api: str) -> Callable[[], None]:
        """Returns the counter for an API's connections whose clients reset too many streams."""
        self._floods[api] = 0

        def closed() -> None:
            self._floods[api] += 1

        return closed

    def _http_app(
        self,
        table: RouteTable,
        host: str,
        *,
        with_models: bool = False,
        managed: bool = False,
        elsewhere: str = "",
        near: Near | None = None,
    ) -> HttpApp:
        """These routes behind the guard of a listener on `host`, "" for a Unix socket. `with_models`: also the paths
        that models declare. `managed`: its own pages may manage the server."""
        config = self.config
        hosts = Hosts(host, config.hosts, config.allowed_hosts)
        custom = HttpCustomHandlers(self.manager.registry)
        return HttpApp(
            table,
            RequestIds().next,
            guard=Guard(hosts, config.cors_allowed_origin, custom.find, managed=managed),
            keys=self._keys,
            client_limits=None if self.limits is None else HttpLimits(self.limits),
            of_a_model=custom.find if with_models else None,
            log=noting(self.metrics.http_answered, self.logs),
            cors=Cors(config.cors_allowed_origin, config.cors_allowed_methods, config.cors_allowed_headers),
            limits=BodyLimits(config.max_request_size, config.request_body_timeout_s, self._arriving),
            times_all=config.times_requests,
            elsewhere=elsewhere,
            near=near,
        )
