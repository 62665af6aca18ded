# Generated from protos/grpc/reflection/v1alpha/reflection.proto by ts_scripts/gen_protos.py: change that file, not this one.

from ts_frontend.protos import grpc_reflection_v1alpha_reflection_pb2
from ts.protocol.pool import serialize


class ServerReflectionStub:
    ServerReflectionInfo_PATH = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"

    def __init__(self, channel):
        self.ServerReflectionInfo = channel.stream_stream(
            self.ServerReflectionInfo_PATH,
            request_serializer=serialize,
            response_deserializer=grpc_reflection_v1alpha_reflection_pb2.ServerReflectionResponse.FromString,
        )
