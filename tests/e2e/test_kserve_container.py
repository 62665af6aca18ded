"""A program as KServe runs it: arguments, no root user, a root that can't be written, /mnt/models, probes.

Needs root, to make such a place with unshare and setpriv."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from support import GUARD_S
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

ENTER = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
#: Reading is allowed everywhere, so that the tests may lie in directories of root's; writing isn't.
SETPRIV = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", "--no-new-privs"]
SETPRIV += ["--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]
#: $1 is the only place that can be written, $2 becomes /mnt/models.
PREPARE = """
mount --make-rprivate /
mount -t tmpfs tmpfs /mnt
mkdir /mnt/models
cp -r "$2/." /mnt/models
mount -t tmpfs -o mode=1777 tmpfs "$1"
mount -o remount,ro,bind /
awk '$2 != "/" {print $2}' /proc/mounts | grep -v -e '^/proc' -e '^/sys' -e '^/dev' -e "^$1\\$" | while read place; do
    mount -o remount,ro,bind "$place" 2>/dev/null || true
done
cd /
shift 2
exec "$@"
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
    def __init__(self, directory: Path) -> None:
        writable, models = directory / "writable", directory / "models"
        writable.mkdir()
        models.mkdir()
        (models / "model.txt").write_text("seven")
        (models / "main.py").write_text(PROGRAM)
        self.output = (directory / "output").open("w+")
        env = [f"TMPDIR={writable}", f"PATH={os.environ['PATH']}", "HOME=/nowhere"]
        env += [f"PYTHONPATH={os.pathsep.join(filter(None, sys.path))}"]
        serve = [sys.executable, "-m", "ts.compat.run", "/mnt/models/main.py", "--http_port=0", "--grpc_port=0"]
        inside = ["bash", "-ec", PREPARE, "prepare", str(writable), str(models), *SETPRIV, "env", "-i", *env, *serve]
        self.process = subprocess.Popen(
            [*ENTER, *inside], cwd="/", stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True
        )

    def said(self) -> str:
        return Path(self.output.name).read_text()

    def wait_for(self, text: str) -> str:
        """The output so far, once it contains `text`."""
        end_s = time.monotonic() + GUARD_S
        while text not in self.said() and self.process.poll() is None and time.monotonic() < end_s:
            try:
                self.process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        assert text in self.said(), self.said()
        return self.said()

    def port(self, api: str) -> int:
        found = re.search(rf"{api} listens on \S+:(\d+)", self.wait_for(f"{api} listens on"))
        assert found
        return int(found[1])

    def get(self, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port('http_inference')}{path}", body, GUARD_S) as answer:
            return answer.status, answer.read()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(GUARD_S)
        self.output.close()


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    made = Container(tmp_path)
    yield made
    made.close()


def test_a_predictor_in_a_container(container: Container) -> None:
    """Promises 003-02, 003-10."""
    container.wait_for("of reading_1.0 is ready")
    assert container.get("/v1/models/reading:predict", b'{"instances": []}') == (
        200,
        b'{"predictions":["seven",12345,false]}',
    )
    for probe in ("/", "/v2/health/live", "/v2/health/ready", "/v2/models/reading/ready", "/v1/models/reading"):
        assert container.get(probe)[0] == 200
    with grpc.insecure_channel(f"127.0.0.1:{container.port('grpc_inference')}") as channel:
        stub = GRPCInferenceServiceStub(channel)
        assert stub.ModelReady(pb.ModelReadyRequest(name="reading"), timeout=GUARD_S).ready
    (first,) = psutil.Process(container.process.pid).children()
    first.send_signal(signal.SIGTERM)
    assert container.process.wait(GUARD_S) == 0
    assert "Draining" in container.said()
