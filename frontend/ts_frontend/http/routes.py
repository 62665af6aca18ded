"""The table of all HTTP routes: the function, the effect, the keys and the description of each.

A new route is a row here and its function. When several rows fit a path, a literal segment wins over a name, then the
first row wins.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ts_frontend.config.keys import KeyKind
from ts_frontend.config.parameters import REGISTER, REGISTER_WORKFLOW, SCALE
from ts_frontend.http.console import CONSOLE_PATH, HttpConsole, HttpPages
from ts_frontend.http.errors import ErrorDialect
from ts_frontend.http.management import HttpManagement, HttpRollouts, HttpWorkflows
from ts_frontend.http.open_inference import HttpKServe, HttpOpenInference, HttpTriton
from ts_frontend.http.openai import HttpOpenAI
from ts_frontend.http.openapi import HttpDescription, HttpDocs
from ts_frontend.http.platforms import HttpAzureML, HttpMLflow, HttpPlatforms
from ts_frontend.http.routing import (
    ANY_KEY,
    GRPC_METRICS,
    HTTP_INFERENCE,
    HTTP_MANAGEMENT,
    HTTP_METRICS,
    Effect,
    Function,
    HttpKeys,
    Row,
    Switch,
)
from ts_frontend.http.torchserve import HttpInference, HttpMetrics

OPEN, READS, RUNS, CHANGES = Effect
_OIP, _OPENAI = ErrorDialect.OPEN_INFERENCE, ErrorDialect.OPENAI
_JSON, _TENSORS = ("application/json",), ("application/json", "application/octet-stream")
_INPUT = ("application/json", "application/octet-stream", "multipart/form-data")
_DESCRIPTION = "The OpenAPI description of this address"
_PAGE = ("limit", "next_page_token")
_REGISTER, _REGISTER_WORKFLOW, _SCALE = (
    tuple(row.name for row in table if row.http) for table in (REGISTER, REGISTER_WORKFLOW, SCALE)
)
_MODEL, _VERSION = "/models/{model_name}", "/models/{model_name}/{model_version}"
_V1_MODEL = "/v1/models/{model_name}"
_V2_MODEL, _V2_VERSION = "/v2/models/{model_name}", "/v2/models/{model_name}/versions/{model_version}"

_everywhere = partial(Row, on=(HTTP_INFERENCE, HTTP_MANAGEMENT, HTTP_METRICS), keys=())
_described = partial(_everywhere, keys=ANY_KEY)
_docs = partial(_everywhere, when=Switch.DOCS)
_inference = partial(Row, on=(HTTP_INFERENCE,), keys=(KeyKind.INFERENCE,))
_predict = partial(_inference, body=_INPUT)
_kserve = partial(_inference, when=Switch.KSERVE)
_openai = partial(_inference, dialect=_OPENAI)
_tensors = partial(_inference, dialect=_OIP)
_managing = partial(_tensors, keys=(KeyKind.MANAGEMENT,))
_management = partial(Row, on=(HTTP_MANAGEMENT,), keys=(KeyKind.MANAGEMENT,))
_hosted = partial(_inference, keys=(KeyKind.MANAGEMENT,), when=Switch.SAGEMAKER)
_azureml = partial(_inference, when=Switch.AZUREML, dialect=ErrorDialect.AZUREML)
_mlflow = partial(_inference, when=Switch.MLFLOW, dialect=ErrorDialect.MLFLOW)
_console = partial(_management, when=Switch.CONSOLE)


def _of_models() -> Iterator[Row]:
    """Returns the rows of an Open Inference Protocol call for a model and for a version."""
    tensors, run = HttpOpenInference, partial(_tensors, json=True)
    for path in (_V2_MODEL, _V2_VERSION):
        yield _tensors("GET", path, READS, tensors.metadata, "A model's versions, inputs and outputs")
        yield _tensors("GET", f"{path}/ready", OPEN, tensors.ready, "Whether a model is ready", keys=())
        yield _tensors("GET", f"{path}/config", READS, tensors.config, "A model's configuration, in Triton's format")
        yield _tensors("GET", f"{path}/stats", READS, HttpTriton.statistics, "The request statistics of a model")
        if path == _V2_VERSION:  # the path without a version is TorchServe's, too
            yield run("POST", f"{path}/infer", RUNS, tensors.infer, "Predict from tensors", body=_TENSORS)
        for word, function, summary, body in (
            ("infer_stream", tensors.infer_stream, "Predict from tensors, with an event for each answer", _TENSORS),
            ("generate", tensors.generate, "Generate a text", _JSON),
            ("generate_stream", tensors.generate_stream, "Generate a text, with an event for each piece", _JSON),
        ):
            yield run("POST", f"{path}/{word}", RUNS, function, summary, body=body)


def _repository() -> Iterator[Row]:
    """Rows for the repository, also with the repository name that Triton's clients may send."""
    tensors, change = HttpOpenInference, partial(_managing, json=True)
    load, unload = "Load a model; with a management key", "Unload a model; with a management key"
    for path, described in (("/v2/repository", True), ("/v2/repository/{repository_name}", False)):
        index, model = f"{path}/index", f"{path}/models/{{model_name}}"
        yield _tensors("POST", index, READS, tensors.index, "The models of the repository" * described, body=_JSON)
        yield change("POST", f"{model}/load", CHANGES, tensors.load, load * described, body=_JSON)
        yield change("POST", f"{model}/unload", CHANGES, tensors.unload, unload * described)


def _setting(path: str, what: str, function: Function) -> Iterator[Row]:
    changed = "The same, changed; with a management key"
    yield _managing("GET", path, READS, function, f"{what}; with a management key")
    yield _managing("POST", path, CHANGES, function, changed, body=_JSON, json=True)


def _shared_memory(kind: str, status: Function, register: Function, unregister: Function) -> Iterator[Row]:
    path, change = f"/v2/{kind}sharedmemory", partial(_tensors, json=True)
    region = f"{path}/region/{{region_name}}"
    yield _tensors("GET", f"{path}/status", READS, status, f"Regions of {kind} shared memory")
    yield _tensors("GET", f"{region}/status", READS, status, "A region of {kind} shared memory")
    yield change("POST", f"{region}/register", CHANGES, register, "Register a region of shared memory", body=_JSON)
    yield change("POST", f"{region}/unregister", CHANGES, unregister, "No longer")
    yield change("POST", f"{path}/unregister", CHANGES, unregister, "Unregister all regions")


def _playground() -> Iterator[Row]:
    """The playground's calls. Inference listeners are other origins than the console's, so that their calls are also
    served at the console's address, with the management key: its owner could register a model with the same effect."""
    predict, tensors = f"{CONSOLE_PATH}/predictions/{{model_name}}/{{model_version}}", HttpOpenInference
    yield _console("POST", predict, RUNS, HttpInference.predictions, "Predict, from the console", body=_INPUT)
    run = partial(_console, dialect=_OIP, json=True)
    for word, function, body in (
        ("infer", tensors.infer, _TENSORS),
        ("infer_stream", tensors.infer_stream, _TENSORS),
        ("generate", tensors.generate, _JSON),
        ("generate_stream", tensors.generate_stream, _JSON),
    ):
        path, summary = f"{CONSOLE_PATH}{_V2_VERSION}/{word}", f"/v2/…/{word}, from the console"
        yield run("POST", path, RUNS, function, summary, body=body)
    chat = partial(_console, dialect=_OPENAI, json=True, body=_JSON)
    yield chat("POST", f"{predict}/v1/chat/completions", RUNS, HttpOpenAI.chat_completion, "Chat, from the console")


def _adapters() -> Iterator[Row]:
    """Adapters of language models; on SageMaker also at the address for inference, for the only model."""
    listed, load, unload = "The adapters of a model", "Load an adapter (LoRA)", "Unload an adapter"
    for path in (_MODEL, _VERSION):
        place, one = f"{path}/adapters", f"{path}/adapters/{{adapter_name}}"
        yield _management("GET", place, READS, HttpManagement.list_adapters, listed)
        yield _management("POST", place, CHANGES, HttpManagement.load_adapter, load, query=("name", "src"), body=_JSON)
        yield _management("DELETE", one, CHANGES, HttpManagement.unload_adapter, unload)
    yield _hosted("GET", "/adapters", READS, HttpPlatforms.list_adapters, listed)
    yield _hosted("POST", "/adapters", CHANGES, HttpPlatforms.load_adapter, load, body=_JSON)
    yield _hosted("DELETE", "/adapters/{adapter_name}", CHANGES, HttpPlatforms.unload_adapter, unload)


def _rollouts() -> Iterator[Row]:
    place = f"{_MODEL}/rollout"
    yield _management("GET", place, READS, HttpRollouts.status, "The rollout of a new version")
    yield _management("PUT", place, CHANGES, HttpRollouts.start, "Roll out a new version", body=_JSON)
    act = "Promote, roll back, pause or resume a rollout"
    yield _management("POST", f"{place}/{{action}}", CHANGES, HttpRollouts.act, act)


def _of_openai(prefix: str, described: bool = True) -> Iterator[Row]:
    """OpenAI's calls; KServe's servers have them below /openai/v1. Engines know more calls, also Anthropic's."""
    listed = "The names of the models, for OpenAI's and KServe's clients"
    ready = ("A model, and whether it is ready", "ready_v1") if described else ()
    yield _openai("GET", f"{prefix}/models", READS, HttpOpenAI.list_models, listed * described)
    yield _openai("GET", f"{prefix}/models/{{model_name}}", OPEN, HttpOpenAI.retrieve, *ready, keys=())
    run = partial(_openai, body=_JSON, json=True)
    for word, function, summary in (
        ("completions", HttpOpenAI.completion, "Complete a text, as OpenAI's API does"),
        ("chat/completions", HttpOpenAI.chat_completion, "Complete a chat, as OpenAI's API does"),
        ("embeddings", HttpOpenAI.other, "Embed texts, as OpenAI's API does; for models with an engine"),
        *(
            (word, HttpOpenAI.other, "")
            for word in ("responses", "messages", "messages/count_tokens", "rerank", "score")
        ),
    ):
        yield run("POST", f"{prefix}/{word}", RUNS, function, summary * described)


ROUTES: tuple[Row, ...] = (
    # Descriptions
    _everywhere("OPTIONS", "/", OPEN, HttpDescription.of_server, _DESCRIPTION, "apiDescription"),
    _everywhere(
        "*", "/api-description", OPEN, HttpDescription.of_server, _DESCRIPTION, "api-description", described_as="get"
    ),
    _docs("GET", "/docs", READS, HttpDocs.page),
    _docs("GET", "/openapi.json", READS, HttpDocs.openapi),
    _docs("GET", "/v2/docs", READS, HttpDocs.page, dialect=_OIP),
    _docs("GET", "/v2/docs/dataplane.json", READS, HttpDocs.openapi, dialect=_OIP),
    _inference(
        *("OPTIONS", "/predictions/{model_name}", READS, HttpDescription.of_model),
        *("The description of a model", "describePredictions"),
        keys=ANY_KEY,
    ),
    _management(
        *("OPTIONS", _MODEL, READS, HttpDescription.of_model, "The description of a model", "describeManagement"),
        keys=ANY_KEY,
    ),
    _described("OPTIONS", "/predictions/{model_name}/{rest*}", READS, HttpDescription.of_model),
    _described("OPTIONS", "/explanations/{model_name}/{rest*}", READS, HttpDescription.of_model),
    _described("OPTIONS", f"{_MODEL}/{{rest*}}", READS, HttpDescription.of_model),
    _described("OPTIONS", f"{_V1_MODEL}/{{rest*}}", READS, HttpDescription.of_model),
    _described("OPTIONS", f"{_V2_MODEL}/{{rest*}}", READS, HttpDescription.of_model, dialect=_OIP),
    # TorchServe's inference; handlers take any body, by any method
    _inference(
        "*", "/ping", OPEN, HttpInference.ping, "Whether the server is healthy", "ping", keys=(), described_as="get"
    ),
    _predict(
        *("*", "/predictions/{model_name}", RUNS, HttpInference.predictions),
        *("Predict with the default version", "predictions"),
    ),
    _predict(
        *("*", "/predictions/{model_name}/{model_version}/{url_path*}", RUNS, HttpInference.predictions),
        *("Predict with a version", "version_predictions"),
    ),
    _predict(
        *("*", "/explanations/{model_name}", RUNS, HttpInference.explanations),
        *("Explain with the default version", "explanations"),
    ),
    _predict(
        *("*", "/explanations/{model_name}/{model_version}/{url_path*}", RUNS, HttpInference.explanations),
        *("Explain with a version", "version_explanations"),
    ),
    # KServe's protocols; without `kserve_mode`, missing models are refused in TorchServe's form
    _kserve("*", f"{_V1_MODEL}:predict", RUNS, HttpKServe.predict, dialect=_OIP),
    _kserve("*", f"{_V1_MODEL}:explain", RUNS, HttpKServe.explain, dialect=_OIP),
    _predict("*", f"{_V1_MODEL}:predict", RUNS, HttpKServe.predict, "Predict, KServe v1", "predict_v1"),
    _predict("*", f"{_V1_MODEL}:explain", RUNS, HttpKServe.explain, "Explain, KServe v1", "explain_v1"),
    _predict(  # handlers get tensors: the body must be JSON, as for a version
        *("*", f"{_V2_MODEL}/infer", RUNS, HttpOpenInference.infer, "Predict, KServe v2", "infer_v2"),
        dialect=_OIP,
        json=True,
    ),
    _predict(
        *("*", f"{_V2_MODEL}/explain", RUNS, HttpInference.explain_v2, "Explain, KServe v2", "explain_v2"),
        dialect=_OIP,
        yields=True,
    ),
    # Azure ML's and MLflow's
    _azureml("GET", "/", OPEN, HttpAzureML.healthy, "Whether the server is healthy", keys=()),
    _azureml("GET POST OPTIONS", "/score", RUNS, HttpAzureML.score),
    _azureml("GET", "/swagger.json", READS, HttpAzureML.swagger, "The description of the model's script"),
    _mlflow("POST", "/invocations", RUNS, HttpInference.invocations),
    _mlflow("GET", "/health", OPEN, HttpInference.ping, "Whether the server is healthy", keys=()),
    _mlflow("GET", "/version", OPEN, HttpMLflow.version, "MLflow's version", keys=()),
    # SageMaker's, MMS's, and workflows
    _inference("*", "/invocations", RUNS, HttpPlatforms.invocations, when=Switch.SAGEMAKER),
    _predict(
        *("*", "/invocations", RUNS, HttpInference.invocations),
        *("Predict, SageMaker", "invocations", ("model_name",)),
        yields=True,
    ),
    _inference("*", f"{_MODEL}/invoke", RUNS, HttpPlatforms.invoke, when=Switch.SAGEMAKER),
    _predict(
        *("*", f"{_MODEL}/invoke", RUNS, HttpInference.with_query),
        *("Predict with a model of several, SageMaker", "invoke"),
    ),
    _predict(
        *("*", "/{model_name}/predict", RUNS, HttpInference.with_query, "Predict, Multi Model Server", "predict"),
        yields=True,
    ),
    _predict(
        *("*", "/{model_name}/{model_version}/predict", RUNS, HttpInference.with_query),
        *("Predict with a version, Multi Model Server", "version_predict"),
        yields=True,
    ),
    _predict(
        "*", "/wfpredict/{workflow_name}/{rest*}", RUNS, HttpWorkflows.predict, "Predict with a workflow", "wfpredict"
    ),
    # The Open Inference Protocol and Triton's
    _tensors("GET", "/v2", READS, HttpOpenInference.server_metadata, "The server's name, version and extensions"),
    _tensors("GET", "/v2/health/live", OPEN, HttpOpenInference.live, "Whether the server runs", keys=()),
    _tensors("GET", "/v2/health/ready", OPEN, HttpOpenInference.server_ready, "Whether the server can serve", keys=()),
    _tensors("GET", "/v2/models", READS, HttpOpenInference.list_models, "The names of the models"),
    _tensors("GET", "/v2/models/stats", READS, HttpTriton.statistics, "The request statistics of all models"),
    *_of_models(),
    *_repository(),
    *_setting("/v2/logging", "The log settings", HttpTriton.logging),
    *_setting("/v2/trace/setting", "The trace settings", HttpTriton.trace_setting),
    *_setting(f"{_V2_MODEL}/trace/setting", "The trace settings of a model", HttpTriton.trace_setting),
    *_shared_memory("system", HttpTriton.regions, HttpTriton.register_region, HttpTriton.unregister_regions),
    *_shared_memory(
        "cuda", HttpTriton.cuda_regions, HttpTriton.register_cuda_region, HttpTriton.unregister_cuda_regions
    ),
    # KServe's own servers', and OpenAI's
    _kserve("GET", "/", READS, HttpKServe.alive, "Whether the server runs, KServe"),
    _kserve("GET", "/v1/models", READS, HttpOpenInference.list_models, dialect=_OPENAI),
    _kserve("GET", _V1_MODEL, OPEN, HttpOpenInference.ready, dialect=_OIP, keys=()),
    *_of_openai("/v1"),
    *_of_openai("/openai/v1", described=False),
    *(
        _openai("POST", f"/{word}", RUNS, HttpOpenAI.other, body=_JSON, json=True, yields=True)
        for word in ("rerank", "score", "classify", "pooling", "tokenize", "detokenize")
    ),
    # Management
    _management("GET", "/models", READS, HttpManagement.list_models, "List models", "listModels", _PAGE),
    _management(
        *("POST", "/models", CHANGES, HttpManagement.register, "Register a model", "registerModel", _REGISTER),
        body=_JSON,
    ),
    _management(
        *("GET", _MODEL, READS, HttpManagement.describe),
        *("Describe the default version", "describeModel", ("customized",)),
    ),
    _management(
        *("PUT", _MODEL, CHANGES, HttpManagement.scale),
        *("Scale the default version's workers", "setAutoScale", _SCALE),
    ),
    _management(
        "DELETE", _MODEL, CHANGES, HttpManagement.unregister, "Unregister the default version", "unregisterModel"
    ),
    _management(
        *("GET", _VERSION, READS, HttpManagement.describe),
        *("Describe a version, or `all`", "version_describeModel", ("customized",)),
    ),
    _management(
        *("PUT", _VERSION, CHANGES, HttpManagement.scale),
        *("Scale a version's workers", "version_setAutoScale", _SCALE),
    ),
    _management(
        "DELETE", _VERSION, CHANGES, HttpManagement.unregister, "Unregister a version", "version_unregisterModel"
    ),
    _management(
        *("PUT", f"{_VERSION}/set-default", CHANGES, HttpManagement.set_default),
        *("Make a version the default", "setDefault"),
    ),
    *_adapters(),
    *_rollouts(),
    _management(
        "GET", _V1_MODEL, OPEN, HttpManagement.ready, "Whether a model is ready, KServe v1", "ready_v1", keys=()
    ),
    _management("GET", "/workflows", READS, HttpWorkflows.list_workflows, "List workflows", "listWorkflows", _PAGE),
    _management(
        *("POST", "/workflows", CHANGES, HttpWorkflows.register),
        *("Register a workflow", "registerWorkflow", _REGISTER_WORKFLOW),
    ),
    _management(
        "GET", "/workflows/{workflow_name}", READS, HttpWorkflows.describe, "Describe a workflow", "describeWorkflow"
    ),
    _management(
        *("DELETE", "/workflows/{workflow_name}", CHANGES, HttpWorkflows.unregister),
        *("Unregister a workflow", "unregisterWorkflow"),
    ),
    _management("*", "/token", CHANGES, HttpKeys.token, keys=(KeyKind.API,), when=Switch.KEYS, yields=True),
    # The console; `/` of inference with `kserve_mode` is KServe's
    _everywhere("GET", "/", READS, HttpPages.root, when=Switch.CONSOLE),
    _everywhere("GET", CONSOLE_PATH, READS, HttpPages.page, on=(HTTP_MANAGEMENT,), when=Switch.CONSOLE),
    _everywhere("GET", f"{CONSOLE_PATH}/{{file}}", READS, HttpPages.file, when=Switch.PAGES),
    _console(
        *("GET", f"{CONSOLE_PATH}/events", READS, HttpConsole.events),
        *("Models, workers and their numbers as server-sent events", "consoleEvents"),
    ),
    _console(
        "GET", f"{CONSOLE_PATH}/store", READS, HttpConsole.stored, "The models of the model store", "storedModels"
    ),
    _console(
        *("GET", f"{_VERSION}/workers/{{worker_id}}/log", READS, HttpConsole.worker_log),
        *("The last lines that a worker printed", "workerLog"),
    ),
    *_playground(),
    # Metrics
    Row(
        *("*", "/metrics", READS, HttpMetrics.read, "Metrics in Prometheus' format", "metrics", ("name[]",)),
        on=(HTTP_METRICS, GRPC_METRICS),
        keys=(),
        described_as="get",
    ),
)


def with_routes(health_route: str | None = None, predict_route: str | None = None) -> tuple[Row, ...]:
    """The table with the two paths that Vertex AI chooses (AIP_HEALTH_ROUTE, AIP_PREDICT_ROUTE)."""
    more = []
    if health_route:
        more.append(_inference("*", health_route, OPEN, HttpInference.ping, keys=()))
    if predict_route:
        more.append(_predict("*", predict_route, RUNS, HttpPlatforms.predict, "Predict, Vertex AI", "predict_vertex"))
    return (*more, *ROUTES)
