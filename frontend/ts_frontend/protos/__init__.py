"""Messages and client stubs generated from `protos/` (`ts_scripts/gen_protos.py`).

`inference_pb2`, `management_pb2` hold the messages, `inference_pb2_grpc`, `management_pb2_grpc` the client stubs; use
them as those that `grpc_tools.protoc` writes. Their descriptors live in a pool of their own (`pool.py`), so that a
program may also import modules generated from TorchServe's files or from another server's of the same package.
"""
