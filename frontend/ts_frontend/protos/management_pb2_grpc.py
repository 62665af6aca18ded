# Generated from protos/management.proto by ts_scripts/gen_protos.py: change that file, not this one.

from ts_frontend.protos.management_pb2 import DESCRIPTOR
from ts.protocol.pool import stub

ManagementAPIsServiceStub = stub(DESCRIPTOR, "ManagementAPIsService")
