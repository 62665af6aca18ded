# Generated from protos/google/rpc/status.proto by ts_scripts/gen_protos.py: change that file, not this one.
from google.protobuf import any_pb2

from ts.protocol import pool

pool.register(any_pb2.DESCRIPTOR.serialized_pb)
DESCRIPTOR = pool.register(
    b'\n\x17google/rpc/status.proto\x12\ngoogle.rpc\x1a\x19google/protobuf/any.proto"N\n\x06Stat'
    b'us\x12\x0c\n\x04code\x18\x01 \x01(\x05\x12\x0f\n\x07message\x18\x02 \x01(\t\x12%\n\x07details\x18\x03 \x03(\x0b2\x14.google.protobuf.Any'
    b'B^\n\x0ecom.google.rpcB\x0bStatusProtoP\x01Z7google.golang.org/genproto/googleapis'
    b'/rpc/status;status\xa2\x02\x03RPCb\x06proto3'
)

globals().update(pool.names(DESCRIPTOR))
