"""The server, and a program as KServe runs it, as process 1 of a container: its own process ids, a read-only root with
one writable directory, a user without an account. Needs root, to make such a place with unshare and setpriv."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import grpc
import psutil
import pytest

from support import GUARD_S
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

ENTER = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
USER = "12345"
SETTINGS = ("--set=number_of_gpu=0", "--set=preload_torch=false")
#: Reading is allowed everywhere, so that the tests may lie in directories of root's; writing isn't.
SETPRIV = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs"]
SETPRIV += ["--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]
#: $1 is the only place that can be written; $2 becomes its folder `store`, and /mnt/models.
PREPARE = """
mount --make-rprivate /
mount -t tmpfs tmpfs /mnt
cp -r "$2" /mnt/models
mount -t tmpfs -o mode=0755 tmpfs "$1"
cp -r "$2" "$1/store"
chown -R 12345:12345 "$1"
mount -o remount,ro,bind /
awk '$2 != "/" {print $2}' /proc/mounts | grep -v -e '^/proc' -e '^/sys' -e '^/dev' -e "^$1\\$" | while read place; do
    mount -o remount,ro,bind "$place" 2>/dev/null || true
done
shift 2
exec "$@"
"""

LEAVING = """
import json
import os
import subprocess

LATE = "import os, time; os.setsid(); os.fork() and os._exit(0); time.sleep(1)"

def handle(data, context):
    if data is None:
        return None
    if data[0]["body"] == "leave":
        subprocess.run(["python3", "-c", LATE], check=True)  # its child's parent is process 1 now
    where = {"uid": os.getuid()}
    try:
        open("/written", "w").close()
        where["root"] = "writable"
    except OSError as error:
        where["root"] = error.strerror
    return [json.dumps(where)] * len(data)
"""


PROGRAM = '''
import os
from pathlib import Path

from kserve import Model, ModelServer


class Reading(Model):
    """Says what its model's file says, who it is, and whether it could write anywhere but in one place."""

    def load(self):
        self.text = Path("/mnt/models/model.txt").read_text()
        self.ready = True
        return self.ready

    def predict(self, payload, headers=None):
        try:
            Path("/mnt/models/written").touch()
            written = True
        except OSError:
            written = False
        return {"predictions": [self.text, os.getuid(), written]}


if __name__ == "__main__":
    ModelServer().start([Reading("reading")])
'''


def possible() -> bool:
    try:
        tried = [*ENTER, *SETPRIV, "true"]
        return os.getuid() == 0 and subprocess.run(tried, capture_output=True, timeout=GUARD_S).returncode == 0
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not possible(), reason="needs root and util-linux: unshare, setpriv")


class Container:
    """A command as process 1, by default `torchserve`, with `directory` as the only place it can write to."""

    def __init__(
        self,
        directory: Path,
        store: Path,
        *words: str,
        environ: Mapping[str, str] = MappingProxyType({}),
        program: tuple[str, ...] = (),
    ) -> None:
        (directory / "writable").mkdir()
        self.output = (directory / "output").open("w+")
        ports = [f"--set=grpc_{api}_port=0" for api in ("inference", "management")]
        ports += [f"--set={api}_address=http://127.0.0.1:0" for api in ("inference", "management", "metrics")]
        command = ["-c", "from ts_frontend.cli.main import main; import sys; sys.exit(main())"]
        writable = str(directory / "writable")
        env = [f"{name}={value.format(writable=writable)}" for name, value in environ.items()]
        env += [f"PATH={os.environ['PATH']}", f"PYTHONPATH={os.pathsep.join(filter(None, sys.path))}", "HOME=/nowhere"]
        words = tuple(word.format(writable=writable) for word in words)
        serve = [*command, *words, "--model-store", f"{writable}/store", *SETTINGS, *ports]
        serve = [sys.executable, *(program or serve)]
        inside = ["bash", "-ec", PREPARE, "prepare", writable, str(store), *SETPRIV, "env", "-i", *env, *serve]
        self.process = subprocess.Popen(
            [*ENTER, *inside], cwd="/", stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True
        )

    def said(self) -> str:
        return Path(self.output.name).read_text()

    def wait_for(self, text: str) -> str:
        """The output so far, once it contains `text`; it doesn't wait beyond the end of the process."""
        for _ in range(GUARD_S * 20):
            if text in self.said() or self.process.poll() is not None:
                break
            try:
                self.process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        assert text in self.said(), self.said()
        return self.said()

    def address(self, api: str) -> str:
        found = re.search(rf"{api} listens on (\S+)", self.wait_for(f"{api} listens on "))
        assert found
        return found[1]

    def first(self) -> psutil.Process:
        """Process 1 of it."""
        (first,) = psutil.Process(self.process.pid).children()
        return first

    def get(self, path: str, body: bytes | None = None) -> bytes:
        """The answer to a GET or, with a body, a POST, which must be good."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.address('http_inference')}{path}", body, headers)
        with urllib.request.urlopen(request, timeout=GUARD_S) as answer:
            return bytes(answer.read())

    def ask(self, model: str, value: object) -> dict[str, object]:
        return dict(json.loads(self.get(f"/predictions/{model}", json.dumps(value).encode())))

    def stop(self) -> None:
        """SIGTERM, after which it drains and ends well."""
        self.first().send_signal(signal.SIGTERM)
        assert self.process.wait(GUARD_S) == 0, self.said()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(GUARD_S)
        self.output.close()


@pytest.fixture
def containers() -> Iterator[list[Container]]:
    made: list[Container] = []
    yield made
    for container in made:
        container.close()


WRITABLE = {"TMPDIR": "{writable}", "LOG_LOCATION": "{writable}/logs"}


@pytest.mark.parametrize("flag", ["--foreground", pytest.param("--start", marks=pytest.mark.long)])
def test_a_server_as_process_1(tmp_path, store, write, containers, flag):
    """`--start` alone would end the container with its launcher: it serves in the foreground there."""
    write("leaving", LEAVING)
    words = (flag, "--models", "leaving", "--set=default_workers_per_model=1")
    container = Container(tmp_path, store, *words, environ=WRITABLE)
    containers.append(container)
    container.wait_for("Worker 9000 of leaving_1.0 is ready")
    assert ("serving in the foreground" in container.said()) == (flag == "--start")
    first = container.first()
    own = set(first.children())
    told = container.ask("leaving", "leave" if flag == "--foreground" else "stay")
    assert (told["uid"], told["root"]) == (int(USER), "Read-only file system")
    if flag == "--foreground":
        adopted = set(first.children()) - own
        assert adopted, "process 1 is the parent of who has lost its own"
        _, alive = psutil.wait_procs(adopted, timeout=GUARD_S)
        assert not alive, "it is waited for"
    container.stop()
    assert "Draining" in container.said()


def test_without_a_place_to_write_to_the_reason_says_what_to_set(tmp_path, store, containers):
    container = Container(tmp_path, store, "--foreground")
    containers.append(container)
    assert container.process.wait(GUARD_S) == 1
    assert "No usable temporary directory found" in container.said() and "Traceback" not in container.said()
    assert "Set TMPDIR to a directory that can be written" in container.said()


def test_a_server_whose_logs_and_snapshots_cannot_be_written_says_so_once_and_serves(
    tmp_path, store, write, containers
):
    write("leaving", LEAVING)
    words = ("--foreground", "--models", "leaving", "--set=default_workers_per_model=1", "--set=metrics_location=/m")
    container = Container(tmp_path, store, *words, environ={"TMPDIR": "{writable}"})
    containers.append(container)
    container.wait_for("Worker 9000 of leaving_1.0 is ready")
    container.wait_for("Model server started.")
    for _ in range(2):
        assert container.ask("leaving", "stay")["root"] == "Read-only file system"
    container.wait_for("PredictionTime")
    container.stop()
    said = container.said()
    assert said.count("Log file logs/ts_log.log can't be written") == 1
    assert said.count("Log file /m/ts_metrics.log can't be written") == 1
    assert said.count("can't be written") == 2, said
    assert said.count("Snapshot could not be written to logs/config") == 1
    assert "Traceback" not in said


@pytest.mark.long
def test_kserves_argv_with_one_directory_to_write_to(tmp_path, store, write, containers):
    """Promises 001-15, 001-16: no variable says where to write; the probes of KServe are answered."""
    write("leaving", LEAVING)
    words = ("--foreground", "--kserve-mode", "--grpc_port", "8001", "--models", "leaving", "--grpc-workers", "1")
    container = Container(tmp_path, store, *words, "--work-dir", "{writable}/work")
    containers.append(container)
    container.wait_for("Worker 9000 of leaving_1.0 is ready")
    assert container.ask("leaving", "stay")["root"] == "Read-only file system"
    for probe in ("/v2/health/live", "/v2/health/ready", "/v2/models/leaving/ready"):
        container.get(probe)
    work = Path(f"/proc/{container.first().pid}/root{tmp_path}/writable/work")
    assert {one.name for one in work.iterdir()} >= {"tmp", "logs", ".model_server.pid"}
    container.stop()


def test_a_predictor_in_a_container(tmp_path, containers):
    """Promises 003-02, 003-10."""
    models = tmp_path / "models"
    models.mkdir()
    (models / "model.txt").write_text("seven")
    (models / "main.py").write_text(PROGRAM)
    serve = ("-m", "ts.compat.run", "/mnt/models/main.py", "--http_port=0", "--grpc_port=0")
    container = Container(tmp_path, models, environ={"TMPDIR": "{writable}"}, program=serve)
    containers.append(container)
    container.wait_for("of reading_1.0 is ready")
    answer = container.get("/v1/models/reading:predict", b'{"instances": []}')
    assert answer == b'{"predictions":["seven",12345,false]}'
    for probe in ("/", "/v2/health/live", "/v2/health/ready", "/v2/models/reading/ready", "/v1/models/reading"):
        container.get(probe)
    with grpc.insecure_channel(container.address("grpc_inference")) as channel:
        stub = GRPCInferenceServiceStub(channel)
        assert stub.ModelReady(pb.ModelReadyRequest(name="reading"), timeout=GUARD_S).ready
    container.stop()
    assert "Draining" in container.said()
