# Generated from protos/rollouts.proto by ts_scripts/gen_protos.py: change that file, not this one.

from ts_frontend.protos.rollouts_pb2 import DESCRIPTOR
from ts.protocol.pool import stub

RolloutsStub = stub(DESCRIPTOR, "Rollouts")
