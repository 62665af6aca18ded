"""The server: builds every part once, joins them, runs, drains, stops. The only module that knows all of them."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
import os
import platform
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ts.version
from ts_frontend.addresses import Address
from ts_frontend.config import ServerConfig, snapshot_settings, worker_environment
from ts_frontend.errors import ServeError
from ts_frontend.health import Health
from ts_frontend.ingress.call import Limits, Listener, Method, Tls, routes
from ts_frontend.ingress.engine import Engine, make_engine, serves_http
from ts_frontend.ingress.http import Cors, HttpApp
from ts_frontend.ingress.http_call import Route
from ts_frontend.models.administration import Administration
from ts_frontend.models.archive import Archive, ExtractLimits
from ts_frontend.models.launchpad import Launchpad
from ts_frontend.models.persistence import Recorder, RestoreFailed
from ts_frontend.models.registry import Registry
from ts_frontend.models.settings import ModelSettings, Requested, resolve
from ts_frontend.models.snapshot import Kind, SnapshotFiles
from ts_frontend.models.startup import load_at_startup
from ts_frontend.models.store import Store
from ts_frontend.services import health as health_service
from ts_frontend.services import reflection
from ts_frontend.services.http_description import INFERENCE as INFERENCE_API
from ts_frontend.services.http_description import MANAGEMENT as MANAGEMENT_API
from ts_frontend.services.http_description import METRICS as METRICS_API
from ts_frontend.services.http_description import HttpDescription, Operation
from ts_frontend.services.http_inference import HttpInference
from ts_frontend.services.http_management import HttpManagement
from ts_frontend.services.http_metrics import MetricsApp
from ts_frontend.services.inference import InferenceService
from ts_frontend.services.management import ManagementService
from ts_frontend.services.metadata import RequestIds
from ts_frontend.telemetry.access import logged
from ts_frontend.telemetry.logs import Logs, setup_logs
from ts_frontend.telemetry.metrics_served import served_families
from ts_frontend.telemetry.metrics_setup import open_metrics, system_metrics
from ts_frontend.telemetry.model_log import ModelLog
from ts_frontend.work_dir import work_dir
from ts_frontend.workers.supervisor import Supervisor, find_accelerators

log = logging.getLogger(__name__)

STARTED = "Model server started."
SERVICES = frozenset(
    {"org.pytorch.serve.grpc.inference.InferenceAPIsService", "org.pytorch.serve.grpc.management.ManagementAPIsService"}
)
INFERENCE, MANAGEMENT = "grpc_inference", "grpc_management"
HTTP_INFERENCE, HTTP_MANAGEMENT, HTTP_METRICS = "http_inference", "http_management", "http_metrics"


class Server:
    """All parts of one server, made from its configuration; `run` is its whole life."""

    def __init__(self, config: ServerConfig, logs: Logs) -> None:
        self.config = config
        self._logs = logs
        self._metrics = open_metrics(config, logs)
        self.engine: Engine | None = None
        self._http: dict[tuple[str, ...], tuple[Address, list[Route]]] = {}
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Asks `run` to drain and return; a second time changes nothing."""
        self._stop.set()

    async def run(self, on_ready: Callable[[dict[str, str], list[str]], None], progress: Callable[[str], None]) -> None:
        """Starts, serves until `stop()`, drains. `on_ready` gets the listening addresses by name and
        what couldn't be loaded, `progress` what is
        being done until then.

        Raises OSError (an address is taken), RestoreFailed, ValueError with what was wrong when it can't start.
        """
        config = self.config
        with work_dir(config.temp_dir) as directory:
            supervisor = await self._supervisor()
            try:
                await supervisor.start()
                await self._serve(supervisor, directory, on_ready, progress)
            finally:
                await supervisor.close()

    async def _supervisor(self) -> Supervisor:
        config = self.config
        inventory = await find_accelerators(config.number_of_gpu, sys.platform, platform.machine())
        log.info("Number of GPUs: %s", inventory.count)
        return Supervisor(
            worker_env(config),
            first_worker_id=config.initial_worker_port,
            fork=config.worker_start == "fork",
            inventory=inventory,
            on_line=ModelLog(self._logs, self._metrics).line,
        )

    async def _serve(
        self,
        supervisor: Supervisor,
        work_dir: Path,
        on_ready: Callable[[dict[str, str], list[str]], None],
        progress: Callable[[str], None],
    ) -> None:
        config = self.config
        store = Store(
            config.model_store,
            config.allowed_urls,
            download_bytes_max=config.download_bytes_max,
            download_timeout_s=config.download_timeout_s,
        )
        recorder = self._recorder()
        administration = self._administration(supervisor, store, work_dir, recorder)
        models, host = administration.registry, self._metrics.host
        self._metrics.gather(lambda: served_families(models, host))
        failures = await load_at_startup(config, administration, store, supervisor.placement.inventory.count, progress)
        health = Health(administration, SERVICES)
        self.engine = make_engine(config.grpc_engine, self._listeners(administration, health))
        await self.engine.start()
        recorder.attach(administration)
        await recorder.write(Kind.STARTUP)
        sampling = self._sample_system(supervisor, models)
        _settle()
        on_ready(self.addresses(), failures)
        await self._until_stopped(self.engine)
        sampling.cancel()
        log.info("Draining: what was accepted is answered within %g s.", config.drain_timeout_s)
        health.drain()
        await self.engine.drain(config.drain_timeout_s)
        await recorder.close()
        await administration.close(config.drain_timeout_s)

    async def _until_stopped(self, engine: Engine) -> None:
        """Returns when `stop` was called; raises when the engine ended by itself."""
        stop = asyncio.create_task(self._stop.wait())
        ended = asyncio.create_task(engine.wait())
        done, _ = await asyncio.wait({stop, ended}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if ended in done:
            ended.result()
            raise RuntimeError("The listeners ended without being asked to")
        ended.cancel()

    # --- parts

    def _sample_system(self, supervisor: Supervisor, models: Registry) -> asyncio.Task[None]:
        """System metrics from now on, until the task is cancelled."""
        inventory = supervisor.placement.inventory
        gpus = inventory.count if inventory.kind == "cuda" else 0

        def pids() -> list[int]:
            return [slot.worker.pid for model in models for slot in model.pool.slots if slot.worker is not None]

        system = system_metrics(self.config, self._metrics, gpus, worker_env(self.config), pids)
        return asyncio.create_task(system.run() if system is not None else asyncio.sleep(0))

    def _recorder(self) -> Recorder:
        config = self.config
        files = None if config.ncs else SnapshotFiles(config.snapshot_dir, config.snapshots_kept_max)
        return Recorder(files, snapshot_settings(config))

    def _administration(
        self, supervisor: Supervisor, store: Store, work_dir: Path, recorder: Recorder
    ) -> Administration:
        config = self.config
        registry = Registry()
        launchpad = Launchpad(config, supervisor, worker_env(config), registry.changes, self._metrics)
        return Administration(
            registry,
            store,
            launchpad,
            supervisor,
            self._settings,
            work_dir=work_dir,
            extract_limits=ExtractLimits(
                bytes_max=config.extract_bytes_max,
                files_max=config.extract_files_max,
                ratio_max=config.extract_ratio_max,
            ),
            model_api=config.model_api_enabled,
            unregister_timeout_s=config.unregister_model_timeout,
            on_change=recorder.changed,
        )

    def _settings(self, requested: Requested, archive: Archive, name: str, version: str) -> ModelSettings:
        entry = self.config.models.get(name, {}).get(version, {})
        settings = resolve(
            requested, archive.config or {}, entry, self.config, handler=archive.handler, runtime=archive.runtime
        )
        for warning in settings.warnings:
            log.warning("Model %s %s: %s", name, version, warning)
        return settings

    def _listeners(self, administration: Administration, health: Health) -> list[Listener]:
        config = self.config
        inference = InferenceService(administration.registry, health).methods()
        management = ManagementService(administration).methods()
        self._http = _sharing(self._http_apis(administration, health)) if serves_http() else {}
        if not self._http:
            log.warning("The HTTP APIs are not served: they need h2corn, which needs Python 3.11 or later")
        return [
            self._listener(INFERENCE, config.grpc_inference_address, config.grpc_inference_port, inference, health),
            self._listener(MANAGEMENT, config.grpc_management_address, config.grpc_management_port, management, health),
            *(self._http_listener(names[0], address, found) for names, (address, found) in self._http.items()),
        ]

    def _http_apis(self, administration: Administration, health: Health) -> dict[str, tuple[Address, list[Route]]]:
        """Each HTTP API by its name: where it listens, and what answers there."""
        config, registry = self.config, administration.registry

        def loaded_at_startup() -> list[str]:
            return [model.name for model in registry if model.loaded_at_startup]

        def described(operations: Sequence[Operation]) -> Route:
            return HttpDescription(operations, registry, ts.version.__version__).route

        inference = HttpInference(registry, health, loaded_at_startup)
        management = HttpManagement(administration, registry, config.cors_allowed_origin)
        apis: dict[str, tuple[Address, list[Route]]] = {
            HTTP_INFERENCE: (config.inference_address, [described(INFERENCE_API), inference.route]),
            HTTP_MANAGEMENT: (config.management_address, [described(MANAGEMENT_API), management.route]),
        }
        if config.enable_metrics_api:
            apis[HTTP_METRICS] = (config.metrics_address, [described(METRICS_API), MetricsApp(self._metrics).route])
        return apis

    def _http_listener(self, name: str, address: Address, found: list[Route]) -> Listener:
        config = self.config
        app = HttpApp(
            found,
            RequestIds().next,
            log=self._http_answered,
            cors=Cors(config.cors_allowed_origin, config.cors_allowed_methods, config.cors_allowed_headers),
            body_s_max=config.request_body_timeout_s,
        )
        tls = Tls(str(config.certificate_file), str(config.private_key_file)) if address.tls else None
        limits = Limits(config.max_request_size, config.max_response_size)
        return Listener(name, address.host, address.port, {}, limits, tls, app, address.path)

    def _http_answered(self, peer: str, request: str, status: int, duration_ms: float) -> None:
        self._metrics.http_answered(status)
        self._logs.access(peer, request, status, duration_ms)

    def _listener(self, name: str, host: str, port: int, methods: tuple[Method, ...], health: Health) -> Listener:
        """A listener with these methods, health and reflection."""
        config = self.config
        own = (*(logged(method, self._logs) for method in methods), *health_service.methods(health))
        tls = None
        if config.enable_grpc_ssl:
            tls = Tls(str(config.certificate_file), str(config.private_key_file))
        limits = Limits(config.max_request_size, config.max_response_size, *self._ages(name))
        return Listener(name, host, port, routes(*own, *reflection.methods(own)), limits, tls)

    def _ages(self, name: str) -> tuple[float, float]:
        """How old a connection of that listener may become, and its grace after that, in seconds."""
        age_ms = getattr(self.config, f"{name}_max_connection_age_ms")
        grace_ms = getattr(self.config, f"{name}_max_connection_age_grace_ms")
        return tuple(math.inf if value is None else value / 1000 for value in (age_ms, grace_ms))  # type: ignore[return-value]

    def addresses(self) -> dict[str, str]:
        """What listens where, by listener name."""
        engine, config = self.engine, self.config
        assert engine is not None
        hosts = {INFERENCE: config.grpc_inference_address, MANAGEMENT: config.grpc_management_address}
        found = {name: f"{host}:{engine.port(name)}" for name, host in hosts.items()}
        for names, (address, _) in self._http.items():
            found |= dict.fromkeys(names, str(replace(address, port=engine.port(names[0]))))
        return found


def _sharing(apis: dict[str, tuple[Address, list[Route]]]) -> dict[tuple[str, ...], tuple[Address, list[Route]]]:
    """Listeners by the names of the APIs that share them: those of one address do, unless each takes a free port."""
    found: list[tuple[list[str], Address, list[Route]]] = []
    for name, (address, own) in apis.items():
        same = [one for one in found if one[1] == address and (address.port or address.path)]
        if same:
            same[0][0].append(name)
            same[0][2].extend(own)
        else:
            found.append(([name], address, list(own)))
    return {tuple(names): (address, routes) for names, address, routes in found}


def worker_env(config: ServerConfig) -> dict[str, str]:
    """The environment of workers: `ts` is found where the server found it, whatever else has that name."""
    env = worker_environment(config)
    package_root = str(Path(ts.version.__file__).parents[1])
    env["PYTHONPATH"] = os.pathsep.join(part for part in (package_root, env.get("PYTHONPATH", "")) if part)
    return env


def _settle() -> None:
    """What exists now stays: the garbage collector needn't look at it again, nor as often at the rest. Requests make no
    cycles; a collection of everything takes some 10 ms, which a request would wait for."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


# --- the process


def main(config: ServerConfig, report_ready_fd: int | None = None) -> int:
    """Runs a server until SIGTERM or SIGINT; the process's exit status.

    `report_ready_fd` gets one line of JSON: `{"ready": true, "listening": {name: address}, "warnings": [text]}`, or
    `{"ready": false, "error": text}`, and is closed.
    """
    report = _Report(report_ready_fd)
    try:
        logs = setup_logs(config)
    except (OSError, ServeError, ValueError) as error:
        report.failed(f"Logs can't be opened: {error}")
        return 1
    try:
        _run_loop(_run(config, logs, report))
        return 0
    except (OSError, RestoreFailed, ServeError, RuntimeError, ValueError) as error:
        log.error("%s", error, exc_info=not isinstance(error, (OSError, RestoreFailed, ServeError)))
        report.failed(str(error))
        return 1
    finally:
        logs.close()


class _Report:
    """Tells the launcher, once, how the start went."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def progress(self, text: str) -> None:
        """What the server is doing before it is ready."""
        if self._fd is not None:
            self._send(self._fd, {"progress": text})

    def ready(self, listening: dict[str, str], warnings: list[str]) -> None:
        self._write({"ready": True, "listening": listening, "warnings": warnings})

    def failed(self, error: str) -> None:
        self._write({"ready": False, "error": error})

    def _write(self, value: dict[str, Any]) -> None:
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        self._send(fd, value)
        os.close(fd)

    def _send(self, fd: int, value: dict[str, Any]) -> None:
        try:
            os.write(fd, json.dumps(value).encode() + b"\n")
        except BrokenPipeError:
            log.warning("The launcher left before the server was ready")


def _run_loop(work: Coroutine[Any, Any, None]) -> None:
    if sys.platform == "win32":
        asyncio.run(work)
    else:
        import uvloop

        uvloop.run(work)


async def _run(config: ServerConfig, logs: Logs, report: _Report) -> None:
    server = Server(config, logs)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)

    def on_ready(listening: dict[str, str], failures: list[str]) -> None:
        for name, address in listening.items():
            log.info("%s listens on %s", name, address)
        print(STARTED, flush=True)
        report.ready(listening, failures)

    await server.run(on_ready, report.progress)
