"""The calls that were recorded with TorchServe 0.12.0, made again: same status, same JSON, same error text.

Values that differ from run to run are masked; intended differences are in DEVIATIONS, with their reasons.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import re
import shlex
import shutil
import ssl
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from PIL import Image

from support import GUARD_S, http_call, until

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
HANDLERS = GOLDEN / "handlers"
#: Values that differ from run to run.
MASKED = {"id", "startTime", "pid", "memoryUsage", "PYTHONPATH", "Host", "host", "server_version"}


@dataclass(frozen=True)
class Deviation:
    """A difference from TorchServe. `reason`: why; `change`: turns the recorded answer into the expected one."""

    reason: str
    change: Callable[[Exchange], None]


@dataclass
class Exchange:
    """A call and its answer. Header names are lower case."""

    method: str = ""
    port: int = 0
    target: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    status: int = 0
    answer_headers: dict[str, str] = field(default_factory=dict)
    answer: bytes = b""

    def json(self) -> Any:
        return json.loads(self.answer)


def message(text: str) -> Callable[[Exchange], None]:
    def change(recorded: Exchange) -> None:
        recorded.answer = json.dumps({**recorded.json(), "message": text}).encode()

    return change


def json_values(**values: Any) -> Callable[[Exchange], None]:
    def change(recorded: Exchange) -> None:
        found = recorded.json()
        for one in found if isinstance(found, list) else [found]:
            one.update(values)
        recorded.answer = json.dumps(found).encode()

    return change


def lower_names(recorded: Exchange) -> None:
    recorded.answer = json.dumps({name.lower(): value for name, value in recorded.json().items()}).encode()


def another(status: int, kind: str, text: str) -> Callable[[Exchange], None]:
    def change(recorded: Exchange) -> None:
        recorded.status, recorded.answer_headers = status, {"content-type": "application/json", "connection": "close"}
        recorded.answer = json.dumps({"code": status, "type": kind, "message": text}).encode()

    return change


def preflight(recorded: Exchange) -> None:
    recorded.status, recorded.answer = 200, b""
    del recorded.answer_headers["content-type"], recorded.answer_headers["connection"]


def plain_rows(recorded: Exchange) -> None:
    recorded.status, recorded.answer = 200, b"[0.0]"
    del recorded.answer_headers["content-type"], recorded.answer_headers["connection"]


def metadata(recorded: Exchange) -> None:
    recorded.status = 200
    recorded.answer_headers.pop("connection")
    found = {"name": "mnist", "versions": ["1.0"], "platform": "", "inputs": [], "outputs": []}
    recorded.answer = json.dumps(found).encode()


NO_SEQUENCE = Deviation(
    "the defaults of sequence batching are shown, used or not", json_values(maxNumSequence=1, maxSequenceJobQueueSize=1)
)
HEADER_NAMES = Deviation("header names are lower case; lookup finds them in any case", lower_names)
DEVIATIONS = {
    **dict.fromkeys(("007", "010", "011", "012", "016", "075"), NO_SEQUENCE),
    "031": HEADER_NAMES,
    "032": HEADER_NAMES,
    "105": Deviation("base_handler takes rows, where TorchServe's fails", plain_rows),
    "171": NO_SEQUENCE,
    **dict.fromkeys(("051", "052", "054", "055", "069"), Deviation("the reason is said", message(""))),
    "070": Deviation("the reason is said", message("Worker died. It ended with exit code 3.")),
    "072": Deviation("the reason is said", message("")),
    **dict.fromkeys(
        ("013", "018", "022", "057", "058", "059", "073", "084", "095", "108", "124", "173", "247"),
        Deviation("what is there is said", message("")),
    ),
    "111": Deviation("the reason is said", message("")),
    "121": Deviation("the answer says what is too large", another(413, "TooLargeException", "")),
    "142": Deviation("a full queue isn't called a missing worker", message("")),
    "191": Deviation(
        "a browser's preflight is allowed, so that the page sees the answer to its own request", preflight
    ),
    "185": Deviation("KServe's clients read `ready`, the protocol's text says `live`", json_values(live=True)),
    "187": Deviation("models have metadata, declared or not", metadata),
    "188": Deviation("versions are served", metadata),
    "241": Deviation("it is answered, where TorchServe lets it hang", another(503, "ServiceUnavailableException", "")),
    "244": Deviation("the reason is said", message("")),
    "259": Deviation("what is no image is the request's fault", another(400, "InternalServerException", "")),
}


# --- reading the recordings


def recorded(name: str) -> Exchange:
    """The content of a file: the call of its first line, and the last answer (after `100 Continue`)."""
    raw = next(GOLDEN.glob(f"{name}_*.txt")).read_bytes()
    call, _, rest = raw.partition(b"\n")
    found = _call(shlex.split(call.decode("utf-8", "surrogateescape").removeprefix("# ")))
    start = rest.rfind(b"HTTP/1.1 ")
    if start < 0:
        return found
    head, _, answer = rest[start:].partition(b"\r\n\r\n")
    status, *headers = head.decode().split("\r\n")
    found.status = int(status.split()[1])
    found.answer_headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in headers)}
    found.answer = answer.removesuffix(b"\n")
    return found


def _call(words: list[str]) -> Exchange:
    """A `curl` line as the request that curl makes of it."""
    found = Exchange("GET", headers={"Accept": "*/*", "User-Agent": "curl/7.88.1"})
    arguments = iter(words[2:])
    for word in arguments:
        if word == "-X":
            found.method = next(arguments)
        elif word == "-H":
            name, _, value = next(arguments).partition(":")
            found.headers[name] = value.strip()
        elif word in ("-d", "--data-binary", "-T", "-F"):
            _add_body(found, word, next(arguments))
        elif word.startswith("http"):
            url = urlsplit(word)
            found.port, found.target = url.port or 0, url.path + (f"?{url.query}" if url.query else "")
    found.headers = {name: value for name, value in found.headers.items() if value}
    return found


def _add_body(found: Exchange, option: str, value: str) -> None:
    if option == "-T":
        found.headers["Expect"] = "100-continue"
        found.body = b'{\n "tiny_kitten": {\n  "pot": 0.001782281'.ljust(390)
        return
    form = "multipart/form-data; boundary=B" if option == "-F" else "application/x-www-form-urlencoded"
    found.headers = {"Content-Type": form} | found.headers
    found.body = bytes(7_000_000) if value.startswith("@") else value.encode("utf-8", "surrogateescape")


# --- making the calls


def perform(server: Any, name: str, body: bytes | None = None) -> Exchange:
    """The recorded call, made to `server`; `body` stands for a file's that wasn't recorded."""
    made = recorded(name)
    made.body = made.body if body is None else body
    made.target = made.target.replace("$SUBS/mar_files", str(server.directory / "elsewhere"))
    ports = {
        8080: server.port("http_inference"),
        8081: server.port("http_management"),
        8082: server.port("http_metrics"),
        8443: server.port("http_inference"),
    }
    connection = http.client.HTTPConnection("127.0.0.1", ports[made.port], timeout=GUARD_S)
    if made.port == 8443:  # recorded with curl -k
        unverified = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection("127.0.0.1", ports[8443], timeout=GUARD_S, context=unverified)
    if name == "246":
        connection._http_vsn, connection._http_vsn_str = 10, "HTTP/1.0"  # type: ignore[attr-defined]
    connection.putrequest(made.method, made.target, skip_accept_encoding=True)
    length = {"Content-Length": str(len(made.body))} if made.body else {}
    for header, value in {**made.headers, **length}.items():
        connection.putheader(header, value)
    connection.endheaders()
    with contextlib.suppress(ConnectionError):  # what is too large may be refused before it is sent
        connection.send(made.body if len(made.body) < 1_000_000 else b"")
    response = connection.getresponse()
    made.status, made.answer = response.status, response.read()
    made.answer_headers = {k.lower(): v for k, v in response.getheaders()}
    connection.close()
    return made


def manage(server: Any, method: str, target: str) -> tuple[int, Any]:
    answer = http_call(server.port("http_management"), method, target)
    return answer.status, answer.json()


def first_model(server: Any, name: str) -> dict[str, Any]:
    return dict(manage(server, "GET", f"/models/{name}")[1][0])


# --- what is served


def manifest(name: str, handler: str, version: str, config: str = "") -> dict[str, Any]:
    model = {"modelName": name, "handler": handler, "modelVersion": version}
    if config:
        model["configFile"] = config
    return {"createdOn": "20/11/2026 23:31:14", "runtime": "python", "model": model, "archiverVersion": "0.12.0"}


def write_mar(store: Path, name: str, handler: str, version: str = "1.0", config: str = "", entry: str = "") -> None:
    """An archive as `torch-model-archiver` packs it."""
    with zipfile.ZipFile(store / f"{name}.mar", "w") as archive:
        for file in filter(None, (handler, config)):
            archive.write(HANDLERS / file, file)
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest(name, entry or handler, version, config)))


def write_eager(store: Path, name: str, handler: str, model_file: str, **more: str) -> None:
    """An archive of a model without weights, served by a built-in handler. `more`: text of further files."""
    described = manifest(name, handler, "1.0")
    described["model"]["modelFile"] = model_file
    with zipfile.ZipFile(store / f"{name}.mar", "w") as archive:
        archive.write(HANDLERS / model_file, model_file)
        for file, text in more.items():
            archive.writestr(f"{file}.json", text)
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(described))


def image() -> bytes:
    """A small picture."""
    file = io.BytesIO()
    Image.new("RGB", (32, 24), (200, 100, 50)).save(file, "PNG")
    return file.getvalue()


def fill(store: Path) -> None:
    write_mar(store, "probe", "probe_handler.py")
    write_mar(store, "probe_v2", "probe_handler.py", "2.0")
    write_mar(store, "probecfg", "probe_handler.py", "2.1", "probe_cfg.yaml")
    write_mar(store, "initfail", "initfail_handler.py")
    write_mar(store, "describe", "describe_handler.py")
    write_mar(store, "batching", "bigresp_handler.py", config="batch_cfg.yaml")
    write_eager(store, "linear", "base_handler", "linear.py")
    write_mar(store, "named", "named_handler.py", entry="named_handler.py:my_entry")
    write_mar(store, "stored", "bigresp_handler.py")
    write_mar(store, "bigresp", "bigresp_handler.py")
    write_mar(store, "crash", "crash_handler.py", config="crash_cfg.yaml")
    write_mar(store, "ctimeout", "bigresp_handler.py", config="clienttimeout_cfg.yaml")
    folder = store / "dirmodel"
    (folder / "MAR-INF").mkdir(parents=True)
    (folder / "bigresp_handler.py").write_text((HANDLERS / "bigresp_handler.py").read_text())
    (folder / "MAR-INF/MANIFEST.json").write_text(json.dumps(manifest("dirmodel", "bigresp_handler.py", "1.0")))
    with tarfile.open(store / "tgz.tar.gz", "w:gz") as archive:
        archive.add(HANDLERS / "bigresp_handler.py", "bigresp_handler.py")
        data = json.dumps(manifest("tgz", "bigresp_handler.py", "1.0")).encode()
        info = tarfile.TarInfo("MAR-INF/MANIFEST.json")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))


# --- the story

MAIN = re.findall(
    r"\d{3}",
    """
    001 002 004 005 006 007 008 009 010 011 012 013 015 016 017 018 019 022 025 027 028 029 030 031
    032 033 034 035 036 038 039 040 041 043 045 046 049 051 052 054 055 057 058 059 060 061 062 063
    064 065 066 068 069 070 071 072 073 074 075 078 079 080 081 082 083 084 085 086 087 088 092 093 095 096 098
    101 102 104 105 106 110 111 112 113 114 115 116 117 121 123 124
    223 225 227 229 235 243 244 247 248 237 239 241 246
    """,
)
#: Other files whose calls other tests make: where. A file that is named there must say the number.
OTHERS = {
    **dict.fromkeys(("140", "142", "143", "171", "172", "173", "180", "181", "182", "183"), "test_http_golden.py"),
    **dict.fromkeys(("184", "185", "187", "188", "190", "191", "200", "210", "231"), "test_http_golden.py"),
    **dict.fromkeys(
        [
            "302",
            "303",
            "306",
            "308",
            "310",
            "311",
            "312",
            "313",
            "314",
            "315",
            "317",
            "318",
            "319",
            "320",
            "321",
            "322",
        ],
        "test_grpc_golden.py",
    ),
    **dict.fromkeys(["323", "324", "325", "333", "334", "337", "338", "345", "346"], "test_grpc_golden.py"),
    **dict.fromkeys(["341", "342", "343", "344"], "test_grpc_golden.py"),
    **dict.fromkeys(
        ["150", "151", "152", "153", "154", "155", "156", "157", "158", "160", "350", "352"], "test_tokens.py"
    ),
    **dict.fromkeys(["108", "250", "251", "253", "256", "258", "259", "260", "261", "262"], "test_workflows_served.py"),
    **dict.fromkeys(["232", "233"], "test_scheduling.py"),
    **dict.fromkeys(["328", "329", "330", "331"], "test_sequences.py"),
}
#: Recordings of many values, which tests of their own compare: the test file, from the folder of all tests.
AREAS = {
    **dict.fromkeys(("174", "175"), "e2e/test_http_metrics.py"),
    "201": "unit/test_snapshot_files.py",
}


def before(server: Any, name: str) -> None:
    """Repeats the unrecorded events before a recorded call."""
    if name == "075":
        until(lambda: first_model(server, "describe")["workers"][0]["status"] == "READY")
    elif name == "101":  # a model of base_handler
        assert manage(server, "POST", "/models?url=linear.mar&model_name=lin&initial_workers=1")[0] == 200
    elif name == "223":
        for model in ("bigresp", "named"):
            assert manage(server, "POST", f"/models?url={model}.mar&initial_workers=1")[0] == 200
    elif name == "239":
        until(lambda: perform(server, "001").status == 500)


@pytest.fixture(scope="module")
def played(serving: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Exchange]]:
    """Every call of the story, made once and in order."""
    directory = tmp_path_factory.mktemp("golden")
    (directory / "store").mkdir()
    fill(directory / "store")
    (directory / "elsewhere").mkdir()
    labels = json.dumps({str(index): f"label {index}" for index in range(1000)})
    write_eager(
        directory / "elsewhere",
        "squeezenet1_1_scripted",
        "image_classifier",
        "tiny_classifier.py",
        index_to_name=labels,
    )
    picture = image()
    part = b'--B\r\nContent-Disposition: form-data; name="data"; filename="a.png"\r\n\r\n' + picture + b"\r\n--B--\r\n"
    bodies = {"113": picture, "114": part}
    with serving(
        directory, directory / "store", {"allowed_urls": "file://.*|http(s)?://.*", "preload_torch": "true"}, ["--ncs"]
    ) as server:
        answers = {}
        for name in MAIN:
            before(server, name)
            answers[name] = perform(server, name, bodies.get(name))
        yield answers


def masked(value: Any) -> Any:
    """JSON with the type in place of values that differ from run to run."""
    if isinstance(value, dict):
        return {k: type(v).__name__ if k in MASKED else masked(v) for k, v in value.items()}
    return [masked(item) for item in value] if isinstance(value, list) else value


def same_description(ours: bytes, theirs: bytes) -> None:
    """TorchServe's has more words (and a wrong path); ours has all its operations."""
    made, expected = json.loads(ours), json.loads(theirs)
    assert (made["openapi"], made["info"]["title"]) == (expected["openapi"], expected["info"]["title"])
    for path, methods in expected["paths"].items():
        assert methods.keys() <= made["paths"][path.replace("/prediction/probe", "/predictions/{model_name}")].keys()


def same_tensor(ours: bytes, theirs: bytes) -> None:
    """Two files of torch.save: of other versions of torch, with equal numbers."""
    for archive in (zipfile.ZipFile(io.BytesIO(data)) for data in (ours, theirs)):
        values = next(name for name in archive.namelist() if name.endswith("/data/0"))
        assert archive.read(values) == b"".join(one.to_bytes(8, "little") for one in TENSOR)


def same_classes(ours: bytes, theirs: bytes) -> None:
    """Five classes with probabilities, the likeliest first; the networks differ."""
    made, expected = json.loads(ours), json.loads(theirs)
    assert len(made) == len(expected) == 5
    for found in (made, expected):
        assert all(isinstance(value, float) for value in found.values())
        assert list(found.values()) == sorted(found.values(), reverse=True)
    assert all(name.startswith("label ") for name in made)


def one_number(ours: bytes, theirs: bytes) -> None:
    (value,) = json.loads(ours)
    assert isinstance(value, float)


def own_families(ours: bytes, theirs: bytes) -> None:
    """Where TorchServe's metrics are logged, its page is empty and ours has families that it hasn't got."""
    comment, *lines = ours.decode().splitlines()
    assert theirs == b"" and comment.startswith("# metrics_mode=log: ")
    assert {line.split("{")[0].split(" ")[0] for line in lines if not line.startswith("# ")}
    assert not re.search(r"ts_inference_|ts_queue_latency|Requests\dXX|QueueTime|WorkerT|Utilization", "\n".join(lines))


COMPARED = {"088": own_families, "092": same_description, "093": same_description, "123": same_tensor}
COMPARED |= {"105": one_number, "113": same_classes, "114": same_classes}
#: The content type of answers that have none in TorchServe.
BYTES = "application/octet-stream"
#: What the handler of 123 answers.
TENSOR = (0, 1, 2)


def check(name: str, made: Exchange) -> None:
    expected = recorded(name)
    open_ended = False
    if name in DEVIATIONS:
        DEVIATIONS[name].change(expected)
        open_ended = expected.answer != b"" and b'"message": ""' in expected.answer
    assert made.status == expected.status, made.answer
    for header in ("content-type", "pragma", "cache-control", "expires"):
        default = BYTES if header == "content-type" and made.answer else None
        assert made.answer_headers.get(header) == expected.answer_headers.get(header, default) or open_ended, header
    closes = expected.answer_headers.get("connection") == "close"
    assert closes or made.answer_headers.get("connection") != "close"  # ours stays open if the request was read
    is_json = expected.answer_headers.get("content-type") == "application/json" or expected.answer.startswith(b"{")
    if not is_json and name not in COMPARED:
        assert made.answer == expected.answer
        return
    if name in COMPARED:
        COMPARED[name](made.answer, expected.answer)
        return
    ours, theirs = masked(json.loads(made.answer)), masked(json.loads(expected.answer))
    if open_ended:
        text = recorded(name).json()["message"] if recorded(name).answer else ""
        assert name == "142" or ours["message"].startswith(text.rstrip("."))
        theirs["message"] = ours["message"]
    assert _comparable(ours) == _comparable(theirs)
    if expected.port == 8081 and expected.answer_headers.get("content-type") == "application/json":
        assert _order(ours) == _order(theirs)


def _comparable(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _order(value: Any) -> Any:
    if isinstance(value, dict):
        return [(k, _order(v)) for k, v in value.items()]
    return [_order(item) for item in value] if isinstance(value, list) else None


@pytest.mark.parametrize("name", MAIN)
def test_the_answer_is_that_of_torchserve(played: dict[str, Exchange], name: str) -> None:
    check(name, played[name])


def number(path: Path) -> str:
    return path.stem.removeprefix("log_") if path.stem.startswith("log_") else path.name[:3]


def test_every_recording_is_accounted_for() -> None:
    there = {number(path) for path in GOLDEN.glob("*.txt")}
    assert there <= {*MAIN, *OTHERS, *AREAS}
    assert {*MAIN, *OTHERS, *AREAS} <= there
    assert len(MAIN) + len(OTHERS) + len(AREAS) == len({*MAIN, *OTHERS, *AREAS})


def test_the_places_that_are_named_replay_their_recordings() -> None:
    for name, file in OTHERS.items():
        text = Path(__file__).with_name(file).read_text()
        assert re.search(rf'"{name}[_"]', text), f"{name} isn't in {file}"


def test_what_is_compared_elsewhere_is_what_was_recorded() -> None:
    """The metrics' pages that their tests read are the recordings; the snapshot's test reads the recording itself."""
    for name, page in (("174", "prometheus"), ("175", "filtered")):
        lines = (GOLDEN.parent / "metrics" / f"{page}.txt").read_text().splitlines()
        assert lines and set(lines) <= set(recorded(name).answer.decode().splitlines())
    tests = GOLDEN.parent.parent
    assert "201_snapshot_files.txt" in (tests / AREAS["201"]).read_text()
    assert all((tests / file).is_file() for file in AREAS.values())


def test_the_reasons_of_what_differs_are_given() -> None:
    assert all(deviation.reason for deviation in DEVIATIONS.values())


def replace_store(store: Path) -> None:
    """The store with the recordings' models in it, and no other."""
    for entry in store.iterdir():
        shutil.rmtree(entry)
    fill(store)


def test_a_full_queue(start: Any, store: Path) -> None:
    replace_store(store)
    server = start(job_queue_size=2, drain_timeout_s=1)
    check("140", perform(server, "140"))
    waiting = []
    for count in range(3):
        connection = http.client.HTTPConnection("127.0.0.1", server.port("http_inference"), timeout=GUARD_S)
        body = json.dumps({"op": "sleep", "seconds": GUARD_S})
        connection.request("POST", "/predictions/probe", body, {"Content-Type": "application/json"})
        waiting.append(connection)
        until(lambda n=count: first_model(server, "probe")["jobQueueStatus"]["pendingRequests"] == n)  # type: ignore[misc]
    check("142", perform(server, "142"))
    for connection in waiting:
        connection.close()
    check("143", perform(server, "143"))


def test_cors(start: Any) -> None:
    server = start(
        cors_allowed_origin="https://example.org",
        cors_allowed_methods="GET, POST, PUT, OPTIONS",
        cors_allowed_headers="X-Custom-Header",
    )
    for name in ("190", "191"):
        made = perform(server, name)
        check(name, made)
        for header, value in recorded(name).answer_headers.items():
            if header.startswith("access-control"):
                assert made.answer_headers[header] == value


def test_https(start: Any, certificates: Path) -> None:
    files = {"certificate_file": certificates / "server.crt", "private_key_file": certificates / "server.key"}
    check("210", perform(start(inference_address="https://127.0.0.1:0", **files), "210"))


def test_a_model_that_is_loaded_at_the_start(start: Any, store: Path) -> None:
    replace_store(store)
    server = start("--models", "probe.mar", default_workers_per_model=1)
    until(lambda: first_model(server, "probe")["workers"][0]["status"] == "READY")
    for name in ("171", "172", "173"):
        check(name, perform(server, name))


def test_batches(start: Any, store: Path) -> None:
    """Recording "231" is text: three requests at once, one alone, and three of which one fails all."""
    replace_store(store)
    server = start(lone_requests_wait="true")
    assert manage(server, "POST", "/models?url=batching.mar&model_name=batching")[0] == 200

    def answers(*bodies: str) -> list[tuple[int, bytes]]:
        def ask(body: str) -> tuple[int, bytes]:
            text = {"Content-Type": "text/plain"}
            answer = http_call(server.port("http_inference"), "POST", "/predictions/batching", body, text)
            return answer.status, answer.body

        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(ask, bodies))

    assert answers("a", "b", "c") == [(200, b"3 rows")] * 3
    assert answers("a") == [(200, b"1 rows")]
    failed = recorded("231").json()
    for status, body in answers("a", "bad", "c"):
        told = json.loads(body)["message"]
        assert status == 503 and told.startswith(failed["message"])
        assert json.loads(body) == {**failed, "message": told}


KSERVE = """
import json
from pathlib import Path

from ts.torch_handler.base_handler import BaseHandler


class Handler(BaseHandler):
    def initialize(self, context):
        self.context, self.initialized = context, True
        self.explained = json.loads(Path(context.system_properties["model_dir"], "explained.json").read_text())

    def preprocess(self, data):
        return data

    def inference(self, data):
        return [ANSWER]

    def postprocess(self, data):
        return data

    def explain_handle(self, data_preprocess, raw_data):
        return self.explained
"""


def write_kserve(store: Path, answer: str) -> None:
    with zipfile.ZipFile(store / "mnist.mar", "w") as archive:
        archive.writestr("handler.py", KSERVE.replace("ANSWER", answer))
        archive.writestr("explained.json", json.dumps(recorded("181").json()["explanations"]))
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest("mnist", "handler.py", "1.0")))


@pytest.mark.long
def test_kserve_v1(start: Any, store: Path) -> None:
    replace_store(store)
    write_kserve(store, "2")
    server = start(service_envelope="kserve")
    assert manage(server, "POST", "/models?url=mnist.mar&initial_workers=1")[0] == 200
    body = json.dumps({"instances": [{"data": [1.0, 2.0]}]}).encode()
    for name in ("180", "181", "182"):
        check(name, perform(server, name, None if name == "182" else body))
    check("200", perform(server, "200"))


@pytest.mark.long
def test_kserve_v2(start: Any, store: Path) -> None:
    replace_store(store)
    write_kserve(store, "1")
    server = start(service_envelope="kservev2")
    assert manage(server, "POST", "/models?url=mnist.mar&initial_workers=1")[0] == 200
    given = {"name": "input-0", "shape": [2], "datatype": "FP32", "data": [1.0, 2.0]}
    body = json.dumps({"id": recorded("183").json()["id"], "inputs": [given]}).encode()
    check("183", perform(server, "183", body))


def test_the_open_inference_protocol(start: Any, store: Path) -> None:
    replace_store(store)
    write_kserve(store, "1")
    server = start(ts_open_inference_protocol="true")
    assert manage(server, "POST", "/models?url=mnist.mar&initial_workers=1")[0] == 200
    for name in ("184", "185", "187", "188"):
        check(name, perform(server, name))
