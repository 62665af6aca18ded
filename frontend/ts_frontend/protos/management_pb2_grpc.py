# Generated from protos/management.proto by ts_scripts/gen_protos.py: change that file, not this one.

from ts_frontend.protos import management_pb2
from ts.protocol.pool import serialize


class ManagementAPIsServiceStub:
    DescribeModel_PATH = "/org.pytorch.serve.grpc.management.ManagementAPIsService/DescribeModel"
    ListModels_PATH = "/org.pytorch.serve.grpc.management.ManagementAPIsService/ListModels"
    RegisterModel_PATH = "/org.pytorch.serve.grpc.management.ManagementAPIsService/RegisterModel"
    ScaleWorker_PATH = "/org.pytorch.serve.grpc.management.ManagementAPIsService/ScaleWorker"
    SetDefault_PATH = "/org.pytorch.serve.grpc.management.ManagementAPIsService/SetDefault"
    UnregisterModel_PATH = "/org.pytorch.serve.grpc.management.ManagementAPIsService/UnregisterModel"

    def __init__(self, channel):
        self.DescribeModel = channel.unary_unary(
            self.DescribeModel_PATH,
            request_serializer=serialize,
            response_deserializer=management_pb2.ManagementResponse.FromString,
        )
        self.ListModels = channel.unary_unary(
            self.ListModels_PATH,
            request_serializer=serialize,
            response_deserializer=management_pb2.ManagementResponse.FromString,
        )
        self.RegisterModel = channel.unary_unary(
            self.RegisterModel_PATH,
            request_serializer=serialize,
            response_deserializer=management_pb2.ManagementResponse.FromString,
        )
        self.ScaleWorker = channel.unary_unary(
            self.ScaleWorker_PATH,
            request_serializer=serialize,
            response_deserializer=management_pb2.ManagementResponse.FromString,
        )
        self.SetDefault = channel.unary_unary(
            self.SetDefault_PATH,
            request_serializer=serialize,
            response_deserializer=management_pb2.ManagementResponse.FromString,
        )
        self.UnregisterModel = channel.unary_unary(
            self.UnregisterModel_PATH,
            request_serializer=serialize,
            response_deserializer=management_pb2.ManagementResponse.FromString,
        )
