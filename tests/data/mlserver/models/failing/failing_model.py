"""Fails as the request's id says."""

from mlserver import MLModel
from mlserver.errors import InferenceError, MLServerError, ModelNotFound
from mlserver.types import InferenceRequest, InferenceResponse


class Failing(MLModel):
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        kind = payload.id or ""
        if kind.isdigit():
            raise MLServerError(f"failed with {kind}", int(kind))
        if kind == "inference":
            raise InferenceError("cannot infer")
        if kind == "elsewhere":
            raise ModelNotFound("another", "v9")
        if kind == "nothing":
            return None
        raise ValueError(f"unforeseen {kind}")
