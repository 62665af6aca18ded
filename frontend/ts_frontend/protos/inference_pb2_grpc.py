# Generated from protos/inference.proto by ts_scripts/gen_protos.py: change that file, not this one.

from ts_frontend.protos.inference_pb2 import DESCRIPTOR
from ts.protocol.pool import stub

InferenceAPIsServiceStub = stub(DESCRIPTOR, "InferenceAPIsService")
