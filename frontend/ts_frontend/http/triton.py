"""What Triton's clients ask over HTTP beside inference: statistics, settings, shared memory."""

from __future__ import annotations

from functools import partial

from ts_frontend.http.open_inference import served
from ts_frontend.http.request import HttpAnswer, HttpRequest, Serve, compact_json, json_object
from ts_frontend.models.registry import Registry
from ts_frontend.open_inference.settings import LogSettings, TraceSettings, trace_given
from ts_frontend.open_inference.shared_memory import Regions, check_cuda, refuse_cuda, region_given
from ts_frontend.open_inference.statistics import statistics_json


class HttpTriton:
    """`route` for whoever may infer, `managing` for whoever may change the server."""

    def __init__(self, models: Registry, regions: Regions, logs: LogSettings, traces: TraceSettings) -> None:
        self._models, self._regions = models, regions
        self._logs, self._traces = logs, traces

    def route(self, request: HttpRequest) -> Serve | None:
        match request.segments:
            case ["v2", "models", "stats"]:
                return served(["GET"], partial(self._statistics, "", ""))
            case ["v2", "models", name, "stats"]:
                return served(["GET"], partial(self._statistics, name, ""))
            case ["v2", "models", name, "versions", version, "stats"]:
                return served(["GET"], partial(self._statistics, name, version))
            case ["v2", "systemsharedmemory", *rest]:
                return self._system(rest)
            case ["v2", "cudasharedmemory", *rest]:
                return self._cuda(rest)
        return None

    def managing(self, request: HttpRequest) -> Serve | None:
        match request.segments:
            case ["v2", "logging"]:
                return served(["GET", "POST"], self._logging)
            case ["v2", "trace", "setting"]:
                return served(["GET", "POST"], partial(self._trace, ""))
            case ["v2", "models", name, "trace", "setting"]:
                return served(["GET", "POST"], partial(self._trace, name))
        return None

    # --- statistics and settings

    async def _statistics(self, name: str, version: str, request: HttpRequest) -> HttpAnswer:
        return compact_json(200, statistics_json(self._models, name, version))

    async def _logging(self, request: HttpRequest) -> HttpAnswer:
        given = json_object(await request.body()) if request.method == "POST" else {}
        return compact_json(200, self._logs.change(given))

    async def _trace(self, model: str, request: HttpRequest) -> HttpAnswer:
        given = trace_given(json_object(await request.body())) if request.method == "POST" else {}
        found = self._traces.change(given, model)
        return compact_json(200, {name: all_ if name == "trace_level" else all_[0] for name, all_ in found.items()})

    # --- shared memory

    def _system(self, rest: list[str]) -> Serve | None:
        match rest:
            case ["status"]:
                return served(["GET"], partial(self._status, ""))
            case ["region", name, "status"]:
                return served(["GET"], partial(self._status, name))
            case ["region", name, "register"]:
                return served(["POST"], partial(self._register, name))
            case ["unregister"]:
                return served(["POST"], partial(self._unregister, ""))
            case ["region", name, "unregister"]:
                return served(["POST"], partial(self._unregister, name))
        return None

    async def _status(self, name: str, request: HttpRequest) -> HttpAnswer:
        return compact_json(200, [one._asdict() for one in self._regions.status(name)])

    async def _register(self, name: str, request: HttpRequest) -> HttpAnswer:
        self._regions.register(*region_given(name, json_object(await request.body())))
        return compact_json(200, {})

    async def _unregister(self, name: str, request: HttpRequest) -> HttpAnswer:
        self._regions.unregister(name)
        return compact_json(200, {})

    def _cuda(self, rest: list[str]) -> Serve | None:
        match rest:
            case ["status"]:
                return served(["GET"], partial(_cuda_status, ""))
            case ["region", name, "status"]:
                return served(["GET"], partial(_cuda_status, name))
            case ["region", _, "register"]:
                return served(["POST"], _refused)
            case ["unregister"] | ["region", _, "unregister"]:
                return served(["POST"], _nothing)
        return None


async def _cuda_status(name: str, request: HttpRequest) -> HttpAnswer:
    check_cuda(name)
    return compact_json(200, [])


async def _nothing(request: HttpRequest) -> HttpAnswer:
    return compact_json(200, {})


async def _refused(request: HttpRequest) -> HttpAnswer:
    refuse_cuda()
