# Generated from protos/inference.proto by ts_scripts/gen_protos.py: change that file, not this one.

from ts_frontend.protos import inference_pb2
from ts.protocol.pool import serialize


class InferenceAPIsServiceStub:
    Ping_PATH = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Ping"
    Predictions_PATH = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
    StreamPredictions_PATH = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/StreamPredictions"
    StreamPredictions2_PATH = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/StreamPredictions2"

    def __init__(self, channel):
        self.Ping = channel.unary_unary(
            self.Ping_PATH,
            request_serializer=serialize,
            response_deserializer=inference_pb2.TorchServeHealthResponse.FromString,
        )
        self.Predictions = channel.unary_unary(
            self.Predictions_PATH,
            request_serializer=serialize,
            response_deserializer=inference_pb2.PredictionResponse.FromString,
        )
        self.StreamPredictions = channel.unary_stream(
            self.StreamPredictions_PATH,
            request_serializer=serialize,
            response_deserializer=inference_pb2.PredictionResponse.FromString,
        )
        self.StreamPredictions2 = channel.stream_stream(
            self.StreamPredictions2_PATH,
            request_serializer=serialize,
            response_deserializer=inference_pb2.PredictionResponse.FromString,
        )
