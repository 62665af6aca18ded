"""The client stub of `inference.GRPCInferenceService`, for `grpc` and `grpc.aio` channels."""

from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

__all__ = ["GRPCInferenceServiceStub"]
