"""The descriptor pool that our messages live in, and what the generated modules have of it.

protobuf's default pool holds each file and message name once per process: two generated modules of one package, made
from files that differ a little, can't both be imported there. Ours use a pool of their own.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message

POOL = descriptor_pool.DescriptorPool()
#: The kinds of calls, by whether the client and whether the server sends a stream.
_ARITY = {(False, False): "unary_unary", (False, True): "unary_stream", (True, False): "stream_unary"}


def register(serialized: bytes) -> FileDescriptor:
    """Adds a serialised FileDescriptorProto (again: no error); the files it imports must have been added before."""
    POOL.AddSerializedFile(serialized)
    return POOL.FindFileByName(FileDescriptorProto.FromString(serialized).name)


def names(file: FileDescriptor) -> dict[str, Any]:
    """What a module made of `file` has: its enums with their values, and the classes of its messages."""
    found: dict[str, Any] = {}
    for enum in file.enum_types_by_name.values():
        found |= {enum.name: EnumTypeWrapper(enum), **{value.name: value.number for value in enum.values}}
    messages = file.message_types_by_name.items()
    return found | {name: message_factory.GetMessageClass(message) for name, message in messages}


def serialize(message: Message) -> bytes:
    """Request serialiser of the stubs: takes messages made with any module."""
    return message.SerializeToString()


def stub(file: FileDescriptor, name: str) -> Any:
    """The class of a service's client stubs, for `grpc` and `grpc.aio` channels: NAME_PATH of each method, and its call
    under its name."""
    service = file.services_by_name[name]
    paths = {method.name: f"/{service.full_name}/{method.name}" for method in service.methods}

    def begin(self: Any, channel: Any) -> None:
        for method in service.methods:
            make = getattr(channel, _ARITY.get((method.client_streaming, method.server_streaming), "stream_stream"))
            answer = message_factory.GetMessageClass(method.output_type).FromString
            call = make(paths[method.name], request_serializer=serialize, response_deserializer=answer)
            setattr(self, method.name, call)

    return type(f"{name}Stub", (), {"__init__": begin} | {f"{one}_PATH": path for one, path in paths.items()})
