# Generated from protos/grpc/reflection/v1/reflection.proto by ts_scripts/gen_protos.py: change that file, not this one.
from collections.abc import Iterable

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer, RepeatedScalarFieldContainer
from google.protobuf.message import Message

DESCRIPTOR: FileDescriptor

class ServerReflectionRequest(Message):
    host: str
    file_by_filename: str
    file_containing_symbol: str
    file_containing_extension: ExtensionRequest
    all_extension_numbers_of_type: str
    list_services: str
    def __init__(
        self,
        *,
        host: str | None = ...,
        file_by_filename: str | None = ...,
        file_containing_symbol: str | None = ...,
        file_containing_extension: ExtensionRequest | None = ...,
        all_extension_numbers_of_type: str | None = ...,
        list_services: str | None = ...,
    ) -> None: ...

class ExtensionRequest(Message):
    containing_type: str
    extension_number: int
    def __init__(
        self,
        *,
        containing_type: str | None = ...,
        extension_number: int | None = ...,
    ) -> None: ...

class ServerReflectionResponse(Message):
    valid_host: str
    original_request: ServerReflectionRequest
    file_descriptor_response: FileDescriptorResponse
    all_extension_numbers_response: ExtensionNumberResponse
    list_services_response: ListServiceResponse
    error_response: ErrorResponse
    def __init__(
        self,
        *,
        valid_host: str | None = ...,
        original_request: ServerReflectionRequest | None = ...,
        file_descriptor_response: FileDescriptorResponse | None = ...,
        all_extension_numbers_response: ExtensionNumberResponse | None = ...,
        list_services_response: ListServiceResponse | None = ...,
        error_response: ErrorResponse | None = ...,
    ) -> None: ...

class FileDescriptorResponse(Message):
    file_descriptor_proto: RepeatedScalarFieldContainer[bytes]
    def __init__(
        self,
        *,
        file_descriptor_proto: Iterable[bytes] | None = ...,
    ) -> None: ...

class ExtensionNumberResponse(Message):
    base_type_name: str
    extension_number: RepeatedScalarFieldContainer[int]
    def __init__(
        self,
        *,
        base_type_name: str | None = ...,
        extension_number: Iterable[int] | None = ...,
    ) -> None: ...

class ListServiceResponse(Message):
    service: RepeatedCompositeFieldContainer[ServiceResponse]
    def __init__(
        self,
        *,
        service: Iterable[ServiceResponse] | None = ...,
    ) -> None: ...

class ServiceResponse(Message):
    name: str
    def __init__(
        self,
        *,
        name: str | None = ...,
    ) -> None: ...

class ErrorResponse(Message):
    error_code: int
    error_message: str
    def __init__(
        self,
        *,
        error_code: int | None = ...,
        error_message: str | None = ...,
    ) -> None: ...
