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
from pathlib import Path

import pytest
import torch

from deploy.debian import debian_root, pip_settings
from deploy.dockerfile import Builder, Container, Image, run
from support import until

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("debootstrap", "unshare", "nsenter", "setpriv", "ip", "chroot")
MISSING = [tool for tool in NEEDED if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.external,
    pytest.mark.skipif(
        bool(MISSING) or os.geteuid() != 0, reason=f"needs root, and of Debian's packages {MISSING or NEEDED}"
    ),
]
ANY_USER = "12345:0"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    faulthandler.cancel_dump_traceback_later()  # downloads of Debian and torch belong to this, and take their time
    return built(tmp_path_factory.mktemp("image"))


def built(place: Path) -> Image:
    """The Dockerfile's last stage, built below `place`."""
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
    builder = Builder(ROOT, base, place, mounts, pip, log)
    version = torch.__version__.partition("+")[0]
    try:
        return builder.build(ROOT / "deploy" / "Dockerfile", {"TORCH_SPEC": f"torch=={version}", "EXTRAS": "vision"})
    except subprocess.CalledProcessError as error:
        raise AssertionError(f"{error}\n{log.read_text()[-5000:]}") from error


def started(image: Image, command: list[str], output: Path, mounts: dict[Path, str] | None = None) -> Container:
    return run(image, command, user=ANY_USER, mounts=mounts or {}, writable=["/home/model-server/tmp"], output=output)


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


STORE = {ROOT / "model_store": "/home/model-server/model-store"}
SERVE = ["--models", "digits=digits.mar", "--disable-token-auth"]


def test_the_image_serves_read_only_as_any_user(image: Image, containers: list[Container], tmp_path: Path) -> None:
    output = tmp_path / "output"
    container = started(image, [*image.command, *SERVE], output, STORE)
    containers.append(container)
    is_ready(container, output)
    sample = ROOT / "examples" / "digits" / "samples" / "3.png"
    answer = json.loads(fetched(container, "http://127.0.0.1:8080/predictions/digits", "--upload-file", str(sample)))
    assert answer["class"] == "3"
    health = subprocess.run(container.inside(*image.health_command), capture_output=True, text=True)
    assert health.returncode == 0, health.stdout + health.stderr
    touched = subprocess.run(container.inside("touch", "/opt/torchrelay/x"), capture_output=True, text=True)
    assert "Read-only" in touched.stderr
    who = subprocess.run(container.inside("sh", "-c", "id -u; grep CapEff /proc/self/status"), stdout=subprocess.PIPE)
    assert who.stdout.split() == [b"12345", b"CapEff:", b"0" * 16]
    ended(container, output)


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
