"""What the inference address answers beside TorchServe's APIs, for its description: the Open Inference Protocol with
Triton's extensions, OpenAI's API, and what KServe's servers have."""

from __future__ import annotations

from collections.abc import Iterator

from ts_frontend.services.http_description import Operation

_JSON, _TENSORS = ("application/json",), ("application/json", "application/octet-stream")
_MODEL, _VERSION = "/v2/models/{model_name}", "/v2/models/{model_name}/versions/{model_version}"
_REGION = "sharedmemory/region/{region_name}"


def _of_models() -> Iterator[Operation]:
    """Each for a model, and for a version of it."""
    for rest, method, summary, takes in (
        ("", "get", "A model's versions, inputs and outputs", ()),
        ("/ready", "get", "Whether a model is ready", ()),
        ("/config", "get", "A model's configuration, in Triton's words", ()),
        ("/stats", "get", "What a model's requests took", ()),
        ("/infer", "post", "Predict from tensors", _TENSORS),
        ("/infer_stream", "post", "The same, with an event for each answer", _TENSORS),
        ("/generate", "post", "Text in, text out", _JSON),
        ("/generate_stream", "post", "The same, with an event for each answer", _JSON),
    ):
        for path in (_MODEL, _VERSION):
            if path + rest != f"{_MODEL}/infer":  # which TorchServe has
                yield Operation(path + rest, method, summary, (), "", takes)


def _settings(path: str, what: str) -> tuple[Operation, Operation]:
    return (
        Operation(path, "get", f"{what}; with a management key"),
        Operation(path, "post", "The same, changed; with a management key", (), "", _JSON),
    )


def _shared_memory(kind: str) -> tuple[Operation, ...]:
    return (
        Operation(f"/v2/{kind}sharedmemory/status", "get", f"Regions of {kind} shared memory"),
        Operation(f"/v2/{kind}{_REGION}/status", "get", "One of them"),
        Operation(f"/v2/{kind}{_REGION}/register", "post", "Let tensors lie there", (), "", _JSON),
        Operation(f"/v2/{kind}{_REGION}/unregister", "post", "No longer"),
        Operation(f"/v2/{kind}sharedmemory/unregister", "post", "None of them any longer"),
    )


OPEN_INFERENCE = (
    Operation("/v2", "get", "The server's name, version and extensions"),
    Operation("/v2/health/live", "get", "Whether the server runs"),
    Operation("/v2/health/ready", "get", "Whether the server can serve"),
    Operation("/v2/models", "get", "The names of the models"),
    Operation("/v2/models/stats", "get", "What the requests of all models took"),
    *_of_models(),
    Operation("/v2/repository/index", "post", "The models that are there", (), "", _JSON),
    Operation("/v2/repository/models/{model_name}/load", "post", "Load a model; with a management key", (), "", _JSON),
    Operation("/v2/repository/models/{model_name}/unload", "post", "Unload it; with a management key"),
    *_settings("/v2/logging", "What is logged"),
    *_settings("/v2/trace/setting", "What is traced"),
    *_settings(f"{_MODEL}/trace/setting", "What is traced of a model"),
    *_shared_memory("system"),
    *_shared_memory("cuda"),
)
OPENAI = (
    Operation("/v1/models", "get", "The names of the models, for OpenAI's and KServe's clients"),
    Operation("/v1/models/{model_name}", "get", "One of them, and whether it is ready", (), "ready_v1"),
    Operation("/v1/completions", "post", "Complete a text, as OpenAI's API does", (), "", _JSON),
    Operation("/v1/chat/completions", "post", "The same for a chat", (), "", _JSON),
)
#: With `kserve_mode`.
KSERVE = (Operation("/", "get", "Whether the server runs, KServe"),)
