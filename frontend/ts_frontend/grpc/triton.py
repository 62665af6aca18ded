"""Triton's extensions of `GRPCInferenceService`: shared memory, the settings of logs and traces, statistics.

The frontend only keeps and checks the names of shared-memory regions; the worker copies a request's tensors from them,
so that a truncated region affects only its own request (`ts.tensors.shared_memory`). GPU memory can't be shared."""

from __future__ import annotations

from typing import Any

from ts.protocol import open_inference_pb2 as pb
from ts_frontend.grpc.call import Call, Method, Shape
from ts_frontend.grpc.open_inference import SERVICE, message
from ts_frontend.models.registry import Registry
from ts_frontend.open_inference.models import statistics_of
from ts_frontend.open_inference.settings import LogSettings, TraceSettings
from ts_frontend.open_inference.shared_memory import Regions, check_cuda, refuse_cuda


class TritonService:
    """Regions of system shared memory that clients register for their tensors, where that is allowed, and statistics of
    the models, in which a request counts once, regardless of its batch dimension."""

    def __init__(self, models: Registry, regions: Regions) -> None:
        self._models, self._regions = models, regions

    def methods(self) -> tuple[Method, ...]:
        own = {
            "ModelStatistics": self.statistics,
            "SystemSharedMemoryStatus": self.status,
            "SystemSharedMemoryRegister": self.register,
            "SystemSharedMemoryUnregister": self.unregister,
            "CudaSharedMemoryStatus": self.cuda_status,
            "CudaSharedMemoryRegister": self.cuda_register,
            "CudaSharedMemoryUnregister": self.cuda_unregister,
        }
        return tuple(Method(f"/{SERVICE}/{name}", Shape.UNARY, run) for name, run in own.items())

    async def statistics(self, call: Call, data: bytes) -> bytes:
        request = message(pb.ModelStatisticsRequest, data)
        return statistics_of(self._models, request.name, request.version).SerializeToString()

    async def status(self, call: Call, data: bytes) -> bytes:
        request = message(pb.SystemSharedMemoryStatusRequest, data)
        answer = pb.SystemSharedMemoryStatusResponse()
        for one in self._regions.status(request.name):
            found = answer.regions[one.name]
            found.name, found.key, found.offset, found.byte_size = one
        return answer.SerializeToString()

    async def register(self, call: Call, data: bytes) -> bytes:
        request = message(pb.SystemSharedMemoryRegisterRequest, data)
        self._regions.register(request.name, request.key, request.offset, request.byte_size)
        return b""

    async def unregister(self, call: Call, data: bytes) -> bytes:
        self._regions.unregister(message(pb.SystemSharedMemoryUnregisterRequest, data).name)
        return b""

    async def cuda_status(self, call: Call, data: bytes) -> bytes:
        """Answers with an empty list: CUDA regions are never registered."""
        check_cuda(message(pb.CudaSharedMemoryStatusRequest, data).name)
        return b""

    async def cuda_register(self, call: Call, data: bytes) -> bytes:
        refuse_cuda()

    async def cuda_unregister(self, call: Call, data: bytes) -> bytes:
        """Does nothing: Triton's clients unregister all regions before they begin."""
        return b""


class SettingsService:
    """The settings of logs and traces that clients may change."""

    def __init__(self, logs: LogSettings, traces: TraceSettings) -> None:
        self._logs, self._traces = logs, traces

    def methods(self) -> tuple[Method, ...]:
        return (
            Method(f"/{SERVICE}/LogSettings", Shape.UNARY, self.log_settings),
            Method(f"/{SERVICE}/TraceSetting", Shape.UNARY, self.trace_setting),
        )

    async def log_settings(self, call: Call, data: bytes) -> bytes:
        request = message(pb.LogSettingsRequest, data)
        given = {name: _value(setting) for name, setting in request.settings.items()}
        answer = pb.LogSettingsResponse()
        for name, value in self._logs.change(given).items():
            field = {bool: "bool_param", int: "uint32_param"}.get(type(value), "string_param")
            setattr(answer.settings[name], field, value)
        return answer.SerializeToString()

    async def trace_setting(self, call: Call, data: bytes) -> bytes:
        request = message(pb.TraceSettingRequest, data)
        given = {name: list(setting.value) for name, setting in request.settings.items()}
        answer = pb.TraceSettingResponse()
        for name, values in self._traces.change(given, request.model_name).items():
            answer.settings[name].value.extend(values)
        return answer.SerializeToString()


def _value(setting: pb.LogSettingsRequest.SettingValue) -> Any:
    choice = setting.WhichOneof("parameter_choice")
    return getattr(setting, choice) if choice else None
