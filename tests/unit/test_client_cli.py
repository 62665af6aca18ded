"""The subcommands against a small gRPC server that is all in this file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from google.protobuf import empty_pb2

from support import GUARD_S
from ts_frontend.cli.client import WorkersFailed, wait_for_workers
from ts_frontend.cli.commands import _shown, commands
from ts_frontend.protos import inference_pb2 as inference
from ts_frontend.protos import management_pb2 as management
from ts_frontend.protos.google_rpc_status_pb2 import Status

FAILURE = {"workerId": "9001", "time": "now", "reason": "exit code 3", "failuresInARow": 2, "lastLines": ["Oh no"]}


def described(name: str = "m", version: str = "1.0", least: int = 1, ready: int = 1, **more: Any) -> dict[str, Any]:
    workers = [
        {"id": f"900{n}", "status": "READY", "pid": 7, "memoryUsage": 3 << 20, "gpuUsage": "N/A", "startTime": "t"}
        for n in range(ready)
    ]
    queue = {"remainingCapacity": 100, "pendingRequests": 4}
    facts = {"modelUrl": f"{name}.mar", "minWorkers": least, "batchSize": 8, "useVenv": False, "deviceIds": [0]}
    return {"modelName": name, "modelVersion": version, **facts, "workers": workers, "jobQueueStatus": queue, **more}


class SmallServer:
    """Answers as TorchServe's APIs do. Workers come up one a describe call; `failing` ones never do."""

    def __init__(self) -> None:
        self.health = "Healthy"
        self.models: dict[str, dict[str, Any]] = {}
        self.failing = False
        self.least = 0
        self.seen: list[Any] = []
        self.cancelled = False
        self.more: dict[str, Any] = {}

    def Ping(self, request: Any, context: Any) -> Any:
        return inference.TorchServeHealthResponse(health=json.dumps({"status": self.health}))

    def Predictions(self, request: Any, context: Any) -> Any:
        self.seen.append(request)
        self.find(request, context)
        if request.input.get("data") == b"binary":
            return inference.PredictionResponse(prediction=b"\xff")
        if request.input.get("data") == b"raise, explained":
            status = Status(code=13, message="Prediction failed: ValueError: q (h.py, line 4, in handle)")
            value = b"\x0a\x03r-7"  # google.rpc.RequestInfo's request_id
            status.details.add(type_url="type.googleapis.com/google.rpc.RequestInfo", value=value)
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
            context.abort(grpc.StatusCode.INTERNAL, status.message)
        if request.input.get("data") == b"raise":
            context.abort(grpc.StatusCode.UNAVAILABLE, "Prediction failed")
        return inference.PredictionResponse(prediction=b"|".join(request.input[key] for key in sorted(request.input)))

    def StreamPredictions(self, request: Any, context: Any) -> Iterator[Any]:
        for number in range(3):
            yield inference.PredictionResponse(prediction=b'{"n": %d}\n' % number)
        for piece in (b"5 ", b"null") if request.input["data"] == b"text" else ():
            yield inference.PredictionResponse(prediction=piece)
        if request.input["data"] == b"raise":
            context.abort(grpc.StatusCode.INTERNAL, "Worker died.")

    def find(self, request: Any, context: Any) -> dict[str, Any]:
        if request.model_name not in self.models:
            context.abort(grpc.StatusCode.NOT_FOUND, f"Model not found: {request.model_name}")
        return self.models[request.model_name]

    def RegisterModel(self, request: Any, context: Any) -> Any:
        self.seen.append(request)
        name = request.model_name or request.url.removesuffix(".mar")
        if name in self.models:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, "Model version 1.0 is already registered for model m")
        self.models[name] = described(name, least=self.least, ready=0, **self.more)
        if self.least:
            return management.ManagementResponse(msg="Processing worker updates...")
        return management.ManagementResponse(msg=f'Model "{name}" Version: 1.0 registered with 0 initial workers.')

    def ScaleWorker(self, request: Any, context: Any) -> Any:
        self.seen.append(request)
        self.find(request, context)["minWorkers"] = request.min_worker
        return management.ManagementResponse(msg="Processing worker updates...")

    def DescribeModel(self, request: Any, context: Any) -> Any:
        model = self.find(request, context)
        ready, least = len(model["workers"]), model["minWorkers"]
        if ready != least and self.failing:
            model["lastWorkerFailure"] = FAILURE
        elif ready != least:
            model["workers"] = described(ready=ready + (1 if ready < least else -1))["workers"]
        if request.customized:
            model = {**model, "customizedMetadata": {"labels": 2}}
        return management.ManagementResponse(msg=json.dumps([model]))

    def ListModels(self, request: Any, context: Any) -> Any:
        """One model a page."""
        names = sorted(self.models)
        page: dict[str, Any] = {"models": []}
        for name in names[request.next_page_token : request.next_page_token + 1]:
            page = {"nextPageToken": str(request.next_page_token + 1)}
            page["models"] = [{"modelName": name, "modelUrl": self.models[name]["modelUrl"]}]
        return management.ManagementResponse(msg=json.dumps(page))

    def SetDefault(self, request: Any, context: Any) -> Any:
        return management.ManagementResponse(msg=f"default {request.model_name} {request.model_version}")

    def UnregisterModel(self, request: Any, context: Any) -> Any:
        del self.models[self.find(request, context)["modelName"]]
        return management.ManagementResponse(msg=f'Model "{request.model_name}" unregistered')


def handlers(small: SmallServer, file: Any, pb: Any) -> Iterator[Any]:
    for service in file.services_by_name.values():
        table = {}
        for method in service.methods:
            if not hasattr(small, method.name):
                continue
            make = (
                grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
            )
            kind = getattr(pb, method.input_type.name, empty_pb2.Empty)
            run = getattr(small, method.name)
            table[method.name] = make(run, kind.FromString, lambda message: message.SerializeToString())
        yield grpc.method_handlers_generic_handler(service.full_name, table)


@pytest.fixture
def small() -> Iterator[SmallServer]:
    small = SmallServer()
    small.models["m"] = described()
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads, options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers(tuple(handlers(small, inference.DESCRIPTOR, inference)))
        server.add_generic_rpc_handlers(tuple(handlers(small, management.DESCRIPTOR, management)))
        small.port = server.add_insecure_port("127.0.0.1:0")  # type: ignore[attr-defined]
        server.start()
        yield small
        server.stop(None).wait(GUARD_S)


@pytest.fixture
def run(small: SmallServer) -> Callable[..., Result]:
    port = str(small.port)  # type: ignore[attr-defined]
    env = {"TORCHSERVE_INFERENCE_PORT": port, "TORCHSERVE_MANAGEMENT_PORT": port}
    return lambda *words, **more: CliRunner().invoke(commands, words, env=env, **more)


Run = Callable[..., Result]


def test_ping(run: Run, small: SmallServer) -> None:
    assert (run("ping").output, run("ping").exit_code) == ("Healthy\n", 0)
    small.health = "Unhealthy"
    result = run("ping", "--json")
    assert (json.loads(result.output), result.exit_code) == ({"status": "Unhealthy"}, 1)


def test_ipv6_hosts_are_bracketed() -> None:
    result = CliRunner().invoke(commands, ["ping", "--host", "::1", "--inference-port", "1"])
    assert "No server answers at [::1]:1" in result.stderr


def test_list(run: Run, small: SmallServer) -> None:
    small.models["other"] = described("other", least=2)
    small.models["other"]["workers"] *= 2
    lines = run("list").output.splitlines()
    assert lines[0].split() == ["MODEL", "VERSION", "DEFAULT", "WORKERS", "WAITING", "URL"]
    assert lines[1].split() == ["m", "1.0", "yes", "1", "of", "1", "ready", "4", "m.mar"]
    assert lines[1].index("m.mar") == lines[2].index("other.mar") == lines[0].index("URL")
    listed = json.loads(run("list", "--json").output)["models"]
    assert [(one["modelName"], one["modelVersion"], one["defaultVersion"]) for one in listed] == [
        ("m", "1.0", True),
        ("other", "1.0", True),
    ]
    assert [(len(one["workers"]), one["jobQueueStatus"]["pendingRequests"], one["modelUrl"]) for one in listed] == [
        (1, 4, "m.mar"),
        (2, 4, "other.mar"),
    ], "what the table has, and more"
    small.models.clear()
    assert run("list").output == "No model is registered.\n"


def test_a_description_with_tables_in_it(run: Run, small: SmallServer) -> None:
    """The values of `shareWeights`, `autoscale` and `loadOnDemand` in a description are tables."""
    small.models["m"] = described(shareWeights={"active": False, "reason": "on GPUs"})
    assert "  shareWeights     active: False; reason: on GPUs\n" in run("describe", "m").output


def test_describe(run: Run, small: SmallServer) -> None:
    small.models["m"]["lastWorkerFailure"] = FAILURE
    output = run("describe", "m", "--customized").output
    for part in ("m 1.0", "1 of 1 ready", "3 MiB", "exit code 3", "2 times in a row", "    Oh no", "{'labels': 2}"):
        assert part in output
    assert "useVenv" not in output
    assert json.loads(run("describe", "m", "--json").output)[0]["modelName"] == "m"


ODD = "a\x1b[2J\u202eb\x9b"


def test_an_answer_is_printable_on_a_terminal_and_unchanged_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = f"{ODD}\n\t".encode() + b"\xff"
    assert _shown(answer) == answer
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert _shown(answer) == b"a\\x1b[2J\\u202eb\\x9b\n\t\\xff"


def test_register_without_waiting(run: Run, small: SmallServer) -> None:
    assert run("register", "new.mar", "--workers", "5", "--no-wait").stdout == "new 1.0: 1 of 5 ready\n"


def test_register_an_archive_that_asks_for_workers(run: Run, small: SmallServer) -> None:
    small.least = 2
    result = run("register", "new.mar")
    assert result.stdout == "new 1.0: 2 of 2 ready\n"
    assert len(small.seen) == 1


def test_register_says_what_of_the_models_settings_is_ignored(run: Run, small: SmallServer) -> None:
    small.more = {"warnings": ["batchSize is 0: ignored", "deviceType is 'gpu', and the server has no GPU"]}
    result = run("register", "new.mar")
    assert result.exit_code == 0
    assert "new 1.0: warning: batchSize is 0: ignored\nnew 1.0: warning: deviceType is 'gpu', and the" in result.stderr
    assert "warnings         batchSize is 0: ignored; deviceType is" in run("describe", "new").stdout


def test_register_a_model_that_fails(run: Run, small: SmallServer) -> None:
    small.failing = True
    result = run("register", "new.mar")
    assert result.exit_code == 1
    for part in ("new 1.0: a worker failed", "exit code 3", "    Oh no", "torchserve unregister"):
        assert part in result.stderr


def test_scale(run: Run, small: SmallServer) -> None:
    result = run("scale", "m", "3", "--max", "4", "--grace", "5")
    assert result.stdout == "m 1.0: 3 of 3 ready\n"
    (asked,) = small.seen
    assert (asked.min_worker, asked.max_worker, asked.timeout, asked.synchronous) == (3, 4, 5, False)
    assert run("scale", "m", "1").stdout == "m 1.0: 1 of 1 ready\n"
    assert run("scale", "m", "2", "--no-wait").stdout == "Processing worker updates...\n"


def test_set_default_and_unregister(run: Run) -> None:
    assert run("set-default", "m", "2.0").output == "default m 2.0\n"
    assert json.loads(run("unregister", "m", "--json").output) == {"status": 'Model "m" unregistered'}


def test_predict(run: Run, small: SmallServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"from a file")
    assert run("predict", "m", str(tmp_path / "file")).stdout_bytes == b"from a file"
    assert run("predict", "m", "-", input=b"piped").stdout_bytes == b"piped"
    named = ("--input", "b=two", "--input", f"a=@{tmp_path}/file")
    assert run("predict", "m", *named, "--version", "9").stdout_bytes == b"from a file|two"
    assert small.seen[-1].model_version == "9"


def test_predict_as_json(run: Run) -> None:
    for sent, value in ((b'{"a": 1}', {"a": 1}), (b"2", 2), (b"text", "text"), (b"NaN", "NaN")):
        assert json.loads(run("predict", "m", "-", "--json", input=sent).output) == {"prediction": value}
    assert json.loads(run("predict", "m", "-", "--json", input=b"binary").output) == {"prediction_base64": "/w=="}


@pytest.mark.parametrize(
    ("words", "text_"),
    [
        (("m",), "Nothing to send"),
        (("m", "/nowhere"), "/nowhere can't be read"),
        (("m", "--input", "x"), "isn't NAME=TEXT"),
        (("m", "-", "--input", "data=x"), "given twice"),
    ],
)
def test_predict_with_unusable_inputs(run: Run, words: tuple[str, ...], text_: str) -> None:
    result = run("predict", *words)
    assert (result.exit_code, text_ in result.stderr) == (2, True)


def test_a_handlers_failure_is_told_with_its_place_in_the_log(run: Run) -> None:
    result = run("predict", "m", "-", input=b"raise, explained")
    told = "Prediction failed: ValueError: q (h.py, line 4, in handle) (request ID r-7)"
    where = "torchserve logs MODEL shows the worker's last output, the server's log has all of it"
    assert (result.exit_code, result.stderr) == (1, f"Error: INTERNAL: {told}\n{where}\n")


def test_pieces_of_a_text_stay_text(run: Run) -> None:
    lines = run("stream", "m", "-", "--json", input=b"text").output.splitlines()[3:]
    assert [json.loads(line)["prediction"] for line in lines] == ["5 ", "null"]


def test_stream_that_breaks(run: Run) -> None:
    result = run("stream", "m", "-", input=b"raise")
    assert (result.exit_code, result.stderr) == (1, "Error: INTERNAL: Worker died.\n")
    assert result.stdout.count("\n") == 3


def test_waiting_ignores_failures_from_before() -> None:
    states = iter([described(ready=0, lastWorkerFailure=FAILURE), described(ready=1, lastWorkerFailure=FAILURE)])
    wait_for_workers(lambda: next(states), 1, FAILURE, lambda _: None, lambda _: None)
    with pytest.raises(WorkersFailed, match="exit code 3"):
        wait_for_workers(lambda: described(ready=0, lastWorkerFailure=FAILURE), 1, None, lambda _: None, lambda _: None)


def test_waiting_ends_when_somebody_else_scales() -> None:
    said: list[str] = []
    wait_for_workers(lambda: described(least=5, ready=1), 2, None, said.append, lambda _: None)
    assert said == ["another client asks for 5 workers now"]
