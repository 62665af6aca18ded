"""Tools of others that call TorchServe, unchanged: torchserve-dashboard, mlflow-torchserve, and usual health checks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.servers import Serving
from support import GUARD_S

pytestmark = pytest.mark.external
#: Without what they require: a dashboard in the browser, and TorchServe.
WHEELS = ("torchserve-dashboard==0.6.0", "mlflow-torchserve==0.1.0")
DOUBLING = """
import json

def handle(data, context):
    return [2 * json.loads(row.get("data") or row["body"]) for row in data or ()]
"""
DASHBOARD = """
import json, sys
from torchserve_dashboard.api import LocalTS, ManagementAPI

found = []
api = ManagementAPI(sys.argv[1])
found.append(api.get_loaded_models())
found.append(api.register_model("first", initial_workers=1, batch_size=2, max_batch_delay=10, response_timeout=60))
found.append(api.register_model("second", initial_workers=1))
while any(one["status"] != "READY" for row in api.get_model("doubling", list_all=True) for one in row["workers"]):
    pass  # they start meanwhile
found.append([row["batchSize"] for row in api.get_model("doubling", "1.0")])
found.append(sorted(row["modelVersion"] for row in api.get_model("doubling", list_all=True)))
found.append(api.change_model_default("doubling", "2.0"))
found.append(api.change_model_workers("doubling", "2.0", min_worker=2, max_worker=2))
found.append(api.delete_model("doubling", "1.0"))
found.append([row["modelVersion"] for row in api.get_model("doubling")])
found.append(LocalTS(".").check_version()[0])
print(json.dumps(found))
"""
MLFLOW = """
import json, sys
import pandas
from mlflow_torchserve import TorchServePlugin

plugin = TorchServePlugin("torchserve")
config = {"HANDLER": sys.argv[1]}
found = [plugin.create_deployment("halves", sys.argv[2], config={**config, "VERSION": number}) for number in (1.0, 2.0)]
found.append(plugin.update_deployment("halves/2.0", config={"set-default": "true"}))
found.append(plugin.update_deployment("halves", config={"min_worker": 2, "max_worker": 2, "synchronous": "true"}))
found.append([list(row) for row in plugin.list_deployments()])
found.append(json.loads(plugin.get_deployment("halves")["deploy"])[0]["modelVersion"])
found.append(plugin.predict("halves", json.dumps({"data": 3})))
plugin.delete_deployment("halves/1.0")
plugin.delete_deployment("halves/2.0")
found.append(plugin.list_deployments())
print(json.dumps(found))
"""
HEALTH = (
    "curl -f {url}/ping",
    "curl --fail --silent --show-error --output /dev/null {url}/ping || exit 1",
    "wget --quiet --tries=1 --spider {url}/ping",
    "wget -qO- {url}/ping | grep Healthy",
    "python3 -c 'import urllib.request as r; assert r.urlopen(\"{url}/ping\").status == 200'",
    "python3 -c 'import requests; requests.get(\"{url}/ping\", timeout=60).raise_for_status()'",
    "curl -sf {management}/models/doubling | grep -q READY",
)


@pytest.fixture
def serve(tmp_path: Path, write_to: Callable[..., str]) -> Iterator[Callable[..., Serving]]:
    store = tmp_path / "store"
    store.mkdir()
    write_to(store, "doubling", DOUBLING, directory="first")
    write_to(store, "doubling", DOUBLING, version="2.0", directory="second")
    running = []

    def start(*arguments: str) -> Serving:
        open_to_callers = {"enable_model_api": "true", "disable_token_authorization": "true"}
        running.append(Serving(tmp_path, store, dict(open_to_callers), [*arguments]))
        return running[-1].wait_started()

    yield start
    for server in running:
        assert server.terminate() == 0, server.log


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheels")
    words = ["install", "--quiet", "--no-deps", "--no-compile", "--target", str(place), *WHEELS]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=600)
    return place


def ran(python: Path | str, program: str, *words: str, path: list[Path], env: dict[str, str], cwd: Path) -> Any:
    """What the program printed, in JSON."""
    env = {**env, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [str(python), "-c", program, *words]
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=GUARD_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_torchserve_dashboard(
    wheels: Path, serve: Callable[..., Serving], client_env: dict[str, str], tmp_path: Path
) -> None:
    url = serve().http_management
    found = ran(sys.executable, DASHBOARD, url, path=[wheels], env=client_env, cwd=tmp_path)
    changed = "Processing worker updates..."
    default = 'Default version successfully updated for model "doubling" to "2.0"'
    assert found[0] == {"models": []}
    assert [one["status"] for one in found[1:3]] == [changed] * 2
    assert found[3:5] == [[2], ["1.0", "2.0"]]
    assert [one["status"] for one in found[5:8]] == [default, changed, 'Model "doubling" unregistered']
    assert found[8] == ["2.0"] and "TorchServe Version is" in found[9]


def test_mlflow_torchserve(
    wheels: Path,
    serve: Callable[..., Serving],
    client_python: Callable[[str], Path],
    client_env: dict[str, str],
    tmp_path: Path,
) -> None:
    python = client_python("mlflow")
    server = serve()
    (tmp_path / "halving.py").write_text(
        "def handle(data, context):\n    return [float(row['data']) / 2 for row in data or ()]\n"
    )
    (tmp_path / "weights.pt").write_bytes(b"not read by this handler")
    config = tmp_path / "mlflow.properties"
    config.write_text(f"inference_address={server.http}\nmanagement_address={server.http_management}\n")
    files = [tmp_path / "halving.py", tmp_path / "weights.pt"]
    suite = Path(sysconfig.get_path("purelib"))
    own = python.parent.parent / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    env = {**client_env, "CONFIG_PROPERTIES": str(config), "EXPORT_PATH": str(tmp_path / "store")}
    found = ran(python, MLFLOW, *map(str, files), path=[wheels, own, suite], env=env, cwd=tmp_path)
    assert found == [
        {"name": "halves/1.0", "flavor": None},
        {"name": "halves/2.0", "flavor": None},
        {"flavor": None},
        {"flavor": None},
        [["halves"]],
        "2.0",
        "1.5",
        [],
    ]


def test_usual_health_checks(serve: Callable[..., Serving], client_env: dict[str, str]) -> None:
    server = serve("--models", "doubling=first")
    missing = {line.split()[0] for line in HEALTH if shutil.which(line.split()[0]) is None}
    for line in HEALTH:
        if line.split()[0] in missing:
            continue
        line = line.format(url=server.http, management=server.http_management)
        done = subprocess.run(line, shell=True, env=client_env, capture_output=True, text=True, timeout=GUARD_S)
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
    if missing:
        pytest.skip(f"the other health checks pass; not on this machine: {', '.join(sorted(missing))}")
