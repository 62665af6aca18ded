# Generated from protos/grpc/health/v1/health.proto by ts_scripts/gen_protos.py: change that file, not this one.

from ts_frontend.protos import grpc_health_v1_health_pb2
from ts.protocol.pool import serialize


class HealthStub:
    Check_PATH = "/grpc.health.v1.Health/Check"
    Watch_PATH = "/grpc.health.v1.Health/Watch"

    def __init__(self, channel):
        self.Check = channel.unary_unary(
            self.Check_PATH,
            request_serializer=serialize,
            response_deserializer=grpc_health_v1_health_pb2.HealthCheckResponse.FromString,
        )
        self.Watch = channel.unary_stream(
            self.Watch_PATH,
            request_serializer=serialize,
            response_deserializer=grpc_health_v1_health_pb2.HealthCheckResponse.FromString,
        )
