"""Core calls from Node, against both engines. Needs node and npm; @grpc/grpc-js is installed into a cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.external

SOURCE = Path(__file__).parent / "node"
INSTALL_S_MAX = 300
RUN_S_MAX = 120


@pytest.fixture(scope="session")
def client_home(tmp_path_factory) -> Path:
    """A folder with node_modules: NODE_CLIENT_HOME, where it is set and installed already, or one of the test's own."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    home = Path(os.environ.get("NODE_CLIENT_HOME") or tmp_path_factory.mktemp("node"))
    if not (home / "node_modules" / "@grpc" / "grpc-js").is_dir():
        home.mkdir(parents=True, exist_ok=True)
        shutil.copy(SOURCE / "package.json", home)
        command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
        subprocess.run(command, cwd=home, check=True, timeout=INSTALL_S_MAX)
    return home


def test_node_client(server, client_home):
    command = ["node", str(SOURCE / "client.mjs"), str(server.port)]
    environment = {**os.environ, "CLIENT_HOME": str(client_home)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S_MAX, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 13
