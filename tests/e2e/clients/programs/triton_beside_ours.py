"""Our stub modules and tritonclient's in one process, in the order that the third argument says; both make calls."""

import sys

GRPC, HTTP, FIRST = sys.argv[1:4]

if FIRST == "ours":
    from torchrelay_client import grpc_predict_v2_pb2 as ours
    from torchrelay_client import grpc_predict_v2_pb2_grpc as stubs

import tritonclient.grpc as theirs  # noqa: E402

if FIRST != "ours":
    from torchrelay_client import grpc_predict_v2_pb2 as ours
    from torchrelay_client import grpc_predict_v2_pb2_grpc as stubs

import grpc  # noqa: E402

with grpc.insecure_channel(GRPC) as channel, theirs.InferenceServerClient(GRPC) as server:
    stub = stubs.GRPCInferenceServiceStub(channel)
    assert stub.ServerLive(ours.ServerLiveRequest()).live and server.is_server_live()
    message = theirs.service_pb2.ModelReadyRequest(name="sum")
    assert stub.ModelReady(message).ready
print("beside ours ok")
