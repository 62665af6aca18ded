"""Triton's HTTP extensions other than inference: statistics, settings, shared memory."""

from __future__ import annotations

from ts_frontend.http.request import HttpAnswer, HttpRequest, compact_json, json_object
from ts_frontend.models.registry import Registry
from ts_frontend.open_inference.models import statistics_json
from ts_frontend.open_inference.settings import LogSettings, TraceSettings, trace_given
from ts_frontend.open_inference.shared_memory import Regions, check_cuda, refuse_cuda, region_given


class HttpTriton:
    def __init__(self, models: Registry, regions: Regions, logs: LogSettings, traces: TraceSettings) -> None:
        self._models, self._regions = models, regions
        self._logs, self._traces = logs, traces

    # --- statistics and settings

    async def statistics(self, request: HttpRequest) -> HttpAnswer:
        params = request.path_params
        found = statistics_json(self._models, params.get("model_name", ""), params.get("model_version", ""))
        return compact_json(200, found)

    async def logging(self, request: HttpRequest) -> HttpAnswer:
        given = json_object(await request.body()) if request.method == "POST" else {}
        return compact_json(200, self._logs.change(given))

    async def trace_setting(self, request: HttpRequest) -> HttpAnswer:
        given = trace_given(json_object(await request.body())) if request.method == "POST" else {}
        found = self._traces.change(given, request.path_params.get("model_name", ""))
        return compact_json(200, {name: all_ if name == "trace_level" else all_[0] for name, all_ in found.items()})

    # --- shared memory: of one region, or of all

    async def regions(self, request: HttpRequest) -> HttpAnswer:
        return compact_json(200, [one._asdict() for one in self._regions.status(_region(request))])

    async def register_region(self, request: HttpRequest) -> HttpAnswer:
        self._regions.register(*region_given(_region(request), json_object(await request.body())))
        return compact_json(200, {})

    async def unregister_regions(self, request: HttpRequest) -> HttpAnswer:
        self._regions.unregister(_region(request))
        return compact_json(200, {})

    async def cuda_regions(self, request: HttpRequest) -> HttpAnswer:
        check_cuda(_region(request))
        return compact_json(200, [])

    async def register_cuda_region(self, request: HttpRequest) -> HttpAnswer:
        refuse_cuda()

    async def unregister_cuda_regions(self, request: HttpRequest) -> HttpAnswer:
        return compact_json(200, {})


def _region(request: HttpRequest) -> str:
    return request.path_params.get("region_name", "")
