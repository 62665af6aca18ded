"""The class that users derive their predictors from."""

from __future__ import annotations

from enum import Enum
from typing import Any


class PredictorProtocol(Enum):
    REST_V1 = "v1"
    REST_V2 = "v2"
    GRPC_V2 = "grpc-v2"


class Model:
    """A predictor. Every step may be a coroutine, and may take fewer arguments than here. The payload is the body of a
    V1 request as a dict, of a V2 request an InferRequest; headers are by name."""

    def __init__(self, name: str, *arguments: Any, return_response_headers: bool = False, **more: Any) -> None:
        self.name, self.ready = name, False
        self.return_response_headers = return_response_headers

    def load(self) -> bool:
        self.ready = True
        return self.ready

    def start(self) -> None:
        """Called by `ModelServer.start`: loads what isn't."""
        if not self.ready:
            self.ready = bool(self.load())

    def stop(self) -> None: ...

    async def healthy(self) -> bool:
        return self.ready

    async def get_input_types(self) -> list[dict[str, Any]]:
        return []

    async def get_output_types(self) -> list[dict[str, Any]]:
        return []

    async def preprocess(self, payload: Any, headers: dict[str, str] | None = None) -> Any:
        return payload

    async def predict(
        self, payload: Any, headers: dict[str, str] | None = None, response_headers: dict[str, str] | None = None
    ) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no predict")

    async def postprocess(
        self, result: Any, headers: dict[str, str] | None = None, response_headers: dict[str, str] | None = None
    ) -> Any:
        return result

    async def explain(self, payload: Any, headers: dict[str, str] | None = None) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no explain")
