"""Messages of the V2 protocol."""

from ts.compat.kserve_api.messages import InferInput, InferOutput, InferRequest, InferResponse, RequestedOutput

__all__ = ["InferInput", "InferOutput", "InferRequest", "InferResponse", "RequestedOutput"]
