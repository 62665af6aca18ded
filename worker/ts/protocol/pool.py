"""The descriptor pool that our messages live in.

protobuf's default pool holds each file and message name once per process: two generated modules of one package, made
from files that differ a little, can't both be imported there. Ours use a pool of their own.
"""

from __future__ import annotations

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import Message

POOL = descriptor_pool.DescriptorPool()


def register(serialized: bytes) -> FileDescriptor:
    """Adds a serialised FileDescriptorProto (again: no error); the files it imports must have been added before."""
    POOL.AddSerializedFile(serialized)
    return POOL.FindFileByName(FileDescriptorProto.FromString(serialized).name)


def message_class(file: FileDescriptor, name: str) -> type[Message]:
    """The class of the top-level message `name` of `file`."""
    return message_factory.GetMessageClass(file.message_types_by_name[name])


def serialize(message: Message) -> bytes:
    """Request serialiser of the stubs: takes messages made with any module."""
    return message.SerializeToString()
