"""Models from S3, served by moto in an environment of its own: an archive or a folder, by each API, and
failures."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from support import GUARD_S, until
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub
from ts_frontend.errors import ArchiveExists, ArchiveNotFound, DownloadFailed, InvalidArchive, ServeError
from ts_frontend.models.sharing import SharedObject
from ts_frontend.models.store.http import DownloadLimits
from ts_frontend.models.store.store import ModelStore
from ts_frontend.tasks import Stop

pytestmark = pytest.mark.external

DOCUMENTS = Path(__file__).parents[2] / "data" / "documents"
#: How many objects the server lists at a time.
PAGE = 10
SAYS = """
def handle(data, context):
    return None if data is None else [{word!r}] * len(data)
"""
TRITON = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.version = args["model_version"]

    def execute(self, requests):
        out = np.array([[self.version]], dtype=object)
        return [pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("out", out)]) for _ in requests]
"""
CONFIG = """
name: "named_elsewhere"
backend: "python"
input [ { name: "in" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "out" data_type: TYPE_STRING dims: [ -1, -1 ] } ]
"""


@pytest.fixture(scope="module")
def endpoint(client_python: Callable[[str], Path], client_env: dict[str, str]) -> Iterator[str]:
    """The address of an S3 server."""
    command = [str(client_python("s3")), "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    env = {**client_env, "MOTO_S3_DEFAULT_MAX_KEYS": str(PAGE)}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            found = next(match for line in server.stderr if (match := re.search(r"http://127\.0\.0\.1:\d+", line)))
            reader = threading.Thread(target=server.stderr.read)
            reader.start()
            yield found[0]
        finally:
            server.kill()
            reader.join(GUARD_S)


@pytest.fixture(scope="module")
def account(endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of who may read there."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "who",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path_factory.mktemp("aws") / "none"),
    }


@pytest.fixture
def here(account: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has the account."""
    for name, value in account.items():
        monkeypatch.setenv(name, value)


class Bucket:
    """A bucket `models` that tests fill."""

    def __init__(self, endpoint: str) -> None:
        from boto3.session import Session

        session = Session(aws_access_key_id="who", aws_secret_access_key="secret", region_name="us-east-1")
        self.client = session.client("s3", endpoint_url=endpoint)
        self.client.create_bucket(Bucket="models")

    def put(self, key: str, content: bytes | str) -> None:
        self.client.put_object(Bucket="models", Key=key, Body=content)

    def put_folder(self, key: str, folder: Path, bucket: str = "models") -> None:
        for file in folder.rglob("*"):
            if file.is_file():
                name = f"{key}/{file.relative_to(folder)}"
                self.client.put_object(Bucket=bucket, Key=name, Body=file.read_bytes())

    def put_archive(self, key: str, folder: Path) -> None:
        made = Path(shutil.make_archive(str(folder), "zip", folder))
        self.put(key, made.read_bytes())


@pytest.fixture(scope="module")
def bucket(endpoint: str) -> Iterator[Bucket]:
    found = Bucket(endpoint)
    yield found
    found.client.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, write_to: Callable[..., str]) -> Callable[[str], Path]:
    """`folder(word)`: the directory of a model that says it."""

    def write(word: str) -> Path:
        path = tmp_path_factory.mktemp("models")
        write_to(path, "says", SAYS.format(word=word))
        return path / "says"

    return write


class Started:
    """Servers on one model store, `store`."""

    def __init__(self, directory: Path, serving: Callable[..., Any], account: dict[str, str]) -> None:
        self.directory, self.store = directory, directory / "store"
        self.store.mkdir()
        self._serving, self._account = serving, account

    def start(self) -> Any:
        settings = {
            "allowed_urls": r"s3://(models|bucket)/.*,http://127\\.0\\.0\\.1:\\d+/models/.*",
            "env": self._account,
        }
        return self._serving(self.directory, self.store, settings, ["--model-control-mode", "explicit"]).wait_started()

    def copies(self) -> list[str]:
        """The downloaded files outside the store."""
        return [path.name for path in self.directory.glob("tmp/*/downloads/*")]


@pytest.fixture
def place(tmp_path: Path, serving: Callable[..., Any], account: dict[str, str]) -> Started:
    return Started(tmp_path, serving, account)


def load(served: Any, name: str, url: str) -> None:
    request = pb.RepositoryModelLoadRequest(model_name=name)
    request.parameters["model_path"].string_param = url
    with grpc.insecure_channel(served.inference) as channel:
        GRPCInferenceServiceStub(channel).RepositoryModelLoad(request, timeout=GUARD_S)


def post(served: Any, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{served.http}/v2/repository/{path}", json=body, timeout=GUARD_S)


def test_loading_an_archive_and_what_is_newer(bucket: Bucket, folder: Callable[[str], Path], place: Started) -> None:
    """Promises 001-19."""
    served = place.start()
    try:
        bucket.put_archive("loaded/one.mar", folder("first"))
        load(served, "mine", "s3://models/loaded/one.mar")
        assert served.predict("mine", b"") == b"first"
        bucket.put_archive("loaded/one.mar", folder("second"))
        load(served, "mine", "s3://models/loaded/one.mar")
        assert served.predict("mine", b"") == b"second"
        served.wait_for_log("Model mine 1.0 unregistered")
        assert not place.copies() and not list(place.store.iterdir())
        served.terminate()
        bucket.put_archive("loaded/one.mar", folder("third"))
        served = place.start()
        assert served.predict("mine", b"") == b"third"
    finally:
        served.terminate()


def test_a_page_loads_from_s3_as_it_says(bucket: Bucket, folder: Callable[[str], Path], place: Started) -> None:
    """Promises 001-19. But for the text that it assigns to a map of messages."""
    page = (DOCUMENTS / "dynamo" / "8.txt").read_text()
    wrong, right = 'parameters["model_path"] =', 'parameters["model_path"].string_param ='
    assert wrong in page
    bucket.client.create_bucket(Bucket="bucket")
    bucket.put_folder("model", folder("from a bucket"), "bucket")
    served = place.start()
    try:
        with grpc.insecure_channel(served.inference) as channel:
            known = {"inference_pb2": pb, "stub": GRPCInferenceServiceStub(channel)}
            exec(page.split("# Unload model")[0].replace(wrong, right), known)  # noqa: S102
        assert served.predict("new-model", b"") == b"from a bucket"
    finally:
        served.terminate()


def test_loading_folders_in_both_layouts(bucket: Bucket, folder: Callable[[str], Path], place: Started) -> None:
    """Promises 001-19."""
    bucket.put_folder("loaded/says", folder("hello"))
    bucket.put("loaded/says/", b"")
    bucket.put("loaded/triton/config.pbtxt", CONFIG)
    for version in ("1", "2"):
        bucket.put(f"loaded/triton/{version}/model.py", TRITON)
    served = place.start()
    try:
        for url in ("s3://models/loaded/says", "s3://models/loaded/says/"):
            assert post(served, "models/greets/load", parameters={"model_path": url}).status_code == 200
            assert served.predict("greets", b"") == b"hello"
        both = {"model_path": "s3://models/loaded/triton", "config": '{"version_policy": {"all": {}}}'}
        for _ in range(2):
            assert post(served, "models/versions/load", parameters=both).json() == {"name": "versions", "load": True}
        infer = {"inputs": [{"name": "in", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}
        for version in ("1", "2"):
            answer = httpx.post(f"{served.http}/v2/models/versions/versions/{version}/infer", json=infer)
            assert answer.json()["outputs"][0]["data"] == [version], answer.text
        served.wait_for_log("Model versions 2 unregistered")
        until(lambda: len(place.copies()) == 2, place.copies)  # the two former ones go with their versions
        for name in ("greets", "versions"):
            assert post(served, f"models/{name}/unload").status_code == 200
        for name in ("greets 1.0", "versions 1", "versions 2"):
            served.wait_for_log(f"Model {name} unregistered", 2)
        until(lambda: not place.copies(), place.copies)
    finally:
        served.terminate()


def test_registering_what_lies_in_s3(
    bucket: Bucket, folder: Callable[[str], Path], place: Started, endpoint: str
) -> None:
    """By TorchServe's management APIs: the copies lie in the store, until the models are unregistered."""
    bucket.put_archive("archives/one.mar", folder("one"))
    bucket.put_archive("archives/web.mar", folder("web"))
    bucket.put_folder("folders/two", folder("two"))
    served = place.start()
    try:
        asked: dict[str, Any] = {"url": "s3://models/archives/one.mar", "model_name": "one", "initial_workers": 1}
        answer = httpx.post(f"{served.http_management}/models", params=asked, timeout=GUARD_S)
        assert answer.status_code == 200, answer.text
        served.register("s3://models/folders/two", model_name="two", s3_sse_kms=True)
        served.register(f"{endpoint}/models/archives/web.mar", model_name="web", s3_sse_kms=True)
        assert sorted(path.name for path in place.store.iterdir()) == ["one.mar", "two", "web.mar"]
        again = httpx.post(f"{served.http_management}/models", params={**asked, "model_name": "other"}, timeout=GUARD_S)
        assert (again.status_code, again.json()["message"]) == (500, "Model file already exists one.mar")
        served.terminate()
        bucket.client.delete_object(Bucket="models", Key="archives/one.mar")
        served = place.start()
        for name in ("one", "two", "web"):
            assert served.predict(name, b"") == name.encode()
            served.unregister(name)
        assert not list(place.store.iterdir())
    finally:
        served.terminate()


def test_a_repository_in_s3(
    bucket: Bucket,
    tmp_path: Path,
    serving: Callable[..., Any],
    account: dict[str, str],
    write_to: Callable[..., str],
) -> None:
    """A repository in S3 in addition to one on disk: the operator named both, so neither needs a permission."""
    for name in ("first", "second"):
        bucket.put(f"all/models/{name}/config.pbtxt", CONFIG.replace("named_elsewhere", name))
        bucket.put(f"all/models/{name}/1/model.py", TRITON)
    (tmp_path / "local" / "third" / "1").mkdir(parents=True)
    (tmp_path / "local" / "third" / "1" / "model.py").write_text(TRITON)
    both = ["--model-repository", "s3://models/all/models/", "--model-repository", str(tmp_path / "local"), "--ncs"]
    with serving(tmp_path, None, {"env": account}, both) as served:
        assert states(served) == {("first", "1"): "READY", ("second", "1"): "READY", ("third", "1"): "READY"}
    more = ["--model-control-mode", "explicit", "--load-model", "first"]
    with serving(tmp_path, None, {"env": account}, [*both, *more]) as served:
        assert states(served) == {("first", "1"): "READY", ("second", ""): "", ("third", ""): ""}
        bucket.put("all/models/first/2/model.py", TRITON)
        assert post(served, "models/first/load").status_code == post(served, "models/second/load").status_code == 200
        assert states(served) == {("first", "2"): "READY", ("second", "1"): "READY", ("third", ""): ""}
        bucket.put("all/models/second/1/model.py", "1 / 0")
        failed = post(served, "models/second/load")
        assert failed.status_code == 500 and "ZeroDivisionError" in failed.text
        assert post(served, "models/nobody/load").status_code == 404
        allowed = post(served, "models/x/load", parameters={"model_path": "s3://models/elsewhere"})
        assert allowed.status_code == 400 and "allowed_urls" in allowed.text
    refused = serving(tmp_path, None, {"env": account}, [*both, "--model-control-mode", "poll"])
    assert refused.wait() == 1 and "s3://models/all/models isn't read again" in refused.log


def states(served: Any) -> dict[tuple[str, str], str]:
    return {(one["name"], one["version"]): one["state"] for one in post(served, "index").json()}


# --- what goes wrong, without a server of ours


def fetch(tmp_path: Path, url: str, **limits: Any) -> Path:
    root = tmp_path / "store"
    root.mkdir(exist_ok=True)
    try:
        return asyncio.run(ModelStore(root, ["s3://.*"], limits=DownloadLimits(**limits)).fetch(url)).path
    except ServeError:
        assert not [path for path in root.iterdir() if path.name.startswith(".")]
        raise


@pytest.mark.usefixtures("here", "bucket")
@pytest.mark.parametrize(
    ("url", "kind", "words"),
    [
        ("s3://nowhere/m.mar", ArchiveNotFound, "there is no bucket nowhere"),
        ("s3://nowhere/folder/", ArchiveNotFound, "there is no bucket nowhere"),
        ("s3://models/nothing.mar", ArchiveNotFound, "the bucket has nothing there"),
        ("s3://models/nothing/", ArchiveNotFound, "the bucket has nothing there"),
        ("s3://models/hel", ArchiveNotFound, "the bucket has nothing there"),
        (f"s3://models/hello.mar#sha256={'0' * 64}", DownloadFailed, "its SHA-256 is"),
        (f"s3://models/folder#sha256={'0' * 64}", Exception, "a folder has no SHA-256"),
        ("s3://models/odd", InvalidArchive, "leads out of the archive"),
        ("s3://models/twice", InvalidArchive, "twice"),
    ],
)
def test_what_cannot_be_had_is_named(bucket: Bucket, tmp_path: Path, url: str, kind: Any, words: str) -> None:
    bucket.put("hello.mar", b"hello")
    bucket.put("folder/a", b"a")
    bucket.put("odd/a\\..\\..\\b", b"b")
    bucket.put("twice/a\\b", b"b")
    bucket.put("twice/a/b", b"b")
    with pytest.raises(kind) as caught:
        fetch(tmp_path, url)
    assert words in str(caught.value)


@pytest.mark.usefixtures("here")
def test_limits(bucket: Bucket, tmp_path: Path) -> None:
    for name in "abc":
        bucket.put(f"large/{name}", b"x" * 1000)
    for url, limits, words in (
        ("s3://models/large/a", {"bytes_max": 999}, "download_bytes_max"),
        ("s3://models/large", {"bytes_max": 2999}, "download_bytes_max"),
        ("s3://models/large", {"files_max": 2}, "extract_files_max"),
    ):
        with pytest.raises(DownloadFailed, match=words):
            fetch(tmp_path, url, **limits)
    path = fetch(tmp_path, "s3://models/large", bytes_max=3000, files_max=3)
    assert sorted(file.name for file in path.iterdir()) == ["a", "b", "c"]
    with pytest.raises(ArchiveExists):
        fetch(tmp_path, "s3://models/large")


@pytest.mark.usefixtures("here")
def test_a_folder_of_many_pages(bucket: Bucket, tmp_path: Path) -> None:
    for number in range(3 * PAGE + 1):
        bucket.put(f"many/{number % 7}/{number}", b"x")
    assert bucket.client.list_objects_v2(Bucket="models", Prefix="many/")["IsTruncated"]
    path = fetch(tmp_path, "s3://models/many")
    assert sum(file.is_file() for file in path.rglob("*")) == 3 * PAGE + 1


@pytest.mark.usefixtures("here")
def test_who_may_not_is_told(bucket: Bucket, endpoint: str, tmp_path: Path) -> None:
    bucket.put("secret.mar", b"secret")
    httpx.post(f"{endpoint}/moto-api/reset-auth", content=b"0").raise_for_status()
    try:
        for url in ("s3://models/secret.mar", "s3://models/"):
            with pytest.raises(DownloadFailed, match="InvalidAccessKeyId|denied"):
                fetch(tmp_path, url)
    finally:
        httpx.post(f"{endpoint}/moto-api/reset-auth", content=b"1000000").raise_for_status()


def test_servers_share_an_object(
    bucket: Bucket, folder: Callable[[str], Path], tmp_path: Path, serving: Callable[..., Any], account: dict[str, str]
) -> None:
    """A model that one server registers from the bucket is served by the other, too, which has its own store."""
    bucket.put_archive("shared/says.mar", folder("shared"))
    servers = []
    try:
        for name in ("one", "other"):
            store = tmp_path / name / "store"
            store.mkdir(parents=True)
            settings = {
                "allowed_urls": "s3://models/.*",
                "shared_snapshot": "s3://models/of/both",
                "shared_snapshot_poll_secs": 0.1,
                "env": account,
            }
            servers.append(serving(tmp_path / name, store, settings, ["--ncs"]))
        one, other = (server.wait_started() for server in servers)
        one.register("s3://models/shared/says.mar")
        other.wait_for_log("Model says 1.0 is registered, as at another server")
        until(lambda: other.worker_pids("says"), lambda: other.log)
        assert other.predict("says", b"") == b"shared"
        other.unregister("says")
        one.wait_for_log("Model says 1.0 is unregistered, as at another server")
    finally:
        for server in servers:
            server.terminate()


def test_a_shared_object_is_written_only_over_what_was_read(bucket: Bucket, here: None) -> None:
    one, other = SharedObject("s3://models/compared"), SharedObject("s3://models/compared/")
    assert one.read("", Stop()) == (b"", "")
    first = one.write(b"first", "", Stop())
    assert first and other.write(b"other", "", Stop()) is None
    assert one.read(first, Stop()) is None and other.read("", Stop()) == (b"first", first)
    assert other.write(b"second", first, Stop()) and one.write(b"third", first, Stop()) is None
    assert SharedObject("s3://models/compared").read(first, Stop()) == (b"second", other.read("", Stop())[1])  # type: ignore[index]
