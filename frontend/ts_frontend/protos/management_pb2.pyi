# Generated from protos/management.proto by ts_scripts/gen_protos.py: change that file, not this one.

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message

DESCRIPTOR: FileDescriptor

class ManagementResponse(Message):
    msg: str
    def __init__(
        self,
        *,
        msg: str | None = ...,
    ) -> None: ...

class DescribeModelRequest(Message):
    model_name: str
    model_version: str
    customized: bool
    def __init__(
        self,
        *,
        model_name: str | None = ...,
        model_version: str | None = ...,
        customized: bool | None = ...,
    ) -> None: ...

class ListModelsRequest(Message):
    limit: int
    next_page_token: int
    def __init__(
        self,
        *,
        limit: int | None = ...,
        next_page_token: int | None = ...,
    ) -> None: ...

class RegisterModelRequest(Message):
    batch_size: int
    handler: str
    initial_workers: int
    max_batch_delay: int
    model_name: str
    response_timeout: int
    runtime: str
    synchronous: bool
    url: str
    s3_sse_kms: bool
    startup_timeout: int
    def __init__(
        self,
        *,
        batch_size: int | None = ...,
        handler: str | None = ...,
        initial_workers: int | None = ...,
        max_batch_delay: int | None = ...,
        model_name: str | None = ...,
        response_timeout: int | None = ...,
        runtime: str | None = ...,
        synchronous: bool | None = ...,
        url: str | None = ...,
        s3_sse_kms: bool | None = ...,
        startup_timeout: int | None = ...,
    ) -> None: ...

class ScaleWorkerRequest(Message):
    model_name: str
    model_version: str
    max_worker: int
    min_worker: int
    number_gpu: int
    synchronous: bool
    timeout: int
    def __init__(
        self,
        *,
        model_name: str | None = ...,
        model_version: str | None = ...,
        max_worker: int | None = ...,
        min_worker: int | None = ...,
        number_gpu: int | None = ...,
        synchronous: bool | None = ...,
        timeout: int | None = ...,
    ) -> None: ...

class SetDefaultRequest(Message):
    model_name: str
    model_version: str
    def __init__(
        self,
        *,
        model_name: str | None = ...,
        model_version: str | None = ...,
    ) -> None: ...

class UnregisterModelRequest(Message):
    model_name: str
    model_version: str
    def __init__(
        self,
        *,
        model_name: str | None = ...,
        model_version: str | None = ...,
    ) -> None: ...
