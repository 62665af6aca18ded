# Generated from protos/grpc/reflection/v1/reflection.proto by ts_scripts/gen_protos.py: change that file, not this one.

from ts_frontend.protos.grpc_reflection_v1_reflection_pb2 import DESCRIPTOR
from ts.protocol.pool import stub

ServerReflectionStub = stub(DESCRIPTOR, "ServerReflection")
