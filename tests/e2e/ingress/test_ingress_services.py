"""Health and reflection, with the public client libraries."""

from __future__ import annotations

import json

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def check(client, service=""):
    request = health_pb2.HealthCheckRequest(service=service)
    return health_pb2_grpc.HealthStub(client.channel).Check(request, timeout=60).status


def set_health(client, **status):
    client.unary("/test.Probe/SetHealth", json.dumps(status).encode())


def test_check(client):
    assert check(client) == SERVING
    set_health(client, good=True, bad=False)
    assert (check(client, "good"), check(client, "bad")) == (SERVING, NOT_SERVING)


def test_check_of_an_unknown_service(client):
    with pytest.raises(grpc.RpcError) as caught:
        check(client, "nobody")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == "Unknown service: nobody"


def test_malformed_message(client):
    with pytest.raises(grpc.RpcError) as caught:
        client.unary("/grpc.health.v1.Health/Check", b"\xff\xff\xff")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "HealthCheckRequest" in caught.value.details()


def test_watch(client, request):
    name = request.node.name
    stub = health_pb2_grpc.HealthStub(client.channel)
    states = stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=60)
    assert next(states).status == UNKNOWN
    set_health(client, **{name: False})
    assert next(states).status == NOT_SERVING
    set_health(client, **{name: False})
    set_health(client, **{name: True})
    assert next(states).status == SERVING
    states.cancel()


def test_reflection_with_grpcios_client(client):
    database = ProtoReflectionDescriptorDatabase(client.channel)
    services = set(database.get_services())
    assert {"test.Echo", "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"} <= services
    pool = DescriptorPool(database)
    method = pool.FindServiceByName("grpc.health.v1.Health").methods_by_name["Check"]
    assert [field.name for field in method.input_type.fields] == ["service"]
    request = pool.FindMessageTypeByName("org.pytorch.serve.grpc.inference.PredictionsRequest")
    assert request.fields_by_name["model_name"].number == 1


def ask(client, version, **question):
    stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    if version == "v1":
        call = client.channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
    else:
        call = stub.ServerReflectionInfo
    (answer,) = call(iter([reflection_pb2.ServerReflectionRequest(**question)]), timeout=60)
    return answer


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_questions(client, version):
    listed = ask(client, version, list_services="")
    assert "test.Echo" in [service.name for service in listed.list_services_response.service]
    by_name = ask(client, version, file_by_filename="inference.proto")
    assert len(by_name.file_descriptor_response.file_descriptor_proto) > 1
    by_symbol = ask(client, version, file_containing_symbol="grpc.health.v1.Health.Watch")
    assert len(by_symbol.file_descriptor_response.file_descriptor_proto) == 1
    missing = ask(client, version, file_containing_symbol="no.Such")
    assert missing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    assert missing.original_request.file_containing_symbol == "no.Such"
    assert ask(client, version).error_response.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    name = "grpc.health.v1.HealthCheckRequest"
    numbers = ask(client, version, all_extension_numbers_of_type=name).all_extension_numbers_response
    assert (numbers.base_type_name, list(numbers.extension_number)) == (name, [])
    extension = reflection_pb2.ExtensionRequest(containing_type=name, extension_number=1000)
    assert ask(client, version, file_containing_extension=extension).error_response.error_code == 5
