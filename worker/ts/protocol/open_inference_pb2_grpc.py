# Generated from protos/open_inference.proto by ts_scripts/gen_protos.py: change that file, not this one.

from ts.protocol.open_inference_pb2 import DESCRIPTOR
from ts.protocol.pool import stub

GRPCInferenceServiceStub = stub(DESCRIPTOR, "GRPCInferenceService")
