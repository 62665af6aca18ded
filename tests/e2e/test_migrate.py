"""A TorchServe deployment is moved step by step, with only docs/moving-from-torchserve.md and `torchserve migrate
--check`, and then serves."""

from __future__ import annotations

import json
import shlex
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from model_archiver import ModelArchiver, ModelArchiverConfig
from ts_frontend.cli import main as cli
from ts_frontend.config import properties

CONTAINER = "/home/model-server"
PASSWORD = "changeit"


class Mover:
    """Somebody with the deployment's directory, the page and the command."""

    def __init__(self, root: Path, deployment: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.page = (root / "docs/moving-from-torchserve.md").read_text()
        self.at, self._capsys = deployment, capsys
        self.config = deployment / "config/config.properties"

    def report(self) -> dict[str, dict[str, str]]:
        """The errors by subject, and the warnings; the exit status says whether there are errors."""
        status = cli.main(["migrate", "--check", str(self.at), "--json"])
        told = json.loads(self._capsys.readouterr().out)
        found: dict[str, dict[str, str]] = {"error": {}, "warning": {}, "ok": {}}
        for section in told["sections"]:
            for one in section["findings"]:
                found[one["severity"]].setdefault(one["about"].partition(",")[0], one["text"])
        assert status == int(bool(found["error"])) and told["errors"] >= len(found["error"])
        return found

    def pack(self) -> None:
        store, models = self.at / "model-store", self.at / "models"
        shutil.rmtree(store, ignore_errors=True)
        store.mkdir()
        for name in ("shouting", "counting"):
            yaml = models / f"{name}-config.yaml"
            ModelArchiver.generate_model_archive(
                ModelArchiverConfig(
                    name,
                    str(models / f"{name}.py"),
                    "1.0",
                    export_path=str(store),
                    config_file=str(yaml) if yaml.exists() else None,
                )
            )

    def change(self, file: Path, old: str, new: str) -> None:
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))


def make_key_store(folder: Path) -> None:
    """The deployment's key store: PKCS12, as keytool makes it."""
    for command in (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -subj /CN=localhost "
        "-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout made.key -out made.pem",
        f"openssl pkcs12 -export -in made.pem -inkey made.key -passout pass:{PASSWORD} -out keystore.p12",
        "rm made.key made.pem",
    ):
        subprocess.run(shlex.split(command), cwd=folder, check=True, capture_output=True)


@pytest.fixture
def mover(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Mover:
    deployment = tmp_path / "deployment"
    shutil.copytree(root / "tests/data/torchserve_deployment", deployment)
    make_key_store(deployment / "config")
    somebody = Mover(root, deployment, capsys)
    somebody.pack()
    return somebody


def test_a_deployment_is_moved(mover: Mover, start: Callable[..., Any], tmp_path: Path) -> None:
    found = mover.report()
    assert found["error"].keys() == {"vmargs", "settings", "imports"}
    assert {"Dockerfile:1", "Dockerfile:4", "plugins_path", "default_response_timout", "JvmHeapUsed"} <= (
        found["warning"].keys()
    )
    assert "every flag stays" in found["ok"]["entrypoint.sh:3"]

    # The key store, by the commands of the message.
    commands = found["error"]["settings"].partition("with its password: ")[2].partition("; then set")[0]
    for command in commands.replace(CONTAINER, str(mover.at)).split(" && "):
        subprocess.run([*shlex.split(command), "-passin", f"pass:{PASSWORD}"], cwd=mover.at / "config", check=True)
    pem = f"certificate_file={CONTAINER}/config/cert.pem\nprivate_key_file={CONTAINER}/config/key.pem\nkeystore="
    mover.change(mover.config, "keystore=", pem)
    found = mover.report()
    assert found["error"].keys() == {"vmargs", "imports"} and "tokens" in found["ok"]

    # The log4j2 file, by the setting of the message.
    setting = found["error"]["vmargs"].partition("Write ")[2]
    assert setting == f"log_config={CONTAINER}/config/log4j2.xml"
    mover.change(mover.config, "vmargs=", f"{setting}\nvmargs=")
    assert mover.report()["error"].keys() == {"imports"}

    # The handler's import, by its line.
    said = found["error"]["imports"]
    assert said.startswith("shouting.py, line 3:") and "load_util.load_exported_model" in said
    handler = mover.at / "models/shouting.py"
    handler.write_text("".join(line for line in handler.read_text().splitlines(True) if "load_exported" not in line))
    # What is misspelt, by the names that are meant; the keys, by token_path.
    mover.change(mover.config, "default_response_timout", "default_response_timeout")
    mover.change(mover.at / "models/counting-config.yaml", "reponseTimeout", "responseTimeout")
    keys = {kind: {"key": one["key"]} for kind, one in json.loads((mover.at / "key_file.json").read_text()).items()}
    (mover.at / "key_file.json").unlink()
    (mover.at / "config/keys.json").write_text(json.dumps(keys))
    mover.change(mover.config, "disable_token", f"token_path={CONTAINER}/config/keys.json\ndisable_token")
    mover.pack()
    found = mover.report()
    assert not found["error"]
    assert not {"default_response_timout", "server", "keys", "log_config"} & found["warning"].keys()

    answers(mover, start, keys)


def answers(mover: Mover, start: Callable[..., Any], keys: dict[str, dict[str, str]]) -> None:
    """The server with the deployment's settings and models, at places and ports of this machine."""
    given = {one.key: one.value.replace(CONTAINER, str(mover.at)) for one in properties.parse(mover.config.read_text())}
    given |= {"grpc_inference_port": "0", "grpc_management_port": "0"}
    given |= {f"{name}_address": "http://127.0.0.1:0" for name in ("management", "metrics")}
    given["inference_address"] = "https://127.0.0.1:0"
    server = start(
        "--model-store", given["model_store"], "--models", "shouting=shouting.mar", "counting=counting.mar", **given
    )
    inference = {"Authorization": f"Bearer {keys['inference']['key']}"}
    management = {"Authorization": f"Bearer {keys['management']['key']}"}

    trusted = ssl.create_default_context(cafile=str(mover.at / "config/cert.pem"))
    with httpx.Client(verify=trusted, base_url=server.http.replace("http:", "https:")) as client:
        assert "Token Authorization failed" in client.get("/predictions/shouting").text
        assert client.post("/predictions/shouting", content=b"hear", headers=inference).text == "HEAR", server.log
        assert client.post("/predictions/counting", content=b"one two", headers=inference).text == "2"
    described = httpx.get(f"{server.http_management}/models/counting", headers=management).json()
    assert described[0]["batchSize"] == 4 and described[0]["responseTimeout"] == 60
    metrics = httpx.get(f"http://127.0.0.1:{server.port('http_metrics')}/metrics", headers=management).text
    assert "WordsCounted" in metrics and "ts_inference_requests_total" in metrics and "JvmHeapUsed{" not in metrics
    assert server.terminate() == 0
    assert "/predictions/counting" in (server.directory / "logs/access_log.log").read_text()
