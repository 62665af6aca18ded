"""The calls that were recorded with TorchServe 0.12.0, made again: same status, same JSON, same error text.

What differs run by run is masked; what differs on purpose is in DEVIATIONS, with its reason.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import re
import shlex
import ssl
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
HANDLERS = GOLDEN / "handlers"
GUARD_S = 60
#: Values that differ from run to run.
MASKED = {"id", "startTime", "pid", "memoryUsage", "PYTHONPATH", "Host", "host", "server_version"}


@dataclass(frozen=True)
class Deviation:
    """`reason` why an answer is another one than TorchServe's; `change` makes of the recorded one what it is here."""

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


def refused_by_the_engine(recorded: Exchange) -> None:
    recorded.status, recorded.answer_headers, recorded.answer = 400, {"connection": "close"}, b""


NO_SEQUENCE = Deviation(
    "the defaults of sequence batching are shown, used or not", json_values(maxNumSequence=1, maxSequenceJobQueueSize=1)
)
HEADER_NAMES = Deviation("header names are lower case; lookup finds them in any case", lower_names)
DEVIATIONS = {
    **dict.fromkeys(("007", "010", "011", "012", "016", "075"), NO_SEQUENCE),
    "031": HEADER_NAMES,
    "032": HEADER_NAMES,
    "069": Deviation("the reason is said", message("")),
    "070": Deviation("the reason is said", message("Worker died. It ended with exit code 3.")),
    "072": Deviation("the reason is said", message("")),
    "111": Deviation("the reason is said", message("")),
    "121": Deviation("the answer says what is too large", another(413, "TooLargeException", "")),
    "142": Deviation("a full queue isn't called a missing worker", message("")),
    "191": Deviation(
        "a browser's preflight is allowed, so that the page sees the answer to its own request", preflight
    ),
    "241": Deviation("it is answered, where TorchServe lets it hang", another(503, "ServiceUnavailableException", "")),
    "244": Deviation("the reason is said", message("")),
    "259": Deviation("what is no image is the request's fault", another(400, "InternalServerException", "")),
    "246": Deviation("HTTP/1.0 isn't spoken: h2corn refuses it", refused_by_the_engine),
}


# --- reading the recordings


def recorded(name: str) -> Exchange:
    """What a file says: the call of its first line, and the last answer (after `100 Continue`)."""
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
        elif word in ("-d", "--data-binary", "-T"):
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
    found.headers = {"Content-Type": "application/x-www-form-urlencoded"} | found.headers
    found.body = bytes(7_000_000) if value.startswith("@") else value.encode("utf-8", "surrogateescape")


# --- making the calls


def perform(server: Any, name: str) -> Exchange:
    """The recorded call, made to `server`."""
    made = recorded(name)
    ports = {
        8080: server.port("http_inference"),
        8081: server.port("http_management"),
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
    connection = http.client.HTTPConnection("127.0.0.1", server.port("http_management"), timeout=GUARD_S)
    connection.request(method, target)
    response = connection.getresponse()
    answer = response.status, json.loads(response.read())
    connection.close()
    return answer


def wait_until(good: Callable[[], bool]) -> None:
    while not good():
        pass  # each look is a request to the server; the test run's own limit ends a wait for ever


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


def fill(store: Path) -> None:
    write_mar(store, "probe", "probe_handler.py")
    write_mar(store, "probe_v2", "probe_handler.py", "2.0")
    write_mar(store, "probecfg", "probe_handler.py", "2.1", "probe_cfg.yaml")
    write_mar(store, "initfail", "initfail_handler.py")
    write_mar(store, "describe", "describe_handler.py")
    write_mar(store, "linear", "named_handler.py", entry="named_handler.py:my_entry")
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
    064 065 066 068 069 070 071 072 073 074 075 078 079 080 081 082 083 084 085 086 087 095 096 098
    101 102 104 106 110 111 116 117 121 124 223 225 227 229 235 243 244 247 248 237 239 241 246
    """,
)


def before(server: Any, name: str) -> None:
    """What happened between two recorded calls and wasn't recorded."""
    if name == "075":
        wait_until(lambda: first_model(server, "describe")["workers"][0]["status"] == "READY")
    elif name == "101":
        assert manage(server, "POST", "/models?url=linear.mar&model_name=lin&initial_workers=1")[0] == 200
    elif name == "223":
        for model in ("bigresp", "named"):
            assert manage(server, "POST", f"/models?url={model}.mar&initial_workers=1")[0] == 200
    elif name == "239":
        wait_until(lambda: perform(server, "001").status == 500)


@pytest.fixture(scope="module")
def played(serving: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Exchange]]:
    """Every call of the story, made once and in order."""
    directory = tmp_path_factory.mktemp("golden")
    (directory / "store").mkdir()
    fill(directory / "store")
    server = serving(directory, directory / "store", {"allowed_urls": "file://.*|http(s)?://.*"}, ["--ncs"])
    try:
        server.wait_started()
        answers = {}
        for name in MAIN:
            before(server, name)
            answers[name] = perform(server, name)
        yield answers
    finally:
        server.terminate()


def masked(value: Any) -> Any:
    """JSON with the type in place of what differs from run to run."""
    if isinstance(value, dict):
        return {k: type(v).__name__ if k in MASKED else masked(v) for k, v in value.items()}
    return [masked(item) for item in value] if isinstance(value, list) else value


def check(name: str, made: Exchange) -> None:
    expected = recorded(name)
    open_ended = False
    if name in DEVIATIONS:
        DEVIATIONS[name].change(expected)
        open_ended = expected.answer != b"" and b'"message": ""' in expected.answer
    assert made.status == expected.status, made.answer
    for header in ("content-type", "pragma", "cache-control", "expires"):
        assert made.answer_headers.get(header) == expected.answer_headers.get(header) or open_ended, header
    closes = expected.answer_headers.get("connection") == "close"
    assert (made.answer_headers.get("connection") == "close") == closes
    if expected.answer_headers.get("content-type") != "application/json" and not expected.answer.startswith(b"{"):
        assert made.answer == expected.answer
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


def test_every_recording_is_replayed() -> None:
    there = {path.name[:3] for path in GOLDEN.glob("*.txt")}
    elsewhere = {
        "test_tokens.py": {"150", "151", "152", "153", "154", "155", "156", "157", "158", "160", "350", "352"},
        "test_workflows_served.py": {"108", "250", "251", "253", "256", "258", "259", "260", "261", "262"},
    }
    assert there == {*MAIN, "140", "142", "143", "190", "191", "210"}.union(*elsewhere.values())


def test_the_reasons_of_what_differs_are_given() -> None:
    assert all(deviation.reason for deviation in DEVIATIONS.values())


def test_a_full_queue(start: Any, store: Path) -> None:
    for entry in store.iterdir():
        entry.rename(entry.with_name(f"unused-{entry.name}"))
    fill(store)
    server = start(job_queue_size=2, drain_timeout_s=1)
    check("140", perform(server, "140"))
    waiting = []
    for count in range(3):
        connection = http.client.HTTPConnection("127.0.0.1", server.port("http_inference"), timeout=GUARD_S)
        body = json.dumps({"op": "sleep", "seconds": GUARD_S})
        connection.request("POST", "/predictions/probe", body, {"Content-Type": "application/json"})
        waiting.append(connection)
        wait_until(lambda n=count: first_model(server, "probe")["jobQueueStatus"]["pendingRequests"] == n)  # type: ignore[misc]
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


def test_https(start: Any, tmp_path: Path) -> None:
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 20 -subj /CN=localhost -keyout key.pem -out cert.pem"
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    files = {"certificate_file": tmp_path / "cert.pem", "private_key_file": tmp_path / "key.pem"}
    check("210", perform(start(inference_address="https://127.0.0.1:0", **files), "210"))
