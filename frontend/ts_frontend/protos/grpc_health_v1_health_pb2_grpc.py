# Generated from protos/grpc/health/v1/health.proto by ts_scripts/gen_protos.py: change that file, not this one.

from ts_frontend.protos.grpc_health_v1_health_pb2 import DESCRIPTOR
from ts.protocol.pool import stub

HealthStub = stub(DESCRIPTOR, "Health")
