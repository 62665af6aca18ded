"""Rollouts with real workers: every dialect is divided, a version that is worse goes back, a good one is promoted."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from click.testing import CliRunner

from e2e.servers import Serving, Start, write_model
from support import GUARD_S, until
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub
from ts_frontend.cli.commands import commands
from ts_frontend.config.snapshot import SnapshotFiles
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub

#: Answers with its version. A version's file, if there is one, has the share of requests that fail (by their count),
#: the seconds that each takes, and what is answered instead.
HANDLER = """
import json, os, time
from pathlib import Path

place, seen = Path(os.environ["ROLLOUT_TEST_DIR"]), 0

def handle(data, context):
    if data is None:
        return None
    global seen
    version = context.manifest["model"]["modelVersion"]
    file = place / version
    asked = json.loads(file.read_text()) if file.exists() else {}
    seen += 1
    time.sleep(asked.get("seconds", 0))
    if asked.get("fails") and seen % asked["fails"] == 0:
        raise ValueError("not this one")
    return [asked.get("answer", version)] * len(data)
"""
STREAM = """
def handle(data, context):
    for number in range(0 if data is None else 3):
        yield [context.manifest["model"]["modelVersion"]] * len(data)
"""
TENSORS = """
import numpy as np

def handle(data, context):
    new = context.manifest["model"]["modelVersion"] == "2.0"
    return None if data is None else [{"y": np.asarray(row["x"], "f4") * (2.01 if new else 2)} for row in data]

def sums(old, new):
    return f"{new['y'].dtype} {new['y'].shape} {new['y'].sum():.2f} instead of {old['y'].sum():.2f}"
"""
#: Its comparisons are in the handler's file. `late` waits for the file that the test writes.
AUTHORED = """
import os, sys, time
from pathlib import Path

WAITED = Path(os.environ["ROLLOUT_TEST_DIR"]) / "waited"

{define} handle(data, context):
    version = context.manifest["model"]["modelVersion"]
    return None if data is None else [{{"score": float(version), "text": version}}] * len(data)

def near(old, new):
    return abs(old["score"] - new["score"]) < 2

def far(old, new):
    return f"the text is {{new['text']}}" if near(old, new) else ""

def fails(old, new):
    raise ValueError("no judgement " + "x" * 10_000)

def leaves(old, new):
    sys.exit(3)

def silent(old, new):
    pass

def late(old, new):
    while not WAITED.exists():
        time.sleep(0.01)
    return True
"""
TENSORS_CONFIG = """
openInference:
  inputs: [{name: x, datatype: FP32, shape: [-1]}]
  outputs: [{name: y, datatype: FP32, shape: [-1]}]
"""
SUMS = Path(__file__).parent.parent / "handlers" / "sequence_sums.py"
SUMS_CONFIG = "sequenceBatching: true\nsequenceMaxIdleMSec: 60000\nmaxNumSequence: 40\n"
VERSIONS = ("1.0", "2.0")
VERSION = "x-model-version"


class Rolled:
    """A server with two versions of each model, and its clients."""

    def __init__(self, server: Serving, place: Path) -> None:
        self.server, self.place = server, place
        self.store = server.directory / "store"
        self.untold = 0  # answers without the header
        self.text = "text"
        self.http = httpx.Client(base_url=server.http, timeout=GUARD_S)
        self.managed = httpx.Client(base_url=server.http_management, timeout=GUARD_S)
        self.channel = grpc.insecure_channel(server.inference)
        self.native, self.oip = InferenceAPIsServiceStub(self.channel), GRPCInferenceServiceStub(self.channel)

    def close(self) -> None:
        self.http.close()
        self.managed.close()
        self.channel.close()

    def start(self, model: str = "text", **given: Any) -> Any:
        """Begins a rollout, and returns when its new version may get calls."""
        answer = self.managed.put(f"/models/{model}/rollout", json={"version": "2.0"} | given)
        assert answer.status_code == 200, answer.text
        until(lambda: "isn't ready" not in self.status(model)["verdict"]["reason"] and self.divided(model))
        return answer.json()

    def divided(self, model: str) -> bool:
        return "just begun" not in self.status(model)["verdict"]["reason"]

    def status(self, model: str = "text") -> Any:
        answer = self.managed.get(f"/models/{model}/rollout")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def act(self, action: str, model: str = "text") -> Any:
        answer = self.managed.post(f"/models/{model}/rollout/{action}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def is_like(self, version: str, **behaviour: Any) -> None:
        (self.place / f"{version}.new").write_text(json.dumps(behaviour))
        (self.place / f"{version}.new").rename(self.place / version)

    def same(self, told: str | None, *answered: str) -> str:
        """The version that has answered, which is what the header says if there is one."""
        self.untold += told is None
        (version,) = {*answered, *([] if told is None else [told])}
        return version

    # --- one call of each dialect; returns the version that has answered

    def predictions(self, request_id: str = "") -> str:
        answer = self.http.post(f"/predictions/{self.text}", content=b"x", headers=_ids(request_id))
        assert answer.status_code == 200, answer.text
        return self.same(answer.headers.get(VERSION), answer.text)

    def grpc_predictions(self, request_id: str = "") -> str:
        request = PredictionsRequest(model_name=self.text, input={"data": b"x"})
        found, call = self.native.Predictions.with_call(
            request, metadata=tuple(_ids(request_id).items()), timeout=GUARD_S
        )
        return self.same(dict(call.trailing_metadata()).get(VERSION), found.prediction.decode())

    def grpc_stream(self, request_id: str = "") -> str:
        request = PredictionsRequest(model_name="stream", input={"data": b"x"})
        call = self.native.StreamPredictions(request, metadata=tuple(_ids(request_id).items()), timeout=GUARD_S)
        pieces = {piece.prediction.decode() for piece in call}
        return self.same(dict(call.trailing_metadata()).get(VERSION), *pieces)

    def http_stream(self, request_id: str = "") -> str:
        answer = self.http.post("/predictions/stream", content=b"x", headers=_ids(request_id))
        return self.same(answer.headers.get(VERSION), answer.text[:3])

    def infer(self, request_id: str = "") -> str:
        answer = self.http.post("/v2/models/tensors/infer", json=_TENSOR, headers=_ids(request_id))
        assert answer.status_code == 200, answer.text
        return self.same(answer.headers.get(VERSION), answer.json()["model_version"])

    def grpc_infer(self, request_id: str = "") -> str:
        found, call = self.oip.ModelInfer.with_call(
            _message(), metadata=tuple(_ids(request_id).items()), timeout=GUARD_S
        )
        return self.same(dict(call.trailing_metadata()).get(VERSION), found.model_version)

    def grpc_infer_stream(self, request_id: str = "") -> str:
        answers = self.oip.ModelStreamInfer(
            iter([_message()]), metadata=tuple(_ids(request_id).items()), timeout=GUARD_S
        )
        (answer,) = answers
        return str(answer.infer_response.model_version)

    def completion(self, request_id: str = "") -> str:
        asked = {"model": self.text, "prompt": "x"}
        answer = self.http.post("/v1/completions", json=asked, headers=_ids(request_id))
        assert answer.status_code == 200, answer.text
        return self.same(answer.headers.get(VERSION), answer.json()["choices"][0]["text"])

    def kserve_v1(self, request_id: str = "") -> str:
        answer = self.http.post("/v1/models/text:predict", json={"instances": [1]}, headers=_ids(request_id))
        return str(answer.headers[VERSION])

    def invoke(self, request_id: str = "") -> str:
        return str(self.http.post("/models/text/invoke", content=b"x", headers=_ids(request_id)).headers[VERSION])


_TENSOR = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1.0, 2.0]}]}


def _message() -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="tensors")
    request.inputs.add(name="x", datatype="FP32", shape=[2]).contents.fp32_contents.extend([1.0, 2.0])
    request.parameters["triton_enable_empty_final_response"].bool_param = False
    return request


def _ids(request_id: str) -> dict[str, str]:
    return {"x-request-id": request_id} if request_id else {}


DIALECTS = (
    Rolled.predictions,
    Rolled.grpc_predictions,
    Rolled.grpc_stream,
    Rolled.http_stream,
    Rolled.infer,
    Rolled.grpc_infer,
    Rolled.grpc_infer_stream,
    Rolled.completion,
    Rolled.kserve_v1,
    Rolled.invoke,
)
MODELS: dict[str, tuple[Path | str, str]] = {
    "text": (HANDLER, ""),
    "stream": (STREAM, ""),
    "tensors": (TENSORS, TENSORS_CONFIG),
    "sums": (SUMS, SUMS_CONFIG),
    "blocking": (AUTHORED.format(define="def"), ""),
    "async": (AUTHORED.format(define="async def"), ""),
    "continuous": (AUTHORED.format(define="def"), "continuousBatching: true\n"),
    "narrow": (HANDLER, ""),
    "busy": (HANDLER, "minWorkers: 4\n"),
    "cached": (HANDLER, "cache: true\n"),
}


def write_versions(store: Path, *names: str, **configs: str) -> list[str]:
    return [
        write_model(
            store,
            name,
            MODELS[name][0],
            version=version,
            config=MODELS[name][1] + configs.get(f"v{version[0]}", ""),
            directory=f"{name}_{version}",
        )
        for name in names
        for version in VERSIONS
    ]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rolled]:
    directory = tmp_path_factory.mktemp("server")
    store, place = directory / "store", directory / "place"
    store.mkdir()
    place.mkdir()
    archives = write_versions(store, *(MODELS.keys() - {"narrow"}))
    archives += write_versions(store, "narrow", v2="jobQueueSize: 1\n")
    settings: dict[str, object] = {"env": {"ROLLOUT_TEST_DIR": str(place)}, "metrics_mode": "prometheus"}
    with Serving(directory, store, settings, ["--ncs"]) as server:
        for archive in archives:
            server.register(archive)
        rolled = Rolled(server, place)
        try:
            yield rolled
        finally:
            rolled.close()


@pytest.fixture
def rolled(served: Rolled) -> Iterator[Rolled]:
    """The server, with version 1.0 of each model as the default, and no rollout in progress."""
    yield served
    served.text = "text"
    for model in MODELS:
        served.managed.post(f"/models/{model}/rollout/rollback")
    for version in VERSIONS:
        (served.place / version).unlink(missing_ok=True)


def held(rolled: Rolled, percent: float, *models: str, **more: Any) -> None:
    for model in models:
        rolled.start(model, canaryTrafficPercent=percent, **more)


def test_each_dialect_is_divided_by_the_requests_id(rolled: Rolled) -> None:
    held(rolled, 50, "text", "stream", "tensors")
    rolled.untold = 0
    for dialect in DIALECTS:
        first = [dialect(rolled, f"caller-{number}") for number in range(16)]
        assert {"1.0", "2.0"} == set(first), dialect
        assert [dialect(rolled, f"caller-{number}") for number in range(16)] == first, dialect
    assert not rolled.untold


def test_a_call_that_names_a_version_gets_it(rolled: Rolled) -> None:
    held(rolled, 99, "text")
    for number in range(10):
        answer = rolled.http.post("/predictions/text/1.0", content=b"x", headers=_ids(f"id-{number}"))
        assert answer.text == "1.0" and VERSION not in answer.headers
    assert rolled.server.predict("text", "x", version="1.0") == b"1.0"
    described = rolled.managed.get("/models/text/1.0", params={"customized": "true"}).json()[0]
    assert described["rollout"]["new"] == "2.0" and described["rollout"]["percent"] == 99


def test_a_caller_stays_with_its_version_while_the_share_grows(rolled: Rolled) -> None:
    def asked(user: int) -> str:
        return rolled.http.post("/predictions/text", content=b"x", headers={"X-User": f"user-{user}"}).text

    held(rolled, 30, "text", sticky="X-User")
    before = [asked(user) for user in range(40)]
    held(rolled, 60, "text", sticky="X-User")
    after = [asked(user) for user in range(40)]
    assert before.count("2.0") < after.count("2.0")
    assert all(later == "2.0" for earlier, later in zip(before, after, strict=True) if earlier == "2.0")


def test_no_call_goes_to_a_version_without_a_worker(rolled: Rolled) -> None:
    held(rolled, 99, "text")
    until(lambda: rolled.predictions() == "2.0")
    assert rolled.managed.put("/models/text/2.0", params={"min_worker": 0, "synchronous": "true"}).status_code == 200
    try:
        assert {rolled.predictions() for _ in range(20)} == {"1.0"}
        until(lambda: "isn't ready" in rolled.status()["verdict"]["reason"])
    finally:
        rolled.managed.put("/models/text/2.0", params={"min_worker": 1, "synchronous": "true"})
    until(lambda: rolled.predictions() == "2.0")


def test_what_the_new_version_cannot_take_the_old_one_answers(rolled: Rolled) -> None:
    """Its queue is full; no call is lost, and the refusals count against it."""
    rolled.is_like("2.0", seconds=0.2)
    held(rolled, 80, "narrow")

    def ask(number: int) -> str:
        answer = rolled.http.post("/predictions/narrow", content=b"x", headers=_ids(f"id-{number}"))
        assert answer.status_code == 200, answer.text
        return answer.text

    with ThreadPoolExecutor(16) as pool:
        answered = Counter(pool.map(ask, range(64)))
    counted = rolled.status("narrow")["requests"]
    assert counted["2.0"]["answered"] == answered["2.0"] > 0
    assert counted["2.0"]["failed"] > 0 and counted["1.0"] == {"answered": answered["1.0"], "failed": 0}


def test_kept_answers_name_their_version_and_are_not_judged(rolled: Rolled) -> None:
    held(rolled, 50, "cached")
    answers = [rolled.http.post("/predictions/cached", content=b"x", headers=_ids(f"id-{n}")) for n in range(40)]
    assert {(one.text, one.headers[VERSION], one.headers["x-cache"]) for one in answers} == {
        (version, version, word) for version in VERSIONS for word in ("MISS", "HIT")
    }
    counted = rolled.status("cached")["requests"]
    assert {version: counted[version]["answered"] for version in VERSIONS} == {"1.0": 1, "2.0": 1}


def test_a_version_for_other_requests_goes_back_before_a_call(rolled: Rolled) -> None:
    rolled.server.register(
        write_model(rolled.store, "text", TENSORS, version="3.0", config=TENSORS_CONFIG, directory="odd")
    )
    assert rolled.managed.put("/models/text/rollout", json={"version": "3.0", "steps": [50]}).status_code == 200
    until(lambda: rolled.status()["state"] == "rolled back")
    assert "tensors" in rolled.status()["events"][-1]["reason"]
    rolled.server.unregister("text", "3.0")


def test_a_rollout_ends_when_its_versions_go(rolled: Rolled) -> None:
    archive = write_model(rolled.store, "text", HANDLER, version="4.0", directory="later")
    rolled.server.register(archive)
    rolled.start(version="4.0", steps=[50])
    until(lambda: rolled.predictions() == "4.0")
    rolled.server.unregister("text", "4.0")
    until(lambda: rolled.status()["state"] == "rolled back")
    assert {rolled.predictions() for _ in range(10)} == {"1.0"}
    rolled.start(steps=[50])
    assert rolled.managed.put("/models/text/2.0/set-default").status_code == 200
    until(lambda: rolled.status()["state"] == "promoted")


def test_a_sequence_stays_where_it_began(rolled: Rolled) -> None:
    def add(sequence: str) -> str:
        request = PredictionsRequest(model_name="sums", sequence_id=sequence, input={"data": b"1"})
        _, call = rolled.native.Predictions.with_call(request, timeout=GUARD_S)
        return str(dict(call.trailing_metadata())[VERSION])

    held(rolled, 20, "sums")
    began = {f"s{number}": add(f"s{number}") for number in range(20)}
    assert set(began.values()) == {"1.0", "2.0"}
    held(rolled, 90, "sums")
    assert {sequence: add(sequence) for sequence in began} == began
    assert {add(f"later{number}") for number in range(10)} >= {"2.0"}
    rolled.act("rollback", "sums")
    assert {sequence: add(sequence) for sequence in began} == began
    assert rolled.status("sums")["state"] == "rolled back"


class Load:
    """Calls of mixed dialects from some threads, until it is closed. `seen`: the answers by version; `lost`: what
    failed, except for the failures that a version was told to have."""

    def __init__(self, rolled: Rolled, threads: int = 4) -> None:
        self.seen: Counter[str] = Counter()
        self.failed = 0
        self.lost: list[str] = []
        self._stop = threading.Event()
        self._rolled = rolled
        self._pool = ThreadPoolExecutor(threads)
        self._running = [self._pool.submit(self._run, number) for number in range(threads)]

    def _run(self, number: int) -> None:
        dialects = (Rolled.predictions, Rolled.grpc_predictions, Rolled.completion)
        while not self._stop.is_set():
            number += 1
            try:
                self.seen[dialects[number % len(dialects)](self._rolled)] += 1
            except (AssertionError, grpc.RpcError) as error:
                if "Prediction failed" in str(error) or "not this one" in str(error):
                    self.failed += 1
                else:
                    self.lost.append(str(error))

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for one in self._running:
            one.result()


@pytest.mark.long
@pytest.mark.parametrize(
    ("behaviour", "said"),
    [({"fails": 20}, "that failed"), ({"seconds": 0.02}, "above the old version's")],
    ids=["fails", "slow"],
)
def test_a_worse_version_goes_back(rolled: Rolled, behaviour: dict[str, Any], said: str) -> None:
    """It fails 5 % of its requests, or takes twice as long; only its share of the calls sees that."""
    rolled.text = "busy"
    rolled.is_like("1.0", seconds=0.01)
    rolled.is_like("2.0", **({"seconds": 0.01} | behaviour))
    with Load(rolled) as load:
        rolled.start("busy", steps=[20, 50, 100], every="2m")
        if "seconds" in behaviour:  # a pause doesn't keep it from going back
            rolled.act("pause", "busy")
        until(lambda: rolled.status("busy")["state"] == "rolled back")
    status = rolled.status("busy")
    assert said in status["events"][-1]["reason"]
    assert not load.lost
    total = load.seen.total() + load.failed
    assert sum(status["requests"]["2.0"].values()) <= 0.2 * total + 5 * (0.2 * 0.8 * total) ** 0.5
    assert {rolled.predictions() for _ in range(10)} == {"1.0"}
    rolled.server.wait_for_log("Rollout of model busy 2.0: rolled back")


@pytest.mark.long
def test_a_good_version_is_promoted(rolled: Rolled) -> None:
    rolled.text = "busy"
    rolled.is_like("1.0", seconds=0.01)
    rolled.is_like("2.0", seconds=0.01)
    with Load(rolled) as load:
        rolled.start("busy", steps=[50, 100], every="1s")
        until(lambda: rolled.status("busy")["state"] == "promoted")
    assert not load.lost and not load.failed
    assert rolled.predictions() == "2.0"
    assert rolled.act("rollback", "busy")["state"] == "rolled back"
    assert rolled.predictions() == "1.0"


def test_copies_are_compared_and_cost_no_call(rolled: Rolled) -> None:
    rolled.start("tensors", shadow=True, steps=[10], every="5m", compare={"FP32": {"rtol": 0.001}})
    asked = [rolled.infer, rolled.grpc_infer]

    def called() -> bool:
        answers = {dialect() for dialect in asked}
        assert answers == {"1.0"}
        return bool(rolled.status("tensors")["state"] == "rolled back")

    until(called)
    status = rolled.status("tensors")
    assert "answers differ" in status["events"][-1]["reason"]
    assert "y: element 0 is 2.0" in status["differences"][0]["difference"]
    assert len(status["differences"]) <= 20 and not status["requests"]["2.0"]["answered"]


def test_metrics(rolled: Rolled) -> None:
    held(rolled, 40, "text")
    for number in range(20):
        rolled.predictions(f"id-{number}")
    text = rolled.server.scraped()
    assert re.search(r'ts_rollout_percent\{model_name="text",model_version="2.0".*\} 40', text)
    found = re.findall(r'ts_rollout_requests_total\{model_name="text",.*outcome="answered",?\} (\d+)', text)
    assert sum(map(int, found)) == 20


def compared(rolled: Rolled, model: str, function: str, result: str) -> Any:
    """The rollout once an author's comparison has had that result for a copy; every call is answered meanwhile."""
    rolled.start(model, shadow=True, steps=[10], compare=f"handler.py:{function}")

    def has_come() -> bool:
        answer = rolled.http.post(f"/predictions/{model}", content=b"x")
        assert answer.status_code == 200 and answer.json()["text"] == "1.0", answer.text
        return bool(rolled.status(model)["copies"].get(result))

    until(has_come)
    return rolled.status(model)


@pytest.mark.parametrize(
    "model", ["blocking", *(pytest.param(model, marks=pytest.mark.long) for model in ("async", "continuous"))]
)
def test_the_authors_function_compares_the_answers(rolled: Rolled, model: str) -> None:
    """A worker of the new version runs it; what it raises is kept, and is no verdict."""
    (before,) = [worker["pid"] for worker in rolled.server.describe(model, "2.0")["workers"]]
    assert not compared(rolled, model, "near", "same")["differences"]
    assert compared(rolled, model, "far", "different")["differences"][0]["difference"] == "the text is 2.0"
    for function, said in (
        ("fails", "ValueError: no judgement xxx"),
        ("leaves", "SystemExit: 3"),
        ("silent", "a comparison returns True, False or a text"),
        ("nothing", "handler.py has no function nothing"),
    ):
        status = compared(rolled, model, function, "comparison failed")
        told = status["differences"][0]["difference"]
        assert said in told and told.startswith("the comparison failed: ") and len(told) < 400
        assert status["state"] == "running" and "different" not in status["copies"]
        assert "0 of 0 requests whose answers differ" in status["verdict"]["reason"]
    assert [worker["pid"] for worker in rolled.server.describe(model, "2.0")["workers"]] == [before]


@pytest.mark.long
def test_an_authors_comparison_that_takes_too_long_is_given_up(rolled: Rolled) -> None:
    waited = rolled.place / "waited"
    try:
        status = compared(rolled, "blocking", "late", "comparison failed")
        assert status["state"] == "running" and status["differences"]
    finally:
        waited.touch()
    until(lambda: rolled.http.post("/predictions/blocking/2.0", content=b"x").json()["text"] == "2.0")
    compared(rolled, "blocking", "late", "same")
    waited.unlink()


def test_the_authors_function_gets_tensors_by_their_names(rolled: Rolled) -> None:
    """However clients ask: JSON, binary tensors after it, and gRPC."""
    binary = _TENSOR | {"parameters": {"binary_data_output": True}}

    def infer_binary() -> None:
        answer = rolled.http.post("/v2/models/tensors/infer", json=binary)
        assert answer.headers["inference-header-content-length"], answer.headers

    for ask in (rolled.infer, infer_binary, rolled.grpc_infer):
        rolled.start("tensors", shadow=True, steps=[10], compare="handler:sums")
        until(lambda ask=ask: (ask(), rolled.status("tensors")["differences"])[1])  # type: ignore[misc]
        told = rolled.status("tensors")["differences"][0]["difference"]
        assert told == "float32 (2,) 6.03 instead of 6.00"


def test_the_command_and_grpc(rolled: Rolled) -> None:
    def ran(*words: str) -> Any:
        port = str(rolled.server.port("grpc_management"))
        done = CliRunner().invoke(commands, ["rollout", *words, "--management-port", port, "--json"])
        return json.loads(done.stdout) if done.exit_code == 0 else done.stderr

    assert ran("text", "2.0", "--steps", "5,100", "--every", "1h", "--sticky", "X-User")["percent"] == 5
    assert ran("text", "pause")["state"] == "paused"
    assert ran("text", "resume")["rule"]["sticky"] == "x-user"
    assert "is its default version already" in ran("text", "1.0")
    assert ran("text", "promote")["state"] == "promoted"
    assert rolled.http.post("/predictions/text", content=b"x").text == "2.0"
    assert ran("text", "rollback")["state"] == "rolled back"
    assert ran("text")["events"][-1]["event"] == "rolled back"
    assert "can't pause" in ran("text", "pause")
    assert "begin of a rollout" in ran("text", "pause", "--steps", "3")


def test_a_version_may_ask_for_its_rollout_itself(tmp_path: Path, store: Path, start: Start) -> None:
    own = "rollout: {steps: [100]}\n"
    old, new = write_versions(store, "text", v2=own)
    server = start(env={"ROLLOUT_TEST_DIR": str(tmp_path)})
    server.register(old)
    server.register(new)
    until(lambda: server.describe("text")["modelVersion"] == "2.0")
    assert [event["event"] for event in server.describe("text")["rollout"]["events"]] == ["begun", "promoted"]
    wrong = write_model(store, "text", HANDLER, version="3.0", config="rollout: {steps: 7}\n", directory="wrong")
    server.register(wrong)
    server.wait_for_log("Model text 3.0: the rollout of its model-config.yaml has no effect: steps must be")


@pytest.mark.long
def test_a_version_on_demand_is_loaded_by_its_share(tmp_path: Path, store: Path, start: Start) -> None:
    archives = write_versions(store, "tensors", v2="loadOnDemand: true\n")
    server = start()
    for archive in archives:
        server.register(archive)
    rolled = Rolled(server, tmp_path)
    rolled.start("tensors", canaryTrafficPercent=50)
    until(lambda: {rolled.infer(f"id-{number}") for number in range(20)} == {"1.0", "2.0"})
    rolled.close()


@pytest.mark.long
def test_killed_processes_lose_no_rollout(tmp_path: Path, store: Path, start: Start) -> None:
    """A worker's death takes the calls that it ran, and the server's leaves the step as it was."""
    archives = write_versions(store, "text", "stream", "tensors")
    place = tmp_path / "place"
    place.mkdir()
    settings: dict[str, Any] = {"env": {"ROLLOUT_TEST_DIR": str(place)}, "snapshots": True}
    server = start(**settings)
    for archive in archives:
        server.register(archive)
    rolled = Rolled(server, place)
    rolled.is_like("1.0", seconds=0.002)
    rolled.is_like("2.0", seconds=0.002)
    with Load(rolled, threads=2) as load:
        rolled.start(steps=[30, 60, 100], every="1s", errors=0.1, p50=0, p99=0)
        until(lambda: rolled.status()["percent"] == 60)
        rolled.act("pause")
        (pid,) = [worker["pid"] for worker in server.describe("text", "2.0")["workers"]]
        before = load.seen["2.0"]
        os.kill(pid, signal.SIGKILL)
        until(lambda: load.seen["2.0"] > before + 20)
    assert len(load.lost) <= 2 and all("Worker died" in lost or "507" in lost for lost in load.lost)
    assert rolled.status()["state"] == "paused"
    until(lambda: _remembered(tmp_path).get("state") == "paused")
    rolled.close()
    server.process.kill()
    server.wait()

    again = Rolled(start(**settings), place)
    status = again.status()
    assert (status["state"], status["percent"], status["new"]) == ("paused", 60, "2.0")
    until(lambda: {again.predictions() for _ in range(40)} == {"1.0", "2.0"})
    again.act("resume")
    with Load(again, threads=2) as load:
        until(lambda: again.status()["state"] == "promoted")
    assert not load.lost
    again.close()


def _remembered(directory: Path) -> Any:
    found, _ = SnapshotFiles(directory / "logs" / "config").newest()
    return {} if found is None else found.snapshot.rollouts.get("text", {})
