"""The gRPC calls that were recorded with TorchServe 0.12.0, made again: same answers, same sentences, better statuses.

TorchServe ends its details with a Java class; that line is cut off. Where the status differs, DEVIATIONS says why.
"""

from __future__ import annotations

import ast
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from support import GUARD_S
from ts.protocol import open_inference_pb2
from ts.version import __version__
from ts_frontend.open_inference.models import EXTENSIONS
from ts_frontend.protos import inference_pb2, management_pb2
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub
from ts_frontend.protos.management_pb2_grpc import ManagementAPIsServiceStub

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
#: Values of describe that differ from run to run.
MASKED = {"id", "startTime", "pid", "memoryUsage"}


class Stubs:
    """Both services of a server; each method gives the answer as a recording shows it."""

    def __init__(self, server: Any, inference: grpc.Channel, management: grpc.Channel) -> None:
        self._server = server
        self._inference = InferenceAPIsServiceStub(inference)
        self._management = ManagementAPIsServiceStub(management)
        self._channel = inference

    def predict(self, data: Any, model: str = "probe", version: str = "", **more: Any) -> str:
        return _shown(lambda: self._inference.Predictions(_request(data, model, version), timeout=GUARD_S, **more))

    def stream(self, data: Any) -> str:
        lines = []
        try:
            for number, message in enumerate(
                self._inference.StreamPredictions(_request(data, "probe", ""), timeout=GUARD_S)
            ):
                lines.append(f"message {number}: {str(message)!r}")
        except grpc.RpcError as error:
            return "\n".join([*lines, _status(error)])
        return "\n".join([*lines, "(end of stream, status OK)"])

    def manage(self, method: str, **fields: Any) -> str:
        request = getattr(management_pb2, f"{method}Request")(**fields)
        return _shown(lambda: getattr(self._management, method)(request, timeout=GUARD_S))

    def open_inference(self, method: str, **fields: Any) -> str:
        """A method of TorchServe's own service of that name."""
        request = getattr(open_inference_pb2, f"{method}Request")(**fields)
        call = self._channel.unary_unary(
            f"/org.pytorch.serve.grpc.openinference.GRPCInferenceService/{method}",
            type(request).SerializeToString,
            getattr(open_inference_pb2, f"{method}Response").FromString,
        )
        return _shown(lambda: call(request, timeout=GUARD_S))

    def describe(self) -> str:
        assert "registered" in self.manage("RegisterModel", url="describe.mar", initial_workers=1, synchronous=True)
        return self.manage("DescribeModel", model_name="describe", customized=True)


def _request(data: Any, model: str, version: str) -> inference_pb2.PredictionsRequest:
    inputs = data if isinstance(data, dict) and "op" not in data else {"data": json.dumps(data).encode()}
    return inference_pb2.PredictionsRequest(model_name=model, model_version=version, input=inputs)


def _shown(call: Callable[[], object]) -> str:
    try:
        return f"OK\n{call()}"
    except grpc.RpcError as error:
        return _status(error)


def _status(error: Any) -> str:
    return f"status: {error.code().name} ({error.code().value[0]})\ndetails: {error.details()!r}"


CALLS: dict[str, Callable[[Stubs], str]] = {
    "302": lambda to: to.manage("RegisterModel", url="probe.mar", initial_workers=1, synchronous=True),
    "303": lambda to: to.manage("RegisterModel", url="probe.mar", initial_workers=1, synchronous=True),
    "306": lambda to: to.manage("RegisterModel", url="missing.mar"),
    "308": lambda to: to.manage("DescribeModel", model_name="nope"),
    "310": lambda to: to.predict({"data": b"raw"}),
    "311": lambda to: to.predict({"body": b"raw"}),
    "312": lambda to: to.predict({"a": b"1", "b": b"2"}),
    "313": lambda to: to.predict({"op": "headers"}, metadata=[("x-meta", "1")]),
    "314": lambda to: to.predict({"op": "ret_int"}),
    "315": lambda to: to.predict({"op": "ret_dict"}),
    "317": lambda to: to.predict({"op": "value_error"}),
    "318": lambda to: to.predict({"op": "pred_exc", "code": 513}),
    "319": lambda to: to.predict({"op": "pred_exc", "code": 404}),
    "320": lambda to: to.predict({"op": "memory_error"}),
    "321": lambda to: to.predict({"data": b"x"}, ""),
    "322": lambda to: to.predict({"data": b"x"}, "nope"),
    "323": lambda to: to.predict({"data": b"x"}, "probe", "9"),
    "324": lambda to: to.stream({"op": "stream"}),
    "325": lambda to: to.stream({"op": "ret_str"}),
    "333": lambda to: to.manage("ScaleWorker", model_name="probe", min_worker=0, synchronous=True),
    "334": lambda to: to.manage("ScaleWorker", model_name="nope"),
    "337": lambda to: to.manage("SetDefault", model_name="probe", model_version="9"),
    "338": lambda to: to.describe(),
    "341": lambda to: to.open_inference("ModelReady", name="describe"),
    "342": lambda to: to.open_inference("ModelReady", name="nope"),
    "343": lambda to: to.open_inference("ModelMetadata", name="probe"),
    "344": lambda to: to.open_inference("ServerMetadata"),
    "345": lambda to: to.manage("UnregisterModel", model_name="probe"),
    "346": lambda to: to.manage("UnregisterModel", model_name="nope"),
}
#: number -> (what TorchServe says, what is said here, why)
DEVIATIONS = {
    "317": (
        *(
            "status: UNAVAILABLE (14)\ndetails: 'Prediction failed'",
            "status: INTERNAL (13)\ndetails: 'Prediction failed: ",
        ),
        "the exception is named, and clients don't repeat what fails again",
    ),
    "320": ("Out of resources'", "Out of resources: MemoryError", "the exception is named"),
    "303": (
        *("status: UNKNOWN (2)\ndetails: ''", "status: ALREADY_EXISTS (6)\ndetails: "),
        "an uncaught exception there: status and sentence are those of the REST API",
    ),
    "313": ('"{\\n', '"{\\n  \\"x-meta\\": \\"1\\",\\n', "metadata reaches the handler as headers"),
    "321": ("INTERNAL (13)", "INVALID_ARGUMENT (3)", "it's the caller's mistake"),
    "322": ("INTERNAL (13)", "NOT_FOUND (5)", "a missing model isn't the server's failure"),
    "323": ("INTERNAL (13)", "NOT_FOUND (5)", "nor is a missing version"),
    "342": (
        *("status: NOT_FOUND (5)\ndetails: 'Model not found: nope'", "OK"),
        "a model that isn't there is not ready, as Triton's and MAX's clients expect",
    ),
    "344": (
        "status: UNIMPLEMENTED (12)\ndetails: 'Method org.pytorch.serve.grpc.openinference.GRPCInferenceService/"
        "ServerMetadata is unimplemented'",
        f'OK\nname: "torchrelay"\nversion: "{__version__}"\n' + "\n".join(f'extensions: "{one}"' for one in EXTENSIONS),
        "all methods are there under this name, too",
    ),
    "325": (
        *("status: INTERNAL (13)\ndetails: 'Worker died.'", "(end of stream, status OK)"),
        "the worker crashes there after the answer",
    ),
    "333": ("scaled to 1", "scaled to 0", "workers can be scaled to zero; there, 0 reads as unset"),
    "338": (
        *(
            '\\"maxNumSequence\\": 0,\\n    \\"maxSequenceJobQueueSize\\": 0',
            '\\"maxNumSequence\\": 1,\\n    \\"maxSequenceJobQueueSize\\": 1',
        ),
        "the defaults of sequence batching are shown, used or not",
    ),
}
#: What is added to TorchServe's sentence about something unknown: what there is.
WHAT_IS_THERE = {
    **dict.fromkeys(("308", "322", "334"), ". Models here: probe."),
    **dict.fromkeys(("323", "337"), ". Versions of probe: 1.0."),
    "346": ". Models here: describe.",
}


def recorded(name: str) -> str:
    """The answer of a recording, without the lines before it and without Java's class names."""
    text = next(GOLDEN.glob(f"{name}_*.txt")).read_text()
    lines = [line for line in text.split("\n") if not line.startswith("#")]
    text = "\n".join(lines).strip()
    return re.sub(r"\\n[\w.]+(\.\(\))?'$", "'", text, flags=re.MULTILINE)


def masked(answer: str) -> str:
    for key in MASKED:
        answer = re.sub(rf'(\\"{key}\\": )[^,\\]*(\\"[^"\\]*\\")?', "\\1", answer)
    return answer.strip()


def comparable(answer: str) -> Any:
    """An answer that is a JSON text as its value: clients of gRPC send the entries of a map in any order."""
    found = re.fullmatch(r"OK\nprediction: (.*)", answer)
    if not found:
        return answer
    text = ast.literal_eval(found[1])
    if not text.startswith("{"):
        return text
    value = json.loads(text)
    return value | {"keys": sorted(value.get("keys", ()))}


@pytest.fixture(scope="module")
def played(serving: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Every call, made once and in order."""
    directory = tmp_path_factory.mktemp("golden")
    store = directory / "store"
    store.mkdir()
    for name in ("probe", "describe"):
        with zipfile.ZipFile(store / f"{name}.mar", "w") as archive:
            archive.write(GOLDEN / "handlers" / f"{name}_handler.py", "handler.py")
            model = {"modelName": name, "handler": "handler.py", "modelVersion": "1.0"}
            archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
    with (
        serving(directory, store, {}, ["--ncs"]) as server,
        grpc.insecure_channel(server.inference) as inference,
        grpc.insecure_channel(server.management) as management,
    ):
        stubs = Stubs(server, inference, management)
        yield {name: call(stubs) for name, call in CALLS.items()}


@pytest.mark.parametrize("name", CALLS)
def test_the_answer_is_that_of_torchserve(played: dict[str, str], name: str) -> None:
    expected = recorded(name)
    if name in DEVIATIONS:
        theirs, ours, _ = DEVIATIONS[name]
        assert theirs in expected
        expected = expected.replace(theirs, ours, 1)
    made = masked(played[name])
    if name == "306":
        assert made.startswith(expected.removesuffix("'"))
    elif name in ("317", "320"):
        assert made.startswith(expected)
    elif name in WHAT_IS_THERE:
        assert made == f"{expected.removesuffix(chr(39))}{WHAT_IS_THERE[name]}'"
    elif name == "303":
        assert made == expected + "'Model version 1.0 is already registered for model probe'"
    else:
        assert comparable(made) == comparable(masked(expected))
