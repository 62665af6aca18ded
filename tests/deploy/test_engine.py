"""deploy/Dockerfile and deploy/compose.yaml with a container engine: podman and podman-compose.

No registry of images is needed. Debian's own files, by debootstrap, stand in for its image, and Debian's Prometheus for
that of compose.yaml. Debian has no package of Grafana, so that service is left out.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.debian import PIP_FOLDER, debian_root, pip_volumes
from deploy.engine import Engine
from deploy.manifests import DEPLOY, ROOT, documents
from deploy.monitoring import alerts, panels
from docs.test_readme import blocks
from e2e.servers import write_model
from support import until

NEEDED = ("podman", "podman-compose", "debootstrap", "nsenter", "unshare", "ip", "curl")
MISSING = [tool for tool in NEEDED if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.external,
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING) or os.geteuid() != 0, reason=f"needs root, and of Debian's packages {MISSING or NEEDED}"
    ),
]
BASE = "docker.io/library/debian:bookworm-slim"
COMPOSE = DEPLOY / "compose.yaml"
COMPOSED = documents(COMPOSE)[0]
SERVICES: dict[str, Any] = COMPOSED["services"]
#: The file's name for it, which Debian's podman-compose doesn't read.
PROJECT = COMPOSED["name"]
#: In place of the image that compose.yaml names, with its user and places.
PROMETHEUS = f"""
FROM {BASE}
RUN apt-get update && apt-get install -y --no-install-recommends prometheus
RUN mkdir /prometheus && chown 65534:65534 /prometheus
USER 65534
WORKDIR /prometheus
ENTRYPOINT ["/usr/bin/prometheus"]
"""
#: The options of docs/kubernetes.md for a read-only root, with the most that a platform takes away.
READ_ONLY = [
    *("--read-only", "--tmpfs", "/home/model-server/tmp:exec,mode=1777"),
    *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
]
STORE = f"--volume={ROOT / 'model_store'}:/home/model-server/model-store:ro"
SAMPLE = ROOT / "examples" / "digits" / "samples" / "3.png"
PORTS = ["--publish", "127.0.0.1:8080:8080", "--publish", "127.0.0.1:7070:7070", "--publish", "127.0.0.1:8082:8082"]
#: Answers when the file's writer has closed it.
WAITS = """
def handle(data, context):
    if data is None:
        return None
    with open("/gate/pipe") as pipe:
        pipe.read()
    return ["done"] * len(data)
"""
#: A script for SageMaker.
TWICE = """
def model_fn(model_dir):
    return 2


def predict_fn(data, model):
    return data * model
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with the image `torchrelay`, the image of compose's service `server`, and Prometheus."""
    faulthandler.cancel_dump_traceback_later()  # downloads of Debian and torch belong to this, and take their time
    place = tmp_path_factory.mktemp("engine")
    root = place / "root"
    debian_root(root, place / "debootstrap.log")
    with Engine(place / "engine") as started:
        archive = place / "root.tar"
        subprocess.run(["tar", "-C", root, "-cf", archive, "."], check=True)
        started.podman("import", archive, BASE)
        shutil.rmtree(root)
        archive.unlink()
        stand_in = place / "prometheus"
        stand_in.mkdir()
        (stand_in / "Dockerfile").write_text(PROMETHEUS)
        started.podman("build", "--network=host", "-t", SERVICES["prometheus"]["image"], stand_in)
        volumes = [f"--volume={here}:{there}:ro" for here, there in pip_volumes(place / "pip").items()]
        started.podman("build", *volumes, "--network=host", "-f", DEPLOY / "Dockerfile", "-t", "torchrelay", ROOT)
        # Its steps are those of the image above, which are not run again.
        compose(started, f"--podman-build-args={' '.join(volumes)} --network=host", "build", "server")
        started.podman("network", "create", "tests")
        yield started
    shutil.rmtree(place)


def compose(engine: Engine, *words: str) -> str:
    return engine.run("podman-compose", "-p", PROJECT, "-f", COMPOSE, *words)


@pytest.fixture
def name(engine: Engine) -> Iterator[str]:
    """A container's name; the container is removed after the test."""
    yield "one"
    engine.podman("rm", "--force", "--ignore", "--time", "0", "one")


def started(engine: Engine, name: str, *words: str) -> None:
    """Runs the image in the background; `words`: options of podman, the image's name, a command."""
    engine.podman("run", "--detach", "--name", name, "--network", "tests", *words)


def is_healthy(engine: Engine, name: str) -> None:
    """Waits for success of the image's own health check."""

    def healthy() -> bool:
        check = engine.begun("podman", "healthcheck", "run", name)
        check.communicate()
        return check.returncode == 0

    until(healthy, lambda: engine.podman("logs", name))


def fetched(engine: Engine, url: str, *options: str | Path) -> str:
    command = engine.beside("curl", "--silent", "--show-error", "--max-time", "60", *options, url)
    return subprocess.run(command, capture_output=True, text=True).stdout


def status(engine: Engine, url: str) -> str:
    return fetched(engine, url, "--output", "/dev/null", "--write-out", "%{http_code}")


def predicts(engine: Engine, port: int = 8080) -> None:
    """Over HTTP, until the model is there."""
    url = f"http://127.0.0.1:{port}/predictions/digits"
    until(lambda: '"class": "3"' in fetched(engine, url, "--upload-file", SAMPLE))


def predicts_by_grpc(engine: Engine) -> None:
    command = engine.beside(Path(sys.executable).with_name("torchserve"), "predict", "digits", SAMPLE)
    assert json.loads(engine.run(*command))["class"] == "3"


def stopped(engine: Engine, name: str) -> None:
    """Stops it as an engine does."""
    engine.podman("stop", name)
    assert engine.podman("inspect", "--format", "{{.State.ExitCode}}", name).split()[-1] == "0"


# --- the image


def test_the_image_has_the_files_settings_and_nothing_of_the_build(engine: Engine) -> None:
    (image,) = json.loads(engine.podman("inspect", "torchrelay"))
    config = image["Config"]
    assert (config["User"], config["WorkingDir"], config["StopSignal"]) == ("1000", "/home/model-server", "SIGTERM")
    assert image["Healthcheck"]["Test"] == ["CMD", "torchserve", "ping", "--timeout", "5"]
    assert set(config["ExposedPorts"]) == {f"{port}/tcp" for port in (8080, 8081, 8082, 7070, 7071)}
    look = f"(ls -A {PIP_FOLDER}; ls -d /src; env | grep PIP_; find / -xdev -name '*pip.conf') 2>/dev/null; true"
    assert engine.podman("run", "--rm", "--no-healthcheck", "--network=none", "torchrelay", "sh", "-c", look) == ""


@pytest.mark.parametrize(("user", "words"), [("12345:0", ["serve"]), ("65534:65534", [])], ids=["any", "nobody"])
def test_it_serves_read_only_as_any_user(engine: Engine, name: str, user: str, words: list[str]) -> None:
    """Also as one without root's group, and with flags alone."""
    words = [*words, "--models", "digits=digits.mar", "--disable-token-auth"]
    started(engine, name, *READ_ONLY, "--user", user, *PORTS, STORE, "torchrelay", *words)
    is_healthy(engine, name)
    predicts(engine)
    predicts_by_grpc(engine)
    assert "Read-only" in engine.podman("exec", name, "touch", "/opt/torchrelay/x", fails=True)
    inside = engine.podman("exec", name, "sh", "-c", "id -u; grep -E 'CapEff|NoNewPrivs' /proc/self/status")
    assert inside.split() == [user.partition(":")[0], "CapEff:", "0" * 16, "NoNewPrivs:", "1"]
    stopped(engine, name)


def test_the_image_has_the_compiled_form(engine: Engine) -> None:
    """The compiler stays in the stage of the build."""
    look = "torchserve --version; ls /usr/bin"
    said = engine.podman("run", "--rm", "--network=none", "torchrelay", "sh", "-c", look)
    assert "(compiled)" in said and "gcc" not in said


def test_the_variant_for_sagemaker_serves_its_folder(engine: Engine, name: str, tmp_path: Path) -> None:
    """As SageMaker starts it: the argument `serve`, and the model's files."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "inference.py").write_text(TWICE)
    given = ["--env=TORCHRELAY_VARIANT=sagemaker", f"--volume={tmp_path}:/opt/ml/model:ro", *PORTS]
    started(engine, name, *given, "torchrelay", "serve")
    until(lambda: status(engine, "http://127.0.0.1:8080/ping") == "200", lambda: engine.podman("logs", name))
    words = ("--data", "[1, 2]", "--header", "Content-Type: application/json")
    assert json.loads(fetched(engine, "http://127.0.0.1:8080/invocations", *words)) == [2, 4]
    stopped(engine, name)


def from_the_readme(engine: Engine, place: Path, mark: str) -> str:
    """The name of the image that the README's Dockerfile with this text makes, in a folder with a model store."""
    written = [one.text for one in blocks((ROOT / "README.md").read_text()) if one.language == "dockerfile"]
    (text,) = (one for one in written if one.startswith("FROM torchrelay\n") and mark in one)
    shutil.copytree(ROOT / "model_store", place / "context" / "model_store")
    (place / "context" / "Dockerfile").write_text(text)
    volumes = [f"--volume={here}:{there}:ro" for here, there in pip_volumes(place / "pip").items()]
    engine.podman("build", *volumes, "--network=host", "-t", "from-the-readme", place / "context")
    return "from-the-readme"


def test_the_readmes_image_for_vertex(engine: Engine, name: str, tmp_path: Path) -> None:
    given = [f"--env=AIP_{one}" for one in ("MODE=PREDICTION", "HTTP_PORT=8080", "HEALTH_ROUTE=/well")]
    started(engine, name, *given, *PORTS, from_the_readme(engine, tmp_path, "digits.mar"))
    until(lambda: status(engine, "http://127.0.0.1:8080/well") == "200", lambda: engine.podman("logs", name))
    predicts(engine)
    stopped(engine, name)


def test_the_readmes_image_for_kserve(engine: Engine, tmp_path: Path) -> None:
    image = from_the_readme(engine, tmp_path, "pip install")
    engine.podman("run", "--rm", "--network=none", image, "python", "-c", "import transformers")
    assert json.loads(engine.podman("inspect", image))[0]["Config"]["User"] == "1000"


def test_log_location_counts_with_a_read_only_root(engine: Engine, name: str) -> None:
    place = "/home/model-server/tmp/log files"
    serve = f"LOG_LOCATION='{place}' exec dockerd-entrypoint.sh serve --disable-token-auth"
    started(engine, name, *READ_ONLY, "--user", "12345:0", "torchrelay", "sh", "-c", serve)
    until(lambda: "Model server started" in engine.podman("logs", name))
    assert {"ts_log.log", "config"} <= set(engine.podman("exec", name, "ls", place).split())
    stopped(engine, name)


def test_a_stop_waits_for_a_running_request(engine: Engine, name: str, tmp_path: Path) -> None:
    store, gate = tmp_path / "store", tmp_path / "gate"
    for folder in (store, gate):
        folder.mkdir()
    write_model(store, "waits", WAITS)
    os.mkfifo(gate / "pipe", 0o644)
    volumes = [f"--volume={store}:/home/model-server/model-store:ro", f"--volume={gate}:/gate"]
    words = ["serve", "--models", "waits", "--disable-token-auth"]
    started(
        engine, name, *READ_ONLY, "--user", "12345:0", *PORTS, *volumes, "--stop-timeout", "45", "torchrelay", *words
    )
    ready = "http://127.0.0.1:8080/v2/health/ready"
    until(lambda: status(engine, ready) == "200", lambda: engine.podman("logs", name))
    url = "http://127.0.0.1:8080/predictions/waits"
    asked = engine.begun(*engine.beside("curl", "--silent", "--data", "go", url))

    def opened() -> int:
        """The pipe's number once the handler reads it; before that there's no one to write to."""
        try:
            return os.open(gate / "pipe", os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return 0

    pipe = until(opened, lambda: engine.podman("logs", name))
    stop = engine.begun("podman", "stop", name)
    until(lambda: status(engine, ready) != "200")
    assert asked.poll() is None and stop.poll() is None
    os.close(pipe)
    assert asked.communicate()[0] == "done"
    said, _ = stop.communicate()
    assert stop.returncode == 0, said
    assert engine.podman("inspect", "--format", "{{.State.ExitCode}}", name).strip() == "0"


def test_variables_override_the_settings(engine: Engine, name: str) -> None:
    variables = {
        "TS_INFERENCE_ADDRESS": "http://0.0.0.0:9000",
        "TS_DISABLE_TOKEN_AUTHORIZATION": "true",
        "TS_LOAD_MODELS": "digits.mar",
    }
    given = [f"--env={key}={value}" for key, value in variables.items()]
    started(engine, name, *given, "--publish", "127.0.0.1:9000:9000", STORE, "torchrelay")
    predicts(engine, 9000)
    stopped(engine, name)


def test_without_words_other_machines_need_a_key(engine: Engine, name: str) -> None:
    started(engine, name, *PORTS, "torchrelay")
    is_healthy(engine, name)
    assert status(engine, "http://127.0.0.1:8080/predictions/digits") == "400"
    assert "key_file.json" in engine.podman("logs", name)
    stopped(engine, name)


def test_torchserves_own_start_stays_in_the_foreground(engine: Engine, name: str) -> None:
    store = f"--volume={ROOT / 'model_store'}:/models:ro"
    words = ["torchserve", "--start", "--model-store", "/models", "--models", "digits=digits.mar"]
    started(engine, name, store, "torchrelay", *words)
    is_healthy(engine, name)
    stopped(engine, name)


@pytest.mark.parametrize(
    "command",
    [["torchserve", "--version"], ["sh", "-c", "torchserve --version"], ["torchserve --version && exec true"]],
    ids=["words", "shell", "one string"],
)
def test_a_command_of_ones_own(command: list[str], engine: Engine) -> None:
    assert "torchrelay" in engine.podman("run", "--rm", "--network=none", "torchrelay", *command).lower()


# --- compose


@pytest.fixture
def together(engine: Engine) -> Iterator[str]:
    """compose.yaml's server and Prometheus, running; the name of the server's container."""
    compose(engine, "up", "--detach", *(service for service in SERVICES if service != "grafana"))
    yield f"{PROJECT}_server_1"
    compose(engine, "down")


def answer(engine: Engine, path: str, **parameters: str) -> Any:
    """The data that Prometheus answers with; None without an answer."""
    given = [word for key, value in parameters.items() for word in ("--data-urlencode", f"{key}={value}")]
    text = fetched(engine, f"http://127.0.0.1:9090/api/v1/{path}", "--get", *given)
    if not text:
        return None
    found = json.loads(text)
    assert found["status"] == "success", (path, parameters, found)
    return found["data"]


def values(engine: Engine, expression: str) -> list[str]:
    found = answer(engine, "query", query=expression)
    return [one["value"][1] for one in found["result"]] if found else []


def test_compose_serves_and_prometheus_scrapes(engine: Engine, together: str) -> None:
    is_healthy(engine, together)
    predicts(engine)
    predicts_by_grpc(engine)

    def logs() -> str:
        return engine.podman("logs", together)

    until(lambda: values(engine, 'up{job="torchrelay"}') == ["1"], logs)
    until(lambda: values(engine, 'ts_server_ready{instance="server:8082"}') == ["1"], logs)
    answered = 'sum(ts_ended_requests_total{model_name="digits",outcome="answered"})'
    until(lambda: [float(value) >= 2 for value in values(engine, answered)] == [True], logs)
    for query in [*panels(), *alerts()]:
        answer(engine, "query", query=query.expression)

    def checked() -> bool:
        groups = answer(engine, "rules")["groups"]
        return bool(groups) and all(rule["health"] == "ok" for group in groups for rule in group["rules"])

    until(checked, lambda: answer(engine, "rules"))
    compose(engine, "stop", "server")
    assert engine.podman("inspect", "--format", "{{.State.ExitCode}}", together).split()[-1] == "0"
