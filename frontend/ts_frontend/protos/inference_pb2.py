# Generated from protos/inference.proto by ts_scripts/gen_protos.py: change that file, not this one.
from google.protobuf import empty_pb2

from ts.protocol import pool
from ts_frontend.protos import google_rpc_status_pb2

pool.register(empty_pb2.DESCRIPTOR.serialized_pb)
DESCRIPTOR = pool.register(
    b'\n\x0finference.proto\x12 org.pytorch.serve.grpc.inference\x1a\x1bgoogle/protobuf/emp'
    b'ty.proto\x1a\x17google/rpc/status.proto"\xe7\x01\n\x12PredictionsRequest\x12\x12\n\nmodel_name\x18\x01'
    b' \x01(\t\x12\x15\n\rmodel_version\x18\x02 \x01(\t\x12N\n\x05input\x18\x03 \x03(\x0b2?.org.pytorch.serve.grpc.infe'
    b'rence.PredictionsRequest.InputEntry\x12\x18\n\x0bsequence_id\x18\x04 \x01(\tH\x00\x88\x01\x01\x1a,\n\nInputEn'
    b'try\x12\x0b\n\x03key\x18\x01 \x01(\t\x12\r\n\x05value\x18\x02 \x01(\x0c:\x028\x01B\x0e\n\x0c_sequence_id"\x86\x01\n\x12PredictionRespon'
    b"se\x12\x12\n\nprediction\x18\x01 \x01(\x0c\x12\x18\n\x0bsequence_id\x18\x02 \x01(\tH\x00\x88\x01\x01\x12'\n\x06status\x18\x03 \x01(\x0b2\x12.googl"
    b'e.rpc.StatusH\x01\x88\x01\x01B\x0e\n\x0c_sequence_idB\t\n\x07_status"*\n\x18TorchServeHealthResponse'
    b'\x12\x0e\n\x06health\x18\x01 \x01(\t2\x80\x04\n\x14InferenceAPIsService\x12\\\n\x04Ping\x12\x16.google.protobuf.Empt'
    b'y\x1a:.org.pytorch.serve.grpc.inference.TorchServeHealthResponse"\x00\x12{\n\x0bPredi'
    b'ctions\x124.org.pytorch.serve.grpc.inference.PredictionsRequest\x1a4.org.pytor'
    b'ch.serve.grpc.inference.PredictionResponse"\x00\x12\x83\x01\n\x11StreamPredictions\x124.org'
    b'.pytorch.serve.grpc.inference.PredictionsRequest\x1a4.org.pytorch.serve.grp'
    b'c.inference.PredictionResponse"\x000\x01\x12\x86\x01\n\x12StreamPredictions2\x124.org.pytorch.'
    b'serve.grpc.inference.PredictionsRequest\x1a4.org.pytorch.serve.grpc.inferen'
    b'ce.PredictionResponse"\x00(\x010\x01B\x02P\x01b\x06proto3'
)

globals().update(pool.names(DESCRIPTOR))
