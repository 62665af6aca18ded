"""The messages of the Open Inference Protocol, as `protoc` would write them from KServe's grpc_predict_v2.proto, with
the fields that Triton and MLServer have beside them.

Their descriptors are in a pool of their own: the modules of tritonclient, kserve and mlserver, which claim the same
names in protobuf's default pool, can be imported before and after this one.
"""

from ts.protocol.open_inference_pb2 import *  # noqa: F403
