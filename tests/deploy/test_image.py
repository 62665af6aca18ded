"""The image of deploy/Dockerfile, built by its own steps in Debian's files; it runs read-only, as any user, in
namespaces of its own."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deploy.debian import debian_root, pip_settings
from deploy.dockerfile import Builder, Container, Image, run
from docs.test_readme import blocks
from e2e.conftest import write_model
from support import until

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("debootstrap", "unshare", "nsenter", "setpriv", "ip", "chroot")
MISSING = [tool for tool in NEEDED if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.external,
    pytest.mark.slow,  # the build alone takes as long as half of the other external tests
    pytest.mark.skipif(
        bool(MISSING) or os.geteuid() != 0, reason=f"needs root, and of Debian's packages {MISSING or NEEDED}"
    ),
]
ANY_USER = "12345:0"
NOBODY = "65534:65534"
#: Enough for the server and a worker with torch.
MEMORY_BYTES = 1 << 30
#: Takes more memory than the container may have.
GREEDY = f"""
def handle(data, context):
    return None if data is None else [str(len(b"x" * {2 * MEMORY_BYTES}))]
"""

#: A script for SageMaker.
TWICE = """
def model_fn(model_dir):
    return 2


def predict_fn(data, model):
    return data * model
"""


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """After the Dockerfile's build, with all its stages."""
    faulthandler.cancel_dump_traceback_later()  # downloads of Debian and torch belong to this, and take their time
    return built(tmp_path_factory.mktemp("image"))


@pytest.fixture(scope="module")
def image(builder: Builder) -> Image:
    """The last stage: of the variant `cpu`."""
    return list(builder.stages.values())[-1]


def built(place: Path) -> Builder:
    """Builds the Dockerfile below `place`."""
    base, log = place / "base", place / "build.log"
    debian_root(base, log)
    pip = pip_settings()
    named = {
        Path(*Path(found).parts[:3]) for value in pip.values() for found in re.findall(r"(?:file://)?(/\S+)", value)
    }
    mounts = sorted(folder for folder in named if folder.is_dir() and folder.parts[1] != "etc")
    for name, value in pip.items():  # files that the image lacks, or would overwrite with its own, as certificates
        for word in value.split():
            if os.path.isfile(word):
                copy = f"/{name.lower()}-{os.path.basename(word)}"
                shutil.copy(word, f"{base}{copy}")
                pip[name] = pip[name].replace(word, copy)
    # What is tested is the image, not the C compiler's optimisation, which takes longer than all else of torchrelay.
    builder = Builder(ROOT, Image(base), place, mounts, {**pip, "TORCHRELAY_OPT_LEVEL": "0"}, log)
    version = torch.__version__.partition("+")[0]
    given = {"VARIANT": "cpu", "TORCH_SPEC": f"torch=={version}", "EXTRAS": "vision"}
    try:
        builder.build(ROOT / "deploy" / "Dockerfile", given)
    except subprocess.CalledProcessError as error:
        raise AssertionError(f"{error}\n{log.read_text()[-5000:]}") from error
    return builder


def started(
    image: Image,
    command: list[str],
    output: Path,
    mounts: dict[Path, str] | None = None,
    user: str = ANY_USER,
    memory_bytes: int = 0,
) -> Container:
    places, writable = mounts or {}, ["/home/model-server/tmp"]
    return run(image, command, user=user, mounts=places, writable=writable, output=output, memory_bytes=memory_bytes)


@pytest.fixture
def containers() -> Iterator[list[Container]]:
    all_of_them: list[Container] = []
    yield all_of_them
    for one in all_of_them:
        one.kill()


def fetched(container: Container, url: str, *options: str) -> str:
    command = container.beside("curl", "--silent", "--show-error", "--max-time", "10", *options, url)
    return subprocess.run(command, capture_output=True, text=True).stdout


def is_ready(container: Container, output: Path, models: int = 1) -> None:
    """Waits until the server is ready, and has so many models."""
    ready = "http://127.0.0.1:8080/v2/health/ready"
    until(
        lambda: fetched(container, ready, "--write-out", "%{http_code}").endswith("200"),
        lambda: "\n".join(line for line in output.read_text().splitlines() if "503" not in line and "5XX" not in line),
    )
    listed = json.loads(fetched(container, "http://127.0.0.1:8081/models"))["models"]
    assert len(listed) == models, output.read_text()


def ended(container: Container, output: Path) -> None:
    """Stops it as an engine does."""
    os.kill(container.pid, getattr(signal, container.image.stop_signal))
    assert container.outer.wait(60) == 0, output.read_text()


def is_well(container: Container, output: Path, route: str) -> None:
    """Waits for a platform's own check."""
    url = f"http://127.0.0.1:8080/{route}"
    until(lambda: fetched(container, url, "--write-out", "%{http_code}").endswith("200"), output.read_text)


def predicts(container: Container) -> None:
    sample = ROOT / "examples" / "digits" / "samples" / "3.png"
    answer = json.loads(fetched(container, "http://127.0.0.1:8080/predictions/digits", "--upload-file", str(sample)))
    assert answer["class"] == "3"


STORE = {ROOT / "model_store": "/home/model-server/model-store"}
SERVE = ["--models", "digits=digits.mar", "--disable-token-auth"]


def test_the_image_serves_read_only_as_any_user(image: Image, containers: list[Container], tmp_path: Path) -> None:
    output = tmp_path / "output"
    container = started(image, [*image.command, *SERVE], output, STORE)
    containers.append(container)
    is_ready(container, output)
    predicts(container)
    health = subprocess.run(container.inside(*image.health_command), capture_output=True, text=True)
    assert health.returncode == 0, health.stdout + health.stderr
    touched = subprocess.run(container.inside("touch", "/opt/torchrelay/x"), capture_output=True, text=True)
    assert "Read-only" in touched.stderr
    who = subprocess.run(container.inside("sh", "-c", "id -u; grep CapEff /proc/self/status"), stdout=subprocess.PIPE)
    assert who.stdout.split() == [b"12345", b"CapEff:", b"0" * 16]
    ended(container, output)


def test_it_serves_as_nobody_with_little_memory(image: Image, containers: list[Container], tmp_path: Path) -> None:
    """Neither root's group nor an account of the image. A worker that the kernel kills for its memory takes only its
    own request with it."""
    store, output = tmp_path / "store", tmp_path / "output"
    shutil.copytree(ROOT / "model_store", store)
    write_model(store, "greedy", GREEDY)
    serve = ["serve", "--models", "digits=digits.mar", "greedy", "--disable-token-auth", "--ncs"]
    places = {store: "/home/model-server/model-store"}
    containers.append(container := started(image, serve, output, places, NOBODY, MEMORY_BYTES))
    is_ready(container, output, models=2)
    predicts(container)
    greedy = json.loads(fetched(container, "http://127.0.0.1:8080/predictions/greedy", "--data", "x"))
    assert greedy["code"] == 507 and "SIGKILL (out of memory?)" in greedy["message"], greedy
    predicts(container)
    assert container.memory and str(container.pid) in (container.memory / "cgroup.procs").read_text().split()
    who = subprocess.run(container.inside("id"), capture_output=True, text=True)
    assert who.stdout.startswith("uid=65534(nobody) gid=65534(nogroup)") and "0(root)" not in who.stdout
    ended(container, output)


def test_the_image_has_the_compiled_form(image: Image, containers: list[Container], tmp_path: Path) -> None:
    output = tmp_path / "output"
    containers.append(container := started(image, ["torchserve", "--version"], output))
    assert container.outer.wait(60) == 0 and "(compiled)" in output.read_text(), output.read_text()
    assert not list((image.root / "usr" / "bin").glob("*gcc*")), "the compiler stays in the stage of the build"


def test_the_variant_for_sagemaker_serves_its_folder(image: Image, containers: list[Container], tmp_path: Path) -> None:
    """As SageMaker starts it: the argument `serve`, and the model's files."""
    assert image.environment["TORCHRELAY_VARIANT"] == "cpu"
    code, output = tmp_path / "model" / "code", tmp_path / "output"
    code.mkdir(parents=True)
    (code / "inference.py").write_text(TWICE)
    sagemaker = replace(image, environment=image.environment | {"TORCHRELAY_VARIANT": "sagemaker"})
    containers.append(container := started(sagemaker, ["serve"], output, {code.parent: "/opt/ml/model"}))
    is_well(container, output, "ping")
    words = ("--data", "[1, 2]", "--header", "Content-Type: application/json")
    answer = fetched(container, "http://127.0.0.1:8080/invocations", *words)
    assert json.loads(answer) == [2, 4], answer + output.read_text()
    ended(container, output)


def from_the_readme(builder: Builder, image: Image, place: Path, mark: str) -> Image:
    """What the README's Dockerfile with this text makes of the image `torchrelay`, in a folder with a model store."""
    written = [one.text for one in blocks((ROOT / "README.md").read_text()) if one.language == "dockerfile"]
    (text,) = (one for one in written if one.startswith("FROM torchrelay\n") and mark in one)
    shutil.copytree(ROOT / "model_store", place / "model_store")
    (place / "Dockerfile").write_text(text)
    return Builder(place, image, place, builder.mounts, builder.environment, builder.log).build(
        place / "Dockerfile", {}
    )


def test_the_readmes_image_for_vertex(
    builder: Builder, image: Image, containers: list[Container], tmp_path: Path
) -> None:
    vertex, output = from_the_readme(builder, image, tmp_path, "digits.mar"), tmp_path / "output"
    vertex.environment |= {"AIP_MODE": "PREDICTION", "AIP_HTTP_PORT": "8080", "AIP_HEALTH_ROUTE": "/well"}
    containers.append(container := started(vertex, vertex.command, output))
    is_well(container, output, "well")
    predicts(container)
    ended(container, output)


def test_the_readmes_image_for_kserve(
    builder: Builder, image: Image, containers: list[Container], tmp_path: Path
) -> None:
    kserve, output = from_the_readme(builder, image, tmp_path, "pip install"), tmp_path / "output"
    assert kserve.user == image.user
    containers.append(
        container := started(kserve, ["python", "-c", "import transformers; print('it is there')"], output)
    )
    assert container.outer.wait(60) == 0 and "it is there" in output.read_text(), output.read_text()


def test_log_location_counts_with_a_read_only_root(image: Image, containers: list[Container], tmp_path: Path) -> None:
    output, place = tmp_path / "output", "/home/model-server/tmp/log files"
    serve = f"LOG_LOCATION='{place}' exec dockerd-entrypoint.sh serve --disable-token-auth"
    containers.append(container := started(image, ["sh", "-c", serve], output))
    until(lambda: "Model server started" in output.read_text(), output.read_text)
    found = subprocess.run(container.inside("ls", place), capture_output=True, text=True)
    assert "ts_log.log" in found.stdout.split() and "config" in found.stdout.split(), found
    ended(container, output)


def test_without_serve_the_words_are_flags(image: Image, containers: list[Container], tmp_path: Path) -> None:
    output = tmp_path / "output"
    containers.append(container := started(image, SERVE, output, STORE))
    is_ready(container, output)
    ended(container, output)


def test_without_words_it_serves_what_its_settings_say(
    image: Image, containers: list[Container], tmp_path: Path
) -> None:
    """`docker run IMAGE`: no models, keys for other machines, and health all the same."""
    output = tmp_path / "output"
    containers.append(container := started(image, image.command, output))
    until(lambda: "Model server started" in output.read_text(), output.read_text)
    health = subprocess.run(container.inside(*image.health_command), capture_output=True, text=True)
    assert health.returncode == 0, health.stdout + health.stderr
    assert "key_file.json" in output.read_text()
    ended(container, output)


@pytest.mark.parametrize(
    "command",
    [
        ["torchserve", "--version"],
        ["sh", "-c", "torchserve --version"],
        ["torchserve --version && exec true"],
        ["serve", "--version"],
    ],
    ids=["words", "shell", "one string", "serve"],
)
def test_a_command_of_ones_own(command: list[str], image: Image, containers: list[Container], tmp_path: Path) -> None:
    output = tmp_path / "output"
    containers.append(container := started(image, command, output))
    assert container.outer.wait(60) == 0, output.read_text()
    assert re.search(r"torchserve|torchrelay", output.read_text())
